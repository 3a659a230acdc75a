"""Weights of 4 bits (`int4.py` has the layout) as 16-bit numbers, some rows at a time, for `dequantised_product.py` and
`dequantised_experts.py`.

out[n, k] = round(scale[n, group of k] * (number[n, k] - zero[n, group of k]))

Numbers in e2m1 have no zero points, and their scales are exponents of 2.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..compile_ahead import launch
from ..dependent_launch import wait_for_predecessor
from ..device import hardware
from ..e2m1 import decode_e2m1, decode_exponents
from . import plans
from .int4 import MIDDLE, Int4Weight

SYMMETRIC_ZERO = tl.constexpr(float(MIDDLE))
POWER = tl.constexpr(2.0**23)  # from here on floats have the step 1: a number in their last bits is added to it
POWER_BITS = tl.constexpr(0x4B000000)
TILE = 4096  # bytes of a program
NUM_WARPS = 4


@triton.jit(do_not_specialize=["first_row", "rows"])
def _dequantise_kernel(
    weight,
    out_ptr,
    first_row,
    rows,
    inputs,
    half,
    groups,
    strides,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    BYTES: tl.constexpr,
    E2M1: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """weight: (codes, scales, zeros or None). out [rows, K]: of so many rows from the first one on. strides: of scales
    and zeros, of a group and a row. GROUP: inputs that share a scale, 0 for all. A program has PARTS times BYTES of
    each of ROWS rows; each half's inputs of BYTES share a scale.
    """
    codes_ptr, scales_ptr, zeros_ptr = weight
    tiles = tl.cdiv(half, PARTS * BYTES)
    row = (tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None, None]
    start = (tl.program_id(0) % tiles * PARTS + tl.arange(0, PARTS)[None, :, None]) * BYTES
    at = start + tl.arange(0, BYTES)[None, None, :]
    inside = (row < rows) & (at < half)
    codes = tl.load(codes_ptr + (first_row + row) * half + at, mask=inside, other=0).to(tl.int32)
    wait_for_predecessor(OVERLAP)
    for upper in tl.static_range(2):
        first = upper * half + start
        group = first // GROUP if GROUP > 0 else first * 0
        place = group * strides[0] + (first_row + row) * strides[1]
        mask = (row < rows) & (group < groups)
        scales = tl.load(scales_ptr + place, mask=mask, other=0)
        own = (codes >> (4 * upper)) & 15
        if E2M1:
            weights = decode_e2m1(own, tl.float32) * decode_exponents(scales)
        else:
            zeros = SYMMETRIC_ZERO
            if zeros_ptr is not None:
                zeros = tl.load(zeros_ptr + place, mask=mask, other=0).to(tl.float32)
            # As floats: of differences of whole numbers LLVM makes `add.s16x2`, whose constants ptxas 12.8 loses in
            # places.
            weights = ((own | POWER_BITS).to(tl.float32, bitcast=True) - (zeros + POWER)) * scales
        k = upper * half + at
        tl.store(out_ptr + row * inputs + k, weights.to(out_ptr.dtype.element_ty), mask=inside & (k < inputs))


def dequantise(weight: Int4Weight, first_row: int, out: Tensor, *, e2m1: bool = False) -> None:
    """Write rows of W from `first_row` on to `out` [rows, K]. e2m1: its codes are that, its scales uint8 exponents.

    Scales and zero points may have any strides, the same.
    """
    (rows, inputs), half = out.shape, weight.codes.shape[1]
    overlap, own_bytes = hardware(out.device).can_overlap, plans.int4_depth(weight.group)
    parts = max(1, min(512 // own_bytes, triton.next_power_of_2(half) // own_bytes))
    own_rows = TILE // (parts * own_bytes)
    launch(_dequantise_kernel, (triton.cdiv(rows, own_rows) * triton.cdiv(half, parts * own_bytes),))(
        (weight.codes, weight.scales, weight.zeros),
        out,
        first_row,
        rows,
        inputs,
        half,
        weight.scales.shape[0],
        weight.scales.stride(),
        GROUP=weight.group or 0,
        ROWS=own_rows,
        PARTS=parts,
        BYTES=own_bytes,
        E2M1=e2m1,
        OVERLAP=overlap,
        num_warps=NUM_WARPS,
        launch_pdl=overlap,
    )
