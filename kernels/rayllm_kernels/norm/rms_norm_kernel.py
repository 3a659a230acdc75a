"""The Triton kernel of `rms_norm`, `fused_add_rms_norm` and `rms_norm_add`: one program takes a long row, or several.

    total = round(x + residual);   y = weight * round(total / sqrt(mean(total^2) + eps))
    y = round(weight * round(x / sqrt(mean(x^2) + eps))) + residual

x and residual [..., D] of fp32, fp16 or bf16 with any row stride, weight [D] -> y, total [..., D], contiguous. The
normalisation is fp32 and rounded to x's dtype before it meets a weight of that dtype, as in transformers' LlamaRMSNorm.
A weight may be in fp32 too: then only the product is rounded, as in its Gemma2RMSNorm.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compile_ahead import launch
from ..dependent_launch import announce_and_wait
from ..device import hardware
from ..experts.device_functions import add_pairs
from ..experts.pair_sum import PairSum, of_kernels, row_warps
from .rows import row_layout

TILE_ELEMENTS = 1024  # short rows (the heads of a q/k norm) share a program


class Form(NamedTuple):
    """The compile-time argument of the kernel."""

    dim: int
    dim_padded: int  # to a power of two
    rows: int  # of one program
    adds_before: bool  # the residual is added to x
    adds_after: bool  # the residual is added to the norm
    top_k: int  # pairs of a token that x is the sum of; 0 if x is there
    overlap: bool  # launches overlap (`dependent_launch.py`)


@triton.jit(do_not_specialize=["num_rows", "x_inner", "residual_inner"])
def _rms_norm_kernel(
    x_ptr, pairs, residual_ptr, norm, y_ptr, total_ptr, num_rows, x_inner, residual_inner, strides, FORM: tl.constexpr
):
    """norm: (weight, eps). x_inner, residual_inner: rows per outer step. strides: (outer, inner), of x and residual.

    pairs: what x, a row a program, is the sum of, as for `add_pairs`; None if x is there.
    """
    weight_ptr, eps = norm
    x_strides, residual_strides = strides
    DIM: tl.constexpr = FORM.dim
    row = tl.program_id(0).to(tl.int64) * FORM.rows + tl.arange(0, FORM.rows)
    dims = tl.arange(0, FORM.dim_padded)[None, :]
    weight = tl.load(weight_ptr + dims, mask=dims < DIM, other=0.0).to(tl.float32)  # no kernel writes it
    announce_and_wait(FORM.overlap)
    mask = (row < num_rows)[:, None] & (dims < DIM)
    dtype = y_ptr.dtype.element_ty
    if FORM.top_k > 0:
        x = add_pairs(pairs, tl.program_id(0).to(tl.int64), DIM, dims, FORM.top_k).to(dtype)
    else:
        x_row = row // x_inner * x_strides[0] + row % x_inner * x_strides[1]
        x = tl.load(x_ptr + x_row[:, None] + dims, mask=mask, other=0.0)
    x = x.to(tl.float32)
    target = row[:, None] * DIM + dims
    if residual_ptr is not None:
        other = row // residual_inner * residual_strides[0] + row % residual_inner * residual_strides[1]
        residual = tl.load(residual_ptr + other[:, None] + dims, mask=mask, other=0.0)
    if FORM.adds_before:
        total = (x + residual.to(tl.float32)).to(dtype)
        tl.store(total_ptr + target, total, mask=mask)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)
    normed = x * scale[:, None]
    if weight_ptr.dtype.element_ty == dtype:
        normed = normed.to(dtype).to(tl.float32)
    y = (normed * weight).to(dtype)
    if FORM.adds_after:
        y = (y.to(tl.float32) + residual.to(tl.float32)).to(dtype)
    tl.store(y_ptr + target, y, mask=mask)


def rms_norm(
    x: Tensor | PairSum, residual: Tensor | None, weight: Tensor, eps: float, adds_after: bool
) -> tuple[Tensor, Tensor | None]:
    """(norm of the rows of the total, total), or, if adds_after, (norm of the rows of x, the residual added, None).

    Without a residual x is the total, and None is returned for it; a `PairSum` has one. The arguments are checked.
    """
    adds_before = residual is not None and not adds_after
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device) if adds_before else None
    rows, x_inner, x_strides = row_layout(y if isinstance(x, PairSum) else x)
    _, residual_inner, residual_strides = row_layout(y if residual is None else residual)
    dim = x.shape[-1]
    dim_padded = triton.next_power_of_2(dim)
    rows_per_program = 1 if isinstance(x, PairSum) else max(1, TILE_ELEMENTS // dim_padded)
    overlap = hardware(x.device).can_overlap
    top_k = x.weights.shape[1] if isinstance(x, PairSum) else 0
    form = Form(dim, dim_padded, rows_per_program, adds_before, adds_after, top_k, overlap)
    strides = (x_strides, residual_strides)
    options = {"num_warps": row_warps(x, dim_padded), "launch_pdl": overlap}
    launch(_rms_norm_kernel, (triton.cdiv(rows, rows_per_program),))(
        None if isinstance(x, PairSum) else x,
        of_kernels(x),
        residual,
        (weight, eps),
        y,
        total,
        rows,
        x_inner,
        residual_inner,
        strides,
        FORM=form,
        **options,
    )
    return y, total
