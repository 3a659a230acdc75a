"""The first half of the adapters beside `hopper_kernel`: u = A x, of few tokens, in a launch just before the product's.

    u[p, t, s * R + r] = A[s, p, r, :] x[t, :]   where slots[t] = s and r is within the slot's rank, else 0

x [T, in], A [S, P, R, in] -> u [P, T, S * R] in x's dtype. Sums are fp32. So u is more columns of x, as B [N, S * R] is
more columns of W. No row of u depends on other tokens.

A program multiplies ROWS rows of A of a slot and projection with a part of the inputs of a tile of tokens, and ends at
once if none of these has the slot. Its part of A, which no kernel writes, is on its way from the start. It leaves its
sums; the program that is last for a tile and these rows adds them up in the order of parts. The launch of the product
overlaps with all of this: it waits for u only when it has multiplied a tile. That x is there, and in which groups of
columns u has to be read, it learns from one more program, which waits for the kernel before and tells the product's
programs: `ready` has a word for each of these, who set it back themselves. Then this program fills up the groups with
zeros. In groups that no token's slot has a part in, u is left as it is.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..compile_ahead import launch
from ..device import hardware
from ..lora.lora import TokenAdapters

ROWS = 16  # rows of A, of a program
DEPTH = 256  # inputs that a program multiplies at a time
MAX_TOKENS = tl.constexpr(128)
GROUP = tl.constexpr(64)  # columns of u that the product multiplies at a time
REGISTERS = 128  # of a thread: a program fits beside one of the product


class Form(NamedTuple):
    """The compile-time argument of the kernel."""

    slots: int
    projections: int
    most: int  # ranks of a slot and projection
    rank_tiles: int  # that they fill
    parts: int  # of the inputs
    ranks: int  # of a program
    depth: int
    slices: int
    tokens: int  # of a tile
    programs: int  # of the product, padded to a power of two
    overlap: bool  # launches overlap (`dependent_launch.py`)


@triton.jit
def _wait(OVERLAP: tl.constexpr):
    if OVERLAP:
        gdc_wait()


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _groups(slot, num_ranks, FORM: tl.constexpr):
    """The groups of GROUP columns of u in which a slot has some if it has so many ranks, 1 at least: a bit each."""
    first = slot * FORM.most
    return (2 << ((first + num_ranks - 1) // GROUP)) - (1 << (first // GROUP))


@triton.jit
def _announce(slots_ptr, ranks_ptr, u_ptr, ready_ptr, tokens, programs, FORM: tl.constexpr):
    """Tell the product's programs that x is there, and which groups of columns are present: those in which a token's
    slot has some. Fill up these groups with zeros.
    """
    PROJECTIONS: tl.constexpr = FORM.projections
    PROGRAMS: tl.constexpr = FORM.programs
    WIDTH: tl.constexpr = FORM.slots * FORM.most
    TOKENS: tl.constexpr = FORM.tokens
    RANKS: tl.constexpr = FORM.ranks
    any_token = tl.arange(0, MAX_TOKENS)
    of_tokens = tl.load(slots_ptr + any_token, mask=any_token < tokens, other=-1)
    own = tl.maximum(of_tokens, 0)
    most = own * 0
    for i in tl.static_range(PROJECTIONS):
        most = tl.maximum(most, tl.load(ranks_ptr + own * PROJECTIONS + i))
    groups = tl.where((of_tokens >= 0) & (most > 0), _groups(own, tl.maximum(most, 1), FORM), 0)
    present = tl.reduce(groups, 0, _either)
    _wait(FORM.overlap)
    program = tl.arange(0, PROGRAMS)
    tl.atomic_xchg(ready_ptr + program, present | -0x80000000, mask=program < programs, sem="release")
    for slot in range(0, FORM.slots):
        is_beside = (present & _groups(slot, FORM.most, FORM)) != 0
        for start in range(0, tl.where(is_beside, tokens, 0), TOKENS):
            token = start + tl.arange(0, TOKENS)
            if tl.max((tl.load(slots_ptr + token, mask=token < tokens, other=-1) == slot).to(tl.int32), 0) == 0:
                for projection in range(0, PROJECTIONS):
                    row = (projection * tokens + token).to(tl.int64)[:, None]
                    for first in range(0, FORM.most, RANKS):
                        rank = first + tl.arange(0, RANKS)
                        wanted = (token < tokens)[:, None] & (rank < FORM.most)[None, :]
                        zeros = tl.zeros([TOKENS, RANKS], u_ptr.dtype.element_ty)
                        tl.store(u_ptr + row * WIDTH + slot * FORM.most + rank[None, :], zeros, mask=wanted)


@triton.jit
def _shrink(program, x_ptr, adapters, slots_ptr, sums_ptr, u_ptr, counters_ptr, sizes, FORM: tl.constexpr):
    """Multiply one part of the inputs with rows of A, if a token has their slot."""
    a_ptr, ranks_ptr = adapters
    stride_x, tokens, inputs = sizes
    PARTS: tl.constexpr = FORM.parts
    TOKENS: tl.constexpr = FORM.tokens
    DEPTH: tl.constexpr = FORM.depth
    SLICES: tl.constexpr = FORM.slices
    RANKS: tl.constexpr = FORM.ranks
    WIDTH: tl.constexpr = FORM.slots * FORM.most
    tiles = tl.cdiv(tokens, TOKENS)
    part, tile, group = program % PARTS, program // PARTS % tiles, program // PARTS // tiles
    rank_tile, projection = group % FORM.rank_tiles, group // FORM.rank_tiles % FORM.projections
    slot = group // (FORM.rank_tiles * FORM.projections)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    mine = tl.load(slots_ptr + token, mask=token < tokens, other=-1) == slot
    num_ranks = tl.load(ranks_ptr + slot * FORM.projections + projection)
    has_ranks = rank_tile * RANKS < num_ranks
    if (tl.max(mine.to(tl.int32), 0) > 0) & (has_ranks | (part == 0)):
        lane, depth = tl.arange(0, RANKS), part * (SLICES * DEPTH) + tl.arange(0, DEPTH)
        rank = rank_tile * RANKS + lane
        row = (slot * FORM.projections + projection).to(tl.int64) * FORM.most + rank
        a_row = a_ptr + row[:, None] * inputs + depth[None, :]
        a = ()
        for i in tl.static_range(SLICES):
            inside = depth + i * DEPTH < inputs
            mask = (rank < num_ranks)[:, None] & inside[None, :]
            a += (tl.load(a_row + i * DEPTH, mask=mask, other=0.0),)  # type: ignore[assignment]
        _wait(FORM.overlap)
        within = tl.arange(0, TOKENS)[:, None] * RANKS + lane[None, :]
        sums_ptr += (program // PARTS).to(tl.int64) * (PARTS * TOKENS * RANKS)
        # Once. In a loop, so that the compiler moves A into shared memory before it, where it takes no registers.
        for start in range(tile * TOKENS, tl.minimum(tile * TOKENS + TOKENS, tokens), TOKENS):
            x_row = x_ptr + (start + tl.arange(0, TOKENS)).to(tl.int64)[:, None] * stride_x + depth[None, :]
            acc = tl.zeros([TOKENS, RANKS], tl.float32)
            for i in tl.static_range(SLICES):
                inside = depth + i * DEPTH < inputs
                x = tl.load(x_row + i * DEPTH, mask=mine[:, None] & inside[None, :], other=0.0)
                acc = tl.dot(x, tl.trans(a[i]), acc, input_precision="ieee")
            tl.store(sums_ptr + part * (TOKENS * RANKS) + within, acc, cache_modifier=".cg")
        tl.debug_barrier()  # until all threads have stored
        counter_ptr = counters_ptr + program // PARTS
        if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == tl.where(has_ranks, PARTS - 1, 0):
            tl.store(counter_ptr, 0)
            summed = within < tl.where(has_ranks, TOKENS * RANKS, 0)
            total = tl.zeros([TOKENS, RANKS], tl.float32)
            for i in tl.static_range(PARTS):
                source = sums_ptr + i * (TOKENS * RANKS) + within
                total += tl.load(source, mask=summed, other=0.0, cache_modifier=".cg")
            u_row = (projection * tokens + token).to(tl.int64)[:, None]
            target = u_ptr + u_row * WIDTH + slot * FORM.most + rank[None, :]
            wanted = (token < tokens)[:, None] & (rank < FORM.most)[None, :]
            tl.store(target, total.to(u_ptr.dtype.element_ty), mask=wanted)


@triton.jit(do_not_specialize=["slots_ptr", "tokens", "programs"])
def _shrink_columns_kernel(
    x_ptr, adapters, slots_ptr, sums_ptr, u_ptr, counters_ptr, ready_ptr, stride_x, tokens, inputs, programs,
    FORM: tl.constexpr,
):  # fmt: skip
    """adapters: (A, ranks). sums: fp32 [groups, parts, T, ROWS]. counters: of each group, 0 between launches."""
    if FORM.overlap:
        gdc_launch_dependents()
    program = tl.program_id(0)
    if program == 0:
        _announce(slots_ptr, adapters[1], u_ptr, ready_ptr, tokens, programs, FORM)
    else:
        sizes = stride_x, tokens, inputs
        _shrink(program - 1, x_ptr, adapters, slots_ptr, sums_ptr, u_ptr, counters_ptr, sizes, FORM)


def count_counters(tokens: int, slots: int, projections: int, most: int) -> int:
    """How many a launch has need of."""
    return slots * projections * triton.cdiv(most, ROWS) * triton.cdiv(tokens, _shape(tokens)[0])


def _shape(tokens: int) -> tuple[int, int]:
    """Tokens of a tile, and slices of the inputs of a program: the more tokens, the less memory the product leaves."""
    if tokens <= 16:
        return 16, 4
    return (32, 2) if tokens <= 32 else (32, 1)


def shrink(x: Tensor, adapters: TokenAdapters, counters: Tensor, ready: Tensor, programs: int) -> Tensor:
    """u [P, T, S * R] of x [T, in], T at most MAX_TOKENS, for a product of so many programs that is launched next.

    counters: `count_counters` zeros at least; ready: a zero for each program of the product. Both int32.
    """
    slots, (a, _b, ranks, _rows) = adapters
    (num_slots, projections, most, inputs), tokens = a.shape, x.shape[0]
    (tile, slices), overlap = _shape(tokens), hardware(x.device).can_overlap
    parts, rank_tiles = triton.cdiv(inputs, slices * DEPTH), triton.cdiv(most, ROWS)
    padded = triton.next_power_of_2(programs)
    form = Form(num_slots, projections, most, rank_tiles, parts, ROWS, DEPTH, slices, tile, padded, overlap)
    groups = count_counters(tokens, *a.shape[:3])
    sums = torch.empty(groups * parts * tile * ROWS, dtype=torch.float32, device=x.device)
    u = torch.empty((projections, tokens, num_slots * most), dtype=x.dtype, device=x.device)
    launch(_shrink_columns_kernel, (1 + groups * parts,))(
        x, (a, ranks), slots, sums, u, counters, ready, x.stride(0), tokens, inputs, programs,
        FORM=form, num_warps=4, num_stages=1, maxnreg=REGISTERS, launch_pdl=overlap,
    )  # fmt: skip
    return u
