"""The Triton kernel of `paged_prefill_attention`, and the choice between it and `prefill_hopper.py`.

    s_ij = cap(scale * <q_i, k_j>) + slope * (j - p_i);  out_i = sum_j e^s_ij v_j / (sum_j e^s_ij + e^sink),
    p_i - window < j <= p_i,  cap(s) = softcap * tanh(s / softcap)

with p_i = seq_len - query_len + i. q [T, Hq, D] of any row and head stride; cache.k, cache.v
[num_blocks, Hkv, block_size, D]; contexts.block_tables [B, max_blocks] int32 and contexts.seq_lens [B] int32;
query_start_loc [B + 1] int32 -> out [T, Hq, D]. Algorithm: FlashAttention-2 (Dao, 2023): a tile of queries stays on
chip while tiles of keys stream past, with the online softmax of Milakov and Gimelshein (2018).

A query tile holds queries x the query heads of one KV head, as rows r = query * group + head. On Hopper a product
wants 64 or 128 rows, which a short chunk (or a lone decode token in a mixed batch) reaches only this way; a grouped
tile also spans fewer positions, so less of its work is masked; and each key tile is read once for the whole group.

The key range of a query tile is cut in three: tiles that the window's lower edge crosses, tiles that every row sees
whole (no masks), and tiles on the diagonal or past the sequence's end. Query tiles run longest first.

This kernel runs on any GPU and in the interpreter. Chunks that fill the tiles of `prefill_hopper.py` go there on a
Hopper GPU, unless they need a window, ALiBi, a soft cap or sinks, or the cache is of latents or in fp8: products there
take keys and values as the tensor copies leave them in shared memory, so for fp8 it would need a fourth role that
converts them.

In an fp8 cache k_j and v_j are stored numbers times a scale of their head: factors of `scale` and of `out`. Products
are computed in fp16 then (`widen_queries`).

In a cache of latents v_j is the first entries of k_j, which are read once; the rest of k_j is a tile of its own. Keys
and values that are expanded from one (`expanded.py`) are rows one after the other, a piece of them a call.

Either kernel gives a query the same bits however its sequence is cut into chunks: key tiles lie at fixed positions and
are folded in in one order, and a tile that a query sees nothing of changes nothing of its (acc, total, peak); a sink
enters the total after the last one. Only the two differ, and tiles of different height, so a deterministic call chooses
kernel and tile without the chunks' length.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cache.fp8 import widen_queries
from ..cache.kv_cache import KVCache
from ..compile_ahead import launch
from ..device import Hardware, hardware
from ..dispatch import TritonModule
from .context import Contexts, Scoring, Tiles, padded_dim
from .device_functions import Shape, finish_scores, load_tile, score_unit, shape_of, sink_weights, slot_offsets
from .expanded import ExpandedKeys, KeyPiece, SoftmaxState

# Rows (queries x heads of a group) of the longest chunk up to which the tiles here, half as tall, are faster.
SHORT_CHUNK_ROWS = 64
# A deterministic call may not look at the longest chunk: tall enough for prefills, not too wasteful for decodes.
DETERMINISTIC_ROWS = 64

# Imported only where it can run.
_hopper = TritonModule("rayllm_kernels.attention.prefill_hopper")


def choose_tiles(head_dim: int, itemsize: int, rows: int, gpu: Hardware, *, rest: int = 0) -> Tiles:
    """The fastest tiles on H200 for `rows` of queries times heads, less what does not fit a smaller GPU.

    rest: entries of keys behind those that are values too, in a cache of latents.
    """
    tiles = _fastest_tiles(head_dim, itemsize, rows)
    row_bytes = (padded_dim(head_dim) + padded_dim(rest)) * itemsize
    while tiles.rows > 16 and 2 * tiles.rows * row_bytes > gpu.shared_memory:  # half is for the keys
        tiles = _fastest_tiles(head_dim, itemsize, tiles.rows // 2)
    return tiles.fitted(head_dim, itemsize, itemsize, gpu, queries_move=False, rest=rest)


def _fastest_tiles(head_dim: int, itemsize: int, rows: int) -> Tiles:
    rows = min(max(16, triton.next_power_of_2(max(rows, 1))), 128)
    if itemsize == 4:  # no tensor cores in exact fp32: larger tiles spill registers
        return Tiles(min(rows, 32), 32 if head_dim <= 64 else 16, 4 if head_dim <= 128 else 8, 2)
    if head_dim > 256:  # so that a warp's part of the output stays in its registers
        return Tiles(min(rows, 64), 32, 4 if rows <= 32 else 8, 2)
    if rows <= 64:
        return Tiles(rows, 64 if head_dim <= 128 else 32, 4, 3)
    return Tiles(rows, 64, 8, 4 if head_dim <= 128 else 2)


def choose_expanded_tiles(head_dim: int, rest: int, value_dim: int, itemsize: int, rows: int, gpu: Hardware) -> Tiles:
    """For `rows` queries over expanded keys: as measured on an H200, less what smaller GPUs have no room for."""
    widest = max(head_dim, value_dim)
    if itemsize == 4:
        tiles = _fastest_tiles(widest, itemsize, rows)
    elif gpu.shared_memory < 200 << 10:  # these multiply out of registers, which hold the queries too
        tiles = Tiles(64, 32, 8, 2) if widest > 128 else Tiles(64, 64, 8, 3)
    else:
        tiles = Tiles(128, 64, 8, 2 if widest > 128 else 4)
    tiles = tiles._replace(rows=min(tiles.rows, max(16, triton.next_power_of_2(rows))))
    return tiles.fitted(head_dim, itemsize, itemsize, gpu, queries_move=False, rest=rest, value_dim=value_dim)


@triton.jit
def _attend_keys(softmax, queries, context, low, high, rule, SHAPE: tl.constexpr, MASKED: tl.constexpr):
    """Fold key tiles low..high into the running softmax; without MASKED every row sees all their keys.

    softmax: (acc, total, peak) of each row. queries: (q, its entries behind head_dim, slopes, positions) of each
    row. context: (cache, where the sequence's keys are, offset of the KV head, strides of block and slot, length, first
    key that is seen). Where keys are: the sequence's row of the block table or, of expanded ones, (what all heads' keys
    end with, its stride, row of the sequence's first key). rule: (scale, window, ALiBi slopes, soft cap), the last
    three None for none.
    """
    acc, total, peak = softmax
    q, q_rest, slopes, q_pos = queries
    cache, places, head_offset, stride_block, stride_slot, seq_len, first_key = context
    scale, window, alibi_slopes, softcap = rule
    KEYS: tl.constexpr = SHAPE.keys
    BLOCK_SIZE: tl.constexpr = SHAPE.block_size
    ALIBI: tl.constexpr = alibi_slopes is not None
    unit = score_unit(scale, softcap, ALIBI)
    if not SHAPE.expanded:
        # Block ids are loaded one tile ahead: with the load in the same step as the keys', the compiler pipelines both
        # and halves the depth that shared memory buys for the keys.
        first = low * KEYS + tl.arange(0, KEYS)
        block = tl.load(places + first // BLOCK_SIZE, mask=first < seq_len, other=0)
    for tile in range(low, high):
        key = tile * KEYS + tl.arange(0, KEYS)
        valid = (key < seq_len) & (key >= first_key) if MASKED else key >= 0
        if SHAPE.expanded:
            row = key.to(tl.int64) + places[2]
            offsets = head_offset + row * stride_slot
        else:
            offsets = head_offset + slot_offsets(block, key, stride_block, stride_slot, BLOCK_SIZE)
            block = tl.load(places + (key + KEYS) // BLOCK_SIZE, mask=key + KEYS < seq_len, other=0)
        k = load_tile(cache.k, offsets, valid, SHAPE.head_dim, SHAPE.padded_dim, MASKED).to(q.dtype)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        if SHAPE.rest > 0:
            if SHAPE.expanded:
                k_rest = load_tile(places[0], row * places[1], valid, SHAPE.rest, SHAPE.rest_padded, MASKED)
            else:
                k_rest = load_tile(cache.k + SHAPE.head_dim, offsets, valid, SHAPE.rest, SHAPE.rest_padded, MASKED)
            products = tl.dot(q_rest, tl.trans(k_rest), products, input_precision="ieee")
        distance = key[None, :] - q_pos[:, None]
        scores = finish_scores(products, distance, slopes, scale, softcap, ALIBI)
        if MASKED:
            visible = (distance <= 0) & valid[None, :]
            if window is not None:
                visible = visible & (distance > -window)
            scores = tl.where(visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * unit)
        # A row may see nothing yet: subtracting an infinite peak would turn its zeros into NaN.
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak
        weights = tl.exp2(scores * unit - shift[:, None])
        decay = tl.exp2(peak - shift)
        total = total * decay + tl.sum(weights, 1)
        peak = new_peak
        if SHAPE.latent:
            v = k
        else:
            v = load_tile(cache.v, offsets, valid, SHAPE.value_dim, SHAPE.value_padded, MASKED).to(q.dtype)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, total, peak


@triton.jit
def _key_tiles(first_pos, last_pos, window, KEYS: tl.constexpr):
    """The first key that queries at first_pos..last_pos see, and their tiles: low, whole_low, whole_high, high.

    Every query sees all of tiles whole_low..whole_high; low..whole_low and whole_high..high need masks.
    """
    # Whole tiles end at the first query's diagonal and begin where the last query's window does.
    whole_high = (first_pos + 1) // KEYS
    high = tl.cdiv(last_pos + 1, KEYS)
    if window is not None:
        first_key = tl.maximum(first_pos - window + 1, 0)
        whole_low = tl.minimum(tl.cdiv(tl.maximum(last_pos - window + 1, 0), KEYS), whole_high)
    else:
        first_key = 0
        whole_low = 0
    return first_key, first_key // KEYS, whole_low, whole_high, high


@triton.jit(do_not_specialize=[*Contexts._fields, "bounds", "starts_ptr", "stride_table"])
def _prefill_kernel(
    q_ptr,
    cache,
    block_tables,
    seq_lens,
    bounds,
    expanded,
    scoring,
    starts_ptr,
    out_ptr,
    strides,
    stride_table,
    SHAPE: tl.constexpr,
):
    """Of expanded keys there are, instead of block_tables: bounds [B, 3], of each sequence the first key that is there,
    the end of those, and the row of the first; and expanded, (what keys end with, its stride, acc [T, Hq, Dv] and norms
    [T, Hq, 2], the fp32 state of the softmax after the keys before these, q heads).
    """
    stride_qt, stride_qh, stride_block, stride_kv_head, stride_slot, stride_ot, stride_oh = strides
    scale, window, alibi_slopes, softcap, sinks = scoring
    ROWS: tl.constexpr = SHAPE.rows
    PADDED: tl.constexpr = SHAPE.padded_dim
    VALUE_PADDED: tl.constexpr = SHAPE.value_padded
    queries: tl.constexpr = ROWS // SHAPE.head_tile
    head_tiles: tl.constexpr = (SHAPE.group + SHAPE.head_tile - 1) // SHAPE.head_tile
    sequence = tl.program_id(2)
    first_row = tl.load(starts_ptr + sequence)
    query_len = tl.load(starts_ptr + sequence + 1) - first_row
    seq_len = tl.load(seq_lens + sequence)
    # The last tile of a chunk has the longest context: start with it, so that the short ones fill the gaps at the end.
    first_query = (tl.num_programs(0) - 1 - tl.program_id(0)) * queries
    if first_query >= query_len:
        return

    kv_head = tl.program_id(1) // head_tiles
    row = tl.arange(0, ROWS)
    query = first_query + row // SHAPE.head_tile
    in_group = (tl.program_id(1) % head_tiles) * SHAPE.head_tile + row % SHAPE.head_tile
    row_valid = (row < queries * SHAPE.head_tile) & (query < query_len) & (in_group < SHAPE.group)
    head = kv_head * SHAPE.group + in_group
    q_row = (first_row + query).to(tl.int64)
    dims = tl.arange(0, PADDED)
    q_mask = row_valid[:, None] & (dims[None, :] < SHAPE.head_dim)
    q_ptrs = q_ptr + (q_row * stride_qt + head * stride_qh)[:, None] + dims[None, :]
    q = widen_queries(tl.load(q_ptrs, mask=q_mask, other=0.0), cache.scales is not None)
    q_rest = 0.0  # of any cache but one of latents: in a tuple made here, None would not compile
    if SHAPE.rest > 0:
        rest_dims = tl.arange(0, SHAPE.rest_padded)
        rest_ptrs = q_ptr + (q_row * stride_qt + head * stride_qh + SHAPE.head_dim)[:, None] + rest_dims[None, :]
        q_rest = tl.load(rest_ptrs, mask=row_valid[:, None] & (rest_dims[None, :] < SHAPE.rest), other=0.0)
    if cache.scales is not None:
        scale = scale * tl.load(cache.scales.k + kv_head)
    slopes = tl.load(alibi_slopes + head, mask=row_valid, other=0.0) if alibi_slopes is not None else 0.0

    q_pos = seq_len - query_len + query
    first_pos = seq_len - query_len + first_query
    last_pos = tl.minimum(first_pos + queries, seq_len) - 1
    first_key, low, whole_low, whole_high, high = _key_tiles(first_pos, last_pos, window, SHAPE.keys)

    head_offset = kv_head.to(tl.int64) * stride_kv_head
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    acc = tl.zeros([ROWS, VALUE_PADDED], tl.float32)
    value_dims = tl.arange(0, VALUE_PADDED)
    is_done = row_valid
    if SHAPE.expanded:
        rest_ptr, stride_rest, acc_ptr, norms_ptr, heads = expanded
        begin = tl.load(bounds + sequence * 3)
        end = tl.load(bounds + sequence * 3 + 1)
        places = (rest_ptr, stride_rest, tl.load(bounds + sequence * 3 + 2) - begin)
        low = tl.maximum(low, begin // SHAPE.keys)
        whole_low = tl.maximum(whole_low, low)
        high = tl.minimum(high, tl.cdiv(end, SHAPE.keys))
        whole_high = tl.maximum(tl.minimum(whole_high, high), whole_low)
        # The softmax goes on where the keys before these left it.
        goes_on = row_valid & (query < tl.where(begin > 0, query_len, 0))
        is_left = row_valid & (query < tl.where(end < seq_len, query_len, 0))
        is_done = row_valid & (query < tl.where(end < seq_len, 0, query_len))
        state_row = q_row * heads + head
        acc_ptrs = acc_ptr + state_row[:, None] * SHAPE.value_dim + value_dims[None, :]
        in_value = value_dims[None, :] < SHAPE.value_dim
        acc = tl.load(acc_ptrs, mask=goes_on[:, None] & in_value, other=0.0)
        total = tl.load(norms_ptr + 2 * state_row, mask=goes_on, other=0.0)
        peak = tl.load(norms_ptr + 2 * state_row + 1, mask=goes_on, other=float("-inf"))
    else:
        places = block_tables + sequence.to(tl.int64) * stride_table
    softmax = (acc, total, peak)
    tile_queries = (q, q_rest, slopes, q_pos)
    context = (cache, places, head_offset, stride_block, stride_slot, seq_len, first_key)
    rule = (scale, window, alibi_slopes, softcap)
    if window is not None:
        softmax = _attend_keys(softmax, tile_queries, context, low, whole_low, rule, SHAPE, True)
    softmax = _attend_keys(softmax, tile_queries, context, whole_low, whole_high, rule, SHAPE, False)
    acc, total, peak = _attend_keys(softmax, tile_queries, context, whole_high, high, rule, SHAPE, True)

    if SHAPE.expanded:
        tl.store(acc_ptrs, acc, mask=is_left[:, None] & in_value)
        tl.store(norms_ptr + 2 * state_row, total, mask=is_left)
        tl.store(norms_ptr + 2 * state_row + 1, peak, mask=is_left)
    # Only padding rows can have seen nothing, and they are not stored.
    total = tl.where(total == 0.0, 1.0, total)
    if sinks is not None:
        total += sink_weights(sinks, head, row_valid, peak)
    if cache.scales is not None:
        acc = acc * (tl.load(cache.scales.v + kv_head) / total)[:, None]
    else:
        acc = acc / total[:, None]
    out = out_ptr + (q_row * stride_ot + head * stride_oh)[:, None] + value_dims[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=is_done[:, None] & (value_dims[None, :] < SHAPE.value_dim))


def hopper_takes(q: Tensor, cache: KVCache, out: Tensor) -> bool:
    """Whether the Hopper kernel can run these checked tensors: its products and tensor copies have fixed shapes.

    A copy moves a power of two of slots, at least the 8 after which the layout of shared memory repeats; heads and
    blocks must lie whole slots apart, at addresses that are multiples of 16 bytes. The result is stored in pairs.
    """
    num_blocks, kv_heads, block_size, head_dim = cache.k.shape
    stride_block, stride_head, stride_slot, _ = cache.k.stride()
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and cache.k.dtype == q.dtype
        and not cache.is_latent
        and head_dim in (64, 128)
        and q.shape[1] // kv_heads <= 128
        and block_size % 8 == 0
        and stride_slot >= head_dim
        and stride_slot % 8 == 0
        and stride_head % stride_slot == 0
        and stride_block % stride_slot == 0
        and 0 < num_blocks * (stride_block // stride_slot) < 1 << 31
        and (cache.k.data_ptr() | cache.v.data_ptr()) % 16 == 0
        and (out.stride(0) | out.stride(1)) % 2 == 0
        and out.data_ptr() % 4 == 0
    )


def prefill(
    q: Tensor,
    cache: KVCache,
    contexts: Contexts,
    scoring: Scoring,
    query_start_loc: Tensor,
    max_query_len: int,
    deterministic: bool,
    out: Tensor,
) -> None:
    """Write attention to `out`; the arguments are checked."""
    batch, heads, (_, kv_heads, _, head_dim) = contexts.seq_lens.shape[0], q.shape[1], cache.v.shape
    group, gpu = heads // kv_heads, hardware(q.device)
    tall = deterministic or max_query_len * group > SHORT_CHUNK_ROWS
    if gpu.is_hopper and batch > 0 and scoring.is_plain and tall and hopper_takes(q, cache, out):
        _hopper.prefill(q, cache, contexts, scoring.scale, query_start_loc, out)
        return
    rows = DETERMINISTIC_ROWS if deterministic else max_query_len * group
    tiles = choose_tiles(head_dim, q.element_size(), rows, gpu, rest=q.shape[2] - head_dim)
    head_tile = min(group, tiles.rows)
    query_tiles = triton.cdiv(max_query_len, tiles.rows // head_tile)
    shape = shape_of(q, cache, head_tile, tiles.rows, tiles.keys)
    strides = (*q.stride()[:2], *cache.k.stride()[:3], *out.stride()[:2])
    stride_table = contexts.block_tables.stride(0)
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    launch(_prefill_kernel, (query_tiles, kv_heads * triton.cdiv(group, head_tile), batch))(
        q, cache, *contexts, None, None, scoring, query_start_loc, out, strides, stride_table, SHAPE=shape, **options
    )


def prefill_expanded(
    q: Tensor, keys: ExpandedKeys, piece: KeyPiece, state: SoftmaxState, scale: float, out: Tensor
) -> None:
    """Fold the keys of a piece into `state` or, of sequences that end there, write attention to `out`.

    The arguments are checked.
    """
    heads, head_dim = keys.k.shape[1:]
    rest, value_dim = keys.rest.shape[1], keys.v.shape[2]
    gpu = hardware(q.device)
    tiles = choose_expanded_tiles(head_dim, rest, value_dim, q.element_size(), piece.max_query_len, gpu)
    shape = Shape(
        group=1,
        head_tile=1,
        rows=tiles.rows,
        keys=tiles.keys,
        block_size=1,
        head_dim=head_dim,
        padded_dim=padded_dim(head_dim),
        rest=rest,
        rest_padded=padded_dim(rest),
        value_dim=value_dim,
        value_padded=padded_dim(value_dim),
        expanded=True,
    )
    strides = (*q.stride()[:2], 0, keys.k.stride(1), keys.k.stride(0), *out.stride()[:2])
    grid = triton.cdiv(piece.max_query_len, tiles.rows), heads, piece.seq_lens.shape[0]
    expanded, scoring = (keys.rest, keys.rest.stride(0), *state, heads), Scoring(scale)
    options = {"SHAPE": shape, "num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    launch(_prefill_kernel, grid)(
        q,
        KVCache(keys.k, keys.v),
        None,
        piece.seq_lens,
        piece.bounds,
        expanded,
        scoring,
        piece.query_starts,
        out,
        strides,
        0,
        **options,
    )
