"""The Triton kernel that fills a `DecodeSchedule`: one program finds one range. `schedule.py` says how work is cut.

seq_lens [B] int32 -> contexts [B, 2] int32, ranges [num_ranges, 8] int32.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..compile_ahead import launch
from .schedule import RANGE_FIELDS, DecodeSchedule

FIELDS = tl.constexpr(RANGE_FIELDS)


@triton.jit
def key_tiles(seq_len, window, KEYS: tl.constexpr):
    """First visible key of the last position, its tile, and the number of tiles from there on."""
    first_key = tl.maximum(seq_len - window, 0) if window is not None else seq_len * 0
    first_tile = first_key // KEYS
    return first_key, first_tile, tl.cdiv(seq_len, KEYS) - first_tile


@triton.jit(do_not_specialize=["seq_lens_ptr", "batch"])
def _schedule_kernel(
    seq_lens_ptr, contexts_ptr, ranges_ptr, batch, window, KEYS: tl.constexpr, BATCH_PADDED: tl.constexpr
):
    """One range a program; each sums up the whole batch, which is cheaper than passing sums on."""
    index = tl.program_id(0)
    count = tl.num_programs(0)
    sequence = tl.arange(0, BATCH_PADDED)
    seq_len = tl.load(seq_lens_ptr + sequence, mask=sequence < batch, other=0)
    _, _, tiles = key_tiles(seq_len, window, KEYS)
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


def fill(schedule: DecodeSchedule, seq_lens: Tensor, sliding_window: int | None, keys: int) -> None:
    """Write the contexts and ranges of a new schedule; the arguments are checked."""
    batch = seq_lens.shape[0]
    options = {"KEYS": keys, "BATCH_PADDED": triton.next_power_of_2(max(batch, 1)), "num_warps": 4}
    launch(_schedule_kernel, (schedule.ranges.shape[0],))(
        seq_lens, schedule.contexts, schedule.ranges, batch, sliding_window, **options
    )
