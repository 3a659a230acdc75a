"""Products with weights in e4m3, of tokens in e4m3 too, or of tokens as they are.

    y = (x W^T) * scales of x * scales of W + bias

x [M, K] in e4m3 with scales [M, K / group], or in fp32, fp16 or bf16 without; W [N, K] in e4m3 with scales
[N / rows, K / group], bias [N] -> y [M, N]. Without groups, a row of x and a row of W have one scale each, which is
applied to the finished sum; with groups, to the sum of each. Sums are fp32, in ascending order of K: Hopper's
instruction adds with fewer bits, so that what it has added is taken over into fp32 every `depth / slices` inputs.

One program owns a tile of y and runs along K; there are no partial results to add between programs. As in
`linear/tiles_kernel.py`, the warps of a program may share a tile's depth instead of its outputs (SLICES > 1).
Tokens that are not fp8 meet weights that are turned into their dtype in registers, by integer operations that every
GPU has.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..compile_ahead import launch
from ..dependent_launch import wait_for_predecessor
from ..device import hardware
from ..dispatch import TritonModule
from ..e4m3 import decode_e4m3
from ..linear.device_functions import add_products, no_sums, sums
from ..linear.invariant_kernel import can_copy, program_tiles
from ..linear.plans import Tiles
from . import plans
from .fp8_operands import Fp8Rows, Fp8Weight

_hopper_kernel = TritonModule("rayllm_kernels.linear.hopper_kernel")


class Form(NamedTuple):
    """The compile-time argument of the kernels."""

    tiles: Tiles
    even: bool  # the tiles' depth divides K
    rows: int  # outputs that share a scale
    group: int  # inputs that share a scale; 0 for all
    wide: bool  # x is no fp8
    overlap: bool  # launches overlap (`dependent_launch.py`)


@triton.jit
def add_fp8_products(acc, weights, x, TILES: tl.constexpr):
    """acc plus the products of weights [outputs, depth] and x [tokens, depth] in e4m3, both of each slice."""
    PART: tl.constexpr = TILES.depth // TILES.slices
    if TILES.slices > 1:
        return tl.dot(x, tl.permute(weights, (0, 2, 1)), acc, max_num_imprecise_acc=PART)
    elif TILES.weights_first:
        return tl.dot(weights, tl.trans(x), acc, max_num_imprecise_acc=PART)
    else:
        return tl.dot(x, tl.trans(weights), acc, max_num_imprecise_acc=PART)


@triton.jit
def _products(acc, weights, x, FORM: tl.constexpr):
    """The same of x in e4m3, or, if wide, of x as it is and weights that become such numbers."""
    TILES: tl.constexpr = FORM.tiles
    if FORM.wide:
        return add_products(acc, decode_e4m3(weights, x.dtype), x, TILES)
    else:
        return add_fp8_products(acc, weights, x, TILES)


@triton.jit
def _scaled(products, x_scales, weight_scales, FORM: tl.constexpr):
    """Sums of products times the scales of their tokens and outputs, [tokens] and [outputs] or as many of each slice.

    x_scales: not looked at if x has none.
    """
    TILES: tl.constexpr = FORM.tiles
    if TILES.slices > 1:
        scaled = products * weight_scales[:, None, :]
        return scaled if FORM.wide else scaled * x_scales[:, :, None]
    elif TILES.weights_first:
        scaled = products * weight_scales[:, None]
        return scaled if FORM.wide else scaled * x_scales[None, :]
    else:
        scaled = products * weight_scales[None, :]
        return scaled if FORM.wide else scaled * x_scales[:, None]


@triton.jit
def _group_scales(scales, strides, token, output, start, tokens, outputs, inputs, FORM: tl.constexpr):
    """(of x, of the weights): the scales of the group, or of each slice's group, of the tile that begins at `start`."""
    x_scales_ptr, weight_scales_ptr = scales
    x_stride, x_group_stride, weight_stride = strides
    TILES: tl.constexpr = FORM.tiles
    PART: tl.constexpr = TILES.depth // TILES.slices
    weight_row = tl.minimum(output, outputs - 1) // FORM.rows * weight_stride
    x_row = tl.minimum(token, tokens - 1).to(tl.int64) * x_stride
    if TILES.slices > 1:
        first = start + tl.arange(0, TILES.slices) * PART
        group = first // FORM.group
        inside = (first < inputs)[:, None]
        weight_scales = tl.load(weight_scales_ptr + weight_row[None, :] + group[:, None], mask=inside, other=0.0)
        x_scales = weight_scales
        if not FORM.wide:
            x_scales = tl.load(x_scales_ptr + x_row[None, :] + group[:, None] * x_group_stride, mask=inside, other=0.0)
    else:
        group = start // FORM.group
        weight_scales = tl.load(weight_scales_ptr + weight_row + group)
        x_scales = weight_scales
        if not FORM.wide:
            x_scales = tl.load(x_scales_ptr + x_row + group * x_group_stride)
    return x_scales, weight_scales


