"""Experts in fewer bits, by every tile that may be chosen, against float64 of the dequantised weights."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.capabilities import HERE, needs_e4m3
from support.closeness import check_close
from support.quantised_experts import make_arguments, make_weight, pack_halves

from rayllm_kernels import dispatch, ops
from rayllm_kernels.device import INTERPRETER, assumed
from rayllm_kernels.ops import ExpertRange, ExpertWeight, Rounding, to_fp8
from rayllm_kernels.quantised import plans
from rayllm_kernels.quantised.formats import E2M1

ON_GPU = torch.cuda.is_available()
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]


@pytest.fixture
def case(randn):
    """(tokens, experts, top_k, hidden, inner, dtype, format) -> as of `make_arguments`."""
    return partial(make_arguments, randn)


def whole(weight):
    return torch.stack([weight.dequantised(expert) for expert in range(weight.codes.shape[0])])


def exact(x, weights, experts, gate_up, down, onto=None, biases=None, fp8_tokens=False):
    """In fp64, token by token."""
    first, last = whole(gate_up).double(), whole(down).double()

    def numbers(tokens, rounding):
        return to_fp8(tokens, rounding).dequantised().double() if fp8_tokens else tokens.double()

    wide = numbers(x, gate_up.rounding)
    total = torch.zeros(x.shape, dtype=torch.float64, device=x.device) if onto is None else onto.double()
    for token in range(x.shape[0]):
        for weight, expert in zip(weights[token].double(), experts[token].tolist(), strict=True):
            gate, up = (first[expert] @ wide[token] + (biases[0][expert] if biases else 0)).chunk(2)
            inner = F.silu(gate) * up
            if fp8_tokens:
                inner = numbers(inner.to(x.dtype)[None], Rounding(down.token_group))[0]
            out = last[expert] @ inner + (biases[1][expert] if biases else 0)
            total[token] += weight * out
    return total.to(x.dtype)


# kind, inputs that share a scale, outputs that do (of int4: more than 1 if there are zero points)
FORMATS = [("fp8", None, 1), ("fp8", 32, 16), ("fp8", 128, 128), ("int4", 32, 1), ("int4", 64, 2), ("int4", None, 2)]
FORMATS += [("mxfp4", 32, 1)]
# tokens, experts, top_k, hidden, inner
SHAPES = [(1, 4, 2, 64, 96), (5, 3, 2, 96, 32), (20, 3, 1, 96, 32)]
CASES = [(shape, dtype) for shape in SHAPES for dtype in DTYPES]
if not ON_GPU:  # the interpreter takes its time
    CASES = [(SHAPES[0], torch.float16), (SHAPES[1], torch.float32), (SHAPES[2], torch.float16)]


@pytest.mark.parametrize("how", FORMATS, ids=str)
def test_what_weights_mean(randn, how):
    """Within what the format's bits allow."""
    weight = randn(2, 32, 96)
    made = whole(make_weight(weight, *how))
    assert (made - weight).abs().mean() < {"fp8": 0.03, "int4": 0.2, "mxfp4": 0.2}[how[0]] * weight.abs().mean()


@pytest.mark.parametrize(("shape", "dtype"), CASES)
@pytest.mark.parametrize("how", FORMATS, ids=str)
def test_values(case, kernels, reference, randn, shape, how, dtype):
    arguments, terms = case(*shape, dtype, how), shape[3] + shape[4] * shape[2]
    onto = randn(shape[0], shape[3] + 3, dtype=dtype)[:, : shape[3]]
    expected = exact(*arguments, onto=onto)
    for each in (kernels, reference):
        check_close(each.experts_quantised(*arguments, onto=onto), expected, terms=terms, slack=2)


def check_rounded(actual, expected):
    """Alike but for a few numbers that lie near the border between two of fp8, and fall to the other side."""
    error, size = (actual - expected).double().abs(), expected.double().square().mean().sqrt()
    assert error.median() < 2e-3 * size
    assert error.square().mean().sqrt() < 0.02 * size


