"""RMS normalisation (Zhang and Sennrich, 2019), alone or after adding the residual.

    y = weight * round((x + residual) / sqrt(mean((x + residual)^2) + eps))

x and residual [..., D] of fp32, fp16 or bf16 with any row stride, weight [D]. The sum is rounded to x's dtype, the
normalisation is fp32 and rounded to x's dtype before it meets the weight, as transformers' LlamaRMSNorm does.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .checks import check_residual, check_rms_norm, row_layout
from .dependent_launch import announce_and_wait, can_overlap

TILE_ELEMENTS = 1024  # short rows (the heads of a q/k norm) share a program


@triton.jit(do_not_specialize=["num_rows", "x_inner", "residual_inner"])
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    total_ptr,
    num_rows,
    eps,
    x_inner,
    x_stride_outer,
    x_stride_inner,
    residual_inner,
    residual_stride_outer,
    residual_stride_inner,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    announce_and_wait(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, DIM_PADDED)[None, :]
    mask = (row < num_rows)[:, None] & (dims < DIM)
    x_row = row // x_inner * x_stride_outer + row % x_inner * x_stride_inner
    x = tl.load(x_ptr + x_row[:, None] + dims, mask=mask, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    target = row[:, None] * DIM + dims
    if HAS_RESIDUAL:
        other = row // residual_inner * residual_stride_outer + row % residual_inner * residual_stride_inner
        residual = tl.load(residual_ptr + other[:, None] + dims, mask=mask, other=0.0)
        total = (x + residual.to(tl.float32)).to(dtype)
        tl.store(total_ptr + target, total, mask=mask)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)
    weight = tl.load(weight_ptr + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    normed = (x * scale[:, None]).to(dtype).to(tl.float32)
    tl.store(y_ptr + target, (normed * weight).to(dtype), mask=mask)


def _launch(x: Tensor, residual: Tensor, weight: Tensor, eps: float, y: Tensor, total: Tensor) -> None:
    rows, *x_layout = row_layout(x)
    _, *residual_layout = row_layout(residual)
    dim = x.shape[-1]
    dim_padded = triton.next_power_of_2(dim)
    rows_per_program = max(1, TILE_ELEMENTS // dim_padded)
    overlap = can_overlap(x.device)
    _rms_norm_kernel[(triton.cdiv(rows, rows_per_program),)](
        x,
        residual,
        weight,
        y,
        total,
        rows,
        eps,
        *x_layout,
        *residual_layout,
        DIM=dim,
        DIM_PADDED=dim_padded,
        ROWS=rows_per_program,
        HAS_RESIDUAL=total is not y,
        OVERLAP=overlap,
        num_warps=min(16, max(4, dim_padded // 512)),
        launch_pdl=overlap,
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the rows of x; see `ops.rms_norm` for the contract."""
    check_rms_norm(x, weight)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, x, weight, eps, y, y)
    return y


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Normalise the rows of x + residual; see `ops.fused_add_rms_norm` for the contract."""
    check_rms_norm(x, weight)
    check_residual(x, residual)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, residual, weight, eps, y, total)
    return y, total
