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


def check_groups(groups, experts, num_experts, rows, first_expert=0):
    """What is defined of the groups is a stable sort's."""
    of_pairs = experts.flatten().long() - first_expert
    here = (of_pairs >= 0) & (of_pairs < num_experts)
    order = of_pairs.sort(stable=True).indices
    expected = order[here[order]]
    assert groups.order.shape == of_pairs.shape
    assert groups.order[: len(expected)].tolist() == expected.tolist()
    tiles, end = [], 0
    for expert, count in enumerate(of_pairs[here].bincount(minlength=num_experts).tolist()):
        first, end = end, end + count
        tiles += [[expert, place, end] for place in range(first, end, rows)]
    if groups.places is not None:
        assert groups.places[expected].tolist() == list(range(len(expected)))
    assert groups.num_tiles.tolist() == [len(tiles)]
    assert groups.tiles[:, : len(tiles)].T.tolist() == tiles


def group_by(chunk, *arguments):
    """In one launch, or in two with such chunks."""
    from rayllm_kernels.experts.group_kernel import group_at_once, group_in_chunks

    if chunk is None:
        return group_at_once(*arguments, places=True)
    return group_in_chunks(*arguments, chunk, places=True)


@pytest.mark.parametrize("chunk", [None, 16])
@pytest.mark.parametrize("rows", [16, 32])
def test_groups_of_the_experts_that_are_here(randn, rows, chunk):
    experts = randn(50, 9).topk(2).indices.to(torch.int32)
    check_groups(group_by(chunk, experts, 4, rows, 3), experts, 4, rows, 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("owned", [None, (3, 4)])
def test_tokens_lie_at_the_places_of_their_pairs(randn, owned, dtype):
    from rayllm_kernels.experts.group_kernel import group, spread

    experts = randn(50, 9).topk(2).indices.to(torch.int32)
    x = randn(50, 33, dtype=torch.float16).to(dtype)[:, :30]
    groups = group(experts, *((9, 16) if owned is None else (4, 16, 3)), places=True)
    with dispatch.forced(triton=True):
        rows = spread(x, groups.places, experts, owned)
    count = int(groups.tiles[2, : int(groups.num_tiles)].max())
    assert rows.shape == (100, 30)
    assert torch.equal(rows[:count].float(), x.float()[groups.order[:count].long() // 2])


def chosen_rows():
    pairs = {choose_rows(p, 8, torch.float16, unsorted=False) for p in range(1, 4096, 7)}
    return sorted(pairs)


@pytest.mark.parametrize("rows", chosen_rows())
def test_every_tile_that_may_be_chosen(case, rows):
    """With experts that have no pair, and one that has most; filled by tensor copies or not, to the bit."""
    from rayllm_kernels.experts.group_kernel import group
    from rayllm_kernels.experts.products_kernel import multiply

    arguments = case(rows + 9, 6, 2, 80, 72, torch.float16, skewed=True)
    x, weights, experts, gate_up, down = arguments
    projections = Projections(gate_up, down, None, None, "silu", None)
    results = []
    with dispatch.forced(triton=True):
        groups = group(experts, 6, rows)
        for copied in (False, True):
            first, last = (choose_tiles(rows, x.dtype, gated=gated)._replace(copied=copied) for gated in (True, False))
            h = multiply(x, projections, experts, groups, first, gated=True)
            z = multiply(h, projections, experts, groups, last, gated=False)
            results.append(ops.PairSum(z, weights).total())
    check_close(results[0], exact(*arguments), terms=300, slack=2)
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("tokens", "num_experts", "rows", "chunk"),
    [
        (5, 8, 16, None),
        (700, 5, 16, None),
        (33, 1, 16, None),
        (40, 20, 32, None),
        (5, 8, 16, 16),  # a part of a chunk
        (24, 5, 16, 16),  # whole chunks
        (33, 1, 16, 32),
        (40, 20, 32, 32),
        (151, 300, 16, 16),  # more chunks than are counted at once
    ],
)
def test_groups(randn, tokens, num_experts, rows, chunk):
    top_k = min(2, num_experts)
    experts = randn(tokens, num_experts).topk(top_k).indices.to(torch.int32)
    check_groups(group_by(chunk, experts, num_experts, rows, None), experts, num_experts, rows)


UNEVEN = {
    "one has all": torch.full((67,), 4),
    "the last has all": torch.full((67,), 63),
    "most have none": torch.arange(67) % 3 * 20 + 5,
    "each has one": torch.arange(64).flip(0),  # more tiles than a program writes at once
}


@pytest.mark.parametrize("chunk", [None, 16, 64])
@pytest.mark.parametrize("chosen", UNEVEN)
def test_uneven_groups(device, chosen, chunk):
    experts = UNEVEN[chosen].to(device, torch.int32)[:, None]
    check_groups(group_by(chunk, experts, 64, 16, None), experts, 64, 16)
    check_groups(group_by(chunk, experts, 23, 16, 4), experts, 23, 16, 4)


def test_bounds_of_the_ways_to_group(randn, monkeypatch):
    """Made small: the interpreter would sort chunks of the real size for minutes."""
    from rayllm_kernels.experts import group_kernel

    for name, value in {"ONE_LAUNCH": 24, "CHUNK": 8, "MANY_CHUNKS": 5, "LARGE_CHUNK": 16}.items():
        monkeypatch.setattr(group_kernel, name, value)
    used = []
    for name in ("group_at_once", "group_in_chunks"):
        form = getattr(group_kernel, name)

        def noted(*given, form=form, **named):
            used.append(given[4:])
            return form(*given, **named)

        monkeypatch.setattr(group_kernel, name, noted)
    for pairs in (24, 25, 40, 41):
        experts = randn(pairs, 6).topk(1).indices.to(torch.int32)
        check_groups(group_kernel.group(experts, 6, 16), experts, 6, 16)
    assert used == [(), (8,), (8,), (16,)]


@pytest.mark.skipif(not ON_GPU, reason="the interpreter would take minutes")
@pytest.mark.parametrize(
    ("tokens", "top_k", "num_experts"),
    [(8192, 1, 128), (8193, 1, 128), (8192, 8, 128), (8193, 8, 128), (16384, 22, 512), (16381, 22, 300)],
)
def test_groups_of_prompts(randn, tokens, top_k, num_experts):
    from rayllm_kernels.experts.group_kernel import group

    experts = randn(tokens, num_experts).topk(top_k).indices.to(torch.int32)
    for first, here in ((None, num_experts), (num_experts // 4, num_experts // 2)):
        groups = group(experts, here, 128, first)
        check_groups(groups, experts, here, 128, first or 0)
        again = group(experts, here, 128, first)
        count = int(groups.tiles[2, : int(groups.num_tiles)].max())
        assert torch.equal(groups.order[:count], again.order[:count])


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
