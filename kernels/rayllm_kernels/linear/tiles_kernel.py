"""Products of few tokens (about 4 to 64) and a weight matrix on the tensor cores, as fast as the weights can be read.

    y = x W^T + bias,   or   y = act(x G^T) * (x U^T)   where W = [G; U]

x [M, K], W [N, K] (gated: [2 N, K]), bias [N] -> y [M, N]; fp32 sums, rounded once.

One program owns some outputs for all tokens and runs along K; there are no partial results to add between programs. So
that few outputs still make enough programs, the warps of a program may share K instead of the outputs (SLICES > 1):
slice s of a tile is a batch of its own, and the batches are added at the end.
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
from .device_functions import add_products, no_sums, sums
from .plans import Tiles


class Form(NamedTuple):
    """The compile-time argument of the kernel."""

    tiles: Tiles
    even: bool  # the tiles' depth divides K
    act: str | None  # of a gate; None where there is none
    overlap: bool  # launches overlap (`dependent_launch.py`)


@triton.jit(do_not_specialize=["tokens"])
def _linear_tiles_kernel(operands, strides, tokens, inputs, outputs, FORM: tl.constexpr):
    """operands: (x, weight, bias or None, y). strides: of x and weight."""
    x_ptr, weight_ptr, bias_ptr, y_ptr = operands
    stride_x, stride_weight = strides
    TILES: tl.constexpr = FORM.tiles
    TOKENS: tl.constexpr = TILES.tokens
    OUTPUTS: tl.constexpr = TILES.outputs
    DEPTH: tl.constexpr = TILES.depth
    EVEN: tl.constexpr = FORM.even
    ACT: tl.constexpr = FORM.act
    GATED: tl.constexpr = ACT is not None
    first = tl.program_id(0) * OUTPUTS
    output, token = first + tl.arange(0, OUTPUTS), tl.arange(0, TOKENS)
    # Rows past the end repeat the last one and are not stored.
    rows = tl.minimum(output, outputs - 1).to(tl.int64) * stride_weight
    up_shift = tl.cast(outputs, tl.int64) * stride_weight
    x_rows = token * stride_x
    wait_for_predecessor(FORM.overlap)

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
    acc = no_sums(TILES)
    up_acc = acc
    for start in range(0, inputs, DEPTH):
        at = start + depth
        # Padding tokens are not read: many programs that repeat one row would crowd the part of L2 that holds it.
        if EVEN:
            weights = tl.load(weights_ptr + at)
            x = tl.load(inputs_ptr + at, mask=real, other=0.0)
        else:
            weights = tl.load(weights_ptr + at, mask=at < inputs, other=0.0)
            x = tl.load(inputs_ptr + at, mask=real & (at < inputs), other=0.0)
        acc = add_products(acc, weights, x, TILES)
        if GATED:
            if EVEN:
                up_weights = tl.load(weights_ptr + up_shift + at)
            else:
                up_weights = tl.load(weights_ptr + up_shift + at, mask=at < inputs, other=0.0)
            up_acc = add_products(up_acc, up_weights, x, TILES)

    column = (first + tl.arange(0, OUTPUTS))[None, :]
    y = sums(acc, bias_ptr, column, outputs, TILES)
    if GATED:
        y = activate(y, ACT) * sums(up_acc, None, column, outputs, TILES)
    mask = (token[:, None] < tokens) & (column < outputs)
    tl.store(y_ptr + token[:, None] * outputs + column, y.to(y_ptr.dtype.element_ty), mask=mask)


def linear_tiles(
    x: Tensor, weight: Tensor, tiles: Tiles, bias: Tensor | None = None, *, act: str | None, out: Tensor | None = None
) -> Tensor:
    """y of checked arguments."""
    tokens, inputs = x.shape
    outputs = weight.shape[0] // 2 if act else weight.shape[0]
    y = torch.empty((tokens, outputs), dtype=x.dtype, device=x.device) if out is None else out
    overlap = hardware(x.device).can_overlap
    form = Form(tiles, inputs % tiles.depth == 0, act, overlap)
    strides = (x.stride(0), weight.stride(0))
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "launch_pdl": overlap}
    launch(_linear_tiles_kernel, (triton.cdiv(outputs, tiles.outputs),))(
        (x, weight, bias, y), strides, tokens, inputs, outputs, FORM=form, **options
    )
    return y
