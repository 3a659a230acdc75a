"""Pairs of a token and an expert, grouped by expert, and the groups cut into tiles of rows: a counting sort.

Pair p is token p // k and its expert number p % k. Few pairs take one launch: the program of an expert counts the pairs
of all experts, which tells where its own begin, and lists those in ascending order.

Of many pairs that is too much for each program to count. They are cut into chunks, and take two launches with a program
a chunk: the first counts its chunk's pairs of every expert; the second adds up all counts, which tells where an expert
begins and where this chunk's pairs of it do, and sorts its chunk. The programs share the writing of the tiles.

Both give the same. There is no atomic, so the result has one order, and nothing is read on the host: how many tiles
there are is on the device, and their number is bounded by shapes alone. Pairs of experts that others own are left out.
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
from .device_functions import store_at_places
from .experts import ExpertRange
from .plans import HOPPER_FROM, HOPPER_ROWS, choose_rows, is_unsorted

ONE_LAUNCH = 8192  # pairs, at most, that one launch takes, in which each program has all of them at once:
LEAST_AT_ONCE = 256
CHUNK = 512  # pairs of a program, of those that take two launches
LARGE_CHUNK = 1024  # of so many that their chunks' counts would take longer to add up than a larger chunk to sort
MANY_CHUNKS = 128
COUNTS = 8192  # that are added up at once
TILES = tl.constexpr(32)  # that are stored at once


class Groups(NamedTuple):
    """order: [P] int32, the pairs, those of the first expert first; what is past the last one is undefined.

    num_tiles: [1] int32.

    tiles: [3, most tiles] int32, of each its expert, its first place in `order`, and the end of its expert's places.

    places: [P] int32, where each pair is in `order`, undefined for those that are left out; None if nobody asked.
    """

    order: Tensor
    tiles: Tensor
    num_tiles: Tensor
    places: Tensor | None


@triton.jit
def _load_experts(experts_ptr, pair, pairs, first_expert, num_experts):
    """(the experts of pairs, counted from the first that is here, whether there is such a pair and it is of one)."""
    inside = pair < pairs
    expert = tl.load(experts_ptr + pair, mask=inside, other=0)
    if first_expert is not None:
        expert -= first_expert
        inside &= (expert >= 0) & (expert < num_experts)
        expert = tl.where(inside, expert, 0)
    return expert, inside


@triton.jit(do_not_specialize=["first_expert", "pairs", "most"])
def _group_kernel(
    experts_ptr,
    order_ptr,
    tiles_ptr,
    count_ptr,
    places_ptr,
    first_expert,
    pairs,
    most,
    ROWS: tl.constexpr,
    BINS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """first_expert: of those that are here, as many as programs; None if these are all.

    most: tiles that there is room for. ROWS: of a tile. BINS: experts, to a power of two. AT_ONCE: so, pairs.
    """
    wait_for_predecessor(OVERLAP)
    mine = tl.program_id(0)
    pair, bin = tl.arange(0, AT_ONCE), tl.arange(0, BINS)
    expert, inside = _load_experts(experts_ptr, pair, pairs, first_expert, tl.num_programs(0))
    counts = tl.histogram(expert, BINS, mask=inside)
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

    found = inside & (expert == mine)
    place = first + tl.cumsum(found.to(tl.int32), 0) - 1
    tl.store(order_ptr + place, pair, mask=found)
    if places_ptr is not None:
        tl.store(places_ptr + pair, place, mask=found)


@triton.jit(do_not_specialize=["first_expert", "pairs"])
def _count_kernel(
    experts_ptr,
    counts_ptr,
    first_expert,
    num_experts,
    pairs,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """counts [programs, BINS]: of a chunk's pairs, those of each expert. first_expert: of num_experts, as above."""
    wait_for_predecessor(OVERLAP)
    chunk = tl.program_id(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    expert, inside = _load_experts(experts_ptr, pair, pairs, first_expert, num_experts)
    tl.store(counts_ptr + chunk * BINS + tl.arange(0, BINS), tl.histogram(expert, BINS, mask=inside))


@triton.jit(do_not_specialize=["first_expert", "pairs", "most"])
def _place_kernel(
    experts_ptr,
    counts_ptr,
    shifts_ptr,
    order_ptr,
    tiles_ptr,
    count_ptr,
    places_ptr,
    first_expert,
    num_experts,
    pairs,
    most,
    ROWS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNTED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """counts, shifts: [programs, BINS]; a program leaves in its shifts what its threads look up. COUNTED: chunks whose
    counts are added up at once. The rest as above.
    """
    wait_for_predecessor(OVERLAP)
    mine, chunks = tl.program_id(0), tl.num_programs(0)
    bin = tl.arange(0, BINS)
    totals = tl.zeros([COUNTED, BINS], tl.int32)
    earlier = totals
    for start in range(0, chunks, COUNTED):
        chunk = start + tl.arange(0, COUNTED)[:, None]
        counts = tl.load(counts_ptr + chunk * BINS + bin[None, :], mask=chunk < chunks, other=0)
        totals += counts
        earlier += tl.where(chunk < mine, counts, 0)
    count = tl.sum(totals, 0)
    end = tl.cumsum(count, 0)
    first = end - count

    # The chunk's pairs, sorted, have those of an expert side by side, as `order` has them: all lie equally far from it.
    own = tl.load(counts_ptr + mine * BINS + bin)
    shift = first + tl.sum(earlier, 0) - (tl.cumsum(own, 0) - own)
    tl.store(shifts_ptr + mine * BINS + bin, shift)
    tl.debug_barrier()
    lane = tl.arange(0, CHUNK)
    expert, inside = _load_experts(experts_ptr, mine * CHUNK + lane, pairs, first_expert, num_experts)
    # An expert and its pair are one number, and the pairs that are left out come last.
    ranked = tl.sort(tl.where(inside, expert, BINS) * CHUNK + lane)
    expert, pair = ranked // CHUNK, mine * CHUNK + ranked % CHUNK
    inside = expert < BINS
    place = tl.load(shifts_ptr + mine * BINS + expert, mask=inside, other=0) + lane
    tl.store(order_ptr + place, pair, mask=inside)
    if places_ptr is not None:
        tl.store(places_ptr + pair, place, mask=inside)

    tiles = (count + (ROWS - 1)) // ROWS
    end_tile = tl.cumsum(tiles, 0)
    first_tile = end_tile - tiles
    num_tiles = tl.sum(tiles, 0)
    if mine == 0:
        tl.store(count_ptr, num_tiles)
    for start in range(mine * TILES, num_tiles, chunks * TILES):
        tile = start + tl.arange(0, TILES)
        owner = (first_tile[None, :] <= tile[:, None]) & (tile[:, None] < end_tile[None, :])
        begin = tl.sum(tl.where(owner, (first - first_tile * ROWS)[None, :], 0), 1) + tile * ROWS
        target, kept = tiles_ptr + tile, tile < num_tiles
        tl.store(target, tl.sum(tl.where(owner, bin[None, :], 0), 1), mask=kept)
        tl.store(target + most, begin, mask=kept)
        tl.store(target + 2 * most, tl.sum(tl.where(owner, end[None, :], 0), 1), mask=kept)


def most_tiles(pairs: int, num_experts: int, rows: int) -> int:
    """A bound of the number of tiles: each expert that has pairs may have one that is not full."""
    return pairs // rows + min(num_experts, pairs)


def group(
    experts: Tensor, num_experts: int, rows: int, first_expert: int | None = None, *, places: bool = False
) -> Groups:
    """The groups of experts [T, k] int32, contiguous, in tiles of so many rows.

    first_expert: of num_experts that are here, out of more, None if there are no others; their groups count from it.
    places: whether the groups are to have them.
    """
    pairs = experts.numel()
    if pairs <= ONE_LAUNCH:
        return group_at_once(experts, num_experts, rows, first_expert, places=places)
    chunk = CHUNK if pairs <= MANY_CHUNKS * CHUNK else LARGE_CHUNK
    return group_in_chunks(experts, num_experts, rows, first_expert, chunk, places=places)


def group_at_once(
    experts: Tensor, num_experts: int, rows: int, first_expert: int | None, *, places: bool = False
) -> Groups:
    """`group` in one launch."""
    groups, overlap = _new_groups(experts, num_experts, rows, places), hardware(experts.device).can_overlap
    launch(_group_kernel, (num_experts,))(
        experts,
        *groups,
        first_expert,
        experts.numel(),
        groups.tiles.shape[1],
        ROWS=rows,
        BINS=triton.next_power_of_2(num_experts),
        AT_ONCE=max(LEAST_AT_ONCE, triton.next_power_of_2(experts.numel())),
        OVERLAP=overlap,
        num_warps=8,
        launch_pdl=overlap,
    )
    return groups


def group_in_chunks(
    experts: Tensor, num_experts: int, rows: int, first_expert: int | None, chunk: int, *, places: bool = False
) -> Groups:
    """`group` in two launches. chunk: pairs of a program, a power of two."""
    groups, overlap = _new_groups(experts, num_experts, rows, places), hardware(experts.device).can_overlap
    pairs, bins = experts.numel(), triton.next_power_of_2(num_experts)
    chunks = triton.cdiv(pairs, chunk)
    counts, shifts = (torch.empty((chunks, bins), dtype=torch.int32, device=experts.device) for _ in range(2))
    launch(_count_kernel, (chunks,))(
        experts,
        counts,
        first_expert,
        num_experts,
        pairs,
        BINS=bins,
        CHUNK=chunk,
        OVERLAP=overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
    launch(_place_kernel, (chunks,))(
        experts,
        counts,
        shifts,
        *groups,
        first_expert,
        num_experts,
        pairs,
        groups.tiles.shape[1],
        ROWS=rows,
        BINS=bins,
        CHUNK=chunk,
        COUNTED=min(64, max(1, COUNTS // bins)),
        OVERLAP=overlap,
        num_warps=8,
        launch_pdl=overlap,
    )
    return groups


def _new_groups(experts: Tensor, num_experts: int, rows: int, places: bool) -> Groups:
    """Room for the groups of experts."""
    pairs = experts.numel()
    order, tiles, num_tiles = (
        torch.empty(shape, dtype=torch.int32, device=experts.device)
        for shape in ((pairs,), (3, most_tiles(pairs, num_experts, rows)), (1,))
    )
    return Groups(order, tiles, num_tiles, torch.empty_like(order) if places else None)


@triton.jit
def _spread_kernel(
    x_ptr,
    y_ptr,
    places_ptr,
    experts_ptr,
    owned,
    stride,
    columns,
    TOP_K: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_predecessor(OVERLAP)
    token = tl.program_id(0)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < columns
    row = tl.load(x_ptr + token.to(tl.int64) * stride + column, mask=mask)
    store_at_places(row, y_ptr, (places_ptr, experts_ptr, owned), token, columns, column, TOP_K)


def spread(x: Tensor, places: Tensor, experts: Tensor, owned: tuple[int, int] | None) -> Tensor:
    """[P, K]: each row of x [T, K] at the places of its pairs, of experts [T, k]. owned: of `first_and_number`.

    Rows of other places, of which there are some if the weights are of some experts alone, are undefined.
    """
    (tokens, columns), top_k = x.shape, experts.shape[1]
    y = torch.empty((tokens * top_k, columns), dtype=x.dtype, device=x.device)
    tile, overlap = min(2048, triton.next_power_of_2(columns)), hardware(x.device).can_overlap
    bits = [each.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else each for each in (x, y)]
    launch(_spread_kernel, (tokens, triton.cdiv(columns, tile)))(
        *bits,
        places,
        experts,
        owned,
        x.stride(0),
        columns,
        TOP_K=top_k,
        TILE=tile,
        OVERLAP=overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
    return y


def arrange(
    experts: Tensor,
    num_here: int,
    owned: ExpertRange | None,
    dtype: torch.dtype,
    *,
    most_rows: int | None = None,
    fixed_rows: int | None = None,
    hopper: bool = False,
) -> tuple[int, Groups | None]:
    """(rows of a tile, the groups of experts [T, k] in tiles of so many; None where each pair is a tile of its own).

    num_here: of the experts whose weights are here. most_rows: that a tile may have, None for any number. fixed_rows:
    of all tiles, for any number of tokens; None for what suits that number. hopper: many pairs have tiles of
    HOPPER_ROWS, for `hopper_kernel`, and their groups have places.
    """
    rows = fixed_rows
    if rows is None:
        (tokens, top_k), num_experts = experts.shape, num_here if owned is None else owned.total
        unsorted = is_unsorted(tokens, top_k, num_experts)
        rows = choose_rows(tokens * top_k, num_experts, dtype, unsorted=unsorted)
        if unsorted:
            return rows, None
        if hopper and tokens * top_k > HOPPER_FROM * num_experts:
            first = None if owned is None else owned.first
            return HOPPER_ROWS, group(experts, num_here, HOPPER_ROWS, first, places=True)
    rows = rows if most_rows is None else min(rows, most_rows)
    return rows, group(experts, num_here, rows, None if owned is None else owned.first)
