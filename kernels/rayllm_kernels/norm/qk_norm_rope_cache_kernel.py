"""The Triton kernel of `qk_norm_rope_cache`: one program takes some heads of one token, of queries, keys or values.

    q, k = rotary(norm(q)) * scale, rotary(norm(k));  cache[slot // block_size, :, slot % block_size] = k, norm(v)

The cache is in qkv's dtype or in fp8, which k and v are then converted to with a scale for each head (`kv_cache.py`).

qkv [T, (Hq + 2 Hkv) D] of any row stride, its heads in the order q, k, v; the norms (`rms_norm`) optional; positions
[T] int64; cos_sin_cache [max_pos, r] fp32; query scales [max_pos] fp32, optional; caches [num_blocks, Hkv, block_size,
D]; slot_mapping [T] int64, negative for padding, or none where there are queries alone -> q [T, Hq, D]. The roundings
are those of `rms_norm`, `rotate` and `reshape_and_cache` in turn.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cache.fp8 import store_rows
from ..cache.kv_cache import KVCache
from ..compile_ahead import launch
from ..dependent_launch import announce_and_wait
from ..device import hardware
from .qk_norm_rope_cache import HeadNorms

TILE_ELEMENTS = 2048  # of one token, by one program
FEW_TOKENS = 128  # up to here latency counts: smaller tiles, more programs
FEW_TOKENS_TILE_ELEMENTS = 512


class Form(NamedTuple):
    """The compile-time argument of the kernel: the parts of a head, and what one program works with."""

    dim: int  # entries of a head
    dim_padded: int  # here and below to a power of two
    half: int  # pairs of entries that are rotated
    half_padded: int
    rest_padded: int  # of what is past the pairs; 0 if nothing is
    interleaved: bool  # entries 2i and 2i + 1 are a pair, not i and i + half
    heads: int  # of one program
    block_size: int
    norm_values: bool
    heads_first: bool  # heads are loaded before the angles of their position, not while the predecessor still runs
    overlap: bool  # launches overlap (`dependent_launch.py`)


@triton.jit
def _entries(FORM: tl.constexpr):
    """Of a head: (first and second entry of each pair, whether there are those; entries past the pairs, whether)."""
    pair = tl.arange(0, FORM.half_padded)[None, :]
    one = 2 * pair if FORM.interleaved else pair
    other = 2 * pair + 1 if FORM.interleaved else FORM.half + pair
    past = 2 * FORM.half + tl.arange(0, FORM.rest_padded if FORM.rest_padded > 0 else 1)[None, :]
    return one, other, pair < FORM.half, past, past < FORM.dim


@triton.jit
def _load_factors(weight_ptr, cos_sin_ptr, query_scale_ptr, FORM: tl.constexpr):
    """What heads of one position are multiplied with: cos, sin, the norm's weights by parts of a head, the scale."""
    one, other, in_pair, past, in_rest = _entries(FORM)
    pair = tl.arange(0, FORM.half_padded)[None, :]
    cos = tl.load(cos_sin_ptr + pair, mask=in_pair, other=0.0)
    sin = tl.load(cos_sin_ptr + FORM.half + pair, mask=in_pair, other=0.0)
    first, second, rest, scale = 1.0, 1.0, 1.0, 1.0
    if weight_ptr is not None:
        first = tl.load(weight_ptr + one, mask=in_pair, other=0.0)
        second = tl.load(weight_ptr + other, mask=in_pair, other=0.0)
        rest = tl.load(weight_ptr + past, mask=in_rest, other=0.0)
    if query_scale_ptr is not None:
        scale = tl.load(query_scale_ptr)
    return cos, sin, first, second, rest, scale


@triton.jit
def _scale_part(x, scale, weight):
    """weight * round(x * scale), rounded to x's dtype and widened again; an fp32 weight meets what is not rounded."""
    normed = x.to(tl.float32) * scale
    if weight.dtype == x.dtype:
        normed = normed.to(x.dtype).to(tl.float32)
    return (normed * weight.to(tl.float32)).to(x.dtype).to(tl.float32)


