"""Write new keys and values into their slots of the paged cache.

cache[slot // block_size, h, slot % block_size, :] = row[t, h, :]   where slot = slot_mapping[t] >= 0
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import check_last_dim, check_like, check_vectors, fail
from ..dispatch import TritonModule, on_triton
from .kv_cache import KVCache, as_bytes, quantise

_kernel = TritonModule("rayllm_kernels.cache.reshape_and_cache_kernel")


def reshape_and_cache(key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
    """Write the keys and values of T tokens into their slots of the cache, in place and in the cache's format.

    key, value: [T, Hkv, D], last dimension contiguous (slices of a fused qkv tensor will do).
    slot_mapping: [T] int64, slot = block * block_size + offset; negative for a padding token, which is skipped. Two
    tokens never name the same slot.
    """
    cache.check(key, "key")
    _, kv_heads, block_size, head_dim = cache.k.shape
    if key.dim() != 3 or key.shape[1:] != (kv_heads, head_dim):
        fail("key", f"must be [T, {kv_heads}, {head_dim}]", key.shape)
    if value.shape != key.shape:
        fail("value", f"must have the shape of key, {tuple(key.shape)}", value.shape)
    check_like(value, "value", key, "key")
    check_last_dim(key, "key")
    check_last_dim(value, "value")
    check_vectors(key.shape[0], torch.int64, key.device, slot_mapping=slot_mapping)
    if on_triton(key):
        _kernel.reshape_and_cache(key, value, cache, slot_mapping)
        return
    used = slot_mapping >= 0
    if not bool(used.all()):
        key, value, slot_mapping = key[used], value[used], slot_mapping[used]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    if cache.scales is not None:
        key = quantise(key, cache.scales.k, cache.k.dtype)
        value = quantise(value, cache.scales.v, cache.v.dtype)
    as_bytes(cache.k)[block, :, offset] = as_bytes(key)
    as_bytes(cache.v)[block, :, offset] = as_bytes(value)