@needs_e4m3
@pytest.mark.parametrize(("shape", "dtype"), CASES)
@pytest.mark.parametrize("how", [("fp8", None, 1), ("fp8", 32, 16), ("fp8", 128, 128)], ids=str)
def test_tokens_in_fp8(case, kernels, reference, randn, shape, how, dtype):
    arguments, onto = case(*shape, dtype, how), randn(shape[0], shape[3], dtype=dtype)
    expected = exact(*arguments, onto=onto, fp8_tokens=True)
    plain = exact(*arguments, onto=onto)
    assert (plain - expected).double().square().mean().sqrt() > 0.01 * expected.double().square().mean().sqrt()
    check_rounded(reference.experts_quantised(*arguments, onto=onto, fp8_tokens=True), expected)
    y = kernels.experts_quantised(*arguments, onto=onto, fp8_tokens=True)
    if shape[0] == 1:  # kernels leave few tokens as they are
        check_close(y, plain, terms=shape[3] + shape[4] * shape[2], slack=2)
    else:
        check_rounded(y, expected)


@needs_e4m3
@pytest.mark.parametrize("clamp", [None, (1.7, 7.0)])
@pytest.mark.parametrize("tokens", [1, 7])
def test_tokens_in_fp8_with_biases(case, kernels, reference, randn, tokens, clamp):
    x, *rest = case(tokens, 4, 2, 64, 48, torch.float32, ("fp8", 32, 16))
    named = {"gate_up_bias": randn(4, 96), "down_bias": randn(4, 64), "clamp": clamp}
    y = kernels.experts_quantised(x, *rest, fp8_tokens=True, **named)
    check_rounded(y, reference.experts_quantised(x, *rest, fp8_tokens=tokens > 1, **named))


# Few pairs and sorted ones; what is not a rank's own is nobody's to read.
@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize(
    ("how", "fp8_tokens"), [pytest.param(("fp8", 32, 16), True, marks=needs_e4m3), (("int4", 32, 2), False)], ids=str
)
def test_experts_of_several_ranks_add_up(case, each, randn, tokens, how, fp8_tokens):
    x, weights, experts, gate_up, down = case(tokens, 5, 2, 64, 32, torch.float32, how)
    biases, options = (randn(5, 64), randn(5, 64)), {"fp8_tokens": fp8_tokens}
    plain = each.experts_quantised(
        x, weights, experts, gate_up, down, gate_up_bias=biases[0], down_bias=biases[1], **options
    )

    def part(weight, first, end):
        parts = {name: getattr(weight, name) for name in ("codes", "scales", "zeros")}
        return weight._replace(**{name: own if own is None else own[first:end] for name, own in parts.items()})

    total = torch.zeros_like(plain)
    for first, end in ((0, 2), (2, 3), (3, 5)):
        total += each.experts_quantised(
            *(x, weights, experts, part(gate_up, first, end), part(down, first, end)),
            gate_up_bias=biases[0][first:end],
            down_bias=biases[1][first:end],
            owned=ExpertRange(first, 5),
            **options,
        )
    check_close(total, plain, terms=300, slack=2)
    with pytest.raises(ValueError, match=r"^owned "):
        each.experts_quantised(x, weights, experts, gate_up, down, owned=ExpertRange(1, 5))


@pytest.mark.parametrize("tokens", [1, 7])
def test_biases_and_the_clamped_activation(case, each, randn, tokens):
    x, weights, experts, gate_up, down = case(tokens, 4, 2, 32, 32, torch.float32, ("mxfp4", 32, 1))
    options = {"gate_up_bias": randn(4, 64), "down_bias": randn(4, 32)}
    y = each.experts_quantised(x, weights, experts, gate_up, down, **options)
    check_close(y, exact(x, weights, experts, gate_up, down, biases=tuple(options.values())), terms=96, slack=2)
    y = each.experts_quantised(x, weights, experts, gate_up, down, clamp=(1.7, 0.8), **options)
    plain = whole(gate_up), whole(down)
    check_close(y, each.experts(x, weights, experts, *plain, clamp=(1.7, 0.8), **options), terms=96, slack=2)


