"""Triton helpers that decode and prefill attention share."""

# mypy: allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

# exp2 is one instruction, exp is two: the softmax runs in powers of two, its scores in units of log2(e).
LOG2E = tl.constexpr(1.4426950408889634)


def padded_head_dim(head_dim: int) -> int:
    """Width of a tile row: a power of two, and at least the 16 that `tl.dot` wants of its inner dimension."""
    return max(16, triton.next_power_of_2(head_dim))


@triton.jit
def slot_offsets(block, positions, stride_block, stride_slot, BLOCK_SIZE: tl.constexpr):
    """Element offsets int64 [N] of the slots at `positions` [N], whose block ids are `block` [N].

    64-bit, because a pool exceeds 2^31 elements.
    """
    return block.to(tl.int64) * stride_block + (positions % BLOCK_SIZE) * stride_slot


@triton.jit
def load_tile(ptr, offsets, valid, dims, HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr, MASKED: tl.constexpr):
    """Rows [N, HEAD_DIM_PADDED] at ptr + offsets [N]; padding columns, and rows not `valid` if MASKED, are zero."""
    pointers = ptr + offsets[:, None] + dims[None, :]
    # Rows that no query may see are zeroed, not only given weight zero: unwritten slots can hold NaN.
    if MASKED:
        return tl.load(pointers, mask=valid[:, None] & (dims[None, :] < HEAD_DIM), other=0.0)
    elif HEAD_DIM < HEAD_DIM_PADDED:
        return tl.load(pointers, mask=dims[None, :] < HEAD_DIM, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def tanh(x):
    """tanh to fp32 accuracy: (1 - e) / (1 + e) with e = exp(-2|x|), and its Taylor series where that cancels."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    far = (1.0 - e) / (1.0 + e)
    square = x * x
    series = 1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835))))
    return tl.where(square < 0.0625, x * series, tl.where(x < 0, -far, far))


@triton.jit
def finish_scores(products, distance, slopes, scale, soft_cap, USE_SOFT_CAP: tl.constexpr, USE_ALIBI: tl.constexpr):
    """Scores from dot products [M, N], short of `score_unit`: scale, then soft cap, then ALiBi.

    `distance` is key minus query position, [1, N] or [M, N]; `slopes` fp32 [M].
    """
    if USE_SOFT_CAP:
        products = soft_cap * tanh(products * (scale / soft_cap))
    elif USE_ALIBI:
        products = products * scale
    if USE_ALIBI:
        products += slopes[:, None] * distance
    return products


@triton.jit
def score_unit(scale, USE_SOFT_CAP: tl.constexpr, USE_ALIBI: tl.constexpr):
    """What `finish_scores` leaves to multiply: applied in the exponent, where it costs no instruction of its own.

    It is positive, so that the greatest score stays the greatest.
    """
    if USE_SOFT_CAP or USE_ALIBI:
        return LOG2E * 1.0
    else:
        return scale * LOG2E
