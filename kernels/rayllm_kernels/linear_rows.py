"""Matrix-vector products: a few tokens times a weight matrix, as fast as the weights can be read.

    y = act(norm(x + residual) W^T + bias),   norm and residual, bias, act each optional
    act: silu(gate) * up, where W = [gate; up]

x, residual [M, K], norm weight [K], W [N, K] (gated: [2 N, K]), bias [N] -> y [M, N], total = x + residual [M, K]. The
sum is rounded to x's dtype, everything after it fp32, rounded once: the norm's factor is a scalar of the row, so it is
applied to the finished product, in the same pass over K that finds it.

One program owns some outputs and runs along K; there are no partial results to add. Its threads hold 16 bytes of each
weight row; a tile is multiplied while the next is on its way, the first is asked for before the previous kernel ends.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dependent_launch import can_overlap, wait_for_predecessor

VECTOR_BYTES = 16  # of one row, by one thread


@triton.jit
def _load_weights(weight_ptr, rows, depth, inputs, EVEN: tl.constexpr):
    """[1, ROWS, DEPTH] at pointers' rows; entries past the end of K are zero."""
    if EVEN:
        return tl.load(weight_ptr + rows + depth)
    else:
        return tl.load(weight_ptr + rows + depth, mask=depth < inputs, other=0.0)


@triton.jit
def _add_products(acc, weights, x, TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, VEC: tl.constexpr):
    """acc [TOKENS, ROWS, DEPTH / VEC] plus the products of weights [1, ROWS, DEPTH] and x [TOKENS, 1, DEPTH].

    Only entries of one thread are added here; the sum over threads waits until the end.
    """
    products = tl.reshape(weights.to(tl.float32) * x, [TOKENS, ROWS, DEPTH // VEC, VEC])
    return acc + tl.sum(products, 3)


@triton.jit
def _linear_rows_kernel(
    x_ptr,
    residual_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    total_ptr,
    eps,
    stride_x,
    stride_residual,
    stride_weight,
    tokens,
    inputs,
    outputs,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    VEC: tl.constexpr,
    EVEN: tl.constexpr,
    NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    program = tl.program_id(0)
    output = program * ROWS + tl.arange(0, ROWS)[None, :, None]
    # Rows past the end repeat the last one and are not stored.
    rows = tl.minimum(output, outputs - 1).to(tl.int64) * stride_weight
    up_rows = rows + outputs.to(tl.int64) * stride_weight
    token = tl.arange(0, TOKENS)[:, None, None]
    x_row = tl.minimum(token, tokens - 1) * stride_x
    residual_row = tl.minimum(token, tokens - 1) * stride_residual
    depth = tl.arange(0, DEPTH)[None, None, :]
    first_tokens = tl.where(program == 0, tokens, 0)  # one program stores the sums for all

    weights = _load_weights(weight_ptr, rows, depth, inputs, EVEN)
    up_weights = _load_weights(weight_ptr, up_rows, depth, inputs, EVEN) if GATED else weights
    wait_for_predecessor(OVERLAP)
    acc = tl.zeros([TOKENS, ROWS, DEPTH // VEC], tl.float32)
    up_acc = tl.zeros([TOKENS, ROWS, DEPTH // VEC], tl.float32)
    squares = tl.zeros([TOKENS, 1, DEPTH // VEC], tl.float32)
    for start in range(0, inputs, DEPTH):
        at = start + depth
        mask = at < inputs
        x = tl.load(x_ptr + x_row + at, mask=mask, other=0.0)
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + residual_row + at, mask=mask, other=0.0)
        if NORM:
            norm = tl.load(norm_ptr + at, mask=mask, other=0.0)
        # The tile after the last one is not read: its mask is false throughout.
        following = tl.load(weight_ptr + rows + at + DEPTH, mask=at + DEPTH < inputs, other=0.0)
        up_following = following
        if GATED:
            up_following = tl.load(weight_ptr + up_rows + at + DEPTH, mask=at + DEPTH < inputs, other=0.0)
        wide = x.to(tl.float32)
        if HAS_RESIDUAL:
            total = (wide + residual.to(tl.float32)).to(x.dtype)
            tl.store(total_ptr + token * inputs + at, total, mask=mask & (token < first_tokens))
            wide = total.to(tl.float32)
        if NORM:
            squares += tl.sum(tl.reshape(wide * wide, [TOKENS, 1, DEPTH // VEC, VEC]), 3)
            wide = wide * norm.to(tl.float32)
        acc = _add_products(acc, weights, wide, TOKENS, ROWS, DEPTH, VEC)
        if GATED:
            up_acc = _add_products(up_acc, up_weights, wide, TOKENS, ROWS, DEPTH, VEC)
        weights, up_weights = following, up_following

    y = tl.sum(acc, 2)
    up = tl.sum(up_acc, 2) if GATED else y
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 2) / inputs + eps)
        y, up = y * scale, up * scale
    column = program * ROWS + tl.arange(0, ROWS)[None, :]
    row = tl.arange(0, TOKENS)[:, None]
    if HAS_BIAS:
        y += tl.load(bias_ptr + column, mask=column < outputs, other=0.0).to(tl.float32)
    if GATED:
        y = y / (1.0 + tl.exp(-y)) * up
    tl.store(y_ptr + row * outputs + column, y.to(y_ptr.dtype.element_ty), mask=(row < tokens) & (column < outputs))


def linear_rows(
    x: Tensor,
    weight: Tensor,
    *,
    rows: int,
    num_warps: int,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(y, total) of checked arguments, total being x where there is no residual; `rows` outputs to a program."""
    tokens, inputs = x.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    y = torch.empty((tokens, outputs), dtype=x.dtype, device=x.device) if out is None else out
    total = x if residual is None else torch.empty((tokens, inputs), dtype=x.dtype, device=x.device)
    vector = VECTOR_BYTES // x.element_size()
    depth = min(32 * num_warps * vector, max(vector, triton.next_power_of_2(inputs)))
    overlap = can_overlap(x.device)
    _linear_rows_kernel[(triton.cdiv(outputs, rows),)](
        x,
        x if residual is None else residual,
        x if norm_weight is None else norm_weight,
        weight,
        x if bias is None else bias,
        y,
        total,
        eps,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        weight.stride(0),
        tokens,
        inputs,
        outputs,
        TOKENS=triton.next_power_of_2(tokens),
        ROWS=rows,
        DEPTH=depth,
        VEC=vector,
        EVEN=inputs >= depth,
        NORM=norm_weight is not None,
        HAS_RESIDUAL=residual is not None,
        HAS_BIAS=bias is not None,
        GATED=gated,
        OVERLAP=overlap,
        num_warps=num_warps,
        launch_pdl=overlap,
    )
    return y, total
