"""Paged attention in plain torch: the statement of what the Triton kernels compute, and the CPU's production path.

For one query at position p of a sequence, head h, its KV head g, and the keys j that p may see:

    s_j = scale * <q, k_j>;  s_j = soft_cap * tanh(s_j / soft_cap);  s_j = s_j + slope_h * (j - p)
    out = sum_j softmax(s)_j * v_j

j runs over the sequence's cached positions with j <= p, and j > p - sliding_window when a window is set. The soft
cap (Gemma 2) and the ALiBi slopes (Press et al., 2021) apply when given. Keys and values of an fp8 cache are what is
stored times their head's scale. All arithmetic is fp32; the result is rounded once, to q's dtype.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .checks import check_decode_schedule, check_paged_attention, check_paged_decode, check_paged_prefill
from .decode_work import DecodeSchedule, choose_tiles, empty_schedule
from .kv_format import KVScales, as_bytes

# Prefill holds a score matrix of [heads, this many queries, context] in fp32 at a time.
QUERY_CHUNK = 256


def _gather(cache: Tensor, scale: Tensor | None, block_tables: Tensor, positions: Tensor) -> Tensor:
    """The cache's rows at `positions` int64 [N, L] through tables [N, blocks] -> a copy [N, Hkv, L, D].

    With scale [Hkv], which an fp8 cache has: their values in fp32.
    """
    _, kv_heads, block_size, head_dim = cache.shape
    stride_block, stride_head, stride_slot, _ = cache.stride()
    # One index_select over the rows of the whole pool: several times faster than indexing by block and head.
    unit = math.gcd(stride_block, stride_head, stride_slot)
    last = sum((size - 1) * stride for size, stride in zip(cache.shape[:3], cache.stride()[:3], strict=True))
    rows = as_bytes(cache).as_strided((last // unit + 1, head_dim), (unit, 1))
    block = block_tables.gather(1, positions // block_size).long()
    row = block * (stride_block // unit) + positions % block_size * (stride_slot // unit)
    heads = torch.arange(kv_heads, device=cache.device) * (stride_head // unit)
    index = row[:, None] + heads[:, None]
    gathered = rows.index_select(0, index.flatten()).view(*index.shape, head_dim)
    return gathered if scale is None else gathered.view(cache.dtype).float().mul_(scale[:, None, None])


def _gather_both(
    k_cache: Tensor, v_cache: Tensor, kv_scales: KVScales | None, block_tables: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    k_scale, v_scale = (None, None) if kv_scales is None else kv_scales
    return (_gather(k_cache, k_scale, block_tables, positions), _gather(v_cache, v_scale, block_tables, positions))


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    distance: Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    alibi_slopes: Tensor | None,
    soft_cap: float | None,
) -> Tensor:
    """Attention of q [N, Q, Hq, D] over k, v [N, Hkv, L, D] -> [N, Q, Hq, D] in fp32.

    `distance` [N, Q, L] is key position minus query position. A query with no visible key yields NaN.
    """
    n, queries, heads, head_dim = q.shape
    kv_heads, length = k.shape[1:3]
    group = heads // kv_heads
    # The heads of a group share their keys: stacked as rows they make one matrix product per KV head.
    rows = q.float().mul(scale).reshape(n, queries, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    scores = torch.matmul(rows.reshape(n, kv_heads, group * queries, head_dim), k.float().transpose(2, 3))
    scores = scores.view(n, kv_heads, group, queries, length)
    if soft_cap is not None:
        scores = scores.div_(soft_cap).tanh_().mul_(soft_cap)
    if alibi_slopes is not None:
        scores += alibi_slopes.view(kv_heads, group, 1, 1) * distance[:, None, None]
    hidden = distance > 0
    if sliding_window is not None:
        hidden |= distance <= -sliding_window
    scores.masked_fill_(hidden[:, None, None], float("-inf"))
    weights = torch.softmax(scores, dim=-1).view(n, kv_heads, group * queries, length)
    result = torch.matmul(weights, v.float()).view(n, kv_heads, group, queries, head_dim)
    return result.permute(0, 3, 1, 2, 4).reshape(n, queries, heads, head_dim)


def decode_schedule(
    q: Tensor, k_cache: Tensor, seq_lens: Tensor, *, sliding_window: int | None = None, num_ranges: int | None = None
) -> DecodeSchedule:
    """Equal ranges of key tiles; see `ops.decode_schedule` for the contract. On the CPU, one range unless told."""
    check_decode_schedule(q, k_cache, seq_lens, sliding_window, num_ranges)
    schedule = empty_schedule(q, num_ranges or 1)
    keys = choose_tiles(q.shape[2], q.element_size(), k_cache.element_size()).keys
    batch, count = q.shape[0], schedule.ranges.shape[0]
    empty = (seq_lens == 0).long()
    order = torch.argsort(empty, stable=True)
    lengths = seq_lens.long()[order]
    schedule.contexts.copy_(torch.stack((order, lengths), 1))
    first_key = torch.zeros_like(lengths) if sliding_window is None else (lengths - sliding_window).clamp_min_(0)
    tiles = (lengths + keys - 1) // keys - first_key // keys
    ends = torch.cat([tiles.new_zeros(1), tiles.cumsum(0)])
    quota = ((ends[-1] + count - 1) // count).clamp_min(1)
    first = torch.arange(count, device=q.device) * quota
    row = torch.searchsorted(ends[1:].contiguous(), first, right=True)
    context = torch.cat([schedule.contexts, schedule.contexts.new_zeros(1, 2)])[row]
    # Ranges past the last tile begin in no sequence: zeros there.
    begin = torch.cat((row[:, None], context, ends[row][:, None]), 1) * (row < batch)[:, None]
    to_zero = torch.zeros_like(first).index_add_(0, torch.arange(batch, device=q.device) % count, empty).clamp_max_(1)
    end = torch.minimum(first + quota, ends[-1])
    schedule.ranges.copy_(torch.cat((begin, torch.stack((first, end, quota.expand(count), to_zero), 1)), 1))
    return schedule


def paged_decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    alibi_slopes: Tensor | None = None,
    soft_cap: float | None = None,
    kv_scales: KVScales | None = None,
    schedule: DecodeSchedule | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """One query per sequence against its paged context; see `ops.paged_decode_attention` for the contract.

    Vectorised over the batch: keys are gathered padded to the longest sequence. A `schedule` has no use here.
    """
    check_paged_attention(
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        scale=scale,
        sliding_window=sliding_window,
        alibi_slopes=alibi_slopes,
        soft_cap=soft_cap,
        out=out,
        kv_scales=kv_scales,
    )
    check_paged_decode(q, seq_lens, schedule)
    lengths = seq_lens.long()[:, None]
    first = torch.zeros_like(lengths) if sliding_window is None else (lengths - sliding_window).clamp_min_(0)
    widest = int((lengths - first).max()) if seq_lens.numel() else 0
    if widest == 0:
        return torch.zeros_like(q, memory_format=torch.contiguous_format) if out is None else out.zero_()
    k_pos = first + torch.arange(widest, device=q.device)
    # Past its end a sequence repeats its last key, at weight zero: what unwritten slots hold (NaN, say) is never read.
    used = torch.minimum(k_pos, (lengths - 1).clamp_min_(0))
    tables = block_tables.masked_fill(lengths == 0, 0)
    k, v = _gather_both(k_cache, v_cache, kv_scales, tables, used)
    distance = (k_pos - (lengths - 1))[:, None]
    result = _attend(
        q[:, None], k, v, distance, scale=scale, sliding_window=None, alibi_slopes=alibi_slopes, soft_cap=soft_cap
    )[:, 0]
    result = result.masked_fill_(seq_lens[:, None, None] == 0, 0.0)
    return result.to(q.dtype) if out is None else out.copy_(result)


def paged_prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    *,
    scale: float,
    sliding_window: int | None = None,
    alibi_slopes: Tensor | None = None,
    soft_cap: float | None = None,
    kv_scales: KVScales | None = None,
    deterministic: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """A chunk of queries per sequence against its paged context; see `ops.paged_prefill_attention` for the contract.

    Loops over sequences and over chunks of `QUERY_CHUNK` queries (of one if `deterministic`, because the order of a
    matrix product's sums follows its shape), each against only the keys that it may see.
    """
    check_paged_attention(
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        scale=scale,
        sliding_window=sliding_window,
        alibi_slopes=alibi_slopes,
        soft_cap=soft_cap,
        out=out,
        kv_scales=kv_scales,
    )
    check_paged_prefill(q, seq_lens, query_start_loc, max_query_len)
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    starts = query_start_loc.tolist()
    for sequence, seq_len in enumerate(seq_lens.tolist()):
        begin, end = starts[sequence], starts[sequence + 1]
        if begin == end:
            continue
        shift = seq_len - end  # position of a query = its row in q + shift
        reach = seq_len if sliding_window is None else sliding_window
        origin = max(0, begin + shift - reach + 1)
        k_pos = torch.arange(origin, seq_len, device=q.device)
        table = block_tables[sequence : sequence + 1]
        k, v = _gather_both(k_cache, v_cache, kv_scales, table, k_pos[None])
        step = 1 if deterministic else QUERY_CHUNK
        for first in range(begin, end, step):
            last = min(first + step, end)
            keys = slice(max(0, first + shift - reach + 1) - origin, last + shift - origin)
            q_pos = torch.arange(first + shift, last + shift, device=q.device)
            distance = k_pos[keys] - q_pos[:, None]
            seen_k, seen_v = k[:, :, keys], v[:, :, keys]
            if deterministic:
                seen_k, seen_v = seen_k.contiguous(), seen_v.contiguous()
            out[first:last] = _attend(
                q[None, first:last],
                seen_k,
                seen_v,
                distance[None],
                scale=scale,
                sliding_window=sliding_window,
                alibi_slopes=alibi_slopes,
                soft_cap=soft_cap,
            )[0]
    return out
