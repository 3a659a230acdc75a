"""Triton device functions that decode and prefill attention share, and what their kernels know at compile time."""

# mypy: allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..cache.kv_cache import KVCache
from .context import padded_dim

# exp2 is one instruction, exp is two: the softmax runs in powers of two, its scores in units of log2(e).
LOG2E = tl.constexpr(1.4426950408889634)


class Shape(NamedTuple):
    """A compile-time argument of the attention kernels."""

    group: int  # query heads of a KV head
    head_tile: int  # of them, those that one program takes
    rows: int  # of a tile of queries (times heads)
    keys: int  # of a tile of keys
    block_size: int
    head_dim: int
    # Width of a tile's row: a power of two, and at least the 16 that `tl.dot` wants of its inner dimension. Even and
    # odd dimensions of an fp8 cache are columns of two products in a decode, each of them 16 or more.
    padded_dim: int
    rest: int  # entries of keys behind these, in a cache of latents or expanded from one; 0 for any other
    rest_padded: int
    value_dim: int
    value_padded: int
    latent: bool = False  # values are the first entries of keys
    expanded: bool = False  # keys and values are as `expanded.py` makes them, and not in blocks
    overlap: bool = False  # launches overlap (`dependent_launch.py`)


def shape_of(
    q: Tensor, cache: KVCache, head_tile: int, rows: int, keys: int, *, least_dim: int = 16, overlap: bool = False
) -> Shape:
    """The shape of queries [.., Hq, D] over a cache; head_tile is at most the query heads of a KV head."""
    _, kv_heads, block_size, head_dim = cache.v.shape
    padded = padded_dim(head_dim, least_dim)
    rest = cache.k.shape[3] - head_dim
    return Shape(
        group=q.shape[1] // kv_heads,
        head_tile=head_tile,
        rows=rows,
        keys=keys,
        block_size=block_size,
        head_dim=head_dim,
        padded_dim=padded,
        rest=rest,
        rest_padded=padded_dim(rest),
        value_dim=head_dim,
        value_padded=padded,
        latent=rest > 0,
        overlap=overlap,
    )


@triton.jit
def slot_offsets(block, positions, stride_block, stride_slot, BLOCK_SIZE: tl.constexpr):
    """Element offsets int64 [N] of the slots at `positions` [N], whose block ids are `block` [N].

    64-bit, because a pool exceeds 2^31 elements.
    """
    return block.to(tl.int64) * stride_block + (positions % BLOCK_SIZE) * stride_slot


@triton.jit
def load_tile(ptr, offsets, valid, HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr, MASKED: tl.constexpr):
    """Rows [N, HEAD_DIM_PADDED] at ptr + offsets [N]; padding columns, and rows not `valid` if MASKED, are zero."""
    dims = tl.arange(0, HEAD_DIM_PADDED)
    pointers = ptr + offsets[:, None] + dims[None, :]
    # Rows that no query may see are zeroed, not only given weight zero: unwritten slots can hold NaN.
    if MASKED:
        return tl.load(pointers, mask=valid[:, None] & (dims[None, :] < HEAD_DIM), other=0.0)
    elif HEAD_DIM < HEAD_DIM_PADDED:
        return tl.load(pointers, mask=dims[None, :] < HEAD_DIM, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def finish_scores(products, distance, slopes, scale, softcap, ALIBI: tl.constexpr):
    """Scores from dot products [M, N], short of `score_unit`: with a soft cap or ALiBi whole ones, else as they are.

    `distance` is key minus query position, [1, N] or [M, N]; `slopes` fp32 [M]. softcap: None for none.
    """
    if softcap is not None:
        # cap * tanh(x), with tanh(x) = 1 - 2 / (1 + e^2x), which neither overflows nor needs a sign.
        power = tl.exp2(products * (scale * (2.0 * LOG2E) / softcap))
        products = softcap - (2.0 * softcap) / (1.0 + power)
    elif ALIBI:
        products = products * scale
    if ALIBI:
        products += slopes[:, None] * distance
    return products


@triton.jit
def score_unit(scale, softcap, ALIBI: tl.constexpr):
    """What `finish_scores` leaves to multiply: applied in the exponent, where it costs no instruction of its own.

    It is positive, so that the greatest score stays the greatest.
    """
    if ALIBI or softcap is not None:
        return LOG2E * 1.0
    else:
        return scale * LOG2E


@triton.jit
def sink_weights(sinks_ptr, head, valid, peak):
    """2^(sink - peak) fp32 of the heads `head`: what sinks add to a softmax's total whose peak is in units of log2(e).

    A sink far above every score makes it infinite, and the result zero, which it is to within fp32.
    """
    sink = tl.load(sinks_ptr + head, mask=valid, other=0.0).to(tl.float32)
    return tl.exp2(sink * LOG2E - peak)
