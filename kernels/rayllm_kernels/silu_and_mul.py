"""The gated activation of Llama's feed-forward layer (SwiGLU: Shazeer, 2020).

    y = round(silu(gate)) * up,   silu(g) = g / (1 + exp(-g)),   gate, up = x[..., :d], x[..., d:]

x [..., 2d] of fp32, fp16 or bf16 with any row stride -> y [..., d]. silu is fp32, rounded to x's dtype before the
product, as torch does it in two kernels.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .checks import check_silu_and_mul, row_layout
from .dependent_launch import can_overlap, wait_for_predecessor

TILE_ELEMENTS = 1024


@triton.jit(do_not_specialize=["x_inner"])
def _silu_and_mul_kernel(
    x_ptr, y_ptr, x_inner, x_stride_outer, x_stride_inner, DIM: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr
):
    wait_for_predecessor(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = element < DIM
    x_ptr += row // x_inner * x_stride_outer + row % x_inner * x_stride_inner
    gate = tl.load(x_ptr + element, mask=mask, other=0.0)
    up = tl.load(x_ptr + DIM + element, mask=mask, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    y = (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    tl.store(y_ptr + row * DIM + element, y, mask=mask)


def silu_and_mul(x: Tensor) -> Tensor:
    """Activate the rows of x; see `ops.silu_and_mul` for the contract."""
    check_silu_and_mul(x)
    rows, *layout = row_layout(x)
    dim = x.shape[-1] // 2
    y = torch.empty((*x.shape[:-1], dim), dtype=x.dtype, device=x.device)
    tile = min(TILE_ELEMENTS, triton.next_power_of_2(max(dim, 1)))
    overlap = can_overlap(x.device)
    _silu_and_mul_kernel[(rows, triton.cdiv(dim, tile))](
        x, y, *layout, DIM=dim, TILE=tile, OVERLAP=overlap, num_warps=4, launch_pdl=overlap
    )
    return y
