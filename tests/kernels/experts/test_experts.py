"""The experts' products, by every tile that may be chosen, and how pairs are grouped."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.closeness import check_close

from rayllm_kernels import dispatch, ops
from rayllm_kernels.experts.experts import Projections
from rayllm_kernels.experts.plans import choose_rows, choose_tiles, is_unsorted

ON_GPU = torch.cuda.is_available()
# The interpreter multiplies the bits of bf16 matrices as if they were integers.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]
EXACT_ACTS = {"silu": F.silu, "swish": F.silu, "gelu": F.gelu, "gelu_new": lambda x: F.gelu(x, approximate="tanh")}


@pytest.fixture
def case(randn, device):
    """(tokens, experts, top_k, hidden, inner, dtype) -> the arguments of `ops.experts` up to `down`."""

    def make(tokens, num_experts, top_k, hidden, inner, dtype, *, skewed=False):
        x = randn(tokens, hidden + 8, dtype=dtype)[:, :hidden]
        gate_up = randn(num_experts, 2 * inner, hidden).mul_(2 * hidden**-0.5).to(dtype)
        down = randn(num_experts, hidden, inner).mul_(inner**-0.5).to(dtype)
        scores = randn(tokens, num_experts)
        if skewed:  # the first half of the experts gets next to nothing
            scores[:, : num_experts // 2] -= 2
        weights, experts = scores.softmax(-1).topk(top_k)
        return x, weights.contiguous(), experts.to(torch.int32), gate_up, down

    return make


def exact(x, weights, experts, gate_up, down, act="silu", onto=None):
    """In fp64, token by token."""
    total = torch.zeros(x.shape, dtype=torch.float64) if onto is None else onto.double().cpu()
    for token in range(x.shape[0]):
        for weight, expert in zip(weights[token].double(), experts[token].tolist(), strict=True):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            total[token] += (weight * (down[expert].double() @ (EXACT_ACTS[act](gate) * up))).cpu()
    return total.to(x.dtype).to(x.device)


# tokens, experts, top_k, hidden, inner
SHAPES = [
    (1, 4, 2, 64, 48),  # one token: every pair is a tile
    (2, 40, 3, 32, 40),  # two, of which pairs may share an expert
    (9, 5, 2, 100, 33),  # sorted, no size a multiple of a tile's
    (70, 3, 1, 48, 16),  # an expert with more than one tile
    (17, 4, 4, 32, 32),  # every token goes through all
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_values(case, each, randn, shape, dtype):
    arguments = case(*shape, dtype)
    terms = shape[3] + shape[4] * shape[2]
    check_close(each.experts(*arguments), exact(*arguments), terms=terms, slack=2)
    onto = randn(shape[0], shape[3] + 3, dtype=dtype)[:, : shape[3]]
    before = onto.clone()
    check_close(each.experts(*arguments, onto=onto), exact(*arguments, onto=onto), terms=terms, slack=2)
    assert torch.equal(onto, before)


@pytest.mark.parametrize("act", EXACT_ACTS)
def test_activations(case, each, act):
    arguments = case(3, 4, 2, 32, 32, torch.float32)
    check_close(each.experts(*arguments, act), exact(*arguments, act), terms=96, slack=2)


@pytest.mark.parametrize("tokens", [1, 7])
def test_biases_and_the_clamped_activation(case, each, randn, tokens):
    x, weights, experts, gate_up, down = case(tokens, 4, 2, 32, 24, torch.float32)
    gate_up_bias, down_bias = randn(4, 48), randn(4, 32)
    options = {"gate_up_bias": gate_up_bias, "down_bias": down_bias, "clamp": (1.7, 0.8)}
    expected = torch.zeros(tokens, 32, dtype=torch.float64, device=x.device)
    for token in range(tokens):
        for weight, expert in zip(weights[token].double(), experts[token].tolist(), strict=True):
            gate, up = (gate_up[expert].double() @ x[token].double() + gate_up_bias[expert]).chunk(2)
            gate, up = gate.clamp(max=0.8), up.clamp(-0.8, 0.8)
            inner = (up + 1) * gate * torch.sigmoid(1.7 * gate)
            expected[token] += weight * (down[expert].double() @ inner + down_bias[expert])
    check_close(each.experts(x, weights, experts, gate_up, down, **options), expected.float(), terms=96, slack=2)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("tokens", "num_experts"), [(1, 5), (2, 40), (9, 7)])
def test_experts_of_several_ranks_add_up(case, each, randn, tokens, num_experts, biased):
    """Unevenly shared, few pairs and sorted ones; what is not a rank's own is NaN, and nobody reads it."""
    x, weights, experts, gate_up, down = case(tokens, num_experts, 3, 64, 48, torch.float32)
    biases = (randn(num_experts, 96), randn(num_experts, 64)) if biased else (None, None)
    whole = each.experts(x, weights, experts, gate_up, down, gate_up_bias=biases[0], down_bias=biases[1])
    total = torch.zeros_like(whole)
    for first, end in ((0, 2), (2, 3), (3, num_experts)):
        own = [None if part is None else part[first:end].contiguous() for part in (gate_up, down, *biases)]
        total += each.experts(
            *(x, weights, experts, *own[:2]),
            gate_up_bias=own[2],
            down_bias=own[3],
            owned=ops.ExpertRange(first, num_experts),
        )
    check_close(total, whole, terms=300, slack=2)
    with pytest.raises(ValueError, match=r"^owned "):
        each.experts(x, weights, experts, gate_up, down, owned=ops.ExpertRange(1, num_experts))


