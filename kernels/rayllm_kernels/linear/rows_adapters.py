"""What `rows_kernel` adds for tokens that have adapters (`lora/lora.py`), in the launch of the product itself.

    u[t, p, c, r] = A[s, p, r, c-th part] x[t, c-th part]
    added[t, n] = B[n, s, :] (u[t, p, 0, :] + u[t, p, 1, :] + ...)

s = slots[t], p the projection that output n belongs to, x after the norm's weight but before its factor, which the
finished sums of the product and of this have in common. All of it is fp32; u is not rounded. The inputs are cut into
parts by their length alone, and the parts are added in order: no token's result depends on the others.

The launch has three kinds of programs. Those that shrink come first, each for one u; then those that expand, for some
outputs of one token; then those of the product, which look at what they add when they have multiplied: it has long been
there then. So a product's program has no more to do than one small load. Programs wait for such of lower numbers only,
which start first.

Nobody waits for a flag. Words in memory are EMPTY until they are written, as in `all_reduce_kernel`, and EMPTY again
when the launch has ended, for the next one. What is added to an output has one reader, which empties it; those who read
u count themselves, and the last one empties all of it. Launches that share this memory must follow one another.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dependent_launch import wait_for_predecessor
from ..lora.lora import AdapterSlots
from . import plans

EMPTY = tl.constexpr(-1)  # 0xFFFFFFFF: a NaN that no arithmetic makes
OTHER_NAN = tl.constexpr(0x7FFFFFFF)
EMPTIED = tl.constexpr(1024)  # words at a time
VECTOR_BYTES = 16  # of a row of A, by one thread
DEPTH_BYTES = 4096  # of a row of A, by a program
EXPANDED = 2048  # entries of B, by a program


class Ranks(NamedTuple):
    """The compile-time argument: how the adapters' part of a launch is cut."""

    slots: int
    projections: int
    most: int  # ranks of a slot and projection
    padded: int  # to a power of two
    parts: int  # of the inputs
    part_inputs: int
    depth: int  # inputs that a program multiplies at a time
    vector: int  # of these, by one thread
    outputs: int  # of a program that expands
    threads: int  # of a program
    lanes: int  # for u of one token and projection, a power of two


class Room(NamedTuple):
    """u [T, P, parts, R], what is added [T, N], both EMPTY between launches, and a counter, then zero."""

    shrunk: Tensor
    added: Tensor
    counter: Tensor


