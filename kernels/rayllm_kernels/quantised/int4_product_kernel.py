"""Products of tokens and weights of 4 bits (`int4.py` has the layout).

    y[t, n] = sum over groups g of scale[n, g] * sum over k in g of x[t, k] * (number[n, k] - zero[n, g])  + bias[n]

x [M, K] of fp32, fp16 or bf16, codes [N, half of K], scales and zeros [N, groups], bias [N] -> y [M, N]; sums are fp32.

One program owns a tile of y and runs along the bytes of K; each tile of bytes is two products, with inputs of the first
half and of the second. Numbers become floats by integer operations: with the exponent of a power of two before them
they are that power plus the number, from which the same power plus the zero point is taken, exactly. The warps of a
program may share a tile's depth instead of its outputs (SLICES > 1), as in `linear/tiles_kernel.py`.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compile_ahead import launch
from ..dependent_launch import wait_for_predecessor
from ..device import hardware
from ..linear.device_functions import add_products, no_sums, sums
from ..linear.invariant_kernel import program_tiles
from ..linear.plans import Tiles
from . import plans
from .int4 import MIDDLE, Int4Weight

SYMMETRIC_ZERO = tl.constexpr(MIDDLE)


class Form(NamedTuple):
    """The compile-time argument of the kernel. tiles.depth: bytes, each of two inputs; `depth / slices` are a group or
    a part of one.
    """

    tiles: Tiles
    group: int  # inputs that share a scale; 0 for all
    overlap: bool  # launches overlap (`dependent_launch.py`)


@triton.jit
def decode_int4(numbers, zeros, DTYPE: tl.constexpr):
    """numbers - zeros, both whole numbers from 0 to 15 in int32, as exactly these floats."""
    if tl.float16 == DTYPE:  # 1024 has the step 1
        return (numbers | 0x6400).to(tl.int16).to(DTYPE, bitcast=True) - (zeros | 0x6400).to(tl.int16).to(
            DTYPE, bitcast=True
        )
    elif tl.bfloat16 == DTYPE:  # so has 128
        return (numbers | 0x4300).to(tl.int16).to(DTYPE, bitcast=True) - (zeros | 0x4300).to(tl.int16).to(
            DTYPE, bitcast=True
        )
    else:
        return (numbers - zeros).to(DTYPE)


@triton.jit
def _of_groups(pointers, start, inputs, outputs, FORM: tl.constexpr):
    """[outputs], or [slices, outputs]: what rows have at `pointers` for the groups of a tile that begins at `start`.

    pointers: of rows, in the first group. Past the end of K, where inputs are zero, anything will do.
    """
    TILES: tl.constexpr = FORM.tiles
    PART: tl.constexpr = TILES.depth // TILES.slices
    if FORM.group == 0:
        found = tl.load(pointers)
        if TILES.slices > 1:
            found = tl.broadcast_to(found[None, :], [TILES.slices, TILES.outputs])
    elif TILES.slices > 1:
        first = start + tl.arange(0, TILES.slices) * PART
        found = tl.load(pointers[None, :] + (tl.minimum(first, inputs - 1) // FORM.group)[:, None] * outputs)
    else:
        found = tl.load(pointers + tl.minimum(start, inputs - 1) // FORM.group * outputs)
    return found


@triton.jit
def _add_half(acc, numbers, x, scales_ptr, zeros_ptr, start, inputs, outputs, FORM: tl.constexpr):
    """acc plus the products of one half's tile, which begins at input `start`. The pointers are of rows."""
    TILES: tl.constexpr = FORM.tiles
    scales = _of_groups(scales_ptr, start, inputs, outputs, FORM)
    if zeros_ptr is not None:
        zeros = _of_groups(zeros_ptr, start, inputs, outputs, FORM).to(tl.int32)
    elif TILES.slices > 1:
        zeros = tl.full([1, 1], SYMMETRIC_ZERO, tl.int32)
    else:
        zeros = tl.full([1], SYMMETRIC_ZERO, tl.int32)
    if TILES.slices > 1:
        weights = decode_int4(numbers, zeros[:, :, None], x.dtype)
        return acc + add_products(no_sums(TILES), weights, x, TILES) * scales[:, None, :]
    else:
        weights = decode_int4(numbers, zeros[:, None], x.dtype)
        products = add_products(no_sums(TILES), weights, x, TILES)
        if TILES.weights_first:
            return acc + products * scales[:, None]
        else:
            return acc + products * scales[None, :]


