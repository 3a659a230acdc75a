"""The Triton kernel of `token_gate`: a program finds a token's gate, and multiplies all of its values.

    y = round(sigmoid(round(<x, weight>))) * values

x [T, K] and values [T, D] of fp32, fp16 or bf16 with any row stride, weight [K] -> y [T, D].
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

TILE = tl.constexpr(2048)  # entries that a program takes at once


@triton.jit
def _token_gate_kernel(
    x_ptr, weight_ptr, values_ptr, y_ptr, strides, INPUTS: tl.constexpr, DIM: tl.constexpr, OVERLAP: tl.constexpr
):
    """strides: of rows of x and of values."""
    wait_for_predecessor(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, TILE)
    products = tl.zeros([TILE], tl.float32)
    for first in tl.static_range(0, INPUTS, TILE):
        mask = first + place < INPUTS
        x = tl.load(x_ptr + row * strides[0] + first + place, mask=mask, other=0.0).to(tl.float32)
        products += x * tl.load(weight_ptr + first + place, mask=mask, other=0.0).to(tl.float32)
    dtype = y_ptr.dtype.element_ty
    logit = tl.sum(products, 0).to(dtype).to(tl.float32)
    gate = (1.0 / (1.0 + tl.exp(-logit))).to(dtype).to(tl.float32)
    for first in tl.static_range(0, DIM, TILE):
        mask = first + place < DIM
        values = tl.load(values_ptr + row * strides[1] + first + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * DIM + first + place, (gate * values).to(dtype), mask=mask)


def token_gate(x: Tensor, weight: Tensor, values: Tensor) -> Tensor:
    """The gated values; the arguments are checked."""
    (rows, inputs), dim = x.shape, values.shape[1]
    y = torch.empty((rows, dim), dtype=x.dtype, device=x.device)
    overlap = hardware(x.device).can_overlap
    if rows:
        launch(_token_gate_kernel, (rows,))(
            x, weight, values, y, (x.stride(0), values.stride(0)), INPUTS=inputs, DIM=dim, OVERLAP=overlap, num_warps=4,
            launch_pdl=overlap,
        )  # fmt: skip
    return y
