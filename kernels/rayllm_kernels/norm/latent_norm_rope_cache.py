"""What lies between the projections and attention of multi-head latent attention (DeepSeek-V2, 2024), in one launch.

latent = norm(kv[:R]), key = rotary(kv[R:]);  cache[slot // block_size, 0, slot % block_size] = latent, key
out = rotary(q)

of every token; `norm` is `rms_norm`, and `rotary` that of `qk_norm_rope_cache`. All heads share the one key, which says
where a token is, and the latent, which says what it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..cache.kv_cache import KVCache
from ..checks import check_last_dim, check_like, check_norm_weight, check_out, check_vectors, fail
from ..dispatch import TritonModule, on_triton
from .qk_norm_rope_cache import rotate
from .rms_norm import rms_norm

_kernel = TritonModule("rayllm_kernels.norm.latent_norm_rope_cache_kernel")


def latent_norm_rope_cache(
    q: Tensor,
    kv: Tensor,
    norm_weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin_cache: Tensor,
    cache: KVCache,
    slot_mapping: Tensor,
    *,
    out: Tensor,
    interleaved: bool = False,
) -> None:
    """Write rotated queries to `out`, and latents and rotated keys to the cache.

    q: [T, Hq, P], what of each query head is rotated. kv: [T, R + P]. Both in the cache's dtype, of any stride but of
    the last dimension; neither is changed but by `out`. norm_weight: [R]. positions: [T] int64, each below max_pos
    (padding rows too). cos_sin_cache: [max_pos, P] fp32, cos in the first half, sin in the second. cache: of latents,
    R + P wide, its values R. slot_mapping: as for `reshape_and_cache`. out: like q, or q itself. interleaved: as for
    `rotate`.
    """
    cache.check(kv, "kv")
    if not cache.is_latent or cache.k.shape[1] != 1:
        fail("cache", "must be one of latents, of one head", cache.k.shape)
    width, rank = cache.k.shape[3], cache.v.shape[3]
    turned = width - rank
    if kv.dim() != 2 or kv.shape[1] != width:
        fail("kv", f"must be [T, {width}]", kv.shape)
    if q.dim() != 3 or q.shape[0] != kv.shape[0] or q.shape[2] != turned:
        fail("q", f"must be [{kv.shape[0]}, Hq, {turned}]", q.shape)
    check_like(q, "q", kv, "kv")
    check_last_dim(q, "q")
    check_last_dim(kv, "kv")
    check_out(out, q.shape, q, "q")
    check_norm_weight(norm_weight, "norm_weight", rank, kv)
    check_vectors(kv.shape[0], torch.int64, kv.device, positions=positions, slot_mapping=slot_mapping)
    table = cos_sin_cache
    if table.dim() != 2 or table.shape[1] != turned or table.dtype != torch.float32 or table.device != kv.device:
        got = (table.dtype, table.device, *table.shape)
        fail("cos_sin_cache", f"must be [max_pos, {turned}] of torch.float32 on {kv.device}", got)
    if turned % 2:
        fail("cos_sin_cache", "must have an even rotary_dim", table.shape)
    check_last_dim(table, "cos_sin_cache")
    if on_triton(kv):
        _kernel.latent_norm_rope_cache(
            q, kv, norm_weight, eps, positions, cos_sin_cache, cache, slot_mapping, out, interleaved
        )
        return
    if out is not q:
        out.copy_(q)
    rotate(out, positions, cos_sin_cache, interleaved=interleaved)
    key = kv[:, None, rank:].clone()
    rotate(key, positions, cos_sin_cache, interleaved=interleaved)
    rows = torch.cat([rms_norm(kv[:, :rank], norm_weight, eps), key[:, 0]], dim=1)
    used = slot_mapping >= 0
    slots, block_size = slot_mapping[used], cache.k.shape[2]
    cache.k[slots // block_size, 0, slots % block_size] = rows[used]
