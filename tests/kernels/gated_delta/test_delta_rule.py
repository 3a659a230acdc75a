"""The gated delta rule over several steps: Triton against the reference, and that against a plain loop in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.closeness import UNIT, check_close
from support.states import CHANNELS, HEADS, KEY, STEPS, VALUE
from torch import Tensor

from rayllm_kernels.ops import Chunks, Contexts, Gates, StateCache

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


def gates_of(randn, rows: int, dtype: torch.dtype = torch.float32) -> Gates:
    """Of which some keep nearly all, and some nearly nothing."""
    both = 3.0 * randn(rows, 2 * HEADS, dtype=dtype)
    if dtype == torch.bfloat16:  # strengths of 0, 1/2 and 1, since the interpreter truncates where a GPU rounds
        both[:, HEADS:] = both[:, HEADS:].sign() * 200.0 * (both[:, HEADS:].abs() > 1.0)
    return Gates(both[:, :HEADS], both[:, HEADS:], randn(HEADS), randn(HEADS))


# Unit roundoff of what is multiplied in long chunks: of tf32, and of two numbers of bf16 that are truncated.
FACTORS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-14}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("step", STEPS)
def test_gated_delta_rule(randn, kernels, reference, state_case, step, dtype):
    from rayllm_kernels.gated_delta.delta_rule_kernel import LONG

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
    in_parts = dtype != torch.float32 and ours.chunks.longest >= LONG
    slack = FACTORS[dtype] / UNIT[torch.float32] if in_parts else 4
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
