"""The Triton kernel that fills a `DecodeSchedule`: one program finds one range. `schedule.py` says how work is cut.

seq_lens [B] int32 -> contexts [B, 2] int32, ranges [num_ranges, 7] int32, cuts [min(B, num_ranges - 1), 3] int32.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..compile_ahead import launch
from .schedule import CUT_FIELDS, RANGE_FIELDS, DecodeSchedule

FIELDS = tl.constexpr(RANGE_FIELDS)
CUTS = tl.constexpr(CUT_FIELDS)


@triton.jit
def key_tiles(seq_len, window, KEYS: tl.constexpr):
    """First visible key of the last position, its tile, and the number of tiles from there on."""
    first_key = tl.maximum(seq_len - window, 0) if window is not None else seq_len * 0
    first_tile = first_key // KEYS
    return first_key, first_tile, tl.cdiv(seq_len, KEYS) - first_tile


@triton.jit
def _in_order(chosen, index):
    """Where entries go so that those chosen are first, all in order."""
    before = tl.cumsum(chosen, 0) - chosen
    return tl.where(chosen > 0, before, tl.sum(chosen, 0) + index - before)


@triton.jit(do_not_specialize=["seq_lens_ptr", "batch", "num_cuts"])
def _schedule_kernel(
    seq_lens_ptr, contexts_ptr, ranges_ptr, cuts_ptr, batch, num_cuts, window, KEYS: tl.constexpr,
    BATCH_PADDED: tl.constexpr,
):  # fmt: skip
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
    row = _in_order(used, sequence)
    if index == 0:
        tl.store(contexts_ptr + row * 2, sequence, mask=sequence < batch)
        tl.store(contexts_ptr + row * 2 + 1, seq_len, mask=sequence < batch)
        first_range = (end - tiles) // quota
        parts = tl.where(used > 0, (end - 1) // quota - first_range + 1, 0)
        cut = (parts > 1).to(tl.int32)
        place = _in_order(cut, sequence)
        cuts = cuts_ptr + place * CUTS
        tl.store(cuts, sequence, mask=place < num_cuts)
        tl.store(cuts + 1, first_range, mask=place < num_cuts)
        tl.store(cuts + 2, parts * cut, mask=place < num_cuts)
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
    tl.store(record + 6, tl.max(empty.to(tl.int32), 0))


@triton.jit
def _settle_kernel(ranges_ptr):
    """Nothing, between the kernel above and attention, which reads its results early."""


def fill(schedule: DecodeSchedule, seq_lens: Tensor, sliding_window: int | None, keys: int) -> None:
    """Write the contexts, ranges and cuts of a new schedule; the arguments are checked."""
    batch = seq_lens.shape[0]
    tensors = schedule.contexts, schedule.ranges, schedule.cuts
    options = {"KEYS": keys, "BATCH_PADDED": triton.next_power_of_2(max(batch, 1)), "num_warps": 4}
    launch(_schedule_kernel, (schedule.ranges.shape[0],))(
        seq_lens, *tensors, batch, schedule.cuts.shape[0], sliding_window, **options
    )
    launch(_settle_kernel, (1,))(schedule.ranges)
