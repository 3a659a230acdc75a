"""What lies between the qkv projection and attention, in one launch: head norms, rotary positions, the cache write.

q, k = rotary(norm(q)) * scale, rotary(norm(k));  cache[slot // block_size, :, slot % block_size] = k, norm(v)

rotary (Su et al., 2021), of two parts a, b of a head's first r entries:

a' = a cos - b sin,  b' = b cos + a sin

which are its halves (GPT-NeoX, Llama), a = head[:r/2] and b = head[r/2:r], or are interleaved (GPT-J, GLM),
a = head[0:r:2] and b = head[1:r:2]. scale: of a query, by its position (Llama 4); most models have none. Few models
norm their values (Gemma 4).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..cache.kv_cache import KVCache
from ..cache.reshape_and_cache import reshape_and_cache
from ..checks import check_last_dim, check_norm_weight, check_vectors, fail
from ..dispatch import TritonModule, on_triton
from .rms_norm import rms_norm

_kernel = TritonModule("rayllm_kernels.norm.qk_norm_rope_cache_kernel")


class HeadNorms(NamedTuple):
    """RMSNorms of one head's size, as Qwen3 has them; weights in the heads' dtype or in fp32, as for `rms_norm`."""

    q: Tensor  # [D], the weight of the norm of query heads
    k: Tensor | None  # [D], the weight of the norm of key heads; None where there are queries alone
    eps: float
    values: bool = False  # value heads are normed too, by a norm without a weight


def qk_norm_rope_cache(
    qkv: Tensor,
    norms: HeadNorms | None,
    positions: Tensor,
    cos_sin_cache: Tensor,
    cache: KVCache,
    slot_mapping: Tensor | None,
    *,
    interleaved: bool = False,
    query_scale: Tensor | None = None,
    deterministic: bool = False,
) -> Tensor:
    """From the qkv projection to attention in one launch -> queries [T, Hq, D], a new contiguous tensor.

    `rms_norm` of each query and key head (unless norms is None), `rotate` of both, `reshape_and_cache` of keys and
    values, with the roundings of the three in sequence. qkv: [T, (Hq + 2 Hkv) D] in the cache's dtype (or any, for an
    fp8 cache), heads in the order q, k, v, last dimension contiguous; not changed. positions: [T] int64, each below
    max_pos (padding rows too). cos_sin_cache: [max_pos, r] fp32, cos in the first half, sin in the second. slot_mapping
    as for `reshape_and_cache`; None for qkv [T, Hq D] of queries alone, of which nothing is stored. interleaved: as for
    `rotate`. query_scale: [max_pos] fp32, by which the queries of a position are multiplied at last.
    deterministic: a token's bits do not depend on the number of tokens. Slower for few.
    positions and slot_mapping must be older than the kernel that qkv is of: they are read before that has ended
    (`dependent_launch.py`).
    """
    cache.check(qkv, "qkv")
    head_dim, num_kv_heads = cache.k.shape[3], 0 if slot_mapping is None else cache.k.shape[1]
    if qkv.dim() != 2 or qkv.shape[1] % head_dim or qkv.shape[1] // head_dim <= 2 * num_kv_heads:
        fail("qkv", f"must be [T, (Hq + 2 * {num_kv_heads}) * {head_dim}]", qkv.shape)
    check_last_dim(qkv, "qkv")
    check_vectors(qkv.shape[0], torch.int64, qkv.device, positions=positions)
    if slot_mapping is not None:
        check_vectors(qkv.shape[0], torch.int64, qkv.device, slot_mapping=slot_mapping)
    if cos_sin_cache.dim() != 2 or cos_sin_cache.dtype != torch.float32 or cos_sin_cache.device != qkv.device:
        got = (cos_sin_cache.dtype, cos_sin_cache.device, *cos_sin_cache.shape)
        fail("cos_sin_cache", f"must be [max_pos, rotary_dim] of torch.float32 on {qkv.device}", got)
    if cos_sin_cache.shape[1] % 2 != 0 or not 0 < cos_sin_cache.shape[1] <= head_dim:
        fail("cos_sin_cache", f"must have an even rotary_dim of 2 to {head_dim}", cos_sin_cache.shape)
    check_last_dim(cos_sin_cache, "cos_sin_cache")
    if norms is not None:
        check_norm_weight(norms.q, "norms.q", head_dim, qkv)
        if norms.k is None and slot_mapping is not None:
            fail("norms.k", "must be a weight where there are keys", None)
        if norms.k is not None:
            check_norm_weight(norms.k, "norms.k", head_dim, qkv)
    if query_scale is not None:
        check_vectors(cos_sin_cache.shape[0], torch.float32, qkv.device, query_scale=query_scale)
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    if on_triton(qkv):
        return _kernel.qk_norm_rope_cache(
            qkv,
            norms,
            positions,
            cos_sin_cache,
            cache,
            slot_mapping,
            num_heads,
            interleaved,
            query_scale,
            deterministic,
        )
    # `deterministic` makes no difference here: a head's norm does not depend on how many there are.
    q, k, v = qkv.unflatten(1, (-1, head_dim)).split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    q = q.clone(memory_format=torch.contiguous_format) if norms is None else rms_norm(q, norms.q, norms.eps)
    rotate(q, positions, cos_sin_cache, interleaved=interleaved)
    if query_scale is not None:
        q *= query_scale[positions].to(q.dtype)[:, None, None]
    if slot_mapping is None:
        return q
    k = k.clone() if norms is None or norms.k is None else rms_norm(k, norms.k, norms.eps)
    rotate(k, positions, cos_sin_cache, interleaved=interleaved)
    if norms is not None and norms.values:
        v = rms_norm(v, torch.ones(head_dim, device=v.device), norms.eps)
    reshape_and_cache(k, v, cache, slot_mapping)
    return q


def rotate(heads: Tensor, positions: Tensor, cos_sin_cache: Tensor, *, interleaved: bool = False) -> None:
    """Rotate the first rotary_dim entries of each of `heads` [T, H, D] by its token's angles, in place.

    interleaved: entries 2i and 2i + 1 are a pair, not i and i + rotary_dim / 2.
    Computed in fp32, rounded once. Of torch alone: on CUDA, `qk_norm_rope_cache` does it in its launch.
    """
    half = cos_sin_cache.shape[1] // 2
    cos, sin = cos_sin_cache[positions].unsqueeze(1).split(half, dim=-1)
    pairs = heads[..., : 2 * half]
    a, b = (pairs[..., 0::2], pairs[..., 1::2]) if interleaved else pairs.split(half, dim=-1)
    first, second = a.float(), b.float()
    # Both results before either is stored: in fp32 `first` and `second` are views of `heads`.
    turned = first * cos - second * sin, second * cos + first * sin
    a[:], b[:] = turned