@triton.jit
def _finish(acc, operands, scales, token, output, tokens, outputs, FORM: tl.constexpr):
    """Store a tile at `token` [TOKENS] and `output` [OUTPUTS], with the bias and, without groups, the rows' scales."""
    _, _, bias_ptr, y_ptr = operands
    x_scales_ptr, weight_scales_ptr = scales
    column = output[None, :]
    TILES: tl.constexpr = FORM.tiles  # as an argument, a tuple in a tuple does not compile in every version of Triton
    y = sums(acc, None, column, outputs, TILES)
    if FORM.group == 0:
        y *= tl.load(weight_scales_ptr + column, mask=column < outputs, other=0.0)
        if not FORM.wide:
            y *= tl.load(x_scales_ptr + token, mask=token < tokens, other=0.0)[:, None]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + column, mask=column < outputs, other=0.0).to(tl.float32)
    target = y_ptr + token.to(tl.int64)[:, None] * outputs + column
    tl.store(target, y.to(y_ptr.dtype.element_ty), mask=(token < tokens)[:, None] & (column < outputs))


@triton.jit(do_not_specialize=["x_scale_stride", "x_group_stride", "tokens"])
def _fp8_product_kernel(
    operands,
    scales,
    x_stride,
    x_scale_stride,
    x_group_stride,
    weight_scale_stride,
    tokens,
    inputs,
    outputs,
    FORM: tl.constexpr,
):
    """operands: (x, weight, bias or None, y). scales: of x (None if it is no fp8) and weight."""
    scale_strides = (x_scale_stride, x_group_stride, weight_scale_stride)
    x_ptr, weight_ptr, _, _ = operands
    TILES: tl.constexpr = FORM.tiles
    DEPTH: tl.constexpr = TILES.depth
    token_tile, output_tile = program_tiles(tokens, outputs, TILES)
    token = token_tile * TILES.tokens + tl.arange(0, TILES.tokens)
    output = output_tile * TILES.outputs + tl.arange(0, TILES.outputs)
    # Weight rows past the end repeat the last one and are not stored.
    rows = tl.minimum(output, outputs - 1).to(tl.int64) * inputs
    x_rows = token.to(tl.int64) * x_stride
    if TILES.slices > 1:
        SLICES: tl.constexpr = TILES.slices
        part: tl.constexpr = DEPTH // SLICES
        depth = (tl.arange(0, SLICES) * part)[:, None, None] + tl.arange(0, part)[None, None, :]
        weights_ptr, inputs_ptr = weight_ptr + rows[None, :, None], x_ptr + x_rows[None, :, None]
        real = (token < tokens)[None, :, None]
    else:
        depth = tl.arange(0, DEPTH)[None, :]
        weights_ptr, inputs_ptr = weight_ptr + rows[:, None], x_ptr + x_rows[:, None]
        real = (token < tokens)[:, None]
    wait_for_predecessor(FORM.overlap)
    acc = no_sums(TILES)
    for start in range(0, inputs, DEPTH):
        at = start + depth
        # Padding tokens are not read: many programs that repeat one row would crowd the part of L2 that holds it.
        if FORM.even:
            weights = tl.load(weights_ptr + at)
            x = tl.load(inputs_ptr + at, mask=real, other=0.0)
        else:
            weights = tl.load(weights_ptr + at, mask=at < inputs, other=0.0)
            x = tl.load(inputs_ptr + at, mask=real & (at < inputs), other=0.0)
        if FORM.group == 0:
            acc = _products(acc, weights, x, FORM)
        else:
            of_x, of_weight = _group_scales(scales, scale_strides, token, output, start, tokens, outputs, inputs, FORM)
            acc += _scaled(_products(no_sums(TILES), weights, x, FORM), of_x, of_weight, FORM)
    _finish(acc, operands, scales, token, output, tokens, outputs, FORM)


