"""Causal attention of chunks of queries over a paged KV cache that already holds the chunks' own keys.

    s_ij = cap(scale * <q_i, k_j>) + slope * (j - p_i);  out_i = sum_j softmax(s_i)_j v_j,  p_i - window < j <= p_i

with p_i = seq_len - query_len + i. Algorithm: FlashAttention-2 (Dao, 2023): a tile of queries stays on chip while
tiles of keys stream past, with the online softmax of Milakov and Gimelshein (2018).

A query tile holds queries x the query heads of one KV head, as rows r = query * group + head. On Hopper a product
wants 64 or 128 rows, which a short chunk (or a lone decode token in a mixed batch) reaches only this way; a grouped
tile also spans fewer positions, so less of its work is masked; and each key tile is read once for the whole group.

The key range of a query tile is cut in three: tiles that the window's lower edge crosses, tiles that every row sees
whole (no masks), and tiles on the diagonal or past the sequence's end. Query tiles run longest first.

This kernel runs on any GPU and in the interpreter. Chunks that fill the tiles of `paged_prefill_hopper.py` go there
on a Hopper GPU, unless they need a window, ALiBi or a soft cap, or the cache is in fp8: products there take keys and
values as the tensor copies leave them in shared memory, so for fp8 it would need a fourth role that converts them.

In an fp8 cache k_j and v_j are stored numbers times a scale of their head: factors of `scale` and of `out`. Products
are computed in fp16 then (`widen_queries`).

Either kernel gives a query the same bits however its sequence is cut into chunks: key tiles lie at fixed positions and
are folded in in one order, and a tile that a query sees nothing of changes nothing of its (acc, total, peak). Only the
two differ, and tiles of different height, so a deterministic call chooses kernel and tile without the chunks' length.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention_common import finish_scores, load_tile, padded_head_dim, score_unit, slot_offsets
from .checks import check_paged_attention, check_paged_prefill
from .fp8_cache import widen_queries
from .kv_format import KVScales

# Rows (queries x heads of a group) of the longest chunk up to which the tiles here, half as tall, are faster.
SHORT_CHUNK_ROWS = 64
# A deterministic call may not look at the longest chunk: tall enough for prefills, not too wasteful for decodes.
DETERMINISTIC_ROWS = 64


class Tiles(NamedTuple):
    rows: int
    keys: int
    num_warps: int
    num_stages: int


def choose_tiles(head_dim_padded: int, itemsize: int, rows: int) -> Tiles:
    """Rows and keys per tile, warps and pipeline stages, measured on H200, for `rows` of queries and heads."""
    rows = min(max(16, triton.next_power_of_2(max(rows, 1))), 128)
    if itemsize == 4:  # no tensor cores in exact fp32: larger tiles spill registers
        return Tiles(min(rows, 32), 32 if head_dim_padded <= 64 else 16, 4 if head_dim_padded <= 128 else 8, 2)
    if rows <= 64:
        return Tiles(rows, 64 if head_dim_padded <= 128 else 32, 4, 3)
    return Tiles(rows, 64, 8, 4 if head_dim_padded <= 128 else 2)


@triton.jit
def _attend_keys(
    acc,
    total,
    peak,
    q,
    slopes,
    q_pos,
    dims,
    low,
    high,
    seq_len,
    first_key,
    k_ptr,
    v_ptr,
    table_ptr,
    head_offset,
    stride_block,
    stride_slot,
    scale,
    soft_cap,
    window,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    MASKED: tl.constexpr,
    USE_WINDOW: tl.constexpr,
    USE_SOFT_CAP: tl.constexpr,
    USE_ALIBI: tl.constexpr,
):
    """Fold key tiles low..high into the running (acc, total, peak); without MASKED every row sees all their keys."""
    unit = score_unit(scale, USE_SOFT_CAP, USE_ALIBI)
    # Block ids are loaded one tile ahead: with the load in the same step as the keys', the compiler pipelines both and
    # halves the depth that shared memory buys for the keys.
    first = low * KEYS + tl.arange(0, KEYS)
    block = tl.load(table_ptr + first // BLOCK_SIZE, mask=first < seq_len, other=0)
    for tile in range(low, high):
        key = tile * KEYS + tl.arange(0, KEYS)
        valid = (key < seq_len) & (key >= first_key) if MASKED else key >= 0
        offsets = head_offset + slot_offsets(block, key, stride_block, stride_slot, BLOCK_SIZE)
        block = tl.load(table_ptr + (key + KEYS) // BLOCK_SIZE, mask=key + KEYS < seq_len, other=0)
        k = load_tile(k_ptr, offsets, valid, dims, HEAD_DIM, HEAD_DIM_PADDED, MASKED).to(q.dtype)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        distance = key[None, :] - q_pos[:, None]
        scores = finish_scores(products, distance, slopes, scale, soft_cap, USE_SOFT_CAP, USE_ALIBI)
        if MASKED:
            visible = (distance <= 0) & valid[None, :]
            if USE_WINDOW:
                visible = visible & (distance > -window)
            scores = tl.where(visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * unit)
        # A row may see nothing yet: subtracting an infinite peak would turn its zeros into NaN.
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak
        weights = tl.exp2(scores * unit - shift[:, None])
        decay = tl.exp2(peak - shift)
        total = total * decay + tl.sum(weights, 1)
        peak = new_peak
        v = load_tile(v_ptr, offsets, valid, dims, HEAD_DIM, HEAD_DIM_PADDED, MASKED).to(q.dtype)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, total, peak


@triton.jit
def _key_tiles(first_pos, last_pos, window, KEYS: tl.constexpr, USE_WINDOW: tl.constexpr):
    """The first key that queries at first_pos..last_pos see, and their tiles: low, whole_low, whole_high, high.

    Every query sees all of tiles whole_low..whole_high; low..whole_low and whole_high..high need masks.
    """
    # Whole tiles end at the first query's diagonal and begin where the last query's window does.
    whole_high = (first_pos + 1) // KEYS
    high = tl.cdiv(last_pos + 1, KEYS)
    if USE_WINDOW:
        first_key = tl.maximum(first_pos - window + 1, 0)
        whole_low = tl.minimum(tl.cdiv(tl.maximum(last_pos - window + 1, 0), KEYS), whole_high)
    else:
        first_key = 0
        whole_low = 0
    return first_key, first_key // KEYS, whole_low, whole_high, high


@triton.jit(do_not_specialize=["tables_ptr", "seq_lens_ptr", "starts_ptr", "stride_table"])
def _prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    seq_lens_ptr,
    starts_ptr,
    slopes_ptr,
    k_scale_ptr,
    v_scale_ptr,
    out_ptr,
    stride_qt,
    stride_qh,
    stride_block,
    stride_kv_head,
    stride_slot,
    stride_table,
    stride_ot,
    stride_oh,
    scale,
    soft_cap,
    window,
    GROUP: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    USE_WINDOW: tl.constexpr,
    USE_SOFT_CAP: tl.constexpr,
    USE_ALIBI: tl.constexpr,
    USE_SCALES: tl.constexpr,
):
    queries: tl.constexpr = ROWS // HEAD_TILE
    head_tiles: tl.constexpr = (GROUP + HEAD_TILE - 1) // HEAD_TILE
    sequence = tl.program_id(2)
    first_row = tl.load(starts_ptr + sequence)
    query_len = tl.load(starts_ptr + sequence + 1) - first_row
    seq_len = tl.load(seq_lens_ptr + sequence)
    # The last tile of a chunk has the longest context: start with it, so that the short ones fill the gaps at the end.
    first_query = (tl.num_programs(0) - 1 - tl.program_id(0)) * queries
    if first_query >= query_len:
        return

    kv_head = tl.program_id(1) // head_tiles
    row = tl.arange(0, ROWS)
    query = first_query + row // HEAD_TILE
    in_group = (tl.program_id(1) % head_tiles) * HEAD_TILE + row % HEAD_TILE
    row_valid = (row < queries * HEAD_TILE) & (query < query_len) & (in_group < GROUP)
    head = kv_head * GROUP + in_group
    q_row = (first_row + query).to(tl.int64)
    dims = tl.arange(0, HEAD_DIM_PADDED)
    q_mask = row_valid[:, None] & (dims[None, :] < HEAD_DIM)
    q_ptrs = q_ptr + (q_row * stride_qt + head * stride_qh)[:, None] + dims[None, :]
    q = widen_queries(tl.load(q_ptrs, mask=q_mask, other=0.0), USE_SCALES)
    if USE_SCALES:
        scale = scale * tl.load(k_scale_ptr + kv_head)
    slopes = tl.load(slopes_ptr + head, mask=row_valid, other=0.0) if USE_ALIBI else 0.0

    q_pos = seq_len - query_len + query
    first_pos = seq_len - query_len + first_query
    last_pos = tl.minimum(first_pos + queries, seq_len) - 1
    first_key, low, whole_low, whole_high, high = _key_tiles(first_pos, last_pos, window, KEYS, USE_WINDOW)

    table_ptr = tables_ptr + sequence.to(tl.int64) * stride_table
    head_offset = kv_head.to(tl.int64) * stride_kv_head
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    acc = tl.zeros([ROWS, HEAD_DIM_PADDED], tl.float32)
    if USE_WINDOW:
        acc, total, peak = _attend_keys(
            acc,
            total,
            peak,
            q,
            slopes,
            q_pos,
            dims,
            low,
            whole_low,
            seq_len,
            first_key,
            k_ptr,
            v_ptr,
            table_ptr,
            head_offset,
            stride_block,
            stride_slot,
            scale,
            soft_cap,
            window,
            KEYS,
            BLOCK_SIZE,
            HEAD_DIM,
            HEAD_DIM_PADDED,
            True,
            USE_WINDOW,
            USE_SOFT_CAP,
            USE_ALIBI,
        )
    acc, total, peak = _attend_keys(
        acc,
        total,
        peak,
        q,
        slopes,
        q_pos,
        dims,
        whole_low,
        whole_high,
        seq_len,
        first_key,
        k_ptr,
        v_ptr,
        table_ptr,
        head_offset,
        stride_block,
        stride_slot,
        scale,
        soft_cap,
        window,
        KEYS,
        BLOCK_SIZE,
        HEAD_DIM,
        HEAD_DIM_PADDED,
        False,
        USE_WINDOW,
        USE_SOFT_CAP,
        USE_ALIBI,
    )
    acc, total, peak = _attend_keys(
        acc,
        total,
        peak,
        q,
        slopes,
        q_pos,
        dims,
        whole_high,
        high,
        seq_len,
        first_key,
        k_ptr,
        v_ptr,
        table_ptr,
        head_offset,
        stride_block,
        stride_slot,
        scale,
        soft_cap,
        window,
        KEYS,
        BLOCK_SIZE,
        HEAD_DIM,
        HEAD_DIM_PADDED,
        True,
        USE_WINDOW,
        USE_SOFT_CAP,
        USE_ALIBI,
    )

    # Only padding rows can have seen nothing, and they are not stored.
    total = tl.where(total == 0.0, 1.0, total)
    acc = acc * (tl.load(v_scale_ptr + kv_head) / total)[:, None] if USE_SCALES else acc / total[:, None]
    out = out_ptr + (q_row * stride_ot + head * stride_oh)[:, None] + dims[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=q_mask)


@cache
def _hopper_kernels(device: torch.device) -> ModuleType | None:
    """The kernel for this device's generation, or None; imported only where it can run."""
    if device.type != "cuda" or torch.version.cuda is None or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    return import_module(".paged_prefill_hopper", __package__)


