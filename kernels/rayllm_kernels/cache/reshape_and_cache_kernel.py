"""The Triton kernel of `reshape_and_cache`: one program writes some heads of one token, keys and values.

    cache[slot // block_size, h, slot % block_size, :] = row[t, h, :]   where slot = slot_mapping[t] >= 0

key, value [T, Hkv, D] of any token and head stride, cache.k and cache.v [num_blocks, Hkv, block_size, D] of the same
dtype, or of an fp8 one, to which rows / scale are then converted (`encode_fp8`); slot_mapping [T] int64.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..compile_ahead import launch
from .fp8 import store_rows
from .kv_cache import KVCache

TILE_ELEMENTS = 4096  # of one token, by one program


class Form(NamedTuple):
    """The compile-time argument of the kernel."""

    heads: int  # of one program
    block_size: int
    head_dim: int
    head_dim_padded: int  # to a power of two


@triton.jit(do_not_specialize=["slots_ptr"])
def _reshape_and_cache_kernel(key_ptr, value_ptr, cache, slots_ptr, strides, num_heads, FORM: tl.constexpr):
    """strides: of key, value and cache."""
    BLOCK_SIZE: tl.constexpr = FORM.block_size
    stride_kt, stride_kh, stride_vt, stride_vh, stride_block, stride_cache_head, stride_slot = strides
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    head = (tl.program_id(1) * FORM.heads + tl.arange(0, FORM.heads))[:, None]
    dims = tl.arange(0, FORM.head_dim_padded)[None, :]
    mask = (head < num_heads) & (dims < FORM.head_dim)
    target = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_slot + head * stride_cache_head + dims
    key = tl.load(key_ptr + token * stride_kt + head * stride_kh + dims, mask=mask)
    value = tl.load(value_ptr + token * stride_vt + head * stride_vh + dims, mask=mask)
    k_scale = tl.load(cache.scales.k + head, mask=head < num_heads, other=1.0) if cache.scales is not None else 1.0
    v_scale = tl.load(cache.scales.v + head, mask=head < num_heads, other=1.0) if cache.scales is not None else 1.0
    store_rows(cache.k + target, key, k_scale, mask)
    store_rows(cache.v + target, value, v_scale, mask)


def reshape_and_cache(key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
    """Store T rows; the arguments are checked."""
    tokens, num_heads, head_dim = key.shape
    head_dim_padded = triton.next_power_of_2(head_dim)
    heads = min(triton.next_power_of_2(num_heads), max(1, TILE_ELEMENTS // head_dim_padded))
    form = Form(heads, cache.k.shape[2], head_dim, head_dim_padded)
    strides = (*key.stride()[:2], *value.stride()[:2], *cache.k.stride()[:3])
    launch(_reshape_and_cache_kernel, (tokens, triton.cdiv(num_heads, heads)))(
        key, value, cache, slot_mapping, strides, num_heads, FORM=form, num_warps=4
    )