@triton.jit(do_not_specialize=["x_scale_stride", "x_group_stride", "tokens"])
def _fp8_copied_kernel(
    x_desc,
    weight_desc,
    operands,
    scales,
    x_scale_stride,
    x_group_stride,
    weight_scale_stride,
    tokens,
    inputs,
    outputs,
    FORM: tl.constexpr,
):
    """The same with tensor copies, which read past an end as zeros."""
    scale_strides = (x_scale_stride, x_group_stride, weight_scale_stride)
    TILES: tl.constexpr = FORM.tiles
    token_tile, output_tile = program_tiles(tokens, outputs, TILES)
    token = token_tile * TILES.tokens + tl.arange(0, TILES.tokens)
    output = output_tile * TILES.outputs + tl.arange(0, TILES.outputs)
    wait_for_predecessor(FORM.overlap)
    acc = no_sums(TILES)
    for start in range(0, inputs, TILES.depth):
        weights = weight_desc.load([output_tile * TILES.outputs, start])
        x = x_desc.load([token_tile * TILES.tokens, start])
        if FORM.group == 0:
            acc = _products(acc, weights, x, FORM)
        else:
            of_x, of_weight = _group_scales(scales, scale_strides, token, output, start, tokens, outputs, inputs, FORM)
            acc += _scaled(_products(no_sums(TILES), weights, x, FORM), of_x, of_weight, FORM)
    _finish(acc, operands, scales, token, output, tokens, outputs, FORM)


def multiply(
    x: Tensor, x_scales: Tensor | None, weight: Fp8Weight, bias: Tensor | None, dtype: torch.dtype, tiles: Tiles
) -> Tensor:
    """y of checked arguments, by one choice of tiles. x: in e4m3 if it has scales."""
    (tokens, inputs), outputs = x.shape, weight.values.shape[0]
    y = torch.empty((tokens, outputs), dtype=dtype, device=x.device)
    if not y.numel():
        return y
    gpu, wide, values = hardware(x.device), x_scales is None, weight.values
    if wide:
        values = values.view(torch.uint8)
    form = Form(tiles, inputs % tiles.depth == 0, weight.rows, weight.group or 0, wide, gpu.can_overlap)
    stages = gpu.stages(tiles.num_stages, (tiles.tokens * x.element_size() + tiles.outputs) * tiles.depth)
    options = {"num_warps": tiles.num_warps, "num_stages": stages, "launch_pdl": gpu.can_overlap}
    grid = (triton.cdiv(tokens, tiles.tokens) * triton.cdiv(outputs, tiles.outputs),)
    operands, scales = (x, values, bias, y), (x_scales, weight.scales)
    x_strides = (0, 0) if x_scales is None else x_scales.stride()
    scale_strides = (*x_strides, weight.scales.stride(0))
    if tiles.copied and not wide and can_copy(x) and can_copy(values):
        x_desc = TensorDescriptor(x, list(x.shape), list(x.stride()), [tiles.tokens, tiles.depth])
        weight_desc = TensorDescriptor(values, list(values.shape), list(values.stride()), [tiles.outputs, tiles.depth])
        launch(_fp8_copied_kernel, grid)(
            x_desc, weight_desc, operands, scales, *scale_strides, tokens, inputs, outputs, FORM=form, **options
        )
    else:
        launch(_fp8_product_kernel, grid)(
            operands, scales, x.stride(0), *scale_strides, tokens, inputs, outputs, FORM=form, **options
        )
    return y


def linear_fp8(x: Fp8Rows, weight: Fp8Weight, bias: Tensor | None, dtype: torch.dtype, deterministic: bool) -> Tensor:
    """y of checked arguments."""
    values, scales, group = x
    if deterministic:
        return multiply(values, scales, weight, bias, dtype, plans.fixed_fp8_tiles(group, wide=False, dtype=dtype))
    gpu = hardware(values.device)
    plan = plans.plan_fp8_hopper(x, weight, dtype, gpu)
    if plan is not None:
        return _hopper_kernel.linear_hopper_fp8(x, weight, plan, bias, dtype)
    tiles = plans.choose_fp8_tiles(values.shape[0], weight.values.shape[0], group, gpu)
    return multiply(values, scales, weight, bias, dtype, tiles)


def linear_fp8_weight(x: Tensor, weight: Fp8Weight, bias: Tensor | None, deterministic: bool) -> Tensor:
    """y of checked arguments, x being no fp8."""
    if deterministic:
        tiles = plans.fixed_fp8_tiles(weight.group, wide=True, dtype=x.dtype)
    else:
        gpu = hardware(x.device)
        tiles = plans.choose_wide_tiles(x.shape[0], weight.values.shape[0], weight.group, x.dtype, gpu)
    return multiply(x, None, weight, bias, x.dtype, tiles)
