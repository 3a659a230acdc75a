"""Decode attention over a paged KV cache, balanced over the device whatever the lengths.

    s_j = cap(scale * <q, k_j>) + slope * (j - p);  out = sum_j softmax(s)_j v_j,  p = seq_len - 1,  p - window < j <= p

In an fp8 cache k_j and v_j are stored numbers times a scale of their head. These are factors of `scale` and of `out`,
so they cost nothing a key; products are computed in fp16 (`widen_queries`), values are read in pairs (`split_pairs`).

Algorithm: flash-decoding (Dao, Haziza, Massa, Sizov, 2023), the online softmax of Milakov and Gimelshein (2018), and
work cut into equal ranges of key tiles as in lean attention (Sanovar, Bharadwaj, St. Amant, Ruehle, Rajmohan, 2024).

One program takes one KV head of one range (`decode_schedule.py`) and walks the sequences in it: the query heads of a KV
head share its keys, so they are the rows of one matrix product, padded to the 16 that `tl.dot` needs. Keys come in
tiles gathered through the block table. A sequence wholly in the range is written out at once. Of a sequence that
borders cut, each range stores its part, normalised, with its log-sum-exp, and a second kernel merges the parts.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention_common import finish_scores, load_tile, padded_head_dim, score_unit, slot_offsets
from .checks import check_paged_attention, check_paged_decode
from .decode_schedule import decode_schedule, key_tiles
from .decode_work import MAX_HEAD_TILE, RANGE_FIELDS, DecodeSchedule, choose_tiles, programs_a_range
from .dependent_launch import announce_and_wait, can_overlap, wait_for_predecessor
from .fp8_cache import split_pairs, widen_queries
from .kv_format import KVScales

# The merge's programs wait on the multiprocessors for the main kernel to end: the fewer warps, the less they are in the
# way of it and of the next kernel.
MERGE_WARPS = 1
MERGE_CHUNK = 8  # parts that a program of the merge takes at once
# Batches whose next product may have small programs, several of which fit a multiprocessor: let in before attention has
# ended everywhere, they crowd where it ended first (a layer of the 0.6B shape at 8 tokens: 41 us instead of 36).
CROWDED = range(3, 17)


@triton.jit
def _slot(index, begins):
    """Where range `index` stores a part: it holds at most one that begins its sequence and one that does not."""
    return index.to(tl.int64) * 2 + begins.to(tl.int32)


@triton.jit
def _zero_padding_rows(seq_lens_ptr, out_ptr, batch, stride_ob, offsets, mask):
    """Zero the outputs of this range's padding rows: every num_ranges-th row, where its length is zero."""
    row = tl.program_id(1).to(tl.int64)
    while row < batch:
        if tl.load(seq_lens_ptr + row) == 0:
            tl.store(out_ptr + row * stride_ob + offsets, tl.zeros(offsets.shape, out_ptr.dtype.element_ty), mask=mask)
        row += tl.num_programs(1)


@triton.jit
def _load_context(contexts_ptr, context, batch):
    """(sequence, its length) of a row of `contexts`, zeros past the end."""
    pointer = contexts_ptr + context * 2
    return tl.load(pointer, mask=context < batch, other=0), tl.load(pointer + 1, mask=context < batch, other=0)