def test_every_code_of_e2m1_becomes_its_number(kernels, device):
    """And every exponent, least and largest too, as far as fp32 goes."""
    codes = torch.arange(16, dtype=torch.uint8, device=device).repeat(2).view(1, 1, 32)
    packed = pack_halves(codes, 32)
    x = torch.eye(32, device=device)
    once = torch.ones(32, 1, device=device), torch.zeros(32, 1, dtype=torch.int32, device=device)
    expected = torch.tensor(E2M1 * 2, device=device)
    from rayllm_kernels.experts.group_kernel import group
    from rayllm_kernels.quantised.experts import QuantisedProjections
    from rayllm_kernels.quantised.experts_kernel import multiply

    for exponent in (0, 1, 127, 200, 250):
        scales = torch.full((1, 1, 1), exponent, dtype=torch.uint8, device=device)
        weight = ExpertWeight("mxfp4", packed, scales, None, 32, 32)
        projections = QuantisedProjections(weight, weight, None, None, "silu", None)
        tiles = plans.choose_expert_tiles(16, "mxfp4", 32, torch.float32, HERE, gated=False)
        with dispatch.forced(triton=True):
            y = multiply(x, projections, once[1], group(once[1], 1, tiles.tokens), tiles, gated=False)
        assert torch.equal(y[:, 0], torch.ldexp(expected, torch.tensor(exponent - 127, device=device)))


@pytest.mark.parametrize("rows", [16, 32, 64, 128])
@pytest.mark.parametrize("how", [("fp8", 128, 16), ("int4", 32, 2)], ids=str)
def test_every_tile_that_may_be_chosen(case, rows, how):
    from rayllm_kernels.experts.group_kernel import group
    from rayllm_kernels.quantised.experts import QuantisedProjections
    from rayllm_kernels.quantised.experts_kernel import multiply

    arguments = case(rows + 9, 4, 2, 160, 64, torch.float16, how)
    x, weights, experts, gate_up, down = arguments
    projections = QuantisedProjections(gate_up, down, None, None, "silu", None)
    tiles = [plans.choose_expert_tiles(rows, *how[:2], x.dtype, HERE, gated=gated) for gated in (True, False)]
    with dispatch.forced(triton=True):
        groups = group(experts, 4, rows)
        h = multiply(x, projections, experts, groups, tiles[0], gated=True)
        z = multiply(h, projections, experts, groups, tiles[1], gated=False)
        y = ops.PairSum(z, weights).total()
    check_close(y, exact(*arguments), terms=300, slack=2)


JOINS = plans.joins_scales("mxfp4", torch.bfloat16, HERE)


@pytest.mark.skipif(not JOINS, reason="only Hopper joins scales, in PTX")
@pytest.mark.parametrize("rows", [16, 32, 64, 128])
@pytest.mark.parametrize("deterministic", [False, True])
def test_every_tile_of_joined_scales(case, rows, deterministic):
    """Inputs and outputs of both products end within a tile; the second half of a row ends within a group."""
    from rayllm_kernels.experts.group_kernel import group
    from rayllm_kernels.experts.pair_sum import PairSum
    from rayllm_kernels.quantised.experts import QuantisedProjections
    from rayllm_kernels.quantised.experts_kernel import multiply

    arguments = case(rows + 9, 4, 2, 672, 352, torch.bfloat16, ("mxfp4", 32, 1))
    x, weights, experts, gate_up, down = arguments
    projections = QuantisedProjections(gate_up, down, None, None, "silu", None)
    options = {"joined": True}
    tiles = [
        plans.choose_expert_tiles(rows, "mxfp4", 32, x.dtype, HERE, gated=gated, deterministic=deterministic, **options)
        for gated in (True, False)
    ]
    with dispatch.forced(triton=True):
        groups = group(experts, 4, rows)
        h = multiply(x, projections, experts, groups, tiles[0], gated=True, **options)
        z = multiply(h, projections, experts, groups, tiles[1], gated=False, **options)
        y = PairSum(z, weights).total()
    check_close(y, exact(*arguments), terms=1400, slack=2)