@triton.jit
def _times(x, scale, SCALED: tl.constexpr):
    """x times a scale, both in x's dtype."""
    if SCALED:
        x = (x.to(tl.float32) * scale.to(x.dtype).to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def _load_heads(source, valid, FORM: tl.constexpr):
    """Heads at pointers `source` [N, 1]: the first and the second entries of the pairs, and what is past them."""
    one, other, in_pair, past, in_rest = _entries(FORM)
    first = tl.load(source + one, mask=valid & in_pair, other=0.0)
    second = tl.load(source + other, mask=valid & in_pair, other=0.0)
    rest = first
    if FORM.rest_padded > 0:
        rest = tl.load(source + past, mask=valid & in_rest, other=0.0)
    return first, second, rest


@triton.jit
def _read(source, valid, weight_ptr, angle_ptr, scale_ptr, FORM: tl.constexpr):
    """(heads at `source`, which the predecessor writes; their factors)."""
    if FORM.heads_first:
        announce_and_wait(FORM.overlap)
        heads = _load_heads(source, valid, FORM)
        factors = _load_factors(weight_ptr, angle_ptr, scale_ptr, FORM)
    else:
        factors = _load_factors(weight_ptr, angle_ptr, scale_ptr, FORM)
        announce_and_wait(FORM.overlap)
        heads = _load_heads(source, valid, FORM)
    return heads, factors


@triton.jit
def _norm_rotate(heads, target, cache_scale, valid, factors, eps, WITH: tl.constexpr, FORM: tl.constexpr):
    """Heads, of `_load_heads`, -> heads at `target` [N, 1]: the pairs that are rotated, and what is past them.

    cache_scale: [N, 1], or anything if `target` is not in fp8. factors: of `_load_factors`. WITH: whether heads are
    normalised, and whether they are scaled.
    """
    NORMED: tl.constexpr = WITH[0]
    SCALED: tl.constexpr = WITH[1]
    one, other, in_pair, past, in_rest = _entries(FORM)
    cos, sin, first_weight, second_weight, rest_weight, scale = factors
    mask = valid & in_pair
    first, second, rest = heads
    dtype = first.dtype
    a, b = first.to(tl.float32), second.to(tl.float32)
    if NORMED:
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        if FORM.rest_padded > 0:
            squares += tl.sum(rest.to(tl.float32) * rest.to(tl.float32), 1)
        norm = tl.rsqrt(squares / FORM.dim + eps)[:, None]
        a = _scale_part(first, norm, first_weight)
        b = _scale_part(second, norm, second_weight)
        if FORM.rest_padded > 0:
            rest = _scale_part(rest, norm, rest_weight).to(dtype)
    store_rows(target + one, _times((a * cos - b * sin).to(dtype), scale, SCALED), cache_scale, mask)
    store_rows(target + other, _times((b * cos + a * sin).to(dtype), scale, SCALED), cache_scale, mask)
    if FORM.rest_padded > 0:
        store_rows(target + past, _times(rest, scale, SCALED), cache_scale, valid & in_rest)


@triton.jit(do_not_specialize=["positions_ptr", "slots_ptr"])
def _qk_norm_rope_cache_kernel(
    qkv_ptr, norms, positions_ptr, angles, cache, slots_ptr, q_ptr, strides, numbers, FORM: tl.constexpr
):
    """norms: (weight of query heads or None, of key heads or None, eps). angles: (cos_sin, query scales or None).

    strides: of qkv, cos_sin and the cache. numbers: of query heads and of KV heads.
    """
    HEADS: tl.constexpr = FORM.heads
    BLOCK_SIZE: tl.constexpr = FORM.block_size
    stride_token, stride_cos_sin, stride_block, stride_cache_head, stride_slot = strides
    q_weight, k_weight, eps = norms
    num_heads, num_kv_heads = numbers
    cos_sin_ptr, query_scale_ptr = angles
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    q_tiles = tl.cdiv(num_heads, HEADS)
    kv_tiles = tl.cdiv(num_kv_heads, HEADS)
    row = qkv_ptr + token * stride_token
    lane = tl.arange(0, HEADS)[:, None]
    position = tl.load(positions_ptr + token)
    angle_ptr = cos_sin_ptr + position * stride_cos_sin
    if tile < q_tiles:
        head = tile * HEADS + lane
        queries = q_ptr + (token * num_heads + head) * FORM.dim
        scale_ptr = query_scale_ptr + position if query_scale_ptr is not None else None
        WITH: tl.constexpr = (q_weight is not None, query_scale_ptr is not None)
        heads, factors = _read(row + head * FORM.dim, head < num_heads, q_weight, angle_ptr, scale_ptr, FORM)
        _norm_rotate(heads, queries, 1.0, head < num_heads, factors, eps, WITH, FORM)
    elif slots_ptr is not None:
        slot = tl.load(slots_ptr + token)
        target = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_slot
        if tile < q_tiles + kv_tiles:
            head = (tile - q_tiles) * HEADS + lane
            valid = head < tl.where(slot >= 0, num_kv_heads, 0)
            scale = tl.load(cache.scales.k + head, mask=valid, other=1.0) if cache.scales is not None else 1.0
            source = row + (num_heads + head) * FORM.dim
            heads, factors = _read(source, valid, k_weight, angle_ptr, None, FORM)
            place = cache.k + target + head * stride_cache_head
            _norm_rotate(heads, place, scale, valid, factors, eps, (k_weight is not None, False), FORM)
        else:
            head = (tile - q_tiles - kv_tiles) * HEADS + lane
            valid = head < tl.where(slot >= 0, num_kv_heads, 0)
            scale = tl.load(cache.scales.v + head, mask=valid, other=1.0) if cache.scales is not None else 1.0
            announce_and_wait(FORM.overlap)
            dims = tl.arange(0, FORM.dim_padded)[None, :]
            mask = valid & (dims < FORM.dim)
            v = tl.load(row + (num_heads + num_kv_heads + head) * FORM.dim + dims, mask=mask)
            if FORM.norm_values:
                wide = tl.where(mask, v, 0.0).to(tl.float32)
                norm = tl.rsqrt(tl.sum(wide * wide, 1) / FORM.dim + eps)[:, None]
                v = (wide * norm).to(v.dtype)
            store_rows(cache.v + target + head * stride_cache_head + dims, v, scale, mask)


def qk_norm_rope_cache(
    qkv: Tensor,
    norms: HeadNorms | None,
    positions: Tensor,
    cos_sin_cache: Tensor,
    cache: KVCache,
    slot_mapping: Tensor | None,
    num_heads: int,
    interleaved: bool,
    query_scale: Tensor | None,
    deterministic: bool,
) -> Tensor:
    """Queries ready for attention, keys and values stored; the arguments are checked."""
    tokens, (_, num_kv_heads, block_size, head_dim) = qkv.shape[0], cache.k.shape
    num_kv_heads = 0 if slot_mapping is None else num_kv_heads
    q = torch.empty((tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return q
    half = cos_sin_cache.shape[1] // 2
    rest = head_dim - 2 * half
    padded = triton.next_power_of_2(head_dim)
    # A token's bits depend on both choices. How many heads a tile holds decides how their squares are added up. The
    # order of loads decides which of two products the compiler fuses with their sum, and so which one is rounded.
    many = tokens > FEW_TOKENS
    elements = TILE_ELEMENTS if many or deterministic else FEW_TOKENS_TILE_ELEMENTS
    heads_first = many and not deterministic
    heads = min(triton.next_power_of_2(max(num_heads, num_kv_heads)), max(1, elements // padded))
    tiles = triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, heads)
    overlap = hardware(qkv.device).can_overlap
    rest_padded = triton.next_power_of_2(rest) if rest else 0
    half_padded = triton.next_power_of_2(half)
    norm_values = norms is not None and norms.values
    parts = head_dim, padded, half, half_padded, rest_padded, interleaved
    form = Form(*parts, heads, block_size, norm_values, heads_first, overlap)
    norm = (None, None, 0.0) if norms is None else (norms.q, norms.k, norms.eps)
    angles = cos_sin_cache, query_scale
    strides = (qkv.stride(0), cos_sin_cache.stride(0), *cache.k.stride()[:3])
    options = {"num_warps": 4, "launch_pdl": overlap}
    launch(_qk_norm_rope_cache_kernel, (tokens, tiles))(
        qkv, norm, positions, angles, cache, slot_mapping, q, strides, (num_heads, num_kv_heads), FORM=form, **options
    )
    return q
