"""Products of fp8 numbers (e4m3), and the rounding of activations to them beside a norm or an activation function.

A weight [N, K] has a scale a row, or one a block of rows and inputs. Tokens are rounded to e4m3 with a scale each, or
with one for each of a weight's blocks of inputs:

    scale = max(|x|) / 448,   x is about scale * e4m3(x / scale)
    y[t, n] = sum over k of x[t, k] scale[t, block of k] * w[n, k] scale[block of n, block of k] + bias[n]

Rounding a row needs nothing of the others, so a token's numbers do not depend on the batch.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import check_norm_weight, check_residual, check_rows, check_vectors, fail
from ..device import hardware
from ..dispatch import TritonModule, on_triton
from ..experts.pair_sum import PairSum
from ..norm.act_and_mul import act_and_mul, kind_of
from ..norm.rms_norm import check_norm, check_sum_residual, normed
from . import plans
from .dequantised_product import linear_dequantised
from .formats import E4M3_MAX, divided
from .fp8_operands import Fp8Rows, Fp8Weight, Rounding

_rows_kernel = TritonModule("rayllm_kernels.quantised.fp8_rows_kernel")
_product_kernel = TritonModule("rayllm_kernels.quantised.fp8_product_kernel")
_dequantise_kernel = TritonModule("rayllm_kernels.quantised.fp8_dequantise_kernel")
_vector_kernel = TritonModule("rayllm_kernels.quantised.fp8_vector_kernel")
_stream_kernel = TritonModule("rayllm_kernels.quantised.fp8_stream_kernel")

LEAST_PEAK = 1e-12  # of a group of activations: that of zeros would have no scale


def to_fp8(x: Tensor, how: Rounding) -> Fp8Rows:
    """x [T, K] of fp32, fp16 or bf16 rounded to fp8, last dimension contiguous."""
    _check_matrix(x, how)
    return _rows_kernel.to_fp8(x, how, None, by_group=_by_group(x, how)) if on_triton(x) else _round(x, how)


def act_and_mul_fp8(x: Tensor, how: Rounding, act: str) -> Fp8Rows:
    """`to_fp8` of `act_and_mul`(x, act), x [T, 2 K], in one pass, rounded to x's dtype before it is to fp8."""
    _check_matrix(x, how)
    if x.shape[1] % 2:
        fail("x", "must have an even last dimension", x.shape)
    if not on_triton(x):
        return _round(act_and_mul(x, act), how)
    return _rows_kernel.to_fp8(x, how, kind_of(act), by_group=_by_group(x, how, x.shape[1] // 2))


def rms_norm_fp8(
    x: Tensor | PairSum, residual: Tensor | None, weight: Tensor, eps: float, how: Rounding
) -> tuple[Fp8Rows, Tensor]:
    """(`to_fp8` of the norm of total, total), total = x + residual, x itself if residual is None; in one pass.

    x, residual: [T, K]; the rest as for `rms_norm`. The norm is rounded to x's dtype before it is to fp8. A `PairSum`,
    which has a residual, is added up in the same pass.
    """
    if isinstance(x, PairSum):
        assert residual is not None
        check_norm_weight(weight, "weight", x.shape[1], x.outputs)
        check_sum_residual(residual, x)
        if on_triton(x.outputs):
            by_group = _by_group(x.outputs[: x.shape[0]], how)
            return _rows_kernel.rms_norm_fp8(x, residual, weight, eps, how, by_group=by_group)
        x = x.total()
    _check_matrix(x, how)
    check_norm_weight(weight, "weight", x.shape[1], x)
    if residual is not None:
        check_residual(residual, x)
    if on_triton(x):
        return _rows_kernel.rms_norm_fp8(x, residual, weight, eps, how, by_group=_by_group(x, how))
    y, total = normed(x, (weight, eps), residual)
    return _round(y, how), total


def linear_fp8(
    x: Fp8Rows, weight: Fp8Weight, bias: Tensor | None, dtype: torch.dtype, *, deterministic: bool = False
) -> Tensor:
    """x W^T + bias -> a new tensor [T, N] of `dtype`, rounded once.

    x has groups of as many inputs as the weight. bias: [N] of `dtype`. Sums are fp32, but of more than 64 tokens, with
    a scale a row, they may have the bits that tensor cores add with (see `_scaled_mm`). deterministic: each row depends
    on its row of x and on W alone, to the bit. Needs a GPU with `Hardware.has_e4m3`, or the CPU.
    """
    values, scales, group = x
    _check_weight(weight, values.shape[1])
    if values.dtype != torch.float8_e4m3fn or not values.is_contiguous():
        fail("x", "must be contiguous e4m3", values.dtype)
    if group != weight.group:
        fail("x.group", f"must be that of the weight, {weight.group}", group)
    _check_scales(scales, "x.scales", (values.shape[0], weight.scales.shape[1]), by_group=group is not None)
    if bias is not None:
        check_vectors(weight.values.shape[0], dtype, values.device, bias=bias)
    if on_triton(values):
        if not deterministic and plans.library_takes(x, weight, dtype):
            return _scaled_mm(x, weight, bias, dtype)
        return _product_kernel.linear_fp8(x, weight, bias, dtype, deterministic)
    return _multiply(x.dequantised(), weight, bias, deterministic).to(dtype)


def linear_rounding_fp8(
    x: Tensor,
    how: Rounding,
    weight: Fp8Weight,
    bias: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    act: str | None = None,
    wanted: Rounding | None = None,
    deterministic: bool = False,
) -> tuple[Tensor | Fp8Rows, Tensor]:
    """(`linear_fp8` of n as `to_fp8` has it, total), where n is the norm of total = x + residual, or x, both in one.

    norm: (weight, eps), None for none. residual: None for none. act: weight is [2 N, K], the rows of gate before
    those of up; the product is act(gate) * up then, and has no bias. wanted: how that is to be rounded to fp8, if it
    can be in the same pass; None for in x's dtype. On GPUs a single token takes one launch, or two where its norm is
    better found once, is not rounded, and its product is in x's dtype, unless deterministic.
    """
    _check_matrix(x, how)
    _check_fused(x, weight, bias, norm, residual, act)
    if how.group != weight.group:
        fail("how.group", f"must be that of the weight, {weight.group}", how.group)
    if on_triton(x) and plans.vector_takes(*x.shape) and not deterministic:
        return _one_token(x, weight, bias, norm, residual, act)
    if norm is not None:
        rows, total = rms_norm_fp8(x, residual, *norm, how)
    else:
        rows, total = to_fp8(x, how), x
    y = linear_fp8(rows, weight, bias, x.dtype, deterministic=deterministic)
    if act is None:
        return y, total
    return (act_and_mul(y, act) if wanted is None else act_and_mul_fp8(y, wanted, act)), total


def _one_token(
    x: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None,
    norm: tuple[Tensor, float] | None,
    residual: Tensor | None,
    act: str | None,
) -> tuple[Tensor, Tensor]:
    """`fused_linear_fp8_weight` of a token that `plans.vector_takes`, of checked arguments."""
    before: tuple[Tensor | None, Tensor | None, float] = (None, None, 0.0)
    total = x
    if norm is not None:
        if plans.vector_norms(_vector_kernel.padded_inputs(x, weight), gated=act is not None):
            before = (residual, *norm)
        else:
            x, total = normed(x, norm, residual)
    if act is None and before[1] is None and plans.stream_takes(weight, hardware(x.device)):
        return _stream_kernel.linear_fp8_stream(x, weight, bias), total
    y, found = _vector_kernel.linear_fp8_vector(x, before, weight, bias, None if act is None else kind_of(act))
    return y, total if before[1] is None else found


def linear_fp8_weight(
    x: Tensor, weight: Fp8Weight, bias: Tensor | None = None, *, deterministic: bool = False
) -> Tensor:
    """x W^T + bias -> a new tensor [T, N] of x's dtype; x [T, K] is not rounded to fp8. For any GPU.

    Sums are fp32 and rounded once. What is multiplied are the numbers in e4m3, which are exact in any dtype, and scales
    are applied to sums, or to the token where it is a single one. Of many tokens on GPUs in 16 bits, weights are
    rounded to x's dtype once they are scaled: each is off by u at most, u being the dtype's unit roundoff. bias: [N] of
    x's dtype. deterministic: each row depends on its row of x and on W alone, to the bit, and no weight is rounded.
    """
    _check_matrix(x, Rounding())
    _check_weight(weight, x.shape[1])
    if bias is not None:
        check_vectors(weight.values.shape[0], x.dtype, x.device, bias=bias)
    if on_triton(x):
        if not deterministic and plans.vector_takes(*x.shape):
            return _one_token(x, weight, bias, None, None, None)[0]
        if not deterministic and plans.dequantised_takes(x, weight.values.shape[0], bits=8):
            dequantise = partial(_dequantise_kernel.dequantise, weight)
            return linear_dequantised(x, weight.values.shape[0], bias, dequantise)
        return _product_kernel.linear_fp8_weight(x, weight, bias, deterministic)
    return _multiply(x.float(), weight, bias, deterministic).to(x.dtype)


def fused_linear_fp8_weight(
    x: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    act: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(`linear_fp8_weight` of n, total), where n is the norm of total = x + residual, or x, with which total is x.

    norm: (weight, eps), None for none. residual: None for none, and without a norm. act: weight is [2 N, K], the rows
    of gate before those of up; the product is act(gate) * up then, and has no bias. On GPUs a single token takes one
    launch, in which nothing is rounded in between, or two where its norm is better found once.
    """
    _check_matrix(x, Rounding())
    _check_fused(x, weight, bias, norm, residual, act)
    if on_triton(x) and plans.vector_takes(*x.shape):
        return _one_token(x, weight, bias, norm, residual, act)
    x, total = normed(x, norm, residual)
    y = linear_fp8_weight(x, weight, bias)
    return (y if act is None else act_and_mul(y, act)), total


def _by_group(x: Tensor, how: Rounding, inputs: int | None = None) -> bool:
    """Whether x, of so many inputs a token once it is activated, is to have its scales group by group."""
    return plans.scales_by_group(x.shape[0], inputs or x.shape[1], how.group, x.dtype, hardware(x.device))


def _round(x: Tensor, how: Rounding) -> Fp8Rows:
    (tokens, inputs), wide = x.shape, x.float()
    group = inputs if how.group is None else how.group
    groups = -(-inputs // group)
    parts = F.pad(wide, (0, groups * group - inputs)).view(tokens, groups, group)
    if how.scale is None:
        scales = divided(parts.abs().amax(-1).clamp(min=LEAST_PEAK), E4M3_MAX)
    else:
        scales = how.scale.float().expand(tokens, groups).contiguous()
    inside = (parts * (1.0 / scales)[..., None]).clamp(-E4M3_MAX, E4M3_MAX)
    return Fp8Rows(inside.flatten(1)[:, :inputs].to(torch.float8_e4m3fn).contiguous(), scales, how.group)


def _multiply(x: Tensor, weight: Fp8Weight, bias: Tensor | None, deterministic: bool) -> Tensor:
    wide, bias = weight.dequantised(), None if bias is None else bias.float()
    if not deterministic or x.shape[0] < 2:
        return F.linear(x, wide, bias)
    return torch.cat([F.linear(row.clone(), wide, bias) for row in x.split(1)])  # see `linear_invariant`


def _scaled_mm(x: Fp8Rows, weight: Fp8Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """By PyTorch's product.

    With a scale a token and one an output, it adds up with the bits that the instruction has. That is off by 0.1 to
    0.3%, where the roundings of tokens to e4m3 are off by 2 to 3%, and takes 5 to 12% less time for prompts than fp32
    sums. With blocks, sums are fp32.
    """
    (tokens, inputs), of_x, of_weight = x.values.shape, F.ScalingType.RowWise, F.ScalingType.RowWise
    values, scales = x.values, x.scales
    if x.group is not None:
        of_x, of_weight = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
        room = scales.stride(1)  # which includes tokens of padding: the product wants a multiple of 4
        values, scales = (
            values.as_strided((room, inputs), (inputs, 1)),
            scales.as_strided((room, scales.shape[1]), (1, room)),
        )
    y: Tensor = F.scaled_mm(
        values,
        weight.values.t(),
        scales,
        of_x,
        weight.scales.t(),
        of_weight,
        bias=bias,
        output_dtype=dtype,
        use_fast_accum=x.group is None,
    )
    return y[:tokens]


def _check_matrix(x: Tensor, how: Rounding) -> None:
    if x.dim() != 2:
        fail("x", "must be [T, K]", x.shape)
    check_rows(x, "x")
    if how.group is not None and (how.group < 1 or how.group & (how.group - 1)):
        fail("group", "must be a power of two", how.group)


def _check_weight(weight: Fp8Weight, inputs: int) -> None:
    values, scales, rows, group = weight
    if values.dim() != 2 or values.shape[1] != inputs or values.dtype != torch.float8_e4m3fn:
        fail("weight", f"must be [N, {inputs}] in e4m3", (values.dtype, *values.shape))
    if not values.is_contiguous():
        fail("weight", "must be contiguous", values.stride())
    if group is None and rows != 1:
        fail("weight.rows", "must be 1 without groups of inputs", rows)
    if group is not None and group not in plans.GROUPS:
        fail("weight.group", f"must be one of {plans.GROUPS}", group)
    groups = 1 if group is None else -(-inputs // group)
    _check_scales(scales, "weight.scales", (-(-values.shape[0] // rows), groups))


def _check_fused(
    x: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None,
    norm: tuple[Tensor, float] | None,
    residual: Tensor | None,
    act: str | None,
) -> None:
    """Check a product with what comes before it and behind it; x is checked."""
    _check_weight(weight, x.shape[1])
    if act is not None and (weight.values.shape[0] % 2 or bias is not None):
        fail("weight", "must have an even number of rows, gate and up, and no bias", weight.values.shape)
    if bias is not None:
        check_vectors(weight.values.shape[0], x.dtype, x.device, bias=bias)
    check_norm(x, norm, residual)


def _check_scales(scales: Tensor, argument: str, shape: tuple[int, int], *, by_group: bool = False) -> None:
    """by_group: they may be in that order."""
    if scales.shape != shape or scales.dtype != torch.float32:
        fail(argument, f"must be float32 of shape {shape}", (scales.dtype, *scales.shape))
    if not (scales.is_contiguous() or (by_group and scales.stride(0) == 1 and scales.stride(1) % 4 == 0)):
        fail(
            argument,
            "must be contiguous, or a group's by multiples of 4" if by_group else "must be contiguous",
            scales.stride(),
        )