@pytest.mark.skipif(not JOINS, reason="only Hopper joins scales, in PTX")
def test_every_code_of_e2m1_is_exact_with_its_scale_in_bf16(device):
    """With every exponent of weights from 2^-100 to 2^33."""
    from rayllm_kernels.experts.group_kernel import group
    from rayllm_kernels.quantised.experts import QuantisedProjections
    from rayllm_kernels.quantised.experts_kernel import multiply

    exponents = torch.arange(27, 161, dtype=torch.uint8, device=device)
    rows = exponents.numel()
    codes = torch.arange(16, dtype=torch.uint8, device=device).repeat(4).view(1, 1, 64).repeat(1, rows, 1)
    scales = exponents.view(1, rows, 1).repeat(1, 1, 2)
    weight = ExpertWeight("mxfp4", pack_halves(codes, 32), scales, None, 64, 32)
    projections = QuantisedProjections(weight, weight, None, None, "silu", None)
    x, once = torch.eye(64, dtype=torch.bfloat16, device=device), torch.zeros(64, 1, dtype=torch.int32, device=device)
    for tokens in (16, 32, 64, 128):
        tiles = plans.choose_expert_tiles(tokens, "mxfp4", 32, x.dtype, HERE, gated=False, joined=True)
        y = multiply(x, projections, once, group(once, 1, tokens), tiles, gated=False, joined=True)
        assert torch.equal(y.float(), weight.dequantised(0).t())


@pytest.mark.parametrize(
    "how",
    [
        ("mxfp4", 32, 1),
        ("int4", 32, 2),
        *(pytest.param(each, marks=pytest.mark.full_matrix) for each in [("int4", 128, 1), ("int4", None, 2)]),
    ],
    ids=str,
)
def test_few_pairs_of_4_bits(randn, how):
    """Rows of several chunks, of which the last ends early, and whose second half ends before the first; a number of
    outputs and of experts a token that is no power of two.
    """
    from rayllm_kernels.experts.pairs_kernel import NO_ACTIVATION, multiply_pairs
    from rayllm_kernels.quantised.experts_kernel import pair_weight

    inputs, dtype = 1184, torch.bfloat16 if ON_GPU else torch.float16
    weight, x = make_weight(randn(5, 22, inputs), *how), randn(6, inputs, dtype=dtype)
    weights, experts = (part.contiguous() for part in randn(2, 5).softmax(-1).topk(3))
    experts, onto, wide = experts.to(torch.int32), randn(2, 22, dtype=dtype), whole(weight).double()
    with dispatch.forced(triton=True):
        h = multiply_pairs(x[:2], pair_weight(weight, HERE), None, experts, ("silu", 0.0, 0.0))
        y = multiply_pairs(x, pair_weight(weight, HERE), None, experts, NO_ACTIVATION, combined=(weights, onto))
    of_pairs = wide[experts.flatten().long()]
    gate, up = torch.einsum("pnk,pk->pn", of_pairs, x[:2].double().repeat_interleave(3, 0)).chunk(2, -1)
    check_close(h, (F.silu(gate) * up).to(dtype), terms=2 * inputs, slack=2)
    z = torch.einsum("pnk,pk->pn", of_pairs, x.double()).to(dtype).double().view(2, 3, 22)
    check_close(y, ((weights[..., None] * z).sum(1) + onto.double()).to(dtype), terms=inputs, slack=2)


@pytest.mark.parametrize("capability", [pytest.param(HERE.capability, marks=needs_e4m3), (8, 0)], ids=["here", "8.0"])
@pytest.mark.parametrize("how", [("fp8", None, 1), ("fp8", 32, 16), ("fp8", 128, 128)], ids=str)
def test_few_pairs_beside_weights_in_fp8(case, kernels, monkeypatch, how, capability):
    """Vector products but for the deterministic mode, also where the bytes of e4m3 have to be decoded."""
    arguments = case(1, 4, 2, 160, 96, torch.float16, how)
    expected = exact(*arguments)
    check_close(kernels.experts_quantised(*arguments, deterministic=True), expected, terms=352, slack=2)
    monkeypatch.setattr(plans, "choose_expert_tiles", None)  # is not asked
    with assumed(arguments[0].device, HERE._replace(capability=capability)):
        check_close(kernels.experts_quantised(*arguments), expected, terms=352, slack=2)


