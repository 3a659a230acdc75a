"""The Triton kernels of `add_adapters`: shrink, and expand and add.

    u[c, t, p, :] = A[s, p, :, c-th part] x[t, c-th part],   y[t, n] += B[n, s, :] (u[0, t, p, :] + u[1, t, p, :] ...)

s = slots[t], p the projection that n belongs to. x [T, in], A [S, P, R, in], B [N, S, R], y [T, N], u fp32
[C, T, P, R], all sums fp32. The inputs are cut into C parts, a number that follows from their length alone, and the
parts are added in order: so a few tokens, too, keep many multiprocessors busy, and no token's sum depends on the batch.

A program has a tile of tokens and one slot, and ends at once if no token of the tile has the slot. Among decodes each
adapter's weights are thus read once a tile; chunks of prompts mostly have one slot a tile. A token's u is written by
the program of its slot alone, up to the slot's rank, and read no further.

What was there before the step (slots, ranks and the first weights) is asked for before the previous kernel ends.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compile_ahead import launch
from ..dependent_launch import wait_for_predecessor
from ..device import hardware
from .lora import AdapterSlots

TOKENS = 16  # of a tile: the least that tensor cores take, and the same for all batches
RANKS = 16  # of a tile
DEPTH = 256  # bytes of a row that a step multiplies
PART_STEPS = 8  # steps of a part of the inputs
MAX_PARTS = 16
OUTPUTS = 128  # of a tile


@triton.jit(do_not_specialize=["slots_ptr", "tokens"])
def _shrink_kernel(
    x_ptr, a_ptr, slots_ptr, ranks_ptr, u_ptr, stride_x, tokens, inputs, part_inputs,
    SLOTS: tl.constexpr, PROJECTIONS: tl.constexpr, MAX_RANK: tl.constexpr,
    TOKENS: tl.constexpr, RANKS: tl.constexpr, DEPTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Programs: (tile of tokens, slot), (projection, tile of ranks), part of the inputs."""
    tile, slot = tl.program_id(0) // SLOTS, tl.program_id(0) % SLOTS
    rank_tiles: tl.constexpr = (MAX_RANK + RANKS - 1) // RANKS
    projection, rank_tile = tl.program_id(1) // rank_tiles, tl.program_id(1) % rank_tiles
    token = tile * TOKENS + tl.arange(0, TOKENS)
    mine = tl.load(slots_ptr + token, mask=token < tokens, other=-1) == slot
    num_ranks = tl.load(ranks_ptr + slot * PROJECTIONS + projection)
    num_ranks = tl.where(tl.max(mine.to(tl.int32), 0) > 0, num_ranks, 0)
    rank = rank_tile * RANKS + tl.arange(0, RANKS)
    there = rank < num_ranks
    depth, part = tl.arange(0, DEPTH), tl.program_id(2)
    begin, end = part * part_inputs, min((part + 1) * part_inputs, inputs)
    row = (slot * PROJECTIONS + projection).to(tl.int64) * MAX_RANK + rank
    a_ptr += row[:, None] * inputs + depth[None, :]
    x_ptr += token.to(tl.int64)[:, None] * stride_x + depth[None, :]
    inside = (begin + depth < inputs)[None, :]
    a = tl.load(a_ptr + begin, mask=there[:, None] & inside, other=0.0)
    wait_for_predecessor(OVERLAP)
    if rank_tile * RANKS < num_ranks:
        x = tl.load(x_ptr + begin, mask=mine[:, None] & inside, other=0.0)
        acc = tl.dot(x, tl.trans(a), input_precision="ieee")
        for start in range(begin + DEPTH, end, DEPTH):
            inside = (start + depth < inputs)[None, :]
            a = tl.load(a_ptr + start, mask=there[:, None] & inside, other=0.0)
            x = tl.load(x_ptr + start, mask=mine[:, None] & inside, other=0.0)
            acc = tl.dot(x, tl.trans(a), acc, input_precision="ieee")
        target = (part.to(tl.int64) * tokens + token) * PROJECTIONS + projection
        tl.store(u_ptr + target[:, None] * MAX_RANK + rank[None, :], acc, mask=mine[:, None] & there[None, :])