@cache
def room(device: torch.device) -> Room:
    """Of all launches on a device, which must follow one another. `ops.prepare` says when it must be made."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the first projection on a device must not be captured: room for adapters would not be there"
        )
    shrunk, added = (
        torch.full((words,), EMPTY.value, dtype=torch.int32, device=device)
        for words in (plans.MAX_SHRUNK, plans.MAX_ADDED)
    )
    return Room(shrunk, added, torch.zeros(1, dtype=torch.int32, device=device))


def arguments(weights: AdapterSlots, tokens: int, num_warps: int) -> tuple[tuple[object, ...], Ranks, int]:
    """(the kernel's argument `adapters`, its form, how many programs shrink and expand)."""
    a, b, ranks, rows = weights
    slots, projections, most, inputs = a.shape
    vector = VECTOR_BYTES // a.element_size()
    depth = min(DEPTH_BYTES // a.element_size(), max(vector, triton.next_power_of_2(inputs)))
    part = triton.cdiv(triton.cdiv(inputs, plans.ADAPTER_PARTS), depth) * depth
    parts, padded = triton.cdiv(inputs, part), triton.next_power_of_2(most)
    outputs, lanes = max(16, EXPANDED // padded), triton.next_power_of_2(parts * most)
    form = Ranks(slots, projections, most, padded, parts, part, depth, vector, outputs, 32 * num_warps, lanes)
    bounds, tile, first = [], 0, 0
    for width in rows:
        bounds.append((tile, first, first + width))
        tile, first = tile + triton.cdiv(width, outputs), first + width
    shrinking, expanding = tokens * projections * most * parts, tokens * tile
    return (a, b, ranks, tuple(bounds), *room(a.device), shrinking, expanding), form, shrinking + expanding


@triton.jit
def _word(x):
    """The bits of fp32 numbers, which are never EMPTY."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits == EMPTY, OTHER_NAN, bits)


@triton.jit
def _look(place, mask):
    """Words that may be EMPTY; 0 where mask is not.

    There must be as many as a program has threads: Triton takes threads that hold the same word to see the same.
    """
    return tl.load(place, mask=mask, other=0, volatile=True)


@triton.jit
def shrink(program, x_ptr, norm, slots_ptr, adapters, strides, sizes, OVERLAP: tl.constexpr, RANKS: tl.constexpr):
    """Compute one u: of a token, a row of A and a part of the inputs."""
    residual_ptr, norm_ptr, _eps = norm
    a_ptr, _b_ptr, ranks_ptr, _bounds, u_ptr, _added_ptr, _counter_ptr, _shrinking, _expanding = adapters
    stride_x, stride_residual, _stride_weight = strides
    tokens, inputs, _outputs = sizes
    PROJECTIONS: tl.constexpr = RANKS.projections
    ROWS: tl.constexpr = PROJECTIONS * RANKS.most
    DEPTH: tl.constexpr = RANKS.depth
    VEC: tl.constexpr = RANKS.vector
    token, rest = program % tokens, program // tokens
    row, part = rest % ROWS, rest // ROWS
    projection, rank = row // RANKS.most, row % RANKS.most
    slot = tl.load(slots_ptr + token)
    num_ranks = tl.load(ranks_ptr + tl.maximum(slot, 0) * PROJECTIONS + projection)
    begin, end = part * RANKS.part_inputs, tl.minimum((part + 1) * RANKS.part_inputs, inputs)
    a_end = tl.where(rank < num_ranks, end, 0)
    depth = tl.arange(0, DEPTH)
    a_ptr += (tl.maximum(slot, 0).to(tl.int64) * ROWS + row) * inputs + depth
    a = tl.load(a_ptr + begin, mask=begin + depth < a_end, other=0.0)
    wait_for_predecessor(OVERLAP)
    if slot >= 0:
        acc = tl.zeros([DEPTH // VEC], tl.float32)
        for start in range(begin, end, DEPTH):
            at = start + depth
            x = tl.load(x_ptr + token * stride_x + at, mask=at < end, other=0.0)
            if residual_ptr is not None:
                residual = tl.load(residual_ptr + token * stride_residual + at, mask=at < end, other=0.0)
            if norm_ptr is not None:
                norm_weight = tl.load(norm_ptr + at, mask=at < end, other=0.0)
            following = tl.load(a_ptr + start + DEPTH, mask=at + DEPTH < a_end, other=0.0)
            wide = x.to(tl.float32)
            if residual_ptr is not None:
                wide = (wide + residual.to(tl.float32)).to(x.dtype).to(tl.float32)
            if norm_ptr is not None:
                wide *= norm_weight.to(tl.float32)
            acc += tl.sum(tl.reshape(a.to(tl.float32) * wide, [DEPTH // VEC, VEC]), 1)
            a = following
        place = (token * PROJECTIONS + projection) * RANKS.parts + part
        tl.store(u_ptr + place * RANKS.most + rank, _word(tl.sum(acc, 0)))


@triton.jit
def expand(program, slots_ptr, adapters, sizes, OVERLAP: tl.constexpr, RANKS: tl.constexpr):
    """Compute what is added to some outputs of a token, of one projection: 0 if it has no adapter."""
    _a_ptr, b_ptr, ranks_ptr, bounds, u_ptr, added_ptr, counter_ptr, _shrinking, expanding = adapters
    tokens, _inputs, _outputs = sizes
    PROJECTIONS: tl.constexpr = RANKS.projections
    WORDS: tl.constexpr = RANKS.parts * RANKS.most
    LANES: tl.constexpr = max(RANKS.threads, RANKS.lanes)
    OUTPUTS: tl.constexpr = RANKS.outputs
    RANKS_PADDED: tl.constexpr = RANKS.padded
    PARTS: tl.constexpr = RANKS.parts
    token, tile = program % tokens, program // tokens
    projection = 0
    first_tile, first, end = bounds[0]
    for number in tl.static_range(1, PROJECTIONS):
        tile_of, first_of, end_of = bounds[number]
        is_later = tile >= tile_of
        projection = tl.where(is_later, number, projection)
        first_tile = tl.where(is_later, tile_of, first_tile)
        first = tl.where(is_later, first_of, first)
        end = tl.where(is_later, end_of, end)
    slot = tl.load(slots_ptr + token)
    num_ranks = tl.load(ranks_ptr + tl.maximum(slot, 0) * PROJECTIONS + projection)
    output = first + (tile - first_tile) * OUTPUTS + tl.arange(0, OUTPUTS)
    rank = tl.arange(0, RANKS.padded)[None, :]
    wanted = (output < end)[:, None] & (rank < num_ranks)
    b_row = output.to(tl.int64) * RANKS.slots + tl.maximum(slot, 0)
    b = tl.load(b_ptr + b_row[:, None] * RANKS.most + rank, mask=wanted, other=0.0)
    wait_for_predecessor(OVERLAP)
    added = tl.zeros([OUTPUTS], tl.float32)
    if slot >= 0:
        own_u_ptr = u_ptr + (token * PROJECTIONS + projection) * WORDS
        lane = tl.arange(0, LANES)
        while tl.max((_look(own_u_ptr + lane, lane < WORDS) == EMPTY).to(tl.int32)) != 0:
            pass
        u = tl.zeros([1, RANKS_PADDED], tl.float32)
        for part in tl.static_range(PARTS):
            words = tl.load(own_u_ptr + part * RANKS.most + rank, mask=rank < RANKS.most, other=0, volatile=True)
            u += words.to(tl.float32, bitcast=True)
        added = tl.sum(b.to(tl.float32) * u, 1)
    tl.store(added_ptr + token * bounds[PROJECTIONS - 1][2] + output, _word(added), mask=output < end)
    tl.debug_barrier()  # until all threads have read u
    if tl.atomic_add(counter_ptr, 1, sem="relaxed") == expanding - 1:
        words = tokens * (PROJECTIONS * WORDS)
        for start in range(0, words, EMPTIED):
            at = start + tl.arange(0, EMPTIED)
            tl.store(u_ptr + at, tl.full([EMPTIED], EMPTY, tl.int32), mask=at < words)
        tl.store(counter_ptr, 0)


@triton.jit
def take(program, adapters, sizes, FORM: tl.constexpr, RANKS: tl.constexpr):
    """What is added to a program's outputs [TOKENS, ROWS]; to gates and what they multiply [TOKENS, ROWS, 2]."""
    added_ptr = adapters[5]
    tokens, _inputs, outputs = sizes
    TOKENS: tl.constexpr = FORM.tokens
    ROWS: tl.constexpr = FORM.rows
    HALVES: tl.constexpr = 1 if FORM.act is None else 2
    SIZE: tl.constexpr = TOKENS * ROWS * HALVES
    LANES: tl.constexpr = max(RANKS.threads, SIZE)
    lane = tl.arange(0, LANES)
    half, row, token = lane % HALVES, lane // HALVES % ROWS, lane // (HALVES * ROWS)
    output = program * ROWS + row
    place, mask = added_ptr + (token * HALVES + half) * outputs + output, (token < tokens) & (output < outputs)
    words = _look(place, mask)
    while tl.max((words == EMPTY).to(tl.int32)) != 0:
        words = _look(place, mask)
    tl.store(place, tl.full([LANES], EMPTY, tl.int32), mask=mask)
    added = words.to(tl.float32, bitcast=True)
    if HALVES == 1:
        return tl.sum(tl.reshape(added, [LANES // SIZE, TOKENS, ROWS]), 0)
    else:
        return tl.sum(tl.reshape(added, [LANES // SIZE, TOKENS, ROWS, 2]), 0)
