"""What the references of decode and prefill attention share: gathering a paged context, and attending to it.

For one query at position p of a sequence, head h, its KV head g, and the keys j that p may see:

    s_j = cap(scale * <q, k_j>) + slope_h * (j - p);   out = sum_j e^s_j * v_j / (sum_j e^s_j + e^sink_h)

j runs over the sequence's cached positions with j <= p, and j > p - sliding_window when a window is set. The ALiBi
slopes (Press et al., 2021), the soft cap, cap(s) = softcap * tanh(s / softcap), and the sinks, one logit a head that no
value belongs to, apply when given. Keys and values of an fp8 cache are what is stored times their head's scale. All
arithmetic is fp32; the result is rounded once, to q's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..cache.kv_cache import KVCache
from ..cache.pool_rows import head_rows, pool_rows, row_index
from .context import Scoring


def gather(cache: KVCache, block_tables: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values at `positions` int64 [N, L] through tables [N, blocks]: two copies [N, Hkv, L, D], or views of
    one in a cache of latents.

    Of an fp8 cache they are what the stored numbers stand for, in fp32.
    """
    k_scale, v_scale = cache.scales or (None, None)
    if cache.is_latent:
        k = _gather(cache.k, None, block_tables, positions)
        return k, k[..., : cache.v.shape[3]]
    return _gather(cache.k, k_scale, block_tables, positions), _gather(cache.v, v_scale, block_tables, positions)


def _gather(part: Tensor, scale: Tensor | None, block_tables: Tensor, positions: Tensor) -> Tensor:
    _, kv_heads, block_size, head_dim = part.shape
    blocks = block_tables.gather(1, positions // block_size).long()
    heads = torch.arange(kv_heads, device=part.device) * head_rows(part)
    index = row_index(part, blocks, positions % block_size)[:, None] + heads[:, None]
    gathered = pool_rows(part).index_select(0, index.flatten()).view(*index.shape, head_dim)
    return gathered if scale is None else gathered.view(part.dtype).float().mul_(scale[:, None, None])


def attend(q: Tensor, k: Tensor, v: Tensor, distance: Tensor, scoring: Scoring) -> Tensor:
    """Attention of q [N, Q, Hq, D] over k [N, Hkv, L, D] and v [N, Hkv, L, Dv] -> [N, Q, Hq, Dv] in fp32.

    `distance` [N, Q, L] is key position minus query position. A query with no visible key yields NaN.
    """
    n, queries, heads, head_dim = q.shape
    kv_heads, length = k.shape[1:3]
    group = heads // kv_heads
    # The heads of a group share their keys: stacked as rows they make one matrix product per KV head.
    rows = q.float().mul(scoring.scale).reshape(n, queries, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    scores = torch.matmul(rows.reshape(n, kv_heads, group * queries, head_dim), k.float().transpose(2, 3))
    scores = scores.view(n, kv_heads, group, queries, length)
    if scoring.softcap is not None:
        scores = scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
    if scoring.alibi_slopes is not None:
        scores += scoring.alibi_slopes.view(kv_heads, group, 1, 1) * distance[:, None, None]
    hidden = distance > 0
    if scoring.sliding_window is not None:
        hidden |= distance <= -scoring.sliding_window
    scores.masked_fill_(hidden[:, None, None], float("-inf"))
    weights = _softmax(scores, scoring.sinks).view(n, kv_heads, group * queries, length)
    result = torch.matmul(weights, v.float()).view(n, kv_heads, group, queries, v.shape[-1])
    return result.permute(0, 3, 1, 2, 4).reshape(n, queries, heads, v.shape[-1])


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Weights of keys, of scores [N, Hkv, group, Q, L]; with sinks [Hkv * group] their sum is less than 1."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    n, kv_heads, group, queries, length = scores.shape
    sink = sinks.float().view(kv_heads, group, 1, 1).expand(n, kv_heads, group, queries, 1)
    return torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :length]
