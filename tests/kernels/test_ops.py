"""The face of the package, the dispatch by device, and errors that name the argument."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from support.closeness import check_close

from rayllm_kernels import dispatch, ops


def test_dispatch_by_device(randn, device):
    assert dispatch.on_triton(randn(2)) == (device.type == "cuda")
    with dispatch.forced(triton=True):
        assert dispatch.on_triton(randn(2))
        with dispatch.forced(triton=False):
            assert not dispatch.on_triton(randn(2))
        assert dispatch.on_triton(randn(2))
    assert dispatch.on_triton(randn(2)) == (device.type == "cuda")
    with pytest.raises(ValueError, match="no kernels for tensors on meta"):
        ops.act_and_mul(torch.empty(2, 8, device="meta"), "silu")


def test_both_implementations_run(randn, kernels, reference):
    """What the two fixtures compute is not the same code: in fp32 sums of many numbers differ in the last bits."""
    x, weight = randn(50, 999), randn(999)
    ours, theirs = kernels.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6)
    check_close(ours, theirs)
    assert not torch.equal(ours, theirs)


IMPORT = """
import sys
sys.modules["triton"] = None
import torch
from rayllm_kernels import ops
print(ops.act_and_mul(torch.ones(1, 2), "silu").shape)
with ops.dispatch.forced(triton=True):
    ops.act_and_mul(torch.ones(1, 2), "silu")
"""


def test_references_need_no_triton_and_kernels_do_not_fall_back():
    script = IMPORT.replace("ops.dispatch", "__import__('rayllm_kernels.dispatch').dispatch")
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert "torch.Size([1, 1])" in result.stdout
    assert result.returncode == 1
    assert "import of triton halted" in result.stderr


def attention_errors(case):
    """(change to the call, name the error must begin with)"""
    k, v = case.cache.k, case.cache.v
    tables, lens = case.contexts
    return [
        ({"q": case.q[0]}, "q"),
        ({"q": case.q[:, :3]}, "q"),
        ({"q": case.q[..., :32]}, "q"),
        ({"q": case.q.double()}, "q"),
        ({"q": case.q.transpose(1, 2).contiguous().transpose(1, 2)}, "q"),
        ({"cache": ops.KVCache(k[0], v)}, "cache.k"),
        ({"cache": ops.KVCache(k, v[:1])}, "cache.v"),
        ({"cache": ops.KVCache(k, v.contiguous())}, "cache.v"),
        ({"contexts": ops.Contexts(tables.long(), lens)}, "block_tables"),
        ({"contexts": ops.Contexts(tables[:1], lens)}, "block_tables"),
        ({"contexts": ops.Contexts(tables, lens.long())}, "seq_lens"),
        ({"scoring": ops.Scoring(0.0)}, "scale"),
        ({"scoring": ops.Scoring(1.0, sliding_window=0)}, "sliding_window"),
        ({"scoring": ops.Scoring(1.0, sliding_window=1 << 31)}, "sliding_window"),
        ({"scoring": ops.Scoring(1.0, alibi_slopes=torch.ones(3, device=case.q.device))}, "alibi_slopes"),
        ({"scoring": ops.Scoring(1.0, softcap=0.0)}, "softcap"),
        ({"scoring": ops.Scoring(1.0, sinks=torch.ones(3, device=case.q.device))}, "sinks"),
        ({"scoring": ops.Scoring(1.0, sinks=torch.ones(4, device=case.q.device).half())}, "sinks"),
        ({"out": case.q[:1]}, "out"),
        ({"out": case.q.half()}, "out"),
    ]


@pytest.mark.parametrize("number", range(20))
def test_attention_errors(paged_case, each, number):
    case = paged_case([20, 3])
    change, name = attention_errors(case)[number]
    decode = {"q": case.q, "cache": case.cache, "contexts": case.contexts, "scoring": ops.Scoring(1.0)} | change
    prefill = decode | {"query_start_loc": case.query_start_loc, "max_query_len": 1}
    with pytest.raises(ValueError, match=f"^{name} "):
        each.paged_decode_attention(**decode)
    with pytest.raises(ValueError, match=f"^{name} "):
        each.paged_prefill_attention(**prefill)


def test_other_errors(paged_case, each, kernels, randn, device):
    case = paged_case([20, 3])
    x, index = randn(4, 2, 8), torch.zeros(4, dtype=torch.int64, device=device)
    row, lens = randn(4, 2, 64), case.contexts.seq_lens
    attention = case.cache, case.contexts, case.scoring()
    long_lens = case.contexts._replace(seq_lens=lens.long())
    calls = [
        ("schedule", lambda: case.decode(each, paged_case([1], heads=(8, 2)).schedule(kernels))),
        ("schedule", lambda: case.decode(each, paged_case([1]).schedule(kernels))),
        ("num_ranges", lambda: case.schedule(each, num_ranges=0)),
        ("sliding_window", lambda: case.schedule(each, sliding_window=0)),
        ("seq_lens", lambda: each.decode_schedule(case.q, case.cache, long_lens, case.scoring())),
        ("q", lambda: each.decode_schedule(case.q[:1], *attention)),
        ("q", lambda: each.decode_schedule(case.q[:, :3], *attention)),
        ("q", lambda: each.paged_decode_attention(case.q[:1], *attention)),
        ("query_start_loc", lambda: each.paged_prefill_attention(case.q, *attention, lens, 1)),
        ("max_query_len", lambda: each.paged_prefill_attention(case.q, *attention, case.query_start_loc, -1)),
        ("weight", lambda: each.rms_norm(x, randn(7), 1e-6)),
        ("weight", lambda: each.rms_norm(x, randn(8).half(), 1e-6)),
        ("x", lambda: each.rms_norm(x.long(), randn(8), 1e-6)),
        ("x", lambda: each.rms_norm(x.transpose(1, 2), randn(2), 1e-6)),
        ("residual", lambda: each.fused_add_rms_norm(x, x[:2], randn(8), 1e-6)),
        ("x", lambda: each.act_and_mul(randn(2, 7), "silu")),
        ("key", lambda: each.reshape_and_cache(row[..., :32], row, case.cache, index)),
        ("value", lambda: each.reshape_and_cache(row, row[:3], case.cache, index)),
        ("slot_mapping", lambda: each.reshape_and_cache(row, row, case.cache, index.int())),
        ("pool", lambda: each.copy_blocks(randn(4, 3, 5).transpose(1, 2), index, index)),
        ("dst", lambda: each.copy_blocks(randn(4, 3), index, index[:1])),
        ("out", lambda: each.linear(randn(2, 8), randn(5, 8), out=randn(3, 5))),
        ("out", lambda: each.linear(randn(2, 8), randn(5, 8), out=randn(2, 4))),
        ("out", lambda: each.linear(randn(2, 8), randn(5, 8), out=randn(2, 9)[:, :5])),
        ("weight", lambda: each.linear_act_mul(randn(2, 8), randn(5, 8), "silu")),
        ("weight", lambda: each.add_rms_norm_linear(randn(2, 8), None, randn(8), 1e-6, randn(5, 8), act="silu")),
        ("norm_weight", lambda: each.add_rms_norm_linear(randn(2, 8), None, randn(7), 1e-6, randn(5, 8))),
        ("bias", lambda: each.linear_invariant(randn(2, 8), randn(5, 8), randn(4))),
    ]
    for name, call in calls:
        with pytest.raises(ValueError, match=f"^{name} "):
            call()
