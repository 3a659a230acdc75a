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
    slot = gl.load(slots_ptr + token, mask=token < tokens, other=-1, eviction_policy="evict_last")
    return gl.reduce(gl.where(slot >= 0, 1 << gl.maximum(slot, 0), 0), 0, _either)


@gluon.jit
def _lowest(bits):
    """The number of the lowest bit that is set, negative if none is. Fewer instructions than a search."""
    return ((bits & -bits).to(gl.float32).to(gl.int32, bitcast=True) >> 23) - 127


@gluon.jit
def _count_blocks(present, ADAPTERS: gl.constexpr):
    """Blocks of the slots in `present`."""
    count = present * 0
    while present != 0:
        count += ADAPTERS.slot_blocks
        present &= present - 1
    return count


@gluon.jit
def _slot_of(number, present):
    """Slot `number` of those that are present, -1 if there are not so many."""
    slot = number * 0 - 1
    while present != 0:
        slot = gl.where(number == 0, _lowest(present), slot)
        number -= 1
        present &= present - 1
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
def copy_blocks(a_desc, first, count, present, column, full, smem, at, ADAPTERS: gl.constexpr):
    """Start copies of `count` blocks from number `first` on to the blocks of `smem` from `at` on."""
    RANK_BLOCKS: gl.constexpr = ADAPTERS.slot_blocks // ADAPTERS.projections
    for _ in range(first // ADAPTERS.slot_blocks):
        present &= present - 1
    inner = first % ADAPTERS.slot_blocks
    for i in range(count):
        row = (_lowest(present) * ADAPTERS.projections + inner // RANK_BLOCKS) * ADAPTERS.rank
        copy_async(a_desc, [row + inner % RANK_BLOCKS * ROWS, column], full, smem.index(at + i))
        inner += 1
        if inner == ADAPTERS.slot_blocks:
            inner = 0
            present &= present - 1


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
    slot = _slot_of(block // ADAPTERS.slot_blocks, present)
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
def _outputs_of(row, first, outputs, GATED: gl.constexpr):
    """(rows of B, whether they are there, rows of B in all) of a tile's rows. GATED: 8 of gate, 8 of up take turns."""
    if GATED:
        output = first + row // 16 * 8 + row % 8
        return output + row // 8 % 2 * outputs, output < outputs, outputs * 2
    else:
        return first + row, first + row < outputs, outputs


@gluon.jit
def prefetch_weights(
    b_ptr, present, first, outputs, TILE_ROWS: gl.constexpr, GATED: gl.constexpr, ADAPTERS: gl.constexpr
):
    """Ask L2 for the tile's rows of B, of which its consumers will have need."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    row = gl.arange(0, TILE_ROWS, layout=LAYOUT)
    output, _, rows = _outputs_of(row, first, outputs, GATED)
    output = gl.minimum(output, rows - 1)
    while present != 0:
        source = b_ptr + (_lowest(present) * rows + output) * ADAPTERS.rank
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$1];\n\tmov.b32 $0, 0;", "=r,l", [source], dtype=gl.int32, is_pure=False, pack=1
        )
        present &= present - 1


@gluon.jit
def _load_weights(slot, place, projection, rank, adapters, LAYOUT: gl.constexpr, ADAPTERS: gl.constexpr):
    """[rows of a tile, ROWS], B of a slot from `rank` on, zero beyond its own; all of it if the slot is negative."""
    output, inside, rows = place
    b_ptr, ranks_ptr = adapters[0], adapters[1]
    inside = inside & (slot >= 0)
    column = rank + gl.arange(0, ROWS, layout=gl.SliceLayout(0, LAYOUT))
    num_ranks = gl.load(ranks_ptr + slot * ADAPTERS.projections + projection, mask=inside, other=0)
    source = b_ptr + (slot * rows + output)[:, None] * ADAPTERS.rank + column[None, :]
    b = gl.load(source, mask=inside[:, None] & (column < ADAPTERS.rank)[None, :], other=0.0)
    return gl.where(column[None, :] < num_ranks[:, None], b, 0.0)


@gluon.jit
def _load_shrunk(u_ptr, token, projection, rank, tokens, LAYOUT: gl.constexpr, ADAPTERS: gl.constexpr):
    """[ROWS, tokens], u from `rank` on."""
    rank += gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    source = u_ptr + (token * (ADAPTERS.projections * ADAPTERS.rank))[None, :]
    there = (token < tokens)[None, :] & (rank < ADAPTERS.rank)[:, None]
    return gl.load(source + (projection * ADAPTERS.rank + rank)[:, None], mask=there, other=0.0, cache_modifier=".cg")


@gluon.jit
def _add_columns(
    acc, slots, weights, first_token, projection, met, rank, slots_ptr, tokens, adapters, ADAPTERS: gl.constexpr
):
    """acc plus the products of the weights of two slots with u. met: the first and the last projection of the rows."""
    if acc.shape[1] > COLUMNS:
        # A part of the tokens at a time, so that u needs fewer registers; the parts lie in registers as the whole does.
        HALF: gl.constexpr = acc.shape[1] // 2
        LAYOUT: gl.constexpr = acc.type.layout
        low, high = acc.reshape([acc.shape[0], 2, HALF]).permute((0, 2, 1)).split()
        low, high = gl.convert_layout(low, LAYOUT), gl.convert_layout(high, LAYOUT)
        middle = first_token + HALF
        low = _add_columns(
            low, slots, weights, first_token, projection, met, rank, slots_ptr, tokens, adapters, ADAPTERS
        )
        high = _add_columns(high, slots, weights, middle, projection, met, rank, slots_ptr, tokens, adapters, ADAPTERS)
        whole = gl.join(low, high).permute((0, 2, 1)).reshape(acc.shape)
        return gl.convert_layout(whole, LAYOUT)
    else:
        RIGHT: gl.constexpr = gl.DotOperandLayout(1, acc.type.layout, 2)
        token = first_token + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, RIGHT))
        own = gl.load(slots_ptr + token, mask=token < tokens, other=-1)
        first_projection, last_projection = met
        for i in range(first_projection, last_projection + 1):
            u = _load_shrunk(adapters[3], token, i, rank, tokens, RIGHT, ADAPTERS)
            for j in gl.static_range(2):
                if slots[j] >= 0:
                    b = gl.where((projection == i)[:, None], weights[j], 0.0)
                    acc = mma_v2(b, gl.where((own == slots[j])[None, :], u, 0.0), acc)
        return acc


@gluon.jit
def add_expanded(
    acc, first, first_token, present, slots_ptr, tokens, outputs, adapters, GATED: gl.constexpr, ADAPTERS: gl.constexpr
):
    """acc [outputs first ..., tokens first_token ...] plus B u. GATED: as in `_outputs_of`.

    The code should be short: what is not in the caches for instructions waits behind the weights as all else.
    """
    ends = adapters[4]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    LAYOUT: gl.constexpr = acc.type.layout
    place = _outputs_of(gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, LEFT)), first, outputs, GATED)
    projection, first_projection, last_projection = place[0] * 0, first * 0, first * 0
    for i in gl.static_range(ADAPTERS.projections - 1):
        projection += (place[0] >= ends[i]).to(gl.int32)
        first_projection += (first >= ends[i]).to(gl.int32)
        last_projection += (first + (acc.shape[0] - 1) >= ends[i]).to(gl.int32)
    if GATED:
        first_projection, last_projection = first * 0, first * 0 + (ADAPTERS.projections - 1)
    met = first_projection, last_projection
    acc = gl.convert_layout(acc, SUMS, assert_trivial=True)
    for rank in range(0, ADAPTERS.rank, ROWS):
        left = present
        while left != 0:
            rest = left & (left - 1)
            slots = _lowest(left), _lowest(rest)
            low = _load_weights(slots[0], place, projection, rank, adapters, LEFT, ADAPTERS)
            high = _load_weights(slots[1], place, projection, rank, adapters, LEFT, ADAPTERS)
            acc = _add_columns(
                acc, slots, (low, high), first_token, projection, met, rank, slots_ptr, tokens, adapters, ADAPTERS
            )
            left = rest & (rest - 1)
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
