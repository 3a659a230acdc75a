"""Adapters that products add themselves: each row and each element, whoever its neighbours are, launch after launch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.closeness import check_close

from rayllm_kernels.linear import plans
from rayllm_kernels.ops import AdapterSlots, TokenAdapters

ON_GPU = torch.cuda.is_available()
DTYPES = [torch.float32, torch.bfloat16 if ON_GPU else torch.float16]
RANKS = [[4, 4], [16, 7], [0, 9], [0, 0]]  # of each slot and projection
# inputs, outputs of each of two projections, slots of the tokens
CASES = [
    (96, 20, [1]),
    (96, 20, [-1]),
    (1300, 13, [0, 2]),
    (1300, 13, [2, -1]),
    (1300, 13, [-1, -1]),
    (5000, 6, [1]),  # several parts of the inputs
    (130, 24, [1, -1, 0, 3, 2, 1, 1]),
]
if ON_GPU:
    CASES += [(4096, 3072, [1]), (14336, 2048, [0]), (14336, 2048, [2]), (2048, 4096, [1, 0]), (2048, 4096, [-1, 1])]
    CASES += [(4096, 3072, slots) for slots in ([0, -1], [1, 1, 0, -1, 2, 2, 3], [-1] * 7, [2] * 8, [1, 0, -1, 2] * 24)]


@pytest.fixture
def make_adapters(randn, device):
    """(inputs, outputs of each of two projections, slots, dtype); what is beyond a rank is NaN in A, large in B."""

    def make(inputs: int, outputs: int, slots: list[int], dtype: torch.dtype) -> TokenAdapters:
        a = (randn(len(RANKS), 2, 16, inputs) * inputs**-0.5).to(dtype)
        b = randn(2 * outputs, len(RANKS), 16, dtype=dtype)
        for slot, ranks in enumerate(RANKS):
            for number, rank in enumerate(ranks):
                a[slot, number, rank:] = float("nan")
                b[number * outputs : (number + 1) * outputs, slot, rank:] = 1e4
        ranks = torch.tensor(RANKS, dtype=torch.int32, device=device)
        of_tokens = torch.tensor(slots, dtype=torch.int32, device=device)
        return TokenAdapters(of_tokens, AdapterSlots(a, b, ranks, (outputs, outputs)))

    return make


def exact(x: torch.Tensor, weight: torch.Tensor, adapters: TokenAdapters) -> torch.Tensor:
    """x W^T and what adapters add, in float64; what is shrunk is rounded as the adapters' numbers are."""
    slots, (a, b, ranks, (outputs, _)) = adapters
    y = x.double() @ weight.double().t()
    for token, slot in enumerate(slots.tolist()):
        for number, rank in enumerate(ranks[slot].tolist() if slot >= 0 else []):
            rows = slice(number * outputs, (number + 1) * outputs)
            shrunk = (a[slot, number, :rank].double() @ x[token].double()).to(a.dtype).double()
            y[token, rows] += b[rows, slot, :rank].double() @ shrunk
    return y


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs", "slots"), CASES)
def test_linear(randn, scaled, each, make_adapters, inputs, outputs, slots, dtype):
    adapters = make_adapters(inputs, outputs, slots, dtype)
    x, weight = randn(len(slots), inputs + 8, dtype=dtype)[:, :inputs], scaled(2 * outputs, inputs, dtype)
    expected = exact(x, weight, adapters)
    check_close(each.linear(x, weight, adapters=adapters), expected.to(dtype), terms=inputs + 16, slack=4)
    bias, out = randn(2 * outputs, dtype=dtype), torch.empty(len(slots), 2 * outputs, dtype=dtype, device=x.device)
    for _launch in range(2):  # the second one finds what the first one left
        each.linear(x, weight, bias, out=out, adapters=adapters)
        check_close(out, (expected + bias.double()).to(dtype), terms=inputs + 16, slack=4)
    if max(slots) < 0:
        assert torch.equal(out, each.linear(x, weight, bias, out=torch.empty_like(out)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs", "slots"), CASES)
@pytest.mark.parametrize("with_residual", [True, False])
def test_with_norm_and_activation(randn, scaled, each, make_adapters, inputs, outputs, slots, dtype, with_residual):
    adapters, weight = make_adapters(inputs, outputs, slots, dtype), scaled(2 * outputs, inputs, dtype)
    x, norm_weight = 3 * randn(len(slots), inputs, dtype=dtype), randn(inputs, dtype=dtype)
    residual = 5 * randn(len(slots), inputs, dtype=dtype) if with_residual else None
    total = x if residual is None else x + residual
    wide = total.double()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * norm_weight.double()
    # The kernel of very few tokens has the norm in it; elsewhere it is rounded in between.
    slack = 4 if plans.rows_take(x, weight, norm=True) and x.is_cuda else 8
    expected = exact(normed, weight, adapters)
    y, found = each.add_rms_norm_linear(x, residual, norm_weight, 1e-5, weight, adapters=adapters)
    check_close(found, total)
    check_close(y, expected.to(dtype), terms=inputs + 16, slack=slack)
    gate, up = expected.chunk(2, dim=1)
    y, found = each.add_rms_norm_linear(x, residual, norm_weight, 1e-5, weight, act="silu", adapters=adapters)
    check_close(found, total)
    check_close(y, (F.silu(gate) * up).to(dtype), terms=inputs + 16, slack=slack)
    gate, up = exact(x, weight, adapters).chunk(2, dim=1)
    y = each.linear_act_mul(x, weight, "silu", adapters=adapters)
    check_close(y, (F.silu(gate) * up).to(dtype), terms=inputs + 16, slack=slack)


@pytest.mark.skipif(not ON_GPU, reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("tokens", [1, 5])
def test_replays_take_the_slots_of_the_moment(randn, scaled, kernels, make_adapters, tokens):
    """Launches back to back, so that they overlap, with the memory between programs in the same state after each."""
    adapters, weight = make_adapters(4096, 3072, [0] * tokens, DTYPES[1]), scaled(6144, 4096, DTYPES[1])
    x, norm_weight = randn(tokens, 4096, dtype=DTYPES[1]), randn(4096, dtype=DTYPES[1])

    def run() -> list[torch.Tensor]:
        gated = kernels.add_rms_norm_linear(x, None, norm_weight, 1e-5, weight, act="silu", adapters=adapters)[0]
        return [kernels.linear(x, weight, adapters=adapters), gated, kernels.linear(x, weight, adapters=adapters)]

    expected = {}
    for slot in (-1, 0, 1, 2, 3):
        adapters.slots.fill_(slot)
        expected[slot] = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for slot in [1, -1, 0, 3, 2, 2, 1, 0] * 20:
        adapters.slots.fill_(slot)
        graph.replay()
        for ours, theirs in zip(captured, expected[slot], strict=True):
            assert torch.equal(ours, theirs)