@pytest.mark.parametrize("rows", [16, 32])
def test_groups_of_the_experts_that_are_here(randn, rows):
    from rayllm_kernels.experts.group_kernel import group

    experts = randn(50, 9).topk(2).indices.to(torch.int32)
    order, tiles, count = group(experts, 4, rows, 3)
    pairs, own = experts.flatten().tolist(), range(3, 7)
    expected = sorted((p for p, expert in enumerate(pairs) if expert in own), key=lambda p: (pairs[p], p))
    assert order.tolist()[: len(expected)] == expected
    found = []
    for expert, first, end in tiles[:, : int(count)].T.tolist():
        assert {pairs[pair] - 3 for pair in order[first:end].tolist()} == {expert}
        found += range(first, min(first + rows, end))
    assert found == list(range(len(expected)))


def chosen_rows():
    pairs = {choose_rows(p, 8, torch.float16, unsorted=False) for p in range(1, 4096, 7)}
    return sorted(pairs)


@pytest.mark.parametrize("rows", chosen_rows())
def test_every_tile_that_may_be_chosen(case, rows):
    """With experts that have no pair, and one that has most."""
    from rayllm_kernels.experts.group_kernel import group
    from rayllm_kernels.experts.products_kernel import combine, multiply

    arguments = case(rows + 9, 6, 2, 80, 72, torch.float16, skewed=True)
    x, weights, experts, gate_up, down = arguments
    projections = Projections(gate_up, down, None, None, "silu", None)
    with dispatch.forced(triton=True):
        groups = group(experts, 6, rows)
        h = multiply(x, projections, experts, groups, choose_tiles(rows, x.dtype, gated=True), gated=True)
        z = multiply(h, projections, experts, groups, choose_tiles(rows, x.dtype, gated=False), gated=False)
        y = combine(z, weights, None)
    check_close(y, exact(*arguments), terms=300, slack=2)


@pytest.mark.parametrize(("tokens", "num_experts", "rows"), [(5, 8, 16), (700, 5, 16), (33, 1, 16), (40, 20, 32)])
def test_groups(randn, tokens, num_experts, rows):
    from rayllm_kernels.experts.group_kernel import group

    top_k = min(2, num_experts)
    experts = randn(tokens, num_experts).topk(top_k).indices.to(torch.int32)
    order, tiles, count = group(experts, num_experts, rows)
    pairs = experts.flatten().tolist()
    assert order.tolist() == sorted(range(len(pairs)), key=lambda pair: (pairs[pair], pair))
    found = []
    for expert, first, end in tiles[:, : int(count)].T.tolist():
        assert end - first > 0
        assert {pairs[pair] for pair in order[first:end].tolist()} == {expert}
        found += range(first, min(first + rows, end))
    assert found == list(range(len(pairs)))


@pytest.mark.parametrize("dtype", DTYPES if ON_GPU else [torch.float16])
def test_tokens_do_not_know_of_each_other(case, each, dtype):
    """To the bit, whatever else is in the batch: all tiles add up in one order."""
    x, weights, experts, *rest = case(200 if ON_GPU else 20, 8, 2, 64, 48, dtype)
    whole = each.experts(x, weights, experts, *rest, deterministic=True)
    for first, end in ((0, 1), (7, 8), (3, 5), (2, 19)):
        part = each.experts(x[first:end], weights[first:end], experts[first:end], *rest, deterministic=True)
        assert torch.equal(part, whole[first:end])


def test_few_pairs_are_not_sorted():
    assert is_unsorted(1, 8, 8)
    assert is_unsorted(4, 8, 128)
    assert not is_unsorted(5, 8, 128)


def test_no_tokens(case, each):
    arguments = case(2, 4, 2, 32, 16, torch.float32)
    x, weights, experts, *rest = arguments
    assert each.experts(x[:0], weights[:0], experts[:0], *rest, deterministic=True).shape == (0, 32)


def test_errors(case, each):
    x, weights, experts, gate_up, down = case(3, 4, 2, 32, 16, torch.float32)
    for name, change in {
        "x": {"x": x[0]},
        "weights": {"weights": weights[:, :1].contiguous()},
        "experts": {"experts": experts.long()},
        "gate_up": {"gate_up": gate_up[:, :, :16]},
        "down": {"down": down[:, :, :15]},
        "act": {"act": "relu6"},
        "onto": {"onto": x[:2]},
        "gate_up_bias": {"gate_up_bias": x[:2]},
        "down_bias": {"down_bias": x},
    }.items():
        arguments = {"x": x, "weights": weights, "experts": experts, "gate_up": gate_up, "down": down}
        with pytest.raises(ValueError, match=f"^{name} "):
            each.experts(**{**arguments, **change})