@triton.jit
def _load_blocks(tables_ptr, sequence, stride_table, tile, seq_len, KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Block ids of a tile's keys; entries past the context's end hold no valid block."""
    key = tile * KEYS + tl.arange(0, KEYS)
    return tl.load(tables_ptr + sequence.to(tl.int64) * stride_table + key // BLOCK_SIZE, mask=key < seq_len, other=0)


@triton.jit
def _load_queries(q_ptr, sequence, head, dims, stride_qb, stride_qh, mask):
    q_ptrs = q_ptr + sequence.to(tl.int64) * stride_qb + head[:, None] * stride_qh + dims[None, :]
    return tl.load(q_ptrs, mask=mask, other=0.0)


@triton.jit
def _weigh(scores, valid, totals, peak, unit):
    """A step of the online softmax: (weights, decay of what came before, totals, peak).

    `totals` [rows, keys] are summed over keys at the end only.
    """
    scores = tl.where(valid[None, :], scores, float("-inf"))
    # Every tile holds a visible key, so the peak is finite from the first one on.
    new_peak = tl.maximum(peak, tl.max(scores, 1) * unit)
    weights = tl.exp2(scores * unit - new_peak[:, None])
    decay = tl.exp2(peak - new_peak)
    # Before the product: after it, the compiled loop was 5% slower.
    totals = totals * decay[:, None] + weights
    return weights, decay, totals, new_peak


@triton.jit
def _add_values(acc, weights, decay, v):
    return tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")


@triton.jit(do_not_specialize=["tables_ptr", "seq_lens_ptr", "batch", "stride_table"])
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    seq_lens_ptr,
    slopes_ptr,
    out_ptr,
    contexts_ptr,
    ranges_ptr,
    partials_ptr,
    lse_ptr,
    k_scale_ptr,
    v_scale_ptr,
    stride_qb,
    stride_qh,
    stride_block,
    stride_kv_head,
    stride_slot,
    stride_table,
    stride_ob,
    stride_oh,
    scale,
    soft_cap,
    window,
    batch,
    num_heads,
    GROUP: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    FIELDS: tl.constexpr,
    USE_WINDOW: tl.constexpr,
    USE_SOFT_CAP: tl.constexpr,
    USE_ALIBI: tl.constexpr,
    USE_SCALES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_predecessor(OVERLAP)
    record = ranges_ptr + tl.program_id(1) * FIELDS
    context = tl.load(record)
    sequence = tl.load(record + 1)
    seq_len = tl.load(record + 2)
    origin = tl.load(record + 3)
    range_first = tl.load(record + 4)
    range_end = tl.load(record + 5)

    tiles_of_head: tl.constexpr = (GROUP + HEAD_TILE - 1) // HEAD_TILE
    kv_head = tl.program_id(0) // tiles_of_head
    first_in_group = (tl.program_id(0) % tiles_of_head) * HEAD_TILE
    in_group = first_in_group + tl.arange(0, ROWS)
    row_valid = (tl.arange(0, ROWS) < HEAD_TILE) & (in_group < GROUP)
    head = kv_head * GROUP + in_group
    dims = tl.arange(0, HEAD_DIM_PADDED)
    mask = row_valid[:, None] & (dims[None, :] < HEAD_DIM)
    if tl.load(record + 7) > 0:
        _zero_padding_rows(seq_lens_ptr, out_ptr, batch, stride_ob, head[:, None] * stride_oh + dims[None, :], mask)

    head_offset = kv_head.to(tl.int64) * stride_kv_head
    slopes = tl.load(slopes_ptr + head, mask=row_valid, other=0.0) if USE_ALIBI else 0.0
    if USE_SCALES:
        scale = scale * tl.load(k_scale_ptr + kv_head)
        v_scale = tl.load(v_scale_ptr + kv_head)
    unit = score_unit(scale, USE_SOFT_CAP, USE_ALIBI)
    first_key, first_tile, tiles = key_tiles(seq_len, window, KEYS, USE_WINDOW)
    tile = first_tile + range_first - origin
    block = _load_blocks(tables_ptr, sequence, stride_table, tile, seq_len, KEYS, BLOCK_SIZE)
    next_sequence, next_len = _load_context(contexts_ptr, context + 1, batch)
    totals = tl.zeros([ROWS, KEYS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    ACC_WIDTH: tl.constexpr = HEAD_DIM_PADDED // 2 if USE_SCALES else HEAD_DIM_PADDED
    acc = tl.zeros([ROWS, ACC_WIDTH], tl.float32)
    if USE_SCALES:
        odd = acc  # odd dimensions, `acc` has the even ones
        pair_dims = tl.arange(0, HEAD_DIM_PADDED // 2)
        # Converted once a sequence, because a tile's own conversions are what this loop has most of.
        q = widen_queries(_load_queries(q_ptr, sequence, head, dims, stride_qb, stride_qh, mask), True)
    # One loop over all tiles, not one a sequence, so that the loads of the next sequence run under the end of this one.
    for position in range(range_first, range_end):
        key = tile * KEYS + tl.arange(0, KEYS)
        valid = (key < seq_len) & (key >= first_key)
        offsets = head_offset + slot_offsets(block, key, stride_block, stride_slot, BLOCK_SIZE)
        if not USE_SCALES:
            q = _load_queries(q_ptr, sequence, head, dims, stride_qb, stride_qh, mask)
        k = load_tile(k_ptr, offsets, valid, dims, HEAD_DIM, HEAD_DIM_PADDED, True).to(q.dtype)
        if USE_SCALES:
            v = load_tile(v_ptr, offsets // 2, valid, pair_dims, HEAD_DIM // 2, HEAD_DIM_PADDED // 2, True)
        else:
            v = load_tile(v_ptr, offsets, valid, dims, HEAD_DIM, HEAD_DIM_PADDED, True)
        distance = (key - (seq_len - 1))[None, :]
        this_sequence, this_origin = sequence, origin
        last = position + 1 == origin + tiles

        # On to the next tile. Its block ids are loaded now: with the load in the same step as the keys', the compiler
        # pipelines both and halves the depth that shared memory buys for the keys.
        context += last.to(tl.int32)
        sequence = tl.where(last, next_sequence, sequence)
        seq_len = tl.where(last, next_len, seq_len)
        next_sequence, next_len = _load_context(contexts_ptr, context + 1, batch)
        origin = tl.where(last, origin + tiles, origin)
        first_key, first_tile, tiles = key_tiles(seq_len, window, KEYS, USE_WINDOW)
        tile = tl.where(last, first_tile, tile + 1)
        block = _load_blocks(tables_ptr, sequence, stride_table, tile, seq_len, KEYS, BLOCK_SIZE)

        scores = finish_scores(
            tl.dot(q, tl.trans(k), input_precision="ieee"), distance, slopes, scale, soft_cap, USE_SOFT_CAP, USE_ALIBI
        )
        weights, decay, totals, peak = _weigh(scores, valid, totals, peak, unit)
        if USE_SCALES:
            v, odd_v = split_pairs(v, k_ptr.dtype.element_ty.fp_mantissa_width == 2)
            odd = _add_values(odd, weights, decay, odd_v.to(q.dtype))
        acc = _add_values(acc, weights, decay, v.to(q.dtype))
        if last | (position + 1 == range_end):
            total = tl.sum(totals, 1)
            if USE_SCALES:
                values = tl.interleave(acc, odd) * (v_scale / total)[:, None]
            else:
                values = acc / total[:, None]
            begins = this_origin >= range_first
            if last & begins:
                row_ptr = out_ptr + this_sequence.to(tl.int64) * stride_ob
                out_ptrs = row_ptr + head[:, None] * stride_oh + dims[None, :]
                tl.store(out_ptrs, values.to(out_ptr.dtype.element_ty), mask=mask)
            else:
                part = _slot(tl.program_id(1), begins) * num_heads + head
                tl.store(partials_ptr + part[:, None] * HEAD_DIM + dims[None, :], values, mask=mask)
                tl.store(lse_ptr + part, peak + tl.log2(total), mask=row_valid)
            totals = tl.zeros([ROWS, KEYS], tl.float32)
            peak = tl.full([ROWS], float("-inf"), tl.float32)
            acc = tl.zeros([ROWS, ACC_WIDTH], tl.float32)
            if USE_SCALES:
                odd = acc
                q = widen_queries(_load_queries(q_ptr, sequence, head, dims, stride_qb, stride_qh, mask), True)


@triton.jit
def _merge_kernel(
    partials_ptr,
    lse_ptr,
    out_ptr,
    ranges_ptr,
    stride_ob,
    stride_oh,
    window,
    num_heads,
    KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    FIELDS: tl.constexpr,
    USE_WINDOW: tl.constexpr,
    OVERLAP: tl.constexpr,
    ANNOUNCE: tl.constexpr,
):
    """out = sum_i w_i partial_i / sum_i w_i with w_i = 2^(lse_i - max lse): one head of the sequence cut by one border.

    Program (h, i) sees to the border between ranges i and i + 1, if it is the first one inside its sequence.
    """
    head = tl.program_id(0)
    first_range = tl.program_id(1)
    # The schedule is older than the attention kernel, and may be read before that is done.
    record = ranges_ptr + (first_range + 1) * FIELDS
    sequence = tl.load(record + 1).to(tl.int64)
    origin = tl.load(record + 3)
    border = tl.load(record + 4)
    range_end = tl.load(record + 5)
    quota = tl.load(record + 6)
    _, _, tiles = key_tiles(tl.load(record + 2), window, KEYS, USE_WINDOW)
    if ANNOUNCE:
        announce_and_wait(OVERLAP)
    else:
        wait_for_predecessor(OVERLAP)
    if (origin >= border) | (origin < border - quota) | (border >= range_end):
        return
    parts = (origin + tiles - 1) // quota - first_range + 1
    dims = tl.arange(0, HEAD_DIM_PADDED)
    total = 0.0
    peak = float("-inf")
    acc = tl.zeros([HEAD_DIM_PADDED], tl.float32)
    for begin in range(0, parts, CHUNK):
        part = begin + tl.arange(0, CHUNK)
        row = _slot(first_range + part, part == 0) * num_heads + head
        lse = tl.load(lse_ptr + row, mask=part < parts, other=float("-inf"))
        mask = (part < parts)[:, None] & (dims[None, :] < HEAD_DIM)
        partial = tl.load(partials_ptr + row[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        weights = tl.exp2(lse - new_peak)
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(weights, 0)
        acc = acc * decay + tl.sum(partial * weights[:, None], 0)
        peak = new_peak
    out = out_ptr + sequence * stride_ob + head * stride_oh + dims
    tl.store(out, (acc / total).to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


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
    """One query per sequence against its paged context; see `ops.paged_decode_attention` for the contract."""
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
    batch, heads, head_dim = q.shape
    if out is None:
        out = torch.empty((batch, heads, head_dim), dtype=q.dtype, device=q.device)
    if batch == 0:  # there is not even a first row to load
        return out
    if schedule is None:
        schedule = decode_schedule(q, k_cache, seq_lens, sliding_window=sliding_window)
    kv_heads, block_size = k_cache.shape[1:3]
    group = heads // kv_heads
    head_tile = min(group, MAX_HEAD_TILE)
    # Even and odd dimensions of an fp8 cache are columns of two products, each of them 16 or more.
    head_dim_padded = max(padded_head_dim(head_dim), 16 if kv_scales is None else 32)
    tiles = choose_tiles(head_dim, q.element_size(), k_cache.element_size())
    window = min(sliding_window or 0, 1 << 30)
    num_ranges = schedule.ranges.shape[0]
    overlap = can_overlap(q.device)
    _decode_kernel[(programs_a_range(heads, kv_heads), num_ranges)](
        q,
        k_cache,
        v_cache if kv_scales is None else v_cache.view(torch.int16),
        block_tables,
        seq_lens,
        q if alibi_slopes is None else alibi_slopes,
        out,
        *schedule,
        *(kv_scales or (q, q)),
        q.stride(0),
        q.stride(1),
        *k_cache.stride()[:3],
        block_tables.stride(0),
        out.stride(0),
        out.stride(1),
        scale,
        soft_cap or 1.0,
        window,
        batch,
        heads,
        GROUP=group,
        HEAD_TILE=head_tile,
        ROWS=max(16, triton.next_power_of_2(head_tile)),
        KEYS=tiles.keys,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=head_dim_padded,
        FIELDS=RANGE_FIELDS,
        USE_WINDOW=sliding_window is not None,
        USE_SOFT_CAP=soft_cap is not None,
        USE_ALIBI=alibi_slopes is not None,
        USE_SCALES=kv_scales is not None,
        OVERLAP=overlap,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        launch_pdl=overlap,
    )
    if num_ranges > 1:
        _merge_kernel[(heads, num_ranges - 1)](
            schedule.partials,
            schedule.lse,
            out,
            schedule.ranges,
            out.stride(0),
            out.stride(1),
            window,
            heads,
            KEYS=tiles.keys,
            HEAD_DIM=head_dim,
            HEAD_DIM_PADDED=head_dim_padded,
            CHUNK=MERGE_CHUNK,
            FIELDS=RANGE_FIELDS,
            USE_WINDOW=sliding_window is not None,
            OVERLAP=overlap,
            ANNOUNCE=batch not in CROWDED,
            num_warps=MERGE_WARPS,
            launch_pdl=overlap,
        )
    return out