def hopper_takes(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether the Hopper kernel can run these checked tensors: its products and tensor copies have fixed shapes.

    A copy moves a power of two of slots, at least the 8 after which the layout of shared memory repeats; heads and
    blocks must lie whole slots apart, at addresses that are multiples of 16 bytes.
    """
    num_blocks, kv_heads, block_size, head_dim = k_cache.shape
    stride_block, stride_head, stride_slot, _ = k_cache.stride()
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and k_cache.dtype == q.dtype
        and head_dim in (64, 128)
        and q.shape[1] // kv_heads <= 128
        and block_size % 8 == 0
        and stride_slot >= head_dim
        and stride_slot % 8 == 0
        and stride_head % stride_slot == 0
        and stride_block % stride_slot == 0
        and 0 < num_blocks * (stride_block // stride_slot) < 1 << 31
        and (k_cache.data_ptr() | v_cache.data_ptr()) % 16 == 0
    )


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
    """A chunk of queries per sequence against its paged context; see `ops.paged_prefill_attention` for the contract."""
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
    batch, (_, heads, head_dim) = seq_lens.shape[0], q.shape
    check_paged_prefill(q, seq_lens, query_start_loc, max_query_len)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    kv_heads, block_size = k_cache.shape[1:3]
    group = heads // kv_heads
    hopper = _hopper_kernels(q.device)
    plain = batch > 0 and sliding_window is None and alibi_slopes is None and soft_cap is None
    tall = deterministic or max_query_len * group > SHORT_CHUNK_ROWS
    if hopper is not None and plain and tall and hopper_takes(q, k_cache, v_cache):
        hopper.hopper_prefill(q, k_cache, v_cache, block_tables, seq_lens, query_start_loc, scale, out)
        return out
    head_dim_padded = padded_head_dim(head_dim)
    rows = DETERMINISTIC_ROWS if deterministic else max_query_len * group
    tiles = choose_tiles(head_dim_padded, q.element_size(), rows)
    head_tile = min(group, tiles.rows)
    query_tiles = triton.cdiv(max_query_len, tiles.rows // head_tile)
    _prefill_kernel[(query_tiles, kv_heads * triton.cdiv(group, head_tile), batch)](
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        query_start_loc,
        q if alibi_slopes is None else alibi_slopes,
        *(kv_scales or (q, q)),
        out,
        q.stride(0),
        q.stride(1),
        *k_cache.stride()[:3],
        block_tables.stride(0),
        out.stride(0),
        out.stride(1),
        scale,
        soft_cap or 1.0,
        min(sliding_window or 0, 1 << 30),
        GROUP=group,
        HEAD_TILE=head_tile,
        ROWS=tiles.rows,
        KEYS=tiles.keys,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=head_dim_padded,
        USE_WINDOW=sliding_window is not None,
        USE_SOFT_CAP=soft_cap is not None,
        USE_ALIBI=alibi_slopes is not None,
        USE_SCALES=kv_scales is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return out