@needs_e4m3
@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.parametrize("gpu", [INTERPRETER, INTERPRETER._replace(capability=(9, 0))], ids=["any", "Hopper"])
@pytest.mark.parametrize("how", [("fp8", 64, 64), ("fp8", None, 1)], ids=str)
def test_every_tile_that_may_be_chosen_for_tokens_in_fp8(case, rows, gpu, how):
    """The outputs of neither product are a multiple of the tile's."""
    from rayllm_kernels.experts.group_kernel import group
    from rayllm_kernels.quantised.experts import QuantisedProjections
    from rayllm_kernels.quantised.fp8_experts_kernel import multiply

    if rows > plans.most_fp8_expert_rows(HERE, shared_scales=True):
        pytest.skip("this GPU has no room for so many rows")
    arguments = case(rows // 2 + 9, 2, 1, 96, 144, torch.float16, how)
    x, weights, experts, gate_up, down = arguments
    projections = QuantisedProjections(gate_up, down, None, None, "silu", None)
    group_size, scaled = down.token_group, down.group is not None
    tiles = [
        plans.choose_fp8_expert_tiles(rows, group_size, group_size, gpu, gated=gated, scaled=scaled)
        for gated in (True, False)
    ]
    with dispatch.forced(triton=True):
        groups, of_x = group(experts, 2, rows), to_fp8(x, gate_up.rounding)
        h = multiply(of_x, projections, experts, groups, tiles[0], x.dtype, gated=True)
        z = multiply(h, projections, experts, groups, tiles[1], x.dtype, gated=False)
        y = ops.PairSum(z, weights).total()
    check_rounded(y, exact(*arguments, fp8_tokens=True))


@pytest.mark.parametrize(
    ("how", "fp8_tokens"),
    [(("fp8", 32, 16), False), (("mxfp4", 32, 1), False), pytest.param(("fp8", 128, 128), True, marks=needs_e4m3)],
    ids=str,
)
def test_tokens_do_not_know_of_each_other(case, each, how, fp8_tokens):
    dtype = torch.bfloat16 if ON_GPU else torch.float16
    x, weights, experts, *rest = case(9, 4, 2, 160 if fp8_tokens else 64, 32, dtype, how)
    options = {"deterministic": True, "fp8_tokens": fp8_tokens}
    everything = each.experts_quantised(x, weights, experts, *rest, **options)
    for first, end in ((0, 1), (7, 8), (2, 8)):
        part = x[first:end], weights[first:end], experts[first:end]
        assert torch.equal(each.experts_quantised(*part, *rest, **options), everything[first:end])


def test_the_deterministic_mode_has_one_depth():
    """Scales meet a sum at the end of a tile's depth, which must not follow the number of rows."""
    for capability in ((8, 0), (9, 0)):
        gpu = HERE._replace(capability=capability)
        for kind, group in (("fp8", None), ("fp8", 128), ("int4", 32), ("int4", 64), ("int4", 128), ("mxfp4", 32)):
            for gated in (True, False):
                tiles = [
                    plans.choose_expert_tiles(rows, kind, group, torch.bfloat16, gpu, gated=gated, deterministic=True)
                    for rows in (16, 32, 64, 128)
                ]
                assert len({each.depth for each in tiles}) == 1


def test_no_tokens_and_errors(case, each):
    x, weights, experts, gate_up, down = case(3, 4, 2, 32, 32, torch.float32, ("int4", 32, 2))
    assert each.experts_quantised(x[:0], weights[:0], experts[:0], gate_up, down).shape == (0, 32)
    for name, change in {
        "x": {"x": x[0]},
        "weights": {"weights": weights[:, :1].contiguous()},
        "experts": {"experts": experts.long()},
        "act": {"act": "relu6"},
        "onto": {"onto": x[:2]},
        "gate_up": {"gate_up": gate_up._replace(inputs=64)},
        "gate_up.group": {"gate_up": gate_up._replace(group=16)},
        "gate_up.codes": {"gate_up": gate_up._replace(codes=gate_up.codes.int())},
        "down.scales": {"down": down._replace(scales=down.scales.half())},
        "down.zeros": {"down": down._replace(zeros=down.zeros[:1])},
        "gate_up_bias": {"gate_up_bias": x[:2]},
        "down_bias": {"down_bias": x},
        "fp8_tokens": {"fp8_tokens": True},
    }.items():
        arguments = {"x": x, "weights": weights, "experts": experts, "gate_up": gate_up, "down": down}
        with pytest.raises(ValueError, match=f"^{name} "):
            each.experts_quantised(**{**arguments, **change})
    gate_up = make_weight(gate_up.dequantised(0)[None].repeat(4, 1, 1), "mxfp4", 32, 1)
    with pytest.raises(ValueError, match=r"^gate_up.group must be 32 for mxfp4"):
        each.experts_quantised(x, weights, experts, gate_up._replace(group=64), down)
