"""Every format against the product of the dequantised weights, and of tokens as they came: a row at a time, within what
the tokens' format allows.

The other tests of these products compare them with exact ones of the very numbers that are multiplied, of few inputs
and outputs. Here, on GPUs, they have the sizes that are served, caches hold nothing of them, and tokens are not rounded
beforehand. The bounds follow from how numbers are rounded (see `support.closeness`): e4m3 has four bits, so
a number is off by 2^-4 of it at most, or by half of the least step where that is more; 16-bit tokens are not rounded,
but weights may become numbers of their dtype. What is off in a factor of a product is as far off in the product:

    most:    what no element may be off by, if all its products were off the same way
    likely:  what a row's root mean square may be, as weights that meet what is off do not know of it
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from support.capabilities import HERE, needs_e4m3
from support.closeness import FP32, unit_of
from torch import Tensor

from rayllm_kernels.ops import ExpertWeight, Fp8Weight, Int4Weight, Rounding
from rayllm_kernels.quantised.formats import E4M3_MAX, e2m1_numbers, e4m3_numbers, int4_numbers
from rayllm_kernels.quantised.int4 import pack_int4

ON_GPU = torch.cuda.is_available()
E4M3_UNIT, E4M3_STEP = 2.0**-4, 2.0**-9  # largest share that a number is rounded by, and the least step
# Hopper's tensor cores add 32 products of fp8 numbers, and their sum so far, with 13 bits behind the largest of them.
FP8_SUM_INPUTS, FP8_SUM_UNIT = 32, 2.0**-13


class Inexact(NamedTuple):
    """Numbers in float64, and how far off they may be, as above."""

    values: Tensor
    most: Tensor
    likely: Tensor

    def plus(self, most: Tensor) -> Inexact:
        """Rounded once more, by so much at most."""
        return Inexact(self.values, self.most + most, (self.likely.square() + most.square()).sqrt())


def known(values: Tensor) -> Inexact:
    return Inexact(values.double(), torch.zeros_like(values.double()), torch.zeros_like(values.double()))


def in_e4m3(x: Inexact, how: Rounding) -> Inexact:
    """Tokens [T, K] once they are rounded; those past the largest number with a scale found beforehand become that."""
    (tokens, inputs), size = x.values.shape, x.values.abs() + x.most
    group = how.group or inputs
    if how.scale is None:
        parts = F.pad(size, (0, -inputs % group)).view(tokens, -1, group)
        scales = (parts.amax(-1) / E4M3_MAX).repeat_interleave(group, 1)[:, :inputs]
    else:
        scales = how.scale.double().expand(tokens, inputs)
    rounding = torch.maximum(E4M3_UNIT * size, 0.5 * E4M3_STEP * scales)
    return x.plus(torch.maximum(rounding, size - E4M3_MAX * scales) + 4 * FP32 * size)


def multiplied(x: Inexact, weight: Tensor, *, unit: float, fp8: bool) -> Inexact:
    """x [T, K] times dequantised weights [N, K], which are rounded to what has this unit roundoff; 0: they are not."""
    wide, inputs = weight.double().T, weight.shape[1]
    size = x.values.abs() + x.most
    sums = inputs * FP32 + (inputs / FP8_SUM_INPUTS * FP8_SUM_UNIT if fp8 and HERE.is_hopper else 0.0)
    values, most = x.values @ wide, x.most @ wide.abs() + (unit + sums) * (size @ wide.abs())
    spread = (size.square() @ wide.square()).sqrt()
    likely = x.likely.square() @ wide.square() + (unit**2 + sums**2) * spread.square()
    return Inexact(values, most, likely.sqrt())


def check_rows(y: Tensor, expected: Inexact) -> None:
    """Assert that y, rounded from what is off by so much, is within both bounds."""
    bound = expected.plus(unit_of(y.dtype) * (expected.values.abs() + expected.most))
    error = (y.double() - expected.values).abs()
    assert (error <= bound.most).all(), "an element is off by more than roundings allow"
    rows, allowed = (part.square().mean(-1).sqrt() for part in (error, bound.likely))
    assert (rows <= allowed).all(), f"rows are off by {(rows / allowed).tolist()} of what roundings allow"


def tokens_of(randn, tokens, inputs, dtype):
    """Of very different sizes, each with a few numbers far larger than the rest."""
    x = randn(tokens, inputs, dtype=torch.float32)
    x[:, 3::20] *= 8
    return (x * torch.logspace(-2, 1, tokens, device=x.device)[:, None]).to(dtype)


def in_fp8(weight, rows, group):
    """rows: outputs that share a scale; None for all, stored for each as layers do."""
    found = e4m3_numbers(weight, (rows, group))
    step = 1 if group is None else rows
    scales = found.scales[::step][:, found.groups[:: group or len(found.groups)]]
    return Fp8Weight(found.values.contiguous(), scales.contiguous(), step, group)


def in_int4(weight, group, *, symmetric):
    codes, scales, zeros = pack_int4(int4_numbers(weight, group, symmetric=symmetric), group)
    zeros = None if symmetric else zeros.T.contiguous()
    return Int4Weight(codes, scales.T.contiguous(), zeros, weight.shape[1], group)


DTYPES = [torch.float16, torch.bfloat16] if ON_GPU else [torch.float32, torch.float16]
FP8 = {"row": (1, None), "tensor": (None, None), "block of 128 x 128": (128, 128), "block of 16 x 32": (16, 32)}
INT4 = [(32, True), (32, False), (128, True), (128, False), (None, False)]
# tokens, outputs, inputs
SHAPES = [(1, 200, 384), (5, 136, 256), (33, 40, 160)]
if ON_GPU:  # as many tokens as there are kernels for, of layers of Llama-3.1-8B
    SHAPES += [(tokens, 4096, 4096) for tokens in (1, 16, 128, 256, 2048)]
    SHAPES += [(tokens, 4096, 14336) for tokens in (1, 100)] + [(32, 6144, 4096), (1, 28672, 4096), (200, 28672, 4096)]
# experts, of them for each token, hidden, inner; on GPUs those of Qwen3-30B-A3B and gpt-oss-20b, but not as many
EXPERTS = [(4, 2, 256, 128), *([(32, 8, 2048, 768), (8, 4, 2880, 2880)] if ON_GPU else [])]


@needs_e4m3
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", FP8)
@pytest.mark.parametrize(("tokens", "outputs", "inputs"), SHAPES)
def test_fp8(randn, scaled, each, repeated, tokens, outputs, inputs, scale, dtype):
    """Tokens rounded by their own largest numbers, or by a scale that some are too large for; one, behind a norm."""
    weight = in_fp8(scaled(outputs, inputs, torch.float32), *FP8[scale])
    x, wide, group = tokens_of(randn, tokens, inputs, dtype), weight.dequantised(), weight.group
    ways = [Rounding(group)]
    if group is None:
        ways.append(Rounding(None, (x.float().abs().max() / 500).view(1)))
    for how in ways:
        expected = multiplied(in_e4m3(known(x), how), wide, unit=0.0, fp8=True)
        check_rows(repeated(partial(each.linear_fp8, each.to_fp8(x, how), weight, None, dtype)), expected)
        check_rows(repeated(lambda how=how: each.linear_rounding_fp8(x, how, weight)[0]), expected)
    norm = (randn(inputs, dtype=dtype), 1e-5)
    normed = x.double() * torch.rsqrt(x.double().square().mean(1, keepdim=True) + norm[1]) * norm[0].double()
    rounded = known(normed).plus(2 * unit_of(dtype) * normed.abs())
    expected = multiplied(in_e4m3(rounded, ways[0]), wide, unit=0.0, fp8=True)
    check_rows(repeated(lambda: each.linear_rounding_fp8(x, ways[0], weight, norm=norm)[0]), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", FP8)
@pytest.mark.parametrize(("tokens", "outputs", "inputs"), SHAPES)
def test_fp8_beside_tokens_as_they_are(randn, scaled, each, repeated, tokens, outputs, inputs, scale, dtype):
    weight = in_fp8(scaled(outputs, inputs, torch.float32), *FP8[scale])
    x = tokens_of(randn, tokens, inputs, dtype)
    expected = multiplied(known(x), weight.dequantised(), unit=unit_of(dtype), fp8=False)
    check_rows(repeated(partial(each.linear_fp8_weight, x, weight)), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "symmetric"), INT4)
@pytest.mark.parametrize(("tokens", "outputs", "inputs"), SHAPES)
def test_int4(randn, scaled, each, repeated, tokens, outputs, inputs, group, symmetric, dtype):
    """Weights, and before them their scales, may be rounded to the tokens' dtype."""
    weight = in_int4(scaled(outputs, inputs, torch.float32), group, symmetric=symmetric)
    x = tokens_of(randn, tokens, inputs, dtype)
    expected = multiplied(known(x), weight.dequantised(), unit=2 * unit_of(dtype), fp8=False)
    check_rows(repeated(partial(each.linear_int4, x, weight)), expected)


