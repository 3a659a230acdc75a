"""The Triton kernel of `rms_norm_gated`, which has the formula: one program takes some heads."""

# mypy: allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compile_ahead import launch

TILE_ELEMENTS = 1024  # of a program


@triton.jit(do_not_specialize=["num_rows"])
def _gated_norm_kernel(
    x_ptr, z_ptr, weight_ptr, y_ptr, num_rows, eps, strides, HEADS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr
):
    """strides: of tokens and heads of x, and of tokens of z. TILE: (rows, DIM padded)."""
    stride_xt, stride_xh, stride_z = strides
    row = tl.program_id(0).to(tl.int64) * TILE[0] + tl.arange(0, TILE[0])
    dims = tl.arange(0, TILE[1])[None, :]
    mask = (row < num_rows)[:, None] & (dims < DIM)
    token, head = row // HEADS, row % HEADS
    x = tl.load(x_ptr + (token * stride_xt + head * stride_xh)[:, None] + dims, mask=mask, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    normed = (x * tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]).to(dtype).to(tl.float32)
    weight = tl.load(weight_ptr + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + (token * stride_z + head * DIM)[:, None] + dims, mask=mask, other=0.0).to(tl.float32)
    gated = (normed * weight).to(dtype).to(tl.float32) * (z / (1.0 + tl.exp(-z)))
    tl.store(y_ptr + row[:, None] * DIM + dims, gated.to(dtype), mask=mask)


def rms_norm_gated(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The result of checked arguments."""
    tokens, heads, dim = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    padded = triton.next_power_of_2(dim)
    tile = (max(1, TILE_ELEMENTS // padded), padded)
    if tokens:
        launch(_gated_norm_kernel, (triton.cdiv(tokens * heads, tile[0]),))(
            x, z, weight, y, tokens * heads, eps, (*x.stride()[:2], z.stride(0)), HEADS=heads, DIM=dim, TILE=tile
        )
    return y
