"""The Triton kernel of a deterministic `linear_heads`: one program computes one tile of one head.

    y[t, h] = weight[h] x[t, h]

x [T, H, K] of any token and head stride, weight [H, N, K] of any strides -> y [T, H, N], like x. fp32 sums, rounded
once. Every tile is of the same size, whatever T is, and sums over K in ascending order.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..compile_ahead import launch

TOKENS, OUTPUTS, DEPTH = 16, 64, 64


@triton.jit(do_not_specialize=["tokens"])
def _linear_heads_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,
    strides,
    tokens,
    inputs,
    outputs,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """strides: of x, weight and y, of the last dimensions of x and y none."""
    stride_xt, stride_xh, stride_wh, stride_wo, stride_wi, stride_yt, stride_yh = strides
    head = tl.program_id(2).to(tl.int64)
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    depth = tl.arange(0, DEPTH)[None, :]
    acc = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    for start in range(0, inputs, DEPTH):
        real = start + depth < inputs
        x = tl.load(
            x_ptr + token * stride_xt + head * stride_xh + start + depth, mask=(token < tokens) & real, other=0.0
        )
        row = weight_ptr + head * stride_wh + output[:, None] * stride_wo + (start + depth) * stride_wi
        weight = tl.load(row, mask=(output[:, None] < outputs) & real, other=0.0)
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
    target = y_ptr + token * stride_yt + head * stride_yh + output[None, :]
    tl.store(target, acc.to(y_ptr.dtype.element_ty), mask=(token < tokens) & (output[None, :] < outputs))


def linear_heads(x: Tensor, weight: Tensor, y: Tensor) -> None:
    """Write y; the arguments are checked."""
    (tokens, heads, inputs), outputs = x.shape, weight.shape[1]
    if not tokens:
        return
    strides = (*x.stride()[:2], *weight.stride(), *y.stride()[:2])
    grid = triton.cdiv(tokens, TOKENS), triton.cdiv(outputs, OUTPUTS), heads
    tiles = {"TOKENS": TOKENS, "OUTPUTS": OUTPUTS, "DEPTH": DEPTH}
    launch(_linear_heads_kernel, grid)(
        x, weight, y, strides, tokens, inputs, outputs, **tiles, num_warps=4, num_stages=2
    )