@triton.jit(do_not_specialize=["tokens"])
def _int4_product_kernel(operands, weight, x_stride, tokens, inputs, outputs, half, FORM: tl.constexpr):
    """operands: (x, bias or None, y). weight: (codes, scales, zeros or None). half: bytes of a row."""
    x_ptr, bias_ptr, y_ptr = operands
    codes_ptr, scales_ptr, zeros_ptr = weight
    TILES: tl.constexpr = FORM.tiles
    DEPTH: tl.constexpr = TILES.depth
    token_tile, output_tile = program_tiles(tokens, outputs, TILES)
    token = token_tile * TILES.tokens + tl.arange(0, TILES.tokens)
    output = output_tile * TILES.outputs + tl.arange(0, TILES.outputs)
    # Weight rows past the end repeat the last one and are not stored.
    row = tl.minimum(output, outputs - 1).to(tl.int64)
    x_rows = token.to(tl.int64) * x_stride
    scales_ptr += row
    if zeros_ptr is not None:
        zeros_ptr += row
    if TILES.slices > 1:
        SLICES: tl.constexpr = TILES.slices
        part: tl.constexpr = DEPTH // SLICES
        depth = (tl.arange(0, SLICES) * part)[:, None, None] + tl.arange(0, part)[None, None, :]
        codes_ptr += (row * half)[None, :, None]
        inputs_ptr = x_ptr + x_rows[None, :, None]
        real = (token < tokens)[None, :, None]
    else:
        depth = tl.arange(0, DEPTH)[None, :]
        codes_ptr += (row * half)[:, None]
        inputs_ptr = x_ptr + x_rows[:, None]
        real = (token < tokens)[:, None]
    wait_for_predecessor(FORM.overlap)
    acc = no_sums(TILES)
    for start in range(0, half, DEPTH):
        at = start + depth
        codes = tl.load(codes_ptr + at, mask=at < half, other=0).to(tl.int32)
        first = tl.load(inputs_ptr + at, mask=real & (at < half) & (at < inputs), other=0.0)
        second = tl.load(inputs_ptr + half + at, mask=real & (at < half) & (half + at < inputs), other=0.0)
        acc = _add_half(acc, codes & 15, first, scales_ptr, zeros_ptr, start, inputs, outputs, FORM)
        acc = _add_half(acc, codes >> 4, second, scales_ptr, zeros_ptr, half + start, inputs, outputs, FORM)
    column = output[None, :]
    y = sums(acc, bias_ptr, column, outputs, TILES)
    target = y_ptr + token.to(tl.int64)[:, None] * outputs + column
    tl.store(target, y.to(y_ptr.dtype.element_ty), mask=(token < tokens)[:, None] & (column < outputs))


def multiply(x: Tensor, weight: Int4Weight, bias: Tensor | None, tiles: Tiles) -> Tensor:
    """y of checked arguments, by one choice of tiles."""
    (tokens, inputs), (outputs, half) = x.shape, weight.codes.shape
    y = torch.empty((tokens, outputs), dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    gpu = hardware(x.device)
    form = Form(tiles, weight.group or 0, gpu.can_overlap)
    stages = gpu.stages(tiles.num_stages, (2 * tiles.tokens * x.element_size() + tiles.outputs) * tiles.depth)
    options = {"num_warps": tiles.num_warps, "num_stages": stages, "launch_pdl": gpu.can_overlap}
    launch(_int4_product_kernel, (triton.cdiv(tokens, tiles.tokens) * triton.cdiv(outputs, tiles.outputs),))(
        (x, bias, y),
        (weight.codes, weight.scales, weight.zeros),
        x.stride(0),
        tokens,
        inputs,
        outputs,
        half,
        FORM=form,
        **options,
    )
    return y


def linear_int4(x: Tensor, weight: Int4Weight, bias: Tensor | None, deterministic: bool) -> Tensor:
    """y of checked arguments."""
    outputs, gpu = weight.codes.shape[0], hardware(x.device)
    if deterministic:
        tiles = plans.fixed_int4_tiles(weight.group, x.dtype)
    else:
        tiles = plans.choose_int4_tiles(x.shape[0], outputs, weight.group, x.dtype, gpu)
    return multiply(x, weight, bias, tiles)
