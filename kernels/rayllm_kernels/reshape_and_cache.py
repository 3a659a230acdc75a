"""Write new keys and values into their slots of the paged cache.

    cache[slot // block_size, h, slot % block_size, :] = row[t, h, :]   where slot = slot_mapping[t] >= 0

key, value [T, Hkv, D] of any token and head stride (slices of a fused qkv tensor), k_cache, v_cache
[num_blocks, Hkv, block_size, D] of the same dtype, or of an fp8 one, to which rows / scale are then converted
(`encode_fp8`); slot_mapping [T] int64, negative for padding.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .checks import check_reshape_and_cache
from .fp8_cache import store_rows
from .kv_format import KVScales

TILE_ELEMENTS = 4096  # of one token, by one program


@triton.jit(do_not_specialize=["slots_ptr"])
def _reshape_and_cache_kernel(
    key_ptr,
    value_ptr,
    k_ptr,
    v_ptr,
    slots_ptr,
    k_scale_ptr,
    v_scale_ptr,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_block,
    stride_cache_head,
    stride_slot,
    num_heads,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    USE_SCALES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    dims = tl.arange(0, HEAD_DIM_PADDED)[None, :]
    mask = (head < num_heads) & (dims < HEAD_DIM)
    target = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_slot + head * stride_cache_head + dims
    key = tl.load(key_ptr + token * stride_kt + head * stride_kh + dims, mask=mask)
    value = tl.load(value_ptr + token * stride_vt + head * stride_vh + dims, mask=mask)
    k_scale = tl.load(k_scale_ptr + head, mask=head < num_heads, other=1.0) if USE_SCALES else 1.0
    v_scale = tl.load(v_scale_ptr + head, mask=head < num_heads, other=1.0) if USE_SCALES else 1.0
    store_rows(k_ptr + target, key, k_scale, mask)
    store_rows(v_ptr + target, value, v_scale, mask)


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    kv_scales: KVScales | None = None,
) -> None:
    """Store T rows; see `ops.reshape_and_cache` for the contract."""
    check_reshape_and_cache(key, value, k_cache, v_cache, slot_mapping, kv_scales)
    tokens, num_heads, head_dim = key.shape
    head_dim_padded = triton.next_power_of_2(head_dim)
    heads = min(triton.next_power_of_2(num_heads), max(1, TILE_ELEMENTS // head_dim_padded))
    _reshape_and_cache_kernel[(tokens, triton.cdiv(num_heads, heads))](
        key,
        value,
        k_cache,
        v_cache,
        slot_mapping,
        *(kv_scales or (key, key)),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        *k_cache.stride()[:3],
        num_heads,
        HEADS=heads,
        BLOCK_SIZE=k_cache.shape[2],
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=head_dim_padded,
        USE_SCALES=kv_scales is not None,
        num_warps=4,
    )