def halves(codes):
    """Numbers of 4 bits [..., K], two a byte, K / 2 apart."""
    half = codes.shape[-1] // 2
    return (codes[..., :half] | codes[..., half:] << 4).contiguous()


def expert_weight(weight, kind):
    """[E, N, K] of any floats."""
    inputs = weight.shape[2]
    if kind == "mxfp4":
        codes, scales = e2m1_numbers(weight)
        return ExpertWeight(kind, halves(codes), scales, None, inputs, 32)
    if kind == "int4":
        found = [pack_int4(int4_numbers(each, 32, symmetric=False), 32) for each in weight]
        codes, scales, zeros = map(torch.stack, zip(*found, strict=True))
        return ExpertWeight(kind, codes, scales, zeros, inputs, 32)
    each = [in_fp8(own, *FP8[kind]) for own in weight]
    codes, scales = (torch.stack(parts) for parts in zip(*(own[:2] for own in each), strict=True))
    return ExpertWeight("fp8", codes.view(torch.uint8), scales, None, inputs, each[0].group, each[0].rows)


def gated(product: Inexact) -> Inexact:
    """SiLU of the first half times the second one. The slope of SiLU is at most 1.1."""
    gate, up = (Inexact(*parts) for parts in zip(*(part.chunk(2, -1) for part in product), strict=True))
    factor = F.silu(gate.values)
    most = 1.1 * gate.most * (up.values.abs() + up.most) + factor.abs() * up.most
    likely = (1.1 * gate.likely * (up.values.abs() + up.likely)).square() + (factor * up.likely).square()
    return Inexact(factor * up.values, most, likely.sqrt())


