"""Low-rank adapters inside `hopper_kernel`: the device functions that are theirs alone.

    y_t = W x_t + B_s A_s x_t,   s = slots[t]

as in `lora/lora.py`, without a launch of its own. The first programs, the shrinkers, begin with u = A_s x: they stream
rows of A as all stream W, each a part of K, and leave their sums; the one that is last adds all up in the order of
programs, and rounds. All programs add B_s u to a tile of W x a few stages before the tile is done, while the last ones
are on their way. Shrinkers are so many that all of their A is on its way from the start: what is asked for later waits
behind the weights that all programs have asked for, some 6 us on an H200.

A [S, P, R, in] is a matrix of S * P * R rows. Blocks of 16 of its rows, of those slots that tokens have, fill the
tiles that W's rows fill otherwise: the blocks of the first such slot, then those of the next one. u is [T, P, R], of
each token's own slot alone, and zero beyond its rank; its parts are fp32 and lie one behind the other.

Three counters: of consumers that have left their part of u, whether u is there, and of tiles that know it. Who is last
sets them back.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..compat import copy_async, thread_barrier
from ..device import hardware
from .plans import (
    ADAPTER_ROWS,
    ADAPTER_TAIL,
    BLOCK_ROWS,
    MAX_HOPPER_TOKENS,
    AdapterShares,
    AdapterTile,
    HopperPlan,
    share_with_adapters,
)

if TYPE_CHECKING:
    from ..lora.lora import TokenAdapters

BLOCK = gl.constexpr(BLOCK_ROWS)

ROWS = gl.constexpr(ADAPTER_ROWS)  # of a block of A, and the depth of one product with B
COLUMNS = gl.constexpr(32)  # tokens that are expanded at a time
MAX_TOKENS = gl.constexpr(MAX_HOPPER_TOKENS)


@gluon.jit
def first_unit(program, units, shares):
    """Of a program where the first ones, the shrinkers, have units of their own."""
    shrinkers, first = shares
    late = (program - shrinkers) * (units - first) // gl.maximum(gl.num_programs(0) - shrinkers, 1)
    return gl.where(program < shrinkers, program * first // shrinkers, first + late)


@gluon.jit
def program_of(unit, sizes, ADAPTERS: gl.constexpr):
    """The program that has a unit of the product."""
    _, _, units, _, shares = sizes
    programs = gl.num_programs(0)
    if ADAPTERS is None:
        return ((unit + 1) * programs - 1) // units
    else:
        shrinkers, first = shares
        early = ((unit + 1) * shrinkers - 1) // gl.maximum(first, 1)
        late = shrinkers + ((unit - first + 1) * (programs - shrinkers) - 1) // gl.maximum(units - first, 1)
        return gl.where(unit < first, early, late)


@gluon.jit
def _either(a, b):
    return a | b


@gluon.jit
def present_slots(slots_ptr, tokens):
    """The slots that tokens have, a bit each."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([MAX_TOKENS // 32], [32], [gl.num_warps()], [0])
    token = gl.arange(0, MAX_TOKENS, layout=LAYOUT)
    slot = gl.load(slots_ptr + token, mask=token < tokens, other=-1)
    return gl.reduce(gl.where(slot >= 0, 1 << gl.maximum(slot, 0), 0), 0, _either)


@gluon.jit
def _count_blocks(present, ADAPTERS: gl.constexpr):
    """Blocks of the slots in `present`."""
    SLOTS: gl.constexpr = ADAPTERS.slots
    count = present * 0
    for slot in gl.static_range(SLOTS):
        count += (present >> slot) & 1
    return count * ADAPTERS.slot_blocks


@gluon.jit
def _slot_of(number, present, ADAPTERS: gl.constexpr):
    """Slot `number` of those that are present, -1 if there are not so many."""
    SLOTS: gl.constexpr = ADAPTERS.slots
    slot, seen = number * 0 - 1, number * 0
    for candidate in gl.static_range(SLOTS):
        bit = (present >> candidate) & 1
        slot = gl.where((bit != 0) & (seen == number), candidate, slot)
        seen += bit
    return slot


