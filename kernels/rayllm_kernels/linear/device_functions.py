"""Triton device functions that `tiles_kernel` and `invariant_kernel` share: sums of products on the tensor cores."""

# mypy: allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def no_sums(TILES: tl.constexpr):
    """A tile of sums, zero: [tokens, outputs], the other way round if weights come first, or one a slice."""
    SLICES: tl.constexpr = TILES.slices
    TOKENS: tl.constexpr = TILES.tokens
    OUTPUTS: tl.constexpr = TILES.outputs
    if SLICES > 1:
        return tl.zeros([SLICES, TOKENS, OUTPUTS], tl.float32)
    elif TILES.weights_first:
        return tl.zeros([OUTPUTS, TOKENS], tl.float32)
    else:
        return tl.zeros([TOKENS, OUTPUTS], tl.float32)


@triton.jit
def add_products(acc, weights, x, TILES: tl.constexpr):
    """A tile of sums plus the products of weights [outputs, depth] and x [tokens, depth], both of each slice."""
    if TILES.slices > 1:
        return tl.dot(x, tl.permute(weights, (0, 2, 1)), acc, input_precision="ieee")
    elif TILES.weights_first:
        return tl.dot(weights, tl.trans(x), acc, input_precision="ieee")
    else:
        return tl.dot(x, tl.trans(weights), acc, input_precision="ieee")


@triton.jit
def sums(acc, bias_ptr, column, outputs, TILES: tl.constexpr):
    """fp32 [tokens, outputs] of a tile of sums, with the bias of `column` [1, outputs]."""
    if TILES.slices > 1:
        y = tl.sum(acc, 0)
    elif TILES.weights_first:
        y = tl.trans(acc)
    else:
        y = acc
    if bias_ptr is not None:
        y += tl.load(bias_ptr + column, mask=column < outputs, other=0.0).to(tl.float32)
    return y
