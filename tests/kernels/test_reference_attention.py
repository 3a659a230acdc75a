"""The torch references of attention against a token-by-token computation in float64."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from rayllm_kernels import reference, reference_attention

OPTIONS = [
    {},
    {"sliding_window": 1},
    {"sliding_window": 7},
    {"sliding_window": 1000},
    {"soft_cap": 2.0},
    {"alibi": True},
    {"sliding_window": 20, "soft_cap": 5.0, "alibi": True},
]


def naive(case, *, sliding_window=None, soft_cap=None, alibi_slopes=None):
    """One query, one head, one key at a time, straight from the definition."""
    tensors = {name: value.cpu() for name, value in vars(case).items() if isinstance(value, torch.Tensor)}
    case = dataclasses.replace(case, **tensors)
    result = torch.zeros(case.q.shape, dtype=torch.float64)
    _, kv_heads, block_size, _ = case.k_cache.shape
    group = case.q.shape[1] // kv_heads
    starts = case.query_start_loc.tolist()
    for sequence, seq_len in enumerate(case.seq_lens.tolist()):
        rows = range(starts[sequence], starts[sequence + 1])
        for row in rows:
            position = seq_len - len(rows) + (row - rows[0])
            first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            slots = [
                (int(case.block_tables[sequence, j // block_size]), j % block_size) for j in range(first, position + 1)
            ]
            for head in range(case.q.shape[1]):
                scores, values = [], []
                for j, (block, offset) in zip(range(first, position + 1), slots, strict=True):
                    score = float(case.q[row, head].double() @ case.k_cache[block, head // group, offset].double())
                    score *= case.scale
                    if soft_cap is not None:
                        score = soft_cap * math.tanh(score / soft_cap)
                    if alibi_slopes is not None:
                        score += float(alibi_slopes[head]) * (j - position)
                    scores.append(score)
                    values.append(case.v_cache[block, head // group, offset].double())
                if scores:
                    weights = torch.softmax(torch.tensor(scores, dtype=torch.float64), 0)
                    result[row, head] = weights @ torch.stack(values)
    return result.to(case.q.dtype)


def resolve(options, heads, device):
    options = dict(options)
    if options.pop("alibi", False):
        options["alibi_slopes"] = 2.0 ** -torch.arange(1.0, heads + 1, device=device)
    return options


@pytest.mark.parametrize("options", OPTIONS)
def test_decode(paged_case, assert_close, device, options):
    case = paged_case([33, 0, 1, 16, 5], heads=(6, 2), head_dim=32, spread=2.0)
    options = resolve(options, 6, device)
    out = torch.full_like(case.q, float("nan"))
    returned = case.decode(reference, out=out, **options)
    assert returned is out
    assert_close(out.cpu(), naive(case, **options).cpu())
    assert torch.equal(case.decode(reference, **options), out)
    assert not out[1].any()


@pytest.mark.parametrize("options", OPTIONS)
def test_prefill(paged_case, assert_close, device, monkeypatch, options):
    monkeypatch.setattr(reference_attention, "QUERY_CHUNK", 8)
    case = paged_case([30, 0, 4, 40, 17], [12, 0, 4, 1, 17], heads=(4, 2), head_dim=32, spread=2.0)
    options = resolve(options, 4, device)
    out = torch.full_like(case.q, float("nan"))
    returned = case.prefill(reference, out=out, **options)
    assert returned is out
    assert_close(out.cpu(), naive(case, **options).cpu())
    assert torch.equal(case.prefill(reference, **options), out)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("block_size", "heads", "head_dim"), [(1, (3, 3), 80), (5, (8, 1), 96), (32, (4, 2), 64)])
def test_shapes_and_dtypes(paged_case, assert_close, dtype, block_size, heads, head_dim):
    case = paged_case([9, 23], heads=heads, head_dim=head_dim, block_size=block_size, dtype=dtype)
    assert_close(case.decode(reference).cpu(), naive(case).cpu())
    case = paged_case([9, 23], [5, 2], heads=heads, head_dim=head_dim, block_size=block_size, dtype=dtype)
    assert_close(case.prefill(reference).cpu(), naive(case).cpu())


def test_blocks_before_the_window_are_not_read(paged_case):
    """The engine may free them: their table entries can name anything."""
    case = paged_case([50, 20])
    before = case.decode(reference, sliding_window=18)
    case.block_tables[0, :2] = 1 << 30
    assert torch.equal(case.decode(reference, sliding_window=18), before)
    case = paged_case([50, 20], [2, 3])
    before = case.prefill(reference, sliding_window=17)
    case.block_tables[0, :2] = 1 << 30
    assert torch.equal(case.prefill(reference, sliding_window=17), before)


def test_agrees_with_torch_attention(paged_case, assert_close):
    """The whole-prompt case is torch's own causal attention."""
    case = paged_case([37], [37], heads=(4, 4))
    blocks = case.block_tables[0, :3].long()
    k, v = (cache[blocks].transpose(0, 1).flatten(1, 2)[:, :37] for cache in (case.k_cache, case.v_cache))
    expected = torch.nn.functional.scaled_dot_product_attention(case.q.transpose(0, 1), k, v, is_causal=True)
    assert_close(case.prefill(reference), expected.transpose(0, 1))


def test_empty_batch(paged_case):
    case = paged_case([], [])
    assert case.decode(reference).shape == (0, 4, 64)
    assert case.prefill(reference).shape == (0, 4, 64)
