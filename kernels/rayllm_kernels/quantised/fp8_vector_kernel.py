"""A single token times weights in e4m3, with the norm before it and the activation behind it.

    y = f((n W^T) * scales of W + bias),   n = x,   or   n = RMS norm of total,   total = round(x + residual);
    f, where W = [gate; up]: act(gate) * up

x, residual [1, K], W [N, K] (gated: [2 N, K]) with scales a row or a block, bias [N] -> y [1, N], total [1, K].

The token is not rounded to fp8: that takes tensor cores to be of use, and every program would do it anew. What a norm
multiplies all of it by is multiplied into the sums. GPUs that do not convert e4m3 decode its bits.

One program owns some outputs and all of K. It asks for its weights before the previous kernel ends, all at once, so
nothing is looped over, and the registers of several programs hold what is in flight.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..activation import activate
from ..compile_ahead import launch
from ..dependent_launch import wait_for_predecessor
from ..device import hardware
from ..e4m3 import widen
from . import plans
from .fp8_operands import Fp8Weight

Norm = tuple[Tensor | None, Tensor | None, float]  # (residual, weight, eps), none of them without a weight


class Form(NamedTuple):
    """The compile-time argument of the kernel."""

    inputs: int
    padded: int  # to a power of two
    rows: int  # outputs of a program
    group: int  # inputs that share a scale; `padded` for all
    weight_rows: int  # outputs that share one
    shared: bool  # whether all outputs of a program do, so that the token may be scaled instead of sums
    act: str | None  # of a gate; None where there is none
    overlap: bool  # launches overlap (`dependent_launch.py`)


@triton.jit
def _token(x_ptr, norm, total_ptr, depth, inside, FORM: tl.constexpr):
    """(what the weights are multiplied by, in fp32, 0 past the end of K; what the sums are)."""
    residual_ptr, norm_ptr, eps = norm
    x = tl.load(x_ptr + depth, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    factor = 1.0
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + depth, mask=inside, other=0.0)
        total = (wide + residual.to(tl.float32)).to(x.dtype)
        stored = tl.where(tl.program_id(0) == 0, FORM.inputs, 0)  # one program stores it for all
        tl.store(total_ptr + depth, total, mask=depth < stored)
        wide = total.to(tl.float32)
    if norm_ptr is not None:
        factor = tl.rsqrt(tl.sum(wide * wide, 0) / FORM.inputs + eps)
        wide *= tl.load(norm_ptr + depth, mask=inside, other=0.0).to(tl.float32)
    return wide, factor


@triton.jit
def _scales(scales_ptr, first, row, num_groups, FORM: tl.constexpr):
    """Of the rows from `first` on: of each input [padded], which all share, or of each row and group [rows, COUNT]."""
    COUNT: tl.constexpr = FORM.padded // FORM.group
    group = tl.arange(0, COUNT)
    inside = group * FORM.group < FORM.inputs
    if FORM.shared:
        scales = tl.load(scales_ptr + first // FORM.weight_rows * num_groups + group, mask=inside, other=0.0)
        return tl.reshape(tl.broadcast_to(scales[:, None], [COUNT, FORM.group]), [FORM.padded])
    else:
        pointers = scales_ptr + (row // FORM.weight_rows * num_groups)[:, None] + group[None, :]
        return tl.load(pointers, mask=inside[None, :], other=0.0)


@triton.jit
def _multiply(codes, wide, scales, FORM: tl.constexpr):
    """[rows]: the scaled sums of codes [rows, padded], in e4m3 or the bytes of it, and the token."""
    numbers = widen(codes)
    if FORM.shared:
        return tl.sum(numbers * (wide * scales)[None, :], 1)
    else:
        products = numbers * wide[None, :]
        parts = tl.reshape(products, [FORM.rows, FORM.padded // FORM.group, FORM.group])
        return tl.sum(tl.sum(parts, 2) * scales, 1)


@triton.jit
def _fp8_vector_kernel(x_ptr, norm, weight, bias_ptr, y_ptr, total_ptr, outputs, num_groups, FORM: tl.constexpr):
    """norm: (residual or None, weight of the norm or None, eps). weight: (codes, scales), with so many groups a row."""
    codes_ptr, scales_ptr = weight
    ACT: tl.constexpr = FORM.act
    first = tl.program_id(0) * FORM.rows
    output = first + tl.arange(0, FORM.rows)
    # Rows past the end repeat the last one and are not stored.
    row = tl.minimum(output, outputs - 1)
    depth = tl.arange(0, FORM.padded)
    inside = depth < FORM.inputs
    pointers = codes_ptr + row.to(tl.int64)[:, None] * FORM.inputs + depth[None, :]
    codes = tl.load(pointers, mask=inside[None, :], other=0.0)
    scales = _scales(scales_ptr, first, row, num_groups, FORM)
    up_codes, up_scales = codes, scales
    if ACT is not None:
        up_codes = tl.load(pointers + tl.cast(outputs, tl.int64) * FORM.inputs, mask=inside[None, :], other=0.0)
        up_scales = _scales(scales_ptr, outputs + first, outputs + row, num_groups, FORM)
    wait_for_predecessor(FORM.overlap)
    wide, factor = _token(x_ptr, norm, total_ptr, depth, inside, FORM)
    y = _multiply(codes, wide, scales, FORM) * factor
    if bias_ptr is not None:
        y += tl.load(bias_ptr + row).to(tl.float32)
    if ACT is not None:
        up = _multiply(up_codes, wide, up_scales, FORM) * factor
        if bias_ptr is not None:
            up += tl.load(bias_ptr + outputs + row).to(tl.float32)
        y = activate(y, ACT) * up
    tl.store(y_ptr + output, y.to(y_ptr.dtype.element_ty), mask=output < outputs)


def padded_inputs(x: Tensor, weight: Fp8Weight) -> int:
    """Of a token x [1, K], to a power of two and at least one group."""
    padded: int = triton.next_power_of_2(max(x.shape[1], weight.group or 1))
    return padded


def linear_fp8_vector(
    x: Tensor,
    norm: Norm,
    weight: Fp8Weight,
    bias: Tensor | None,
    act: str | None,
    *,
    choice: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """(y, total) of one token, of checked arguments; total is x where there is no residual.

    choice: outputs and warps of a program; None for those of the plan.
    """
    inputs, rows = x.shape[1], weight.values.shape[0]
    outputs = rows // 2 if act else rows
    y = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    total = x if norm[0] is None else torch.empty_like(x)
    padded = padded_inputs(x, weight)
    program_rows, num_warps = choice or plans.choose_fp8_vector(padded, gated=act is not None)
    gpu = hardware(x.device)
    values = weight.values if gpu.has_e4m3 else weight.values.view(torch.uint8)
    # Where programs, and those of up, begin at multiples of their rows.
    shared = (
        weight.group is not None and weight.rows % program_rows == 0 and (act is None or outputs % program_rows == 0)
    )
    form = Form(inputs, padded, program_rows, weight.group or padded, weight.rows, shared, act, gpu.can_overlap)
    launch(_fp8_vector_kernel, (triton.cdiv(outputs, program_rows),))(
        x,
        norm,
        (values, weight.scales),
        bias,
        y,
        total,
        outputs,
        weight.scales.shape[1],
        FORM=form,
        num_warps=num_warps,
        launch_pdl=gpu.can_overlap,
    )
    return y, total
