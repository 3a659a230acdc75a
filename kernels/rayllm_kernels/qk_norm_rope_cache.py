"""What lies between the qkv projection and attention, in one launch: head norms, rotary positions, the cache write.

    q, k = rotary(norm(q)), rotary(norm(k));  cache[slot // block_size, :, slot % block_size] = k, v

The cache is in qkv's dtype or in fp8, which k and v are then converted to with a scale for each head (`kv_format.py`).

qkv [T, (Hq + 2 Hkv) D] of any row stride, its heads in the order q, k, v; the norms (`rms_norm`) optional; positions
[T] int64; cos_sin_cache [max_pos, r] fp32; caches [num_blocks, Hkv, block_size, D]; slot_mapping [T] int64, negative
for padding -> q [T, Hq, D]. The roundings are those of `rms_norm`, `rotary_embedding` and `reshape_and_cache` in turn.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .checks import check_qk_norm_rope_cache
from .dependent_launch import can_overlap, wait_for_predecessor
from .fp8_cache import store_rows
from .kv_format import KVScales

TILE_ELEMENTS = 2048  # of one token, by one program
FEW_TOKENS = 128  # up to here latency counts: smaller tiles, more programs
FEW_TOKENS_TILE_ELEMENTS = 512


@triton.jit
def _scale_part(x, scale, weight_ptr, dims, valid):
    """weight * round(x * scale), rounded to x's dtype and widened again."""
    weight = tl.load(weight_ptr + dims, mask=valid, other=0.0).to(tl.float32)
    normed = (x.to(tl.float32) * scale).to(x.dtype).to(tl.float32)
    return (normed * weight).to(x.dtype).to(tl.float32)


@triton.jit
def _norm_rotate(
    source,
    target,
    scale,
    valid,
    weight_ptr,
    angle_ptr,
    eps,
    NORM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
):
    """Heads at pointers `source` [N, 1] -> heads at `target` [N, 1]: the two rotated halves, and what is past them.

    scale: [N, 1], or anything if `target` is not in fp8.
    """
    pair = tl.arange(0, HALF_PADDED)[None, :]
    in_pair = pair < HALF
    mask = valid & in_pair
    cos = tl.load(angle_ptr + pair, mask=in_pair, other=0.0)
    sin = tl.load(angle_ptr + HALF + pair, mask=in_pair, other=0.0)
    first = tl.load(source + pair, mask=mask, other=0.0)
    second = tl.load(source + HALF + pair, mask=mask, other=0.0)
    dtype = first.dtype
    a, b = first.to(tl.float32), second.to(tl.float32)
    if REST_PADDED > 0:
        past = 2 * HALF + tl.arange(0, REST_PADDED)[None, :]
        in_rest = past < HEAD_DIM
        rest = tl.load(source + past, mask=valid & in_rest, other=0.0)
    if NORM:
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        if REST_PADDED > 0:
            squares += tl.sum(rest.to(tl.float32) * rest.to(tl.float32), 1)
        norm = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        a = _scale_part(first, norm, weight_ptr, pair, in_pair)
        b = _scale_part(second, norm, weight_ptr, HALF + pair, in_pair)
        if REST_PADDED > 0:
            rest = _scale_part(rest, norm, weight_ptr, past, in_rest).to(dtype)
    store_rows(target + pair, (a * cos - b * sin).to(dtype), scale, mask)
    store_rows(target + HALF + pair, (b * cos + a * sin).to(dtype), scale, mask)
    if REST_PADDED > 0:
        store_rows(target + past, rest, scale, valid & in_rest)