@triton.jit(do_not_specialize=["slots_ptr", "tokens"])
def _expand_kernel(
    u_ptr, b_ptr, slots_ptr, ranks_ptr, y_ptr, stride_y, tokens, bounds,
    SLOTS: tl.constexpr, PROJECTIONS: tl.constexpr, MAX_RANK: tl.constexpr, PARTS: tl.constexpr,
    TOKENS: tl.constexpr, RANKS: tl.constexpr, OUTPUTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Programs: (tile of tokens, slot), tile of outputs. bounds: of each projection (its first tile, its first output,
    the output behind its last one)."""
    tile, slot = tl.program_id(0) // SLOTS, tl.program_id(0) % SLOTS
    output_tile = tl.program_id(1)
    projection = 0
    first_tile, first, end = bounds[0]
    for number in tl.static_range(1, PROJECTIONS):
        tile_of, first_of, end_of = bounds[number]
        is_later = output_tile >= tile_of
        projection = tl.where(is_later, number, projection)
        first_tile = tl.where(is_later, tile_of, first_tile)
        first = tl.where(is_later, first_of, first)
        end = tl.where(is_later, end_of, end)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    mine = tl.load(slots_ptr + token, mask=token < tokens, other=-1) == slot
    num_ranks = tl.load(ranks_ptr + slot * PROJECTIONS + projection)
    num_ranks = tl.where(tl.max(mine.to(tl.int32), 0) > 0, num_ranks, 0)
    output = first + (output_tile - first_tile) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = output < end
    rank = tl.arange(0, RANKS)
    b_ptr += (output.to(tl.int64) * SLOTS + slot)[:, None] * MAX_RANK + rank[None, :]
    b = tl.load(b_ptr, mask=inside[:, None] & (rank < num_ranks)[None, :], other=0.0)
    wait_for_predecessor(OVERLAP)
    if num_ranks > 0:
        u_row = token.to(tl.int64) * PROJECTIONS + projection
        acc = tl.zeros([TOKENS, OUTPUTS], tl.float32)
        for start in range(0, num_ranks, RANKS):
            there = start + rank < num_ranks
            wanted = mine[:, None] & there[None, :]
            u = tl.zeros([TOKENS, RANKS], tl.float32)
            for part in tl.static_range(PARTS):
                at = (u_row + tokens.to(tl.int64) * (part * PROJECTIONS)) * MAX_RANK
                u += tl.load(u_ptr + at[:, None] + (start + rank)[None, :], mask=wanted, other=0.0)
            acc = tl.dot(u.to(b.dtype), tl.trans(b), acc, input_precision="ieee")
            following = (start + RANKS + rank < num_ranks)[None, :]  # not read behind the last one
            b = tl.load(b_ptr + start + RANKS, mask=inside[:, None] & following, other=0.0)
        target = y_ptr + token.to(tl.int64)[:, None] * stride_y + output[None, :]
        wanted = mine[:, None] & inside[None, :]
        y = tl.load(target, mask=wanted, other=0.0).to(tl.float32) + acc
        tl.store(target, y.to(y_ptr.dtype.element_ty), mask=wanted)


def add_adapters(x: Tensor, y: Tensor, slots: Tensor, weights: AdapterSlots) -> None:
    """y += B A x of each token's slot; the arguments are checked."""
    a, b, ranks, rows = weights
    (num_slots, projections, max_rank, inputs), tokens = a.shape, x.shape[0]
    depth = DEPTH // x.element_size()
    parts = max(1, min(MAX_PARTS, triton.cdiv(inputs, PART_STEPS * depth)))
    part_inputs = triton.cdiv(triton.cdiv(inputs, parts), depth) * depth
    parts = triton.cdiv(inputs, part_inputs)
    u = torch.empty((parts, tokens, projections, max_rank), dtype=torch.float32, device=x.device)
    overlap = hardware(x.device).can_overlap
    tiles = triton.cdiv(tokens, TOKENS) * num_slots
    sizes = {"SLOTS": num_slots, "PROJECTIONS": projections, "MAX_RANK": max_rank, "TOKENS": TOKENS, "RANKS": RANKS}
    options = {"OVERLAP": overlap, "num_warps": 4, "launch_pdl": overlap}
    rank_tiles = projections * triton.cdiv(max_rank, RANKS)
    launch(_shrink_kernel, (tiles, rank_tiles, parts))(
        x, a, slots, ranks, u, x.stride(0), tokens, inputs, part_inputs, DEPTH=depth, num_stages=4, **sizes, **options
    )
    bounds, tile, first = [], 0, 0
    for width in rows:
        bounds.append((tile, first, first + width))
        tile, first = tile + triton.cdiv(width, OUTPUTS), first + width
    launch(_expand_kernel, (tiles, tile))(
        u, b, slots, ranks, y, y.stride(0), tokens, tuple(bounds), PARTS=parts, OUTPUTS=OUTPUTS, **sizes, **options
    )
