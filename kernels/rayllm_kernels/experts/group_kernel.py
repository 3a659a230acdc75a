"""Pairs of a token and an expert, grouped by expert, and the groups cut into tiles of rows: a counting sort.

Pair p is token p // k and its expert number p % k. One launch: the program of an expert counts the pairs of all
experts, which tells where its own begin, and lists those in ascending order. So the result has one order, and nothing
is read on the host: how many tiles there are is on the device, and their number is bounded by shapes alone. Pairs of
experts that others own are left out.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compile_ahead import launch
from ..dependent_launch import wait_for_predecessor
from ..device import hardware
from .experts import ExpertRange
from .plans import choose_rows, is_unsorted

CHUNK = 1024  # pairs that are read at once
LARGE_CHUNK = 8192  # of many pairs
TILES = tl.constexpr(32)  # that are stored at once


class Groups(NamedTuple):
    """order: [P] int32, the pairs, those of the first expert first; what is past the last one is undefined.

    num_tiles: [1] int32.

    tiles: [3, most tiles] int32, of each its expert, its first place in `order`, and the end of its expert's places.
    """

    order: Tensor
    tiles: Tensor
    num_tiles: Tensor


@triton.jit(do_not_specialize=["first_expert", "pairs", "most"])
def _group_kernel(
    experts_ptr,
    order_ptr,
    tiles_ptr,
    count_ptr,
    first_expert,
    pairs,
    most,
    ROWS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """first_expert: of those that are here, as many as programs; None if these are all.

    most: tiles that there is room for. ROWS: of a tile. BINS: experts, to a power of two.
    """
    wait_for_predecessor(OVERLAP)
    mine = tl.program_id(0)
    wanted = mine
    if first_expert is not None:
        wanted += first_expert
    lane, bin = tl.arange(0, CHUNK), tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, pairs, CHUNK):
        inside = start + lane < pairs
        expert = tl.load(experts_ptr + start + lane, mask=inside, other=0)
        if first_expert is not None:
            expert -= first_expert
            inside &= (expert >= 0) & (expert < tl.num_programs(0))
            expert = tl.where(inside, expert, 0)
        counts += tl.histogram(expert, BINS, mask=inside)
    tiles = (counts + (ROWS - 1)) // ROWS
    before = bin < mine
    first = tl.sum(tl.where(before, counts, 0), 0)
    first_tile = tl.sum(tl.where(before, tiles, 0), 0)
    count = tl.sum(tl.where(bin == mine, counts, 0), 0)
    if mine == 0:
        tl.store(count_ptr, tl.sum(tiles, 0))

    for start in range(0, (count + (ROWS - 1)) // ROWS, TILES):
        tile = start + tl.arange(0, TILES)
        kept = tile * ROWS < count
        target = tiles_ptr + first_tile + tile
        tl.store(target, tl.zeros([TILES], tl.int32) + mine, mask=kept)
        tl.store(target + most, first + tile * ROWS, mask=kept)
        tl.store(target + 2 * most, tl.zeros([TILES], tl.int32) + (first + count), mask=kept)

    place = first
    for start in range(0, pairs, CHUNK):
        pair = start + lane
        found = tl.load(experts_ptr + pair, mask=pair < pairs, other=-1) == wanted
        rank = tl.cumsum(found.to(tl.int32), 0)
        tl.store(order_ptr + place + rank - 1, pair, mask=found)
        place += tl.sum(found.to(tl.int32), 0)


def most_tiles(pairs: int, num_experts: int, rows: int) -> int:
    """A bound of the number of tiles: each expert that has pairs may have one that is not full."""
    return pairs // rows + min(num_experts, pairs)


def group(experts: Tensor, num_experts: int, rows: int, first_expert: int | None = None) -> Groups:
    """The groups of experts [T, k] int32, contiguous, in tiles of so many rows.

    first_expert: of num_experts that are here, out of more, None if there are no others; their groups count from it.
    """
    pairs = experts.numel()
    most = most_tiles(pairs, num_experts, rows)
    order, tiles, count = (
        torch.empty(shape, dtype=torch.int32, device=experts.device) for shape in (pairs, (3, most), 1)
    )
    overlap, chunk = hardware(experts.device).can_overlap, CHUNK if pairs <= LARGE_CHUNK else LARGE_CHUNK
    launch(_group_kernel, (num_experts,))(
        experts,
        order,
        tiles,
        count,
        first_expert,
        pairs,
        most,
        ROWS=rows,
        BINS=triton.next_power_of_2(num_experts),
        CHUNK=chunk,
        OVERLAP=overlap,
        num_warps=4 if chunk == CHUNK else 16,
        launch_pdl=overlap,
    )
    return Groups(order, tiles, count)


def arrange(
    experts: Tensor,
    num_here: int,
    owned: ExpertRange | None,
    dtype: torch.dtype,
    *,
    most_rows: int | None = None,
    fixed_rows: int | None = None,
) -> tuple[int, Groups | None]:
    """(rows of a tile, the groups of experts [T, k] in tiles of so many; None where each pair is a tile of its own).

    num_here: of the experts whose weights are here. most_rows: that a tile may have, None for any number. fixed_rows:
    of all tiles, for any number of tokens; None for what suits that number.
    """
    rows = fixed_rows
    if rows is None:
        (tokens, top_k), num_experts = experts.shape, num_here if owned is None else owned.total
        unsorted = is_unsorted(tokens, top_k, num_experts)
        rows = choose_rows(tokens * top_k, num_experts, dtype, unsorted=unsorted)
        if unsorted:
            return rows, None
    rows = rows if most_rows is None else min(rows, most_rows)
    return rows, group(experts, num_here, rows, None if owned is None else owned.first)
