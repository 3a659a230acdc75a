"""Cuts the work of a decode step into equal ranges, on the device.

Sequence b has tiles(b) = ceil(seq_len / KEYS) - first visible key // KEYS key tiles a KV head. Laid end to end, the
T tiles of all sequences are cut every ceil(T / num_ranges); range r holds tiles r * quota to (r + 1) * quota, which may
begin and end inside a sequence ("stream-K": Osama, Merrill, Cecka, Garland, Owens, 2023). So every program of the
attention kernel gets the same work however ragged the batch is, and nothing here or there depends on host values:
a captured graph stays right as sequences grow.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .checks import check_decode_schedule
from .decode_work import RANGE_FIELDS, DecodeSchedule, choose_num_ranges, choose_tiles, empty_schedule, programs_a_range


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def key_tiles(seq_len, window, KEYS: tl.constexpr, USE_WINDOW: tl.constexpr):
    """First visible key of the last position, its tile, and the number of tiles from there on."""
    first_key = tl.maximum(seq_len - window, 0) if USE_WINDOW else seq_len * 0
    first_tile = first_key // KEYS
    return first_key, first_tile, tl.cdiv(seq_len, KEYS) - first_tile


@triton.jit(do_not_specialize=["seq_lens_ptr", "batch"])
def _schedule_kernel(
    seq_lens_ptr,
    contexts_ptr,
    ranges_ptr,
    batch,
    window,
    KEYS: tl.constexpr,
    USE_WINDOW: tl.constexpr,
    BATCH_PADDED: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """One range a program; each sums up the whole batch, which is cheaper than passing sums on."""
    index = tl.program_id(0)
    count = tl.num_programs(0)
    sequence = tl.arange(0, BATCH_PADDED)
    seq_len = tl.load(seq_lens_ptr + sequence, mask=sequence < batch, other=0)
    _, _, tiles = key_tiles(seq_len, window, KEYS, USE_WINDOW)
    end = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0)
    quota = tl.maximum(tl.cdiv(total, count), 1)
    first = index * quota
    used = (seq_len > 0).to(tl.int32)
    used_before = tl.cumsum(used, 0) - used
    row = tl.where(used > 0, used_before, tl.sum(used, 0) + sequence - used_before)
    if index == 0:
        tl.store(contexts_ptr + row * 2, sequence, mask=sequence < batch)
        tl.store(contexts_ptr + row * 2 + 1, seq_len, mask=sequence < batch)
    here = (end > first) & (end - tiles <= first) & (used > 0)
    # Padding rows are dealt out one by one: they are usually neighbours, and would all fall to one range.
    empty = (used == 0) & (sequence < batch) & (sequence % count == index)
    record = ranges_ptr + index * FIELDS
    tl.store(record, tl.sum(tl.where(here, row, 0), 0))
    tl.store(record + 1, tl.sum(tl.where(here, sequence, 0), 0))
    tl.store(record + 2, tl.sum(tl.where(here, seq_len, 0), 0))
    tl.store(record + 3, tl.sum(tl.where(here, end - tiles, 0), 0))
    tl.store(record + 4, first)
    tl.store(record + 5, tl.minimum(first + quota, total))
    tl.store(record + 6, quota)
    tl.store(record + 7, tl.max(empty.to(tl.int32), 0))


def decode_schedule(
    q: Tensor, k_cache: Tensor, seq_lens: Tensor, *, sliding_window: int | None = None, num_ranges: int | None = None
) -> DecodeSchedule:
    """Cut the contexts of a batch into ranges; see `ops.decode_schedule` for the contract."""
    check_decode_schedule(q, k_cache, seq_lens, sliding_window, num_ranges)
    batch, heads, head_dim = q.shape
    programs = programs_a_range(heads, k_cache.shape[1])
    tiles = choose_tiles(head_dim, q.element_size(), k_cache.element_size())
    schedule = empty_schedule(q, num_ranges or choose_num_ranges(programs, _multiprocessors(q.device), tiles))
    _schedule_kernel[(schedule.ranges.shape[0],)](
        seq_lens,
        schedule.contexts,
        schedule.ranges,
        batch,
        min(sliding_window or 0, 1 << 30),
        KEYS=tiles.keys,
        USE_WINDOW=sliding_window is not None,
        BATCH_PADDED=triton.next_power_of_2(max(batch, 1)),
        FIELDS=RANGE_FIELDS,
        num_warps=4,
    )
    return schedule