@gluon.jit
def shrinks(present, work, TILE: gl.constexpr, ADAPTERS: gl.constexpr):
    """(uses of the ring for adapters, steps of each of their tiles, the first step, blocks) of a program."""
    _, _, steps, token_tiles = work
    SHRINKERS: gl.constexpr = ADAPTERS.parts
    program = gl.minimum(gl.program_id(0), SHRINKERS - 1)
    first = program * steps // SHRINKERS
    count = (program + 1) * steps // SHRINKERS - first
    blocks = _count_blocks(present, ADAPTERS)
    tiles = gl.cdiv(blocks * ROWS, TILE.consumers * TILE.blocks * BLOCK) * token_tiles
    return gl.where(gl.program_id(0) < SHRINKERS, tiles * count, 0), count, first, blocks


@gluon.jit
def copy_blocks(a_desc, first, count, present, column, full, smem, at, ADAPTERS: gl.constexpr, BLOCKS: gl.constexpr):
    """Start copies of blocks first ... of `count` in all, at most BLOCKS, to the blocks of `smem` from `at` on."""
    RANK_BLOCKS: gl.constexpr = ADAPTERS.slot_blocks // ADAPTERS.projections
    for i in gl.static_range(BLOCKS):
        if first + i < count:
            block = first + i
            slot = _slot_of(block // ADAPTERS.slot_blocks, present, ADAPTERS)
            inner = block % ADAPTERS.slot_blocks
            row = (slot * ADAPTERS.projections + inner // RANK_BLOCKS) * ADAPTERS.rank + inner % RANK_BLOCKS * ROWS
            copy_async(a_desc, [row, column], full, smem.index(at + i))


@gluon.jit
def store_shrunk(acc, first, first_token, part, present, slots_ptr, tokens, adapters, ADAPTERS: gl.constexpr):
    """Leave sums [rows of blocks first ..., tokens first_token ...] as part number `part` of u."""
    ranks_ptr, parts_ptr = adapters[1], adapters[2]
    LAYOUT: gl.constexpr = acc.type.layout
    P: gl.constexpr = ADAPTERS.projections
    R: gl.constexpr = ADAPTERS.rank
    RANK_BLOCKS: gl.constexpr = ADAPTERS.slot_blocks // P
    row = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    token = first_token + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    block = first + row // ROWS
    slot = _slot_of(block // ADAPTERS.slot_blocks, present, ADAPTERS)
    inner = block % ADAPTERS.slot_blocks
    projection = inner // RANK_BLOCKS
    rank = inner % RANK_BLOCKS * ROWS + row % ROWS
    there = (slot >= 0) & (rank < R)
    num_ranks = gl.load(ranks_ptr + slot * P + projection, mask=there, other=0)
    own = gl.load(slots_ptr + token, mask=token < tokens, other=-1)
    target = parts_ptr + ((part * tokens + token) * (P * R))[None, :] + (projection * R + rank)[:, None]
    value = gl.where((rank < num_ranks)[:, None], acc, 0.0)
    gl.store(target, value, mask=there[:, None] & (own[None, :] == slot[:, None]), cache_modifier=".cg")


@gluon.jit
def finish_shrunk(counters_ptr, tokens, adapters, CONSUMERS: gl.constexpr, ADAPTERS: gl.constexpr):
    """Called by each consumer that has left its part of u: the last one adds all up, rounds, and says so."""
    parts_ptr, u_ptr = adapters[2], adapters[3]
    PARTS: gl.constexpr = ADAPTERS.parts
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    thread_barrier()
    if gl.atomic_add(counters_ptr, 1, sem="acq_rel") == PARTS * CONSUMERS - 1:
        gl.atomic_xchg(counters_ptr, 0, sem="relaxed")
        size = tokens * (ADAPTERS.projections * ADAPTERS.rank)
        for start in range(0, size, 512):
            i = start + gl.arange(0, 512, layout=LAYOUT)
            u = gl.load(parts_ptr + i, mask=i < size, other=0.0, cache_modifier=".cg")
            for part in gl.static_range(1, PARTS):
                u += gl.load(parts_ptr + part * size + i, mask=i < size, other=0.0, cache_modifier=".cg")
            gl.store(u_ptr + i, u.to(u_ptr.dtype.element_ty), mask=i < size, cache_modifier=".cg")
        thread_barrier()
        gl.atomic_add(counters_ptr + 1, 1, sem="release")


@gluon.jit
def wait_for_shrunk(counters_ptr, tiles):
    """Wait until u is there. Called once for each of `tiles`."""
    while gl.atomic_add(counters_ptr + 1, 0, sem="acquire") == 0:
        pass
    if gl.atomic_add(counters_ptr + 2, 1, sem="relaxed") == tiles - 1:
        gl.atomic_xchg(counters_ptr + 1, 0, sem="relaxed")
        gl.atomic_xchg(counters_ptr + 2, 0, sem="relaxed")


@gluon.jit
def _load_shrunk(u_ptr, own, first_token, projection, rank, LAYOUT: gl.constexpr, ADAPTERS: gl.constexpr):
    """[ROWS, tokens of `own`], u from `rank` on, of tokens that have a slot."""
    P: gl.constexpr = ADAPTERS.projections
    R: gl.constexpr = ADAPTERS.rank
    token = first_token + gl.arange(0, own.shape[0], layout=gl.SliceLayout(0, LAYOUT))
    rank += gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    source = u_ptr + (token * (P * R))[None, :] + (projection * R + rank)[:, None]
    return gl.load(source, mask=(own >= 0)[None, :] & (rank < R)[:, None], other=0.0, cache_modifier=".cg")


@gluon.jit
def _add_columns(
    acc, weights, first_slot, first_token, projection, met, rank, present, slots_ptr, tokens, adapters,
    ADAPTERS: gl.constexpr,
):  # fmt: skip
    """acc plus the products of `weights`, those of slots first_slot ..., with u. met: how the rows' projections lie."""
    if acc.shape[1] > COLUMNS:
        # A part of the tokens at a time, so that u needs fewer registers; the parts lie in registers as the whole does.
        HALF: gl.constexpr = acc.shape[1] // 2
        LAYOUT: gl.constexpr = acc.type.layout
        low, high = acc.reshape([acc.shape[0], 2, HALF]).permute((0, 2, 1)).split()
        low, high = gl.convert_layout(low, LAYOUT), gl.convert_layout(high, LAYOUT)
        low = _add_columns(
            low, weights, first_slot, first_token, projection, met, rank, present, slots_ptr, tokens, adapters, ADAPTERS
        )
        high = _add_columns(
            high, weights, first_slot, first_token + HALF, projection, met, rank, present, slots_ptr, tokens, adapters,
            ADAPTERS,
        )  # fmt: skip
        whole = gl.join(low, high).permute((0, 2, 1)).reshape(acc.shape)
        return gl.convert_layout(whole, LAYOUT)
    else:
        u_ptr = adapters[3]
        RIGHT: gl.constexpr = gl.DotOperandLayout(1, acc.type.layout, 2)
        P: gl.constexpr = ADAPTERS.projections
        token = first_token + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, RIGHT))
        own = gl.load(slots_ptr + token, mask=token < tokens, other=-1)
        for i in gl.static_range(P):
            if met[i]:
                u = _load_shrunk(u_ptr, own, first_token, i, rank, RIGHT, ADAPTERS)
                for j in gl.static_range(len(weights)):
                    if ((present >> (first_slot + j)) & 1) != 0:
                        b = weights[j]
                        if P > 1:
                            b = gl.where((projection == i)[:, None], b, 0.0)
                        acc = mma_v2(b, gl.where((own == first_slot + j)[None, :], u, 0.0), acc)
        return acc


@gluon.jit
def add_expanded(
    acc, first, first_token, present, slots_ptr, tokens, outputs, adapters, GATED: gl.constexpr, ADAPTERS: gl.constexpr
):
    """acc [outputs first ..., tokens first_token ...] plus B u. GATED: rows of gate and up take turns, 8 by 8."""
    b_ptr, ranks_ptr, _, _, ends = adapters
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    P: gl.constexpr = ADAPTERS.projections
    R: gl.constexpr = ADAPTERS.rank
    SLOTS: gl.constexpr = ADAPTERS.slots
    ASKED: gl.constexpr = min(SLOTS, 512 // acc.shape[0])  # slots whose weights are asked for at a time
    row = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, LEFT))
    if GATED:
        output = first + row // 16 * 8 + row % 8
        inside = output < outputs
        output += row // 8 % 2 * outputs
        rows = outputs * 2
    else:
        output = first + row
        inside = output < outputs
        rows = outputs
    projection, met = row * 0, ()
    for i in gl.static_range(P):
        if GATED:
            met += (first >= 0,)  # type: ignore[assignment]
        else:
            begin = 0 if i == 0 else ends[i - 1]
            met += ((first < ends[i]) & (first + acc.shape[0] > begin),)  # type: ignore[assignment]
        if i > 0:
            projection += (output >= ends[i - 1]).to(gl.int32)
    column = gl.arange(0, ROWS, layout=gl.SliceLayout(0, LEFT))
    LAYOUT: gl.constexpr = acc.type.layout
    acc = gl.convert_layout(acc, SUMS, assert_trivial=True)
    for rank in range(0, R, ROWS):
        for first_slot in range(0, SLOTS, ASKED):
            weights = ()
            for j in gl.static_range(ASKED):
                slot = first_slot + j
                here = inside & (((present >> slot) & 1) != 0)
                num_ranks = gl.load(ranks_ptr + slot * P + projection, mask=here, other=0)
                source = b_ptr + (slot * rows + output)[:, None] * R + (rank + column)[None, :]
                b = gl.load(source, mask=here[:, None] & (rank + column < R)[None, :], other=0.0)
                weights += (gl.where((rank + column)[None, :] < num_ranks[:, None], b, 0.0),)  # type: ignore[assignment]
            acc = _add_columns(
                acc, weights, first_slot, first_token, projection, met, rank, present, slots_ptr, tokens, adapters,
                ADAPTERS,
            )  # fmt: skip
    return gl.convert_layout(acc, LAYOUT, assert_trivial=True)


