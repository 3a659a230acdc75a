"""The dispatch: one signature everywhere, the right implementation, and errors that name the argument."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch

from rayllm_kernels import ops, reference

NAMES = reference.__all__


@pytest.mark.parametrize("name", NAMES)
def test_one_signature(kernels, name):
    expected = inspect.signature(getattr(ops, name))
    assert inspect.signature(getattr(reference, name)) == expected
    assert inspect.signature(getattr(kernels, name)) == expected


def test_one_set_of_names(kernels):
    assert sorted(kernels.__all__) == sorted(NAMES)


def test_dispatch_by_device(randn, device, kernels, monkeypatch):
    chosen = kernels if device.type == "cuda" else reference
    calls = []
    monkeypatch.setattr(chosen, "silu_and_mul", lambda x: calls.append(x.shape))
    ops.silu_and_mul(randn(2, 8))
    assert calls == [(2, 8)]
    with pytest.raises(ValueError, match="no kernels for tensors on meta"):
        ops.silu_and_mul(torch.empty(2, 8, device="meta"))


def test_import_needs_no_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from rayllm_kernels import ops\n"
        "print(ops.silu_and_mul(torch.ones(1, 2)).shape)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert "torch.Size([1, 1])" in result.stdout


def test_every_op_runs(paged_case, randn, device):
    """Each name through the dispatch, on whatever device there is."""
    case = paged_case([20, 3])
    assert torch.isfinite(case.decode(ops)).all()
    case = paged_case([20, 3], [4, 3])
    assert torch.isfinite(case.prefill(ops)).all()
    key = randn(2, 2, 64)
    ops.reshape_and_cache(key, key, case.k_cache, case.v_cache, torch.tensor([1, -1], device=device))
    assert torch.equal(case.k_cache[0, :, 1], key[0])
    pool = randn(3, 4)
    ops.copy_blocks(pool, torch.tensor([0], device=device), torch.tensor([2], device=device))
    assert torch.equal(pool[0], pool[2])
    x, weight = randn(2, 8), randn(8)
    y, total = ops.fused_add_rms_norm(x, x, weight, 1e-6)
    assert torch.allclose(ops.rms_norm(total, weight, 1e-6), y)
    q = randn(2, 2, 8)
    before = q.clone()
    ops.rotary_embedding(torch.zeros(2, dtype=torch.int64, device=device), q, q.clone(), randn(1, 8))
    assert not torch.equal(q, before)


def attention_errors(case):
    """(change to the call, name the error must begin with)"""
    return [
        ({"q": case.q[0]}, "q"),
        ({"q": case.q[:, :3]}, "q"),
        ({"q": case.q[..., :32]}, "q"),
        ({"q": case.q.double()}, "q"),
        ({"q": case.q.transpose(1, 2).contiguous().transpose(1, 2)}, "q"),
        ({"k_cache": case.k_cache[0]}, "k_cache"),
        ({"v_cache": case.v_cache[:1]}, "v_cache"),
        ({"v_cache": case.v_cache.contiguous()}, "v_cache"),
        ({"block_tables": case.block_tables.long()}, "block_tables"),
        ({"block_tables": case.block_tables[:1]}, "block_tables"),
        ({"seq_lens": case.seq_lens.long()}, "seq_lens"),
        ({"scale": 0.0}, "scale"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"soft_cap": -1.0}, "soft_cap"),
        ({"alibi_slopes": torch.ones(3, device=case.q.device)}, "alibi_slopes"),
        ({"out": case.q[:1]}, "out"),
        ({"out": case.q.half()}, "out"),
    ]


@pytest.mark.parametrize("number", range(17))
def test_attention_errors(paged_case, kernels, number):
    case = paged_case([20, 3])
    change, name = attention_errors(case)[number]
    decode = {
        "q": case.q,
        "k_cache": case.k_cache,
        "v_cache": case.v_cache,
        "block_tables": case.block_tables,
        "seq_lens": case.seq_lens,
        "scale": 1.0,
    } | change
    prefill = decode | {"query_start_loc": case.query_start_loc, "max_query_len": 1}
    for module in (reference, kernels):
        with pytest.raises(ValueError, match=f"^{name} "):
            module.paged_decode_attention(**decode)
        with pytest.raises(ValueError, match=f"^{name} "):
            module.paged_prefill_attention(**prefill)


def test_other_errors(paged_case, kernels, randn, device):
    case = paged_case([20, 3])
    x, index = randn(4, 2, 8), torch.zeros(4, dtype=torch.int64, device=device)
    cache = case.k_cache, case.v_cache
    row = randn(4, 2, 64)
    for module in (reference, kernels):
        calls = [
            ("schedule", lambda m=module: case.decode(m, schedule=paged_case([1], heads=(8, 2)).schedule(m))),
            ("schedule", lambda m=module: case.decode(m, schedule=paged_case([1]).schedule(m))),
            ("num_ranges", lambda m=module: case.schedule(m, num_ranges=0)),
            ("sliding_window", lambda m=module: case.schedule(m, sliding_window=0)),
            ("seq_lens", lambda m=module: m.decode_schedule(case.q[:1], case.k_cache, case.seq_lens)),
            ("q", lambda m=module: m.decode_schedule(case.q[:, :3], case.k_cache, case.seq_lens)),
            (
                "q",
                lambda m=module: m.paged_decode_attention(
                    case.q[:1], *cache, case.block_tables, case.seq_lens, scale=1.0
                ),
            ),
            (
                "query_start_loc",
                lambda m=module: m.paged_prefill_attention(
                    case.q, *cache, case.block_tables, case.seq_lens, case.seq_lens, 1, scale=1.0
                ),
            ),
            (
                "max_query_len",
                lambda m=module: m.paged_prefill_attention(
                    case.q, *cache, case.block_tables, case.seq_lens, case.query_start_loc, -1, scale=1.0
                ),
            ),
            ("weight", lambda m=module: m.rms_norm(x, randn(7), 1e-6)),
            ("weight", lambda m=module: m.rms_norm(x, randn(8).half(), 1e-6)),
            ("x", lambda m=module: m.rms_norm(x.long(), randn(8), 1e-6)),
            ("x", lambda m=module: m.rms_norm(x.transpose(1, 2), randn(2), 1e-6)),
            ("residual", lambda m=module: m.fused_add_rms_norm(x, x[:2], randn(8), 1e-6)),
            ("x", lambda m=module: m.silu_and_mul(randn(2, 7))),
            ("positions", lambda m=module: m.rotary_embedding(index.int(), x, x, randn(5, 8))),
            ("k", lambda m=module: m.rotary_embedding(index, x, x[..., :4], randn(5, 8))),
            ("cos_sin_cache", lambda m=module: m.rotary_embedding(index, x, x, randn(5, 10))),
            ("cos_sin_cache", lambda m=module: m.rotary_embedding(index, x, x, randn(5, 8).half())),
            ("key", lambda m=module: m.reshape_and_cache(row[..., :32], row, *cache, index)),
            ("value", lambda m=module: m.reshape_and_cache(row, row[:3], *cache, index)),
            ("slot_mapping", lambda m=module: m.reshape_and_cache(row, row, *cache, index.int())),
            ("pool", lambda m=module: m.copy_blocks(randn(4, 3, 5).transpose(1, 2), index, index)),
            ("dst", lambda m=module: m.copy_blocks(randn(4, 3), index, index[:1])),
        ]
        for name, call in calls:
            with pytest.raises(ValueError, match=f"^{name} "):
                call()
