"""What lies between the qkv projection and attention, in one launch: head norms, rotary positions, the cache write.

q, k = rotary(norm(q)), rotary(norm(k));  cache[slot // block_size, :, slot % block_size] = k, v
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..cache.kv_cache import KVCache
from ..cache.reshape_and_cache import reshape_and_cache
from ..checks import check_last_dim, check_vectors, fail
from ..dispatch import TritonModule, on_triton
from .rms_norm import rms_norm
from .rotary_embedding import check_angles, rotary_embedding

_kernel = TritonModule("rayllm_kernels.norm.qk_norm_rope_cache_kernel")


class HeadNorms(NamedTuple):
    """RMSNorms of one head's size, as Qwen3 has them."""

    q: Tensor  # [D], the weight of the norm of query heads
    k: Tensor  # [D], the weight of the norm of key heads
    eps: float


def qk_norm_rope_cache(
    qkv: Tensor,
    norms: HeadNorms | None,
    positions: Tensor,
    cos_sin_cache: Tensor,
    cache: KVCache,
    slot_mapping: Tensor,
    *,
    deterministic: bool = False,
) -> Tensor:
    """From the qkv projection to attention in one launch -> queries [T, Hq, D], a new contiguous tensor.

    `rms_norm` of each query and key head (unless norms is None), `rotary_embedding` of both, `reshape_and_cache` of
    keys and values, with the roundings of the three in sequence. qkv: [T, (Hq + 2 Hkv) D] in the cache's dtype (or any,
    for an fp8 cache), heads in the order q, k, v, last dimension contiguous; not changed. The rest as for those.
    deterministic: a token's bits do not depend on the number of tokens. Slower for few.
    """
    cache.check(qkv, "qkv")
    _, num_kv_heads, _, head_dim = cache.k.shape
    if qkv.dim() != 2 or qkv.shape[1] % head_dim or qkv.shape[1] // head_dim <= 2 * num_kv_heads:
        fail("qkv", f"must be [T, (Hq + 2 * {num_kv_heads}) * {head_dim}]", qkv.shape)
    check_last_dim(qkv, "qkv")
    check_angles(positions, cos_sin_cache, qkv.shape[0], head_dim, qkv.device)
    check_vectors(qkv.shape[0], torch.int64, qkv.device, slot_mapping=slot_mapping)
    if norms is not None:
        check_vectors(head_dim, qkv.dtype, qkv.device, **{"norms.q": norms.q, "norms.k": norms.k})
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    if on_triton(qkv):
        return _kernel.qk_norm_rope_cache(
            qkv, norms, positions, cos_sin_cache, cache, slot_mapping, num_heads, deterministic
        )
    # `deterministic` makes no difference here: a head's norm does not depend on how many there are.
    q, k, v = qkv.unflatten(1, (-1, head_dim)).split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if norms is not None:
        q, k = rms_norm(q, norms.q, norms.eps), rms_norm(k, norms.k, norms.eps)
    else:
        q, k = q.clone(memory_format=torch.contiguous_format), k.clone()
    rotary_embedding(positions, q, k, cos_sin_cache)
    reshape_and_cache(k, v, cache, slot_mapping)
    return q