@pytest.mark.parametrize("dtype", DTYPES[1:] if not ON_GPU else DTYPES)
@pytest.mark.parametrize("tokens", [1, 9, *([64, 500] if ON_GPU else [])])
@pytest.mark.parametrize("sizes", EXPERTS, ids=str)
@pytest.mark.parametrize(
    ("kind", "fp8_tokens"),
    [("mxfp4", False), ("int4", False), *((kind, False) for kind in ("row", "block of 16 x 32"))]
    + [pytest.param(kind, True, marks=needs_e4m3) for kind in ("row", "block of 16 x 32", "block of 128 x 128")],
)
def test_experts(randn, each, repeated, tokens, kind, fp8_tokens, sizes, dtype):
    """What is off in the first product goes through SiLU and the second one."""
    count, top_k, hidden, inner = sizes
    first = expert_weight(randn(count, 2 * inner, hidden) * 2 * hidden**-0.5, kind)
    last = expert_weight(randn(count, hidden, inner) * inner**-0.5, kind)
    x = tokens_of(randn, tokens, hidden, dtype)
    weights, experts = (part.contiguous() for part in randn(tokens, count).softmax(-1).topk(top_k))
    unit, own = unit_of(dtype), 0.0 if fp8_tokens else unit_of(dtype)
    start = in_e4m3(known(x), first.rounding) if fp8_tokens else known(x)
    total = known(torch.zeros_like(x))
    for expert in range(count):
        share = torch.where(experts == expert, weights, 0.0).sum(1, keepdim=True).double()
        middle = gated(multiplied(start, first.dequantised(expert), unit=own, fp8=fp8_tokens))
        middle = middle.plus(unit * (middle.values.abs() + middle.most))
        if fp8_tokens:
            middle = in_e4m3(middle, Rounding(last.token_group))
        out = multiplied(middle, last.dequantised(expert), unit=own, fp8=fp8_tokens)
        out = Inexact(*(share * part for part in out.plus(unit * (out.values.abs() + out.most))))
        likely = (total.likely.square() + out.likely.square()).sqrt()
        total = Inexact(total.values + out.values, total.most + out.most, likely)
    arguments = x, weights, experts.to(torch.int32), first, last
    check_rows(repeated(partial(each.experts_quantised, *arguments, fp8_tokens=fp8_tokens)), total)


def test_the_bounds_are_tight(randn, scaled, reference):
    """A scale for all tokens leaves small ones few bits; a block's scale, an element or a zero point is off."""
    weight, how = in_fp8(scaled(136, 256, torch.float32), 128, 128), Rounding(128)
    x = tokens_of(randn, 5, 256, torch.float32)
    x[0] *= 0.01
    expected = multiplied(in_e4m3(known(x), how), weight.dequantised(), unit=0.0, fp8=True)
    right = reference.linear_fp8(reference.to_fp8(x, how), weight, None, torch.float32)
    check_rows(right, expected)
    of_all = x.abs().max() / E4M3_MAX
    few_bits = ((x / of_all).to(torch.float8_e4m3fn).float() * of_all) @ weight.dequantised().T
    scales = weight.scales.clone()
    scales[0, 1] *= 1.25
    other = reference.linear_fp8(reference.to_fp8(x, how), weight._replace(scales=scales), None, torch.float32)
    element = right.clone()
    element[4, 7] += 1.5 * right.std(1)[4]
    for wrong in (few_bits, other, element):
        with pytest.raises(AssertionError, match="off by"):
            check_rows(wrong, expected)
    weight = in_int4(scaled(40, 256, torch.float32), 32, symmetric=False)
    expected = multiplied(known(x), weight.dequantised(), unit=unit_of(torch.float16), fp8=False)
    check_rows(reference.linear_int4(x, weight), expected)
    zeros = weight.zeros.clone()
    zeros[2, 3] += 1
    with pytest.raises(AssertionError, match="off by"):
        check_rows(reference.linear_int4(x, weight._replace(zeros=zeros)), expected)
