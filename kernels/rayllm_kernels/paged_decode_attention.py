"""Decode attention over a paged KV cache, split over the context.

    s_j = cap(scale * <q, k_j>) + slope * (j - p);  out = sum_j softmax(s)_j v_j,  p = seq_len - 1,  p - window < j <= p

Algorithm: flash-decoding (Dao, Haziza, Massa, Sizov, 2023), the online softmax of Milakov and Gimelshein (2018) over
a slice of the context per program, and a second kernel that merges the slices by their log-sum-exp.

One program handles one (sequence, KV head, split): the query heads of a KV head share its keys, so they are the rows
of one matrix product, padded to the 16 that `tl.dot` needs. Keys come in tiles gathered through the block table. The
split of a context is computed on the device from `seq_lens`, the number of splits on the host from shapes alone, so
a call never synchronises and a captured graph stays valid as sequences grow.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention_common import finish_scores, load_tile, padded_head_dim, score_unit, slot_offsets
from .checks import check_paged_attention, check_paged_decode
from .dependent_launch import can_overlap, wait_for_predecessor

MAX_SPLITS = 128
MIN_SPLIT_KEYS = 128  # below this a split costs more in the merge than it wins
PROGRAMS_PER_MULTIPROCESSOR = 2  # what splitting aims at
CROWDED_PROGRAMS_PER_MULTIPROCESSOR = 3
MAX_HEAD_TILE = 64  # query heads of one KV head that one program takes


class Tiles(NamedTuple):
    keys: int
    num_warps: int
    num_stages: int


def choose_tiles(head_dim_padded: int, itemsize: int, crowded: bool) -> Tiles:
    """Keys per tile, warps and pipeline stages, as measured on H200.

    Where programs crowd a multiprocessor, they hide each other's loads; where few run, each needs a deeper pipeline.
    """
    if itemsize == 4:  # no tensor cores in exact fp32: larger tiles spill registers
        return Tiles(32 if head_dim_padded <= 128 else 16, 4, 2)
    if head_dim_padded > 128:
        return Tiles(32, 4, 3)
    return Tiles(64, 4, 3) if crowded else Tiles(64, 2, 5)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def choose_num_splits(programs: int, max_seq_len: int, multiprocessors: int) -> int:
    """Splits that fill the device once, given the programs of one split; no more than the longest context feeds."""
    wanted = PROGRAMS_PER_MULTIPROCESSOR * multiprocessors // max(programs, 1)
    return max(1, min(wanted, triton.cdiv(max_seq_len, MIN_SPLIT_KEYS), MAX_SPLITS))


@triton.jit
def _split_tiles(first_key, end_key, split, num_splits, KEYS: tl.constexpr):
    """The key tiles low..high of one split; the last splits of a short context are empty."""
    first_tile = first_key // KEYS
    end_tile = tl.cdiv(end_key, KEYS)
    tiles_per_split = tl.cdiv(end_tile - first_tile, num_splits)
    low = first_tile + split * tiles_per_split
    return low, tl.minimum(low + tiles_per_split, end_tile)


@triton.jit
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, tables_ptr, seq_lens_ptr, slopes_ptr, out_ptr, lse_ptr,
    stride_qb, stride_qh, stride_block, stride_kv_head, stride_slot, stride_table,
    stride_ob, stride_oh, stride_os, scale, soft_cap, window, num_splits, num_heads,
    GROUP: tl.constexpr, HEAD_TILE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr, SPLIT: tl.constexpr,
    USE_WINDOW: tl.constexpr, USE_SOFT_CAP: tl.constexpr, USE_ALIBI: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(OVERLAP)
    head_tiles: tl.constexpr = (GROUP + HEAD_TILE - 1) // HEAD_TILE
    kv_head = tl.program_id(0) // head_tiles
    sequence = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)

    seq_len = tl.load(seq_lens_ptr + sequence)
    first_key = tl.maximum(seq_len - window, 0) if USE_WINDOW else 0
    low, high = _split_tiles(first_key, seq_len, split, num_splits, KEYS)

    in_group = (tl.program_id(0) % head_tiles) * HEAD_TILE + tl.arange(0, ROWS)
    row_valid = (tl.arange(0, ROWS) < HEAD_TILE) & (in_group < GROUP)
    head = kv_head * GROUP + in_group
    lse_ptrs = lse_ptr + (sequence * num_heads + head) * num_splits + split
    if SPLIT:  # noqa: SIM102 - a condition known at compile time around one that is not
        if low >= high:  # more splits than tiles, or a padding row: the merge skips what has no weight
            tl.store(lse_ptrs, tl.full([ROWS], float("-inf"), tl.float32), mask=row_valid)
            return
    dims = tl.arange(0, HEAD_DIM_PADDED)
    q_mask = row_valid[:, None] & (dims[None, :] < HEAD_DIM)
    q = tl.load(q_ptr + sequence * stride_qb + head[:, None] * stride_qh + dims[None, :], mask=q_mask, other=0.0)
    slopes = tl.load(slopes_ptr + head, mask=row_valid, other=0.0) if USE_ALIBI else 0.0

    unit = score_unit(scale, USE_SOFT_CAP, USE_ALIBI)
    table_ptr = tables_ptr + sequence * stride_table
    head_offset = kv_head.to(tl.int64) * stride_kv_head
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    acc = tl.zeros([ROWS, HEAD_DIM_PADDED], tl.float32)
    for tile in range(low, high):
        key = tile * KEYS + tl.arange(0, KEYS)
        valid = (key < seq_len) & (key >= first_key)
        # Entries past the end, or before the window, hold no valid block.
        block = tl.load(table_ptr + key // BLOCK_SIZE, mask=valid, other=0)
        offsets = head_offset + slot_offsets(block, key, stride_block, stride_slot, BLOCK_SIZE)
        k = load_tile(k_ptr, offsets, valid, dims, HEAD_DIM, HEAD_DIM_PADDED, True)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        distance = (key - (seq_len - 1))[None, :]
        scores = finish_scores(products, distance, slopes, scale, soft_cap, USE_SOFT_CAP, USE_ALIBI)
        scores = tl.where(valid[None, :], scores, float("-inf"))
        # Every tile holds a visible key, so the peak is finite from the first one on.
        new_peak = tl.maximum(peak, tl.max(scores, 1) * unit)
        weights = tl.exp2(scores * unit - new_peak[:, None])
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(weights, 1)
        peak = new_peak
        v = load_tile(v_ptr, offsets, valid, dims, HEAD_DIM, HEAD_DIM_PADDED, True)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")

    # Unsplit, a padding row has total 0 and gets zeros.
    total = tl.where(total == 0.0, 1.0, total)
    if SPLIT:
        tl.store(lse_ptrs, peak + tl.log2(total), mask=row_valid)
    out = out_ptr + sequence * stride_ob + head[:, None] * stride_oh + split * stride_os + dims[None, :]
    tl.store(out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=q_mask)


@triton.jit
def _merge_kernel(
    partial_ptr, lse_ptr, out_ptr, stride_ob, stride_oh, num_splits, num_heads,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr, SPLITS_PADDED: tl.constexpr, CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """out = sum_s w_s partial_s / sum_s w_s with w_s = 2^(lse_s - max lse), for one (sequence, head)."""
    wait_for_predecessor(OVERLAP)
    sequence = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0)
    row = (sequence * num_heads + head) * num_splits
    splits = tl.arange(0, SPLITS_PADDED)
    lse = tl.load(lse_ptr + row + splits, mask=splits < num_splits, other=float("-inf"))
    peak = tl.max(lse, 0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.exp2(lse - peak), 0)
    dims = tl.arange(0, HEAD_DIM_PADDED)
    acc = tl.zeros([HEAD_DIM_PADDED], tl.float32)
    for begin in range(0, num_splits, CHUNK):
        chunk = begin + tl.arange(0, CHUNK)
        weights = tl.exp2(tl.load(lse_ptr + row + chunk, mask=chunk < num_splits, other=float("-inf")) - peak)
        # The partial result of an empty split was never written.
        mask = (weights > 0.0)[:, None] & (dims[None, :] < HEAD_DIM)
        partial = tl.load(partial_ptr + (row + chunk)[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
        acc += tl.sum(partial * weights[:, None], 0)
    acc = acc / tl.where(total == 0.0, 1.0, total)
    out = out_ptr + sequence * stride_ob + head * stride_oh + dims
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


def paged_decode_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, *,
    scale: float, sliding_window: int | None = None, alibi_slopes: Tensor | None = None,
    soft_cap: float | None = None, num_splits: int | None = None, max_seq_len: int | None = None,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """One query per sequence against its paged context; see `ops.paged_decode_attention` for the contract."""
    check_paged_attention(q, k_cache, v_cache, block_tables, seq_lens, scale=scale, sliding_window=sliding_window,
                          alibi_slopes=alibi_slopes, soft_cap=soft_cap, out=out)  # fmt: skip
    batch, heads, head_dim = q.shape
    check_paged_decode(q, seq_lens, num_splits, max_seq_len)
    if out is None:
        out = torch.empty((batch, heads, head_dim), dtype=q.dtype, device=q.device)
    kv_heads, block_size = k_cache.shape[1:3]
    group = heads // kv_heads
    head_tile = min(group, MAX_HEAD_TILE)
    programs = kv_heads * triton.cdiv(group, head_tile)
    if num_splits is None:
        longest = min(block_tables.shape[1] * block_size, max_seq_len or 1 << 62)
        num_splits = choose_num_splits(programs * batch, longest, _multiprocessors(q.device))

    head_dim_padded = padded_head_dim(head_dim)
    crowd = CROWDED_PROGRAMS_PER_MULTIPROCESSOR * _multiprocessors(q.device)
    tiles = choose_tiles(head_dim_padded, q.element_size(), programs * batch * num_splits >= crowd)
    partial, lse = out, out
    strides: tuple[int, ...] = (out.stride(0), out.stride(1), 0)
    if num_splits > 1:
        partial = torch.empty((batch, heads, num_splits, head_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty((batch, heads, num_splits), dtype=torch.float32, device=q.device)
        strides = partial.stride()[:3]
    overlap = can_overlap(q.device)
    _decode_kernel[(programs, batch, num_splits)](
        q, k_cache, v_cache, block_tables, seq_lens, q if alibi_slopes is None else alibi_slopes, partial, lse,
        q.stride(0), q.stride(1), *k_cache.stride()[:3], block_tables.stride(0),
        *strides, scale, soft_cap or 1.0, min(sliding_window or 0, 1 << 30), num_splits, heads,
        GROUP=group, HEAD_TILE=head_tile, ROWS=max(16, triton.next_power_of_2(head_tile)), KEYS=tiles.keys,
        BLOCK_SIZE=block_size, HEAD_DIM=head_dim, HEAD_DIM_PADDED=head_dim_padded, SPLIT=num_splits > 1,
        USE_WINDOW=sliding_window is not None, USE_SOFT_CAP=soft_cap is not None, USE_ALIBI=alibi_slopes is not None,
        OVERLAP=overlap, num_warps=tiles.num_warps, num_stages=tiles.num_stages, launch_pdl=overlap,
    )  # fmt: skip
    if num_splits > 1:
        splits_padded = triton.next_power_of_2(num_splits)
        _merge_kernel[(heads, batch)](
            partial, lse, out, out.stride(0), out.stride(1), num_splits, heads,
            HEAD_DIM=head_dim, HEAD_DIM_PADDED=head_dim_padded, SPLITS_PADDED=splits_padded,
            CHUNK=min(splits_padded, 16), OVERLAP=overlap, num_warps=4, launch_pdl=overlap,
        )  # fmt: skip
    return out
