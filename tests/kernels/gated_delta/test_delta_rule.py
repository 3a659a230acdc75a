"""The gated delta rule over several steps: Triton against the reference, and that against a plain loop in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.closeness import UNIT, check_close
from support.states import CHANNELS, HEADS, KEY, STEPS, VALUE
from torch import Tensor

from rayllm_kernels.ops import Chunks, Contexts, Gates, StateCache

ON_GPU = torch.cuda.is_available()
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


def gates_of(randn, rows: int, dtype: torch.dtype = torch.float32) -> Gates:
    """Of which some keep nearly all, and some nearly nothing."""
    both = 3.0 * randn(rows, 2 * HEADS, dtype=dtype)
    return Gates(both[:, :HEADS], both[:, HEADS:], randn(HEADS), randn(HEADS))


TF32, PAIR = 2.0**-11, 2.0**-15  # unit roundoff of what is multiplied in long chunks


# The interpreter multiplies bf16 bit patterns as integers: there, pairs are of fp16, whose exponents are enough here.
@pytest.mark.parametrize(
    ("dtype", "in_pairs"),
    [(torch.float32, False), (torch.float16, False), (torch.bfloat16 if ON_GPU else torch.float16, True)],
)
@pytest.mark.parametrize("step", STEPS)
def test_gated_delta_rule(randn, kernels, reference, state_case, monkeypatch, step, dtype, in_pairs):
    from rayllm_kernels.gated_delta import chunk_kernel
    from rayllm_kernels.gated_delta.delta_rule_kernel import LONG

    if chunk_kernel.are_pairs(dtype) != in_pairs:
        assert (dtype, in_pairs) == (torch.float16, True)
        monkeypatch.setattr(chunk_kernel, "are_pairs", lambda _dtype: True)
    ours = state_case(*step, dtype=dtype)
    theirs = ours.copy()
    qkv, gates = randn(ours.num_rows, CHANNELS, dtype=dtype), gates_of(randn, ours.num_rows, dtype)
    results = []
    for case, module in ((ours, kernels), (theirs, reference)):
        out = torch.full((ours.num_rows, HEADS, VALUE), 7.0, dtype=dtype, device=qkv.device)
        module.gated_delta_rule(qkv, gates, case.cache, case.chunks, out)
        results.append(out)
    check_close(*results, terms=KEY, slack=4)
    written = ~theirs.cache.recurrent.isnan()
    assert torch.equal(written, ~ours.cache.recurrent.isnan())
    # States are in fp32, and so are all sums.
    is_rounded = dtype != torch.float32 and ours.chunks.longest >= LONG
    slack = (PAIR if in_pairs else TF32) / UNIT[torch.float32] if is_rounded else 4
    check_close(ours.cache.recurrent[written], theirs.cache.recurrent[written], terms=KEY, slack=slack)
    if ours.chunks.starts is None:
        padding = ours.chunks.contexts.seq_lens == 0
        assert (results[0][padding] == 0).all()


def plain(qkv: Tensor, gates: Gates) -> tuple[Tensor, list[Tensor]]:
    """Outputs of a whole sequence, and the state after each token."""
    a, b, a_log, dt_bias = (part.double() for part in gates)
    keys = (CHANNELS - HEADS * VALUE) // 2
    q, k, v = qkv.double().split([keys, keys, HEADS * VALUE], dim=1)
    ratio = HEADS * KEY // keys
    state, states, out = torch.zeros(HEADS, KEY, VALUE, dtype=torch.float64, device=qkv.device), [], []
    for t in range(len(qkv)):
        rows = []
        state = state * torch.exp(-a_log.exp() * F.softplus(a[t] + dt_bias))[:, None, None]
        for head in range(HEADS):
            part = slice(head // ratio * KEY, (head // ratio + 1) * KEY)
            query, key = (x[t, part] / (x[t, part].square().sum() + 1e-6).sqrt() for x in (q, k))
            value = v[t, head * VALUE : (head + 1) * VALUE]
            state[head] += torch.outer(key, (value - key @ state[head]) * b[t, head].sigmoid())
            rows.append(query @ state[head] / KEY**0.5)
        states.append(state)
        out.append(torch.stack(rows))
    return torch.stack(out), states


def test_in_steps_as_at_once(randn, each, device):
    qkv, gates, size = randn(23, CHANNELS), gates_of(randn, 23), 4
    expected, states = plain(qkv, gates)
    for steps in ([23], [1] * 23, [2, 9, 1, 11]):
        recurrent = torch.full((6, HEADS, KEY, VALUE), float("nan"), device=device)
        cache, tables = StateCache(torch.empty(0), recurrent, size), torch.arange(5, -1, -1, dtype=torch.int32)[None]
        out, done = torch.empty(23, HEADS, VALUE, device=device), 0
        for count in steps:
            rows = slice(done, done + count)
            lens = torch.tensor([done + count], dtype=torch.int32, device=device)
            starts = torch.tensor([0, count], dtype=torch.int32, device=device) if count > 1 else None
            own = Gates(gates.a[rows], gates.b[rows], *gates[2:])
            each.gated_delta_rule(
                qkv[rows], own, cache, Chunks(Contexts(tables.to(device), lens), starts, count), out[rows]
            )
            done += count
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
        for block in range(6):
            after = states[min(23, (block + 1) * size) - 1]
            torch.testing.assert_close(recurrent[5 - block].double(), after, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not ON_GPU, reason="the interpreter runs programs one by one, in order")
def test_long_chunks_have_the_same_bits_each_time(randn, kernels, device):
    """Of a served size, beside a state token by token: what is pipelined must not be read too early."""
    heads, size, length, block = 32, 128, 1000, 528
    qkv = randn(4 * length, 2 * 16 * size + heads * size, dtype=torch.bfloat16)
    both = randn(4 * length, 2 * heads, dtype=torch.bfloat16)
    gates = Gates(both[:, :heads], both[:, heads:], randn(heads), randn(heads))
    tables = torch.arange(8, dtype=torch.int32, device=device).view(4, 2)
    lens = torch.full((4,), length, dtype=torch.int32, device=device)
    starts = torch.arange(5, dtype=torch.int32, device=device) * length
    chunks, found = Chunks(Contexts(tables, lens), starts, length), []
    for deterministic in [True] + [False] * 20:
        cache = StateCache(torch.empty(0), torch.zeros(8, heads, size, size, device=device), block)
        out = torch.empty(4 * length, heads, size, dtype=torch.bfloat16, device=device)
        kernels.gated_delta_rule(qkv, gates, cache, chunks, out, deterministic=deterministic)
        found.append((cache.recurrent, out))
    exact, first, *others = found
    off = (first[0] - exact[0]).square().mean().sqrt() / exact[0].square().mean().sqrt()
    assert off < PAIR
    for other in others:
        assert torch.equal(other[0], first[0])
        assert torch.equal(other[1], first[1])


def test_a_deterministic_call_gives_a_token_the_same_bits_in_any_chunk(randn, each, state_case):
    whole, parts = (state_case([0], [30], 8) for _ in range(2))
    qkv, gates = randn(30, CHANNELS), gates_of(randn, 30)
    expected, out = (torch.empty(30, HEADS, VALUE, device=qkv.device) for _ in range(2))
    each.gated_delta_rule(qkv, gates, whole.cache, whole.chunks, expected, deterministic=True)
    tables, lens = parts.chunks.contexts
    for first, end in ((0, 3), (3, 4), (4, 24), (24, 30)):
        own = Gates(gates.a[first:end], gates.b[first:end], *gates[2:])
        starts = torch.tensor([0, end - first], dtype=torch.int32, device=qkv.device)
        chunks = Chunks(Contexts(tables, torch.full_like(lens, end)), starts, end - first)
        each.gated_delta_rule(qkv[first:end], own, parts.cache, chunks, out[first:end], deterministic=True)
    assert torch.equal(out, expected)
    torch.testing.assert_close(parts.cache.recurrent, whole.cache.recurrent, rtol=0, atol=0, equal_nan=True)


def test_pairs_are_of_bf16_alone():
    from rayllm_kernels.gated_delta.chunk_kernel import are_pairs

    assert [are_pairs(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)] == [False, False, True]


def test_rows_that_lie_apart_are_refused(randn, each, state_case):
    case = state_case([0], [20], 8)
    qkv, gates = randn(20, CHANNELS), gates_of(randn, 20)
    out = torch.empty(20, HEADS + 1, VALUE, device=qkv.device)
    with pytest.raises(ValueError, match=r"^out must be contiguous"):
        each.gated_delta_rule(qkv, gates, case.cache, case.chunks, out[:, 1:])
    wide = torch.empty(20, CHANNELS + 1, device=qkv.device)
    with pytest.raises(ValueError, match=r"^qkv must be contiguous"):
        each.gated_delta_rule(wide[:, 1:], gates, case.cache, case.chunks, out[:, 1:].contiguous())