def arguments(
    adapters: TokenAdapters, plan: HopperPlan, tiles: int, steps: int
) -> tuple[TensorDescriptor, tuple[Any, ...], torch.Tensor, AdapterTile, AdapterShares]:
    """What the kernel takes of the adapters of a planned product of so many tiles of so many steps, and its shares."""
    slots, (a, b, ranks, rows) = adapters
    (num_slots, projections, rank, inputs), tile = a.shape, plan[0]
    blocks = projections * triton.cdiv(rank, ADAPTER_ROWS)
    shares = share_with_adapters(plan, tiles, steps, num_slots * blocks, hardware(a.device).multiprocessors)
    matrix = a.view(-1, inputs)
    layout = gl.NVMMASharedLayout(128, 16, 2)
    a_desc = TensorDescriptor(matrix, list(matrix.shape), [inputs, 1], [ADAPTER_ROWS, tile.depth], layout)
    count = slots.shape[0] * projections * rank
    parts = torch.empty(shares.shrinkers * count, dtype=torch.float32, device=a.device)
    u = torch.empty(count, dtype=a.dtype, device=a.device)
    of_adapters = b, ranks, parts, u, tuple(itertools.accumulate(rows))
    return (
        a_desc,
        of_adapters,
        slots,
        AdapterTile(num_slots, projections, rank, blocks, shares.shrinkers, ADAPTER_TAIL),
        shares,
    )
