"""Weights in e4m3 as 16-bit numbers, some rows at a time, for `dequantised_product.py`.

    out[n, k] = round(scale[n / rows, k / group] * w[n, k])

Nothing here needs a GPU that converts e4m3: its bits are decoded.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compile_ahead import launch
from ..dependent_launch import wait_for_predecessor
from ..device import hardware
from ..e4m3 import decode_e4m3
from .fp8_operands import Fp8Weight

TILE = 4096  # numbers of a program
ROW_PART = 512  # of them that lie side by side
NUM_WARPS = 4


@triton.jit(do_not_specialize=["first_row", "rows"])
def _dequantise_fp8_kernel(
    weight,
    out_ptr,
    first_row,
    rows,
    inputs,
    groups,
    WEIGHT_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """weight: (codes, scales), with so many groups a row; WEIGHT_ROWS rows share a scale. out [rows, K]: of so many
    rows from the first one on. A program has PARTS times PART inputs of each of ROWS rows; PART of them share a scale,
    or all of a row do.
    """
    codes_ptr, scales_ptr = weight
    tiles = tl.cdiv(inputs, PARTS * PART)
    row = (tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None, None]
    part = tl.program_id(0) % tiles * PARTS + tl.arange(0, PARTS)[None, :, None]
    at = part * PART + tl.arange(0, PART)[None, None, :]
    inside = (row < rows) & (at < inputs)
    codes = tl.load(codes_ptr + (first_row + row) * inputs + at, mask=inside, other=0)
    group = tl.minimum(part, groups - 1)  # past the end of K it is not stored, and a scale a row is that of all parts
    scales = tl.load(scales_ptr + (first_row + row) // WEIGHT_ROWS * groups + group, mask=row < rows, other=0.0)
    wait_for_predecessor(OVERLAP)
    weights = decode_e4m3(codes, tl.float32) * scales
    tl.store(out_ptr + row * inputs + at, weights.to(out_ptr.dtype.element_ty), mask=inside)


def dequantise(weight: Fp8Weight, first_row: int, out: Tensor) -> None:
    """Write rows of W from `first_row` on to `out` [rows, K]."""
    rows, inputs = out.shape
    overlap, part = hardware(out.device).can_overlap, weight.group or ROW_PART
    parts = min(ROW_PART, triton.next_power_of_2(inputs)) // part or 1
    own_rows = TILE // (parts * part)
    launch(_dequantise_fp8_kernel, (triton.cdiv(rows, own_rows) * triton.cdiv(inputs, parts * part),))(
        (weight.values.view(torch.uint8), weight.scales),
        out,
        first_row,
        rows,
        inputs,
        weight.scales.shape[1],
        WEIGHT_ROWS=weight.rows,
        ROWS=own_rows,
        PARTS=parts,
        PART=part,
        OVERLAP=overlap,
        num_warps=NUM_WARPS,
        launch_pdl=overlap,
    )
