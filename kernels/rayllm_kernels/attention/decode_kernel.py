"""The Triton kernels of `paged_decode_attention`, balanced over the device whatever the lengths.

    s_j = cap(scale * <q, k_j>) + slope * (j - p);  out = sum_j e^s_j v_j / (sum_j e^s_j + e^sink),
    p = seq_len - 1,  p - window < j <= p,  cap(s) = softcap * tanh(s / softcap)

q [B, Hq, D] of any row and head stride; cache.k, cache.v [num_blocks, Hkv, block_size, D]; contexts.block_tables
[B, max_blocks] int32 and contexts.seq_lens [B] int32 -> out [B, Hq, D].

In an fp8 cache k_j and v_j are stored numbers times a scale of their head. These are factors of `scale` and of `out`,
so they cost nothing a key; products are computed in fp16 (`widen_queries`), values are read in pairs (`split_pairs`).

In a cache of latents v_j is the first entries of k_j. These and the rest are two tiles, because their number together
is no power of two (512 and 64, in DeepSeek-V3); the first is read once, for scores and for the sum.

Algorithm: flash-decoding (Dao, Haziza, Massa, Sizov, 2023), the online softmax of Milakov and Gimelshein (2018), and
work cut into equal ranges of key tiles as in lean attention (Sanovar, Bharadwaj, St. Amant, Ruehle, Rajmohan, 2024).

One program takes one KV head of one range (`schedule.py`) and walks the sequences in it: the query heads of a KV head
share its keys, so they are the rows of one matrix product, padded to the 16 that `tl.dot` needs. Keys come in tiles
gathered through the block table. A sequence wholly in the range is written out at once. Of a sequence that borders cut,
each range stores its part, normalised, with its log-sum-exp, and a second kernel merges the parts. A sink enters the
total once: where a sequence is written out, or where its parts are merged.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cache.fp8 import split_pairs, widen_queries
from ..cache.kv_cache import KVCache
from ..carveout import fit_carveout
from ..compile_ahead import launch
from ..dependent_launch import announce_and_wait, wait_for_predecessor
from ..device import hardware
from ..dispatch import TritonModule
from .context import Contexts, Scoring
from .device_functions import finish_scores, load_tile, score_unit, shape_of, sink_weights, slot_offsets
from .schedule import DecodeSchedule, choose_tiles, head_tile, hopper_takes, programs_a_range
from .schedule_kernel import CUTS, FIELDS, key_tiles

# Entries of a head that a warp of the merge takes. Its programs wait on the multiprocessors for the main kernel to end:
# the fewer warps, the less they are in the way of it and of the next kernel.
MERGE_WIDTH = 128
MERGE_CHUNK = tl.constexpr(8)  # parts that a program of the merge takes at once
# Batches whose next product may have small programs, several of which fit a multiprocessor: let in before attention has
# ended everywhere, they crowd where it ended first (a layer of the 0.6B shape at 8 tokens: 41 us instead of 36).
CROWDED = range(3, 17)


# Imported only where it can run.
_hopper = TritonModule("rayllm_kernels.attention.latent_hopper")


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
    """(sequence, its length) of a row of `schedule.contexts`, zeros past the end."""
    pointer = contexts_ptr + context * 2
    return tl.load(pointer, mask=context < batch, other=0), tl.load(pointer + 1, mask=context < batch, other=0)


@triton.jit
def _load_blocks(tables_ptr, sequence, stride_table, tile, seq_len, KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Block ids of a tile's keys; entries past the context's end hold no valid block."""
    key = tile * KEYS + tl.arange(0, KEYS)
    return tl.load(tables_ptr + sequence.to(tl.int64) * stride_table + key // BLOCK_SIZE, mask=key < seq_len, other=0)


@triton.jit
def _load_queries(q_ptr, sequence, head, dims, strides, mask):
    q_ptrs = q_ptr + sequence.to(tl.int64) * strides[0] + head[:, None] * strides[1] + dims[None, :]
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


@triton.jit(do_not_specialize=[*Contexts._fields, "stride_table", "batch"])
def _decode_kernel(
    q_ptr, cache, block_tables, seq_lens, scoring, out_ptr, schedule, strides, stride_table, batch, SHAPE: tl.constexpr
):
    """strides: of q, the cache, out, and `schedule.lse`, of the last dimensions none."""
    stride_qb, stride_qh, stride_block, stride_kv_head, stride_slot, stride_ob, stride_oh, num_heads = strides
    q_strides = (stride_qb, stride_qh)
    window = scoring.sliding_window
    ROWS: tl.constexpr = SHAPE.rows
    KEYS: tl.constexpr = SHAPE.keys
    BLOCK_SIZE: tl.constexpr = SHAPE.block_size
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    PADDED: tl.constexpr = SHAPE.padded_dim
    ALIBI: tl.constexpr = scoring.alibi_slopes is not None
    FP8: tl.constexpr = cache.scales is not None
    LATENT: tl.constexpr = SHAPE.rest > 0
    record = schedule.ranges + tl.program_id(1) * FIELDS
    context = tl.load(record)
    sequence = tl.load(record + 1)
    seq_len = tl.load(record + 2)
    origin = tl.load(record + 3)
    range_first = tl.load(record + 4)
    range_end = tl.load(record + 5)

    tiles_of_head: tl.constexpr = (SHAPE.group + SHAPE.head_tile - 1) // SHAPE.head_tile
    kv_head = tl.program_id(0) // tiles_of_head
    first_in_group = (tl.program_id(0) % tiles_of_head) * SHAPE.head_tile
    in_group = first_in_group + tl.arange(0, ROWS)
    row_valid = (tl.arange(0, ROWS) < SHAPE.head_tile) & (in_group < SHAPE.group)
    head = kv_head * SHAPE.group + in_group
    dims = tl.arange(0, PADDED)
    mask = row_valid[:, None] & (dims[None, :] < HEAD_DIM)
    if LATENT:
        rest_dims = tl.arange(0, SHAPE.rest_padded)
        rest_mask = row_valid[:, None] & (rest_dims[None, :] < SHAPE.rest)
    has_padding = tl.load(record + 6) > 0
    first_key, first_tile, tiles = key_tiles(seq_len, window, KEYS)
    tile = first_tile + range_first - origin
    block = _load_blocks(block_tables, sequence, stride_table, tile, seq_len, KEYS, BLOCK_SIZE)
    next_sequence, next_len = _load_context(schedule.contexts, context + 1, batch)
    wait_for_predecessor(SHAPE.overlap)
    if has_padding:
        offsets = head[:, None] * stride_oh + dims[None, :]
        _zero_padding_rows(seq_lens, out_ptr, batch, stride_ob, offsets, mask)

    head_offset = kv_head.to(tl.int64) * stride_kv_head
    slopes = tl.load(scoring.alibi_slopes + head, mask=row_valid, other=0.0) if ALIBI else 0.0
    scale = scoring.scale
    if FP8:
        scale = scale * tl.load(cache.scales.k + kv_head)
        v_scale = tl.load(cache.scales.v + kv_head)
    softcap = scoring.softcap
    unit = score_unit(scale, softcap, ALIBI)
    totals = tl.zeros([ROWS, KEYS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    ACC_WIDTH: tl.constexpr = PADDED // 2 if FP8 else PADDED
    acc = tl.zeros([ROWS, ACC_WIDTH], tl.float32)
    if FP8:
        odd = acc  # odd dimensions, `acc` has the even ones
        # Converted once a sequence, because a tile's own conversions are what this loop has most of.
        q = widen_queries(_load_queries(q_ptr, sequence, head, dims, q_strides, mask), True)
    # One loop over all tiles, not one a sequence, so that the loads of the next sequence run under the end of this one.
    for position in range(range_first, range_end):
        key = tile * KEYS + tl.arange(0, KEYS)
        valid = (key < seq_len) & (key >= first_key)
        offsets = head_offset + slot_offsets(block, key, stride_block, stride_slot, BLOCK_SIZE)
        if not FP8:
            q = _load_queries(q_ptr, sequence, head, dims, q_strides, mask)
        k = load_tile(cache.k, offsets, valid, HEAD_DIM, PADDED, True).to(q.dtype)
        if LATENT:
            v = k
            q_rest = _load_queries(q_ptr + HEAD_DIM, sequence, head, rest_dims, q_strides, rest_mask)
            k_rest = load_tile(cache.k + HEAD_DIM, offsets, valid, SHAPE.rest, SHAPE.rest_padded, True)
        elif FP8:
            v = load_tile(cache.v, offsets // 2, valid, HEAD_DIM // 2, PADDED // 2, True)
        else:
            v = load_tile(cache.v, offsets, valid, HEAD_DIM, PADDED, True)
        distance = (key - (seq_len - 1))[None, :]
        this_sequence, this_origin = sequence, origin
        last = position + 1 == origin + tiles

        # On to the next tile. Its block ids are loaded now: with the load in the same step as the keys', the compiler
        # pipelines both and halves the depth that shared memory buys for the keys.
        context += last.to(tl.int32)
        sequence = tl.where(last, next_sequence, sequence)
        seq_len = tl.where(last, next_len, seq_len)
        next_sequence, next_len = _load_context(schedule.contexts, context + 1, batch)
        origin = tl.where(last, origin + tiles, origin)
        first_key, first_tile, tiles = key_tiles(seq_len, window, KEYS)
        tile = tl.where(last, first_tile, tile + 1)
        block = _load_blocks(block_tables, sequence, stride_table, tile, seq_len, KEYS, BLOCK_SIZE)

        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        if LATENT:
            products = tl.dot(q_rest, tl.trans(k_rest), products, input_precision="ieee")
        scores = finish_scores(products, distance, slopes, scale, softcap, ALIBI)
        weights, decay, totals, peak = _weigh(scores, valid, totals, peak, unit)
        if FP8:
            v, odd_v = split_pairs(v, cache.k.dtype.element_ty.fp_mantissa_width == 2)
            odd = _add_values(odd, weights, decay, odd_v.to(q.dtype))
        acc = _add_values(acc, weights, decay, v.to(q.dtype))
        if last | (position + 1 == range_end):
            total = tl.sum(totals, 1)
            if scoring.sinks is not None:
                whole = last & (this_origin >= range_first)
                total += tl.where(whole, sink_weights(scoring.sinks, head, row_valid, peak), 0.0)
            if FP8:
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
                tl.store(schedule.partials + part[:, None] * HEAD_DIM + dims[None, :], values, mask=mask)
                tl.store(schedule.lse + part, peak + tl.log2(total), mask=row_valid)
            totals = tl.zeros([ROWS, KEYS], tl.float32)
            peak = tl.full([ROWS], float("-inf"), tl.float32)
            acc = tl.zeros([ROWS, ACC_WIDTH], tl.float32)
            if FP8:
                odd = acc
                q = widen_queries(_load_queries(q_ptr, sequence, head, dims, q_strides, mask), True)


@triton.jit
def _merge_kernel(schedule, out_ptr, out_strides, sinks, num_heads, SHAPE: tl.constexpr, ANNOUNCE: tl.constexpr):
    """out = sum_i w_i partial_i / sum_i w_i with w_i = 2^(lse_i - max lse): one head of a sequence that borders cut.

    With a sink, e^sink is one more term of the lower sum.
    """
    stride_ob, stride_oh, _ = out_strides
    head = tl.program_id(0)
    # The schedule is older than the attention kernel, and may be read before that is done.
    cut = schedule.cuts + tl.program_id(1) * CUTS
    sequence = tl.load(cut).to(tl.int64)
    first_range = tl.load(cut + 1)
    parts = tl.load(cut + 2)
    if ANNOUNCE:
        announce_and_wait(SHAPE.overlap)
    else:
        wait_for_predecessor(SHAPE.overlap)
    if parts == 0:
        return
    PADDED: tl.constexpr = SHAPE.padded_dim
    dims = tl.arange(0, PADDED)
    total = 0.0
    peak = float("-inf")
    acc = tl.zeros([PADDED], tl.float32)
    for begin in range(0, parts, MERGE_CHUNK):
        part = begin + tl.arange(0, MERGE_CHUNK)
        row = _slot(first_range + part, part == 0) * num_heads + head
        lse = tl.load(schedule.lse + row, mask=part < parts, other=float("-inf"))
        mask = (part < parts)[:, None] & (dims[None, :] < SHAPE.head_dim)
        partial_ptrs = schedule.partials + row[:, None] * SHAPE.head_dim + dims[None, :]
        partial = tl.load(partial_ptrs, mask=mask, other=0.0)
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        weights = tl.exp2(lse - new_peak)
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(weights, 0)
        acc = acc * decay + tl.sum(partial * weights[:, None], 0)
        peak = new_peak
    if sinks is not None:
        total += sink_weights(sinks, head, True, peak)
    out = out_ptr + sequence * stride_ob + head * stride_oh + dims
    tl.store(out, (acc / total).to(out_ptr.dtype.element_ty), mask=dims < SHAPE.head_dim)


def decode(
    q: Tensor, cache: KVCache, contexts: Contexts, scoring: Scoring, schedule: DecodeSchedule, out: Tensor
) -> None:
    """Write attention to `out`; the arguments are checked, and B is at least 1."""
    batch, heads = q.shape[:2]
    least_dim = 16 if cache.scales is None else 32
    tiles, gpu = choose_tiles(q, cache, scoring), hardware(q.device)
    overlap, tile = gpu.can_overlap, head_tile(q, cache, scoring)
    shape = shape_of(q, cache, tile, tiles.rows, tiles.keys, least_dim=least_dim, overlap=overlap)
    if hopper_takes(q, cache, scoring):
        _hopper.decode(q, cache, contexts, scoring.scale, schedule, tiles.rows, out)
    else:
        if cache.scales is not None:
            cache = cache._replace(v=cache.v.view(torch.int16))
        strides = (*q.stride()[:2], *cache.k.stride()[:3], *out.stride()[:2], heads)
        stride_table = contexts.block_tables.stride(0)
        options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "launch_pdl": overlap}
        kernel = launch(_decode_kernel, (programs_a_range(q, cache, scoring), schedule.ranges.shape[0]))(
            q, cache, *contexts, scoring, out, schedule, strides, stride_table, batch, SHAPE=shape, **options
        )
        fit_carveout(kernel, tiles.programs, gpu)
    cuts = schedule.cuts.shape[0]
    if cuts:
        announce = batch not in CROWDED
        options = {"num_warps": max(1, shape.padded_dim // MERGE_WIDTH), "launch_pdl": overlap}
        launch(_merge_kernel, (heads, cuts))(
            schedule, out, out.stride(), scoring.sinks, heads, SHAPE=shape, ANNOUNCE=announce, **options
        )