@triton.jit(do_not_specialize=["positions_ptr", "slots_ptr"])
def _qk_norm_rope_cache_kernel(
    qkv_ptr,
    positions_ptr,
    cos_sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    k_ptr,
    v_ptr,
    slots_ptr,
    k_scale_ptr,
    v_scale_ptr,
    q_ptr,
    eps,
    stride_token,
    stride_cos_sin,
    stride_block,
    stride_cache_head,
    stride_slot,
    num_heads,
    num_kv_heads,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
    USE_SCALES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    q_tiles = tl.cdiv(num_heads, HEADS)
    kv_tiles = tl.cdiv(num_kv_heads, HEADS)
    row = qkv_ptr + token * stride_token
    lane = tl.arange(0, HEADS)[:, None]
    wait_for_predecessor(OVERLAP)
    if tile < q_tiles:
        head = tile * HEADS + lane
        angle = cos_sin_ptr + tl.load(positions_ptr + token) * stride_cos_sin
        target = q_ptr + (token * num_heads + head) * HEAD_DIM
        _norm_rotate(
            row + head * HEAD_DIM,
            target,
            1.0,
            head < num_heads,
            q_weight_ptr,
            angle,
            eps,
            NORM,
            HEAD_DIM,
            HALF,
            HALF_PADDED,
            REST_PADDED,
        )
    else:
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            target = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_slot
            if tile < q_tiles + kv_tiles:
                head = (tile - q_tiles) * HEADS + lane
                angle = cos_sin_ptr + tl.load(positions_ptr + token) * stride_cos_sin
                source = row + (num_heads + head) * HEAD_DIM
                valid = head < num_kv_heads
                scale = tl.load(k_scale_ptr + head, mask=valid, other=1.0) if USE_SCALES else 1.0
                _norm_rotate(
                    source,
                    k_ptr + target + head * stride_cache_head,
                    scale,
                    valid,
                    k_weight_ptr,
                    angle,
                    eps,
                    NORM,
                    HEAD_DIM,
                    HALF,
                    HALF_PADDED,
                    REST_PADDED,
                )
            else:
                head = (tile - q_tiles - kv_tiles) * HEADS + lane
                dims = tl.arange(0, HEAD_DIM_PADDED)[None, :]
                mask = (head < num_kv_heads) & (dims < HEAD_DIM)
                v = tl.load(row + (num_heads + num_kv_heads + head) * HEAD_DIM + dims, mask=mask)
                scale = tl.load(v_scale_ptr + head, mask=head < num_kv_heads, other=1.0) if USE_SCALES else 1.0
                store_rows(v_ptr + target + head * stride_cache_head + dims, v, scale, mask)


def qk_norm_rope_cache(
    qkv: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
    num_kv_heads: int,
    *,
    kv_scales: KVScales | None = None,
    deterministic: bool = False,
) -> Tensor:
    """Queries ready for attention, keys and values stored; see `ops.qk_norm_rope_cache` for the contract."""
    check_qk_norm_rope_cache(
        qkv,
        positions,
        cos_sin_cache,
        q_weight,
        k_weight,
        k_cache,
        v_cache,
        slot_mapping,
        num_heads,
        num_kv_heads,
        kv_scales,
    )
    tokens, head_dim = qkv.shape[0], k_cache.shape[3]
    q = torch.empty((tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return q
    half = cos_sin_cache.shape[1] // 2
    rest = head_dim - 2 * half
    head_dim_padded = triton.next_power_of_2(head_dim)
    # How many heads a tile holds decides how their squares are added up.
    few = tokens <= FEW_TOKENS and not deterministic
    elements = FEW_TOKENS_TILE_ELEMENTS if few else TILE_ELEMENTS
    heads = min(triton.next_power_of_2(max(num_heads, num_kv_heads)), max(1, elements // head_dim_padded))
    tiles = triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, heads)
    overlap = can_overlap(qkv.device)
    _qk_norm_rope_cache_kernel[(tokens, tiles)](
        qkv,
        positions,
        cos_sin_cache,
        qkv if q_weight is None else q_weight,
        qkv if k_weight is None else k_weight,
        k_cache,
        v_cache,
        slot_mapping,
        *(kv_scales or (qkv, qkv)),
        q,
        eps,
        qkv.stride(0),
        cos_sin_cache.stride(0),
        *k_cache.stride()[:3],
        num_heads,
        num_kv_heads,
        HEADS=heads,
        BLOCK_SIZE=k_cache.shape[2],
        NORM=q_weight is not None,
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=head_dim_padded,
        HALF=half,
        HALF_PADDED=triton.next_power_of_2(half),
        REST_PADDED=triton.next_power_of_2(rest) if rest else 0,
        USE_SCALES=kv_scales is not None,
        OVERLAP=overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
    return q
