"""The torch references of attention against a token-by-token computation in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support.closeness import check_close

from rayllm_kernels.attention import decode, prefill
from rayllm_kernels.attention.context import Contexts

OPTIONS = [
    {},
    {"sliding_window": 1},
    {"sliding_window": 7},
    {"sliding_window": 1000},
    {"alibi": True},
    {"sliding_window": 20, "alibi": True},
    {"softcap": 2.0},
    {"sinks": True},
    {"softcap": 0.7, "sinks": True, "sliding_window": 7, "alibi": True},
]


def naive(case, *, sliding_window=None, alibi_slopes=None, softcap=None, sinks=None):
    """One query, one head, one key at a time, straight from the definition."""
    q, k, v = (tensor.cpu() for tensor in (case.q, case.cache.k, case.cache.v))
    tables, seq_lens, starts = (t.tolist() for t in (*case.contexts, case.query_start_loc))
    result = torch.zeros(q.shape, dtype=torch.float64)
    _, kv_heads, block_size, _ = k.shape
    group = q.shape[1] // kv_heads
    for sequence, seq_len in enumerate(seq_lens):
        rows = range(starts[sequence], starts[sequence + 1])
        for row in rows:
            position = seq_len - len(rows) + (row - rows[0])
            first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            slots = [(tables[sequence][j // block_size], j % block_size) for j in range(first, position + 1)]
            for head in range(q.shape[1]):
                scores, values = [], []
                for j, (block, offset) in zip(range(first, position + 1), slots, strict=True):
                    score = float(q[row, head].double() @ k[block, head // group, offset].double())
                    score *= case.scoring().scale
                    if softcap is not None:
                        score = softcap * math.tanh(score / softcap)
                    if alibi_slopes is not None:
                        score += float(alibi_slopes[head]) * (j - position)
                    scores.append(score)
                    values.append(v[block, head // group, offset].double())
                if scores and sinks is not None:
                    scores.append(float(sinks[head]))
                    values.append(torch.zeros_like(values[0]))
                if scores:
                    weights = torch.softmax(torch.tensor(scores, dtype=torch.float64), 0)
                    result[row, head] = weights @ torch.stack(values)
    return result.to(q.dtype)


@pytest.fixture
def resolved(alibi_slopes, sinks):
    """(one of OPTIONS, heads) -> fields of `Scoring`."""

    def resolve(options, heads):
        options = dict(options)
        if options.pop("alibi", False):
            options["alibi_slopes"] = alibi_slopes(heads)
        if options.pop("sinks", False):
            options["sinks"] = sinks(heads)
        return options

    return resolve


@pytest.mark.parametrize("options", OPTIONS)
def test_decode(paged_case, reference, resolved, options):
    case = paged_case([33, 0, 1, 16, 5], heads=(6, 2), head_dim=32, spread=2.0)
    options = resolved(options, 6)
    out = torch.full_like(case.q, float("nan"))
    assert case.decode(reference, out=out, **options) is out
    check_close(out.cpu(), naive(case, **options), terms=case.terms)
    assert torch.equal(case.decode(reference, **options), out)
    assert not out[1].any()


@pytest.mark.parametrize("options", OPTIONS)
def test_prefill(paged_case, reference, resolved, monkeypatch, options):
    monkeypatch.setattr(prefill, "QUERY_CHUNK", 8)
    case = paged_case([30, 0, 4, 40, 17], [12, 0, 4, 1, 17], heads=(4, 2), head_dim=32, spread=2.0)
    options = resolved(options, 4)
    out = torch.full_like(case.q, float("nan"))
    assert case.prefill(reference, out, **options) is out
    check_close(out.cpu(), naive(case, **options), terms=case.terms)
    assert torch.equal(case.prefill(reference, **options), out)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("block_size", "heads", "head_dim"), [(1, (3, 3), 80), (5, (8, 1), 96), (32, (4, 2), 64)])
def test_shapes_and_dtypes(paged_case, reference, dtype, block_size, heads, head_dim):
    case = paged_case([9, 23], heads=heads, head_dim=head_dim, block_size=block_size, dtype=dtype)
    check_close(case.decode(reference).cpu(), naive(case), terms=case.terms)
    case = paged_case([9, 23], [5, 2], heads=heads, head_dim=head_dim, block_size=block_size, dtype=dtype)
    check_close(case.prefill(reference).cpu(), naive(case), terms=case.terms)


def test_a_large_batch_of_decodes_is_computed_in_parts(paged_case, reference):
    lengths = [1100, 0, 3, 1100, 700, 1, 1100, 900, 0, 1000, 20, 1100]
    case = paged_case(lengths)
    assert len(lengths) * max(lengths) * 2 * 64 * 8 > 1.3 * decode.GATHERED_BYTES, "several parts"
    together = case.decode(reference)
    for row, length in enumerate(lengths):
        alone = replace(
            case, q=case.q[row : row + 1], contexts=Contexts(*(each[row : row + 1] for each in case.contexts))
        )
        check_close(together[row : row + 1], alone.decode(reference), terms=max(1, length))


def test_blocks_before_the_window_are_not_read(paged_case, reference):
    """The engine may free them: their table entries can name anything."""
    case = paged_case([50, 20])
    before = case.decode(reference, sliding_window=18)
    case.contexts.block_tables[0, :2] = 1 << 30
    assert torch.equal(case.decode(reference, sliding_window=18), before)
    case = paged_case([50, 20], [2, 3])
    before = case.prefill(reference, sliding_window=17)
    case.contexts.block_tables[0, :2] = 1 << 30
    assert torch.equal(case.prefill(reference, sliding_window=17), before)


def test_agrees_with_torch_attention(paged_case, reference):
    """The whole-prompt case is torch's own causal attention."""
    case = paged_case([37], [37], heads=(4, 4))
    blocks = case.contexts.block_tables[0, :3].long()
    k, v = (cache[blocks].transpose(0, 1).flatten(1, 2)[:, :37] for cache in case.cache[:2])
    expected = torch.nn.functional.scaled_dot_product_attention(case.q.transpose(0, 1), k, v, is_causal=True)
    check_close(case.prefill(reference), expected.transpose(0, 1), terms=case.terms)


def test_empty_batch(paged_case, reference):
    case = paged_case([], [])
    assert case.decode(reference).shape == (0, 4, 64)
    assert case.prefill(reference).shape == (0, 4, 64)
