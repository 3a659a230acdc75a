"""The Triton kernel of `act_and_mul`: one program activates a tile of one row.

    y = round(act(gate)) * up,   gate, up = x[..., :d], x[..., d:]

x [..., 2d] of fp32, fp16 or bf16 with any row stride -> y [..., d]. act is fp32, rounded to x's dtype before the
product, as torch does it in two kernels.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..activation import activate
from ..compile_ahead import launch
from ..dependent_launch import wait_for_predecessor
from ..device import hardware
from .rows import row_layout

TILE_ELEMENTS = 1024


@triton.jit(do_not_specialize=["x_inner"])
def _act_and_mul_kernel(
    x_ptr, y_ptr, x_inner, x_strides, DIM: tl.constexpr, TILE: tl.constexpr, ACT: tl.constexpr, OVERLAP: tl.constexpr
):
    wait_for_predecessor(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = element < DIM
    x_ptr += row // x_inner * x_strides[0] + row % x_inner * x_strides[1]
    gate = tl.load(x_ptr + element, mask=mask, other=0.0)
    up = tl.load(x_ptr + DIM + element, mask=mask, other=0.0)
    activated = activate(gate.to(tl.float32), ACT).to(gate.dtype)
    y = (activated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    tl.store(y_ptr + row * DIM + element, y, mask=mask)


def act_and_mul(x: Tensor, kind: str) -> Tensor:
    """Activate the rows of x, which is checked, by an activation of `kind_of`."""
    rows, *layout = row_layout(x)
    dim = x.shape[-1] // 2
    y = torch.empty((*x.shape[:-1], dim), dtype=x.dtype, device=x.device)
    tile = min(TILE_ELEMENTS, triton.next_power_of_2(max(dim, 1)))
    overlap = hardware(x.device).can_overlap
    launch(_act_and_mul_kernel, (rows, triton.cdiv(dim, tile)))(
        x, y, *layout, DIM=dim, TILE=tile, ACT=kind, OVERLAP=overlap, num_warps=4, launch_pdl=overlap
    )
    return y
