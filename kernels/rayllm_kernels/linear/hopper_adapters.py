"""Low-rank adapters inside `hopper_kernel`: more columns of x and of W.

    y = [x | u] [W | B]^T,   u = A x of each token's slot, 0 elsewhere

u [P, T, S * R] comes from `shrink_kernel`, whose launch is the one before; B is [N, S * R]. So what adapters add to a
tile of outputs takes a few more uses of the ring, after the tile's last weights, in the program that stores the tile:
one for every DEPTH columns in which a token's slot has any. Consumers see no difference.

Projections of one input have a u of their own each. A tile that holds outputs of several, as all gated ones do, has
these uses for each of them: outside of its own rows the copies of B are out of bounds, and so zero.

The kernel before that of u, which wrote x, is done when `ready` says so. u is there when the launch before has ended,
which the producer waits for when it comes to the first of these uses.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..compat import copy_async
from ..hopper import copy_rows, expect_rows, row_box
from .plans import BLOCK_ROWS, MAX_PROJECTIONS, HopperTile

if TYPE_CHECKING:
    from ..lora.lora import AdapterSlots

BLOCK = gl.constexpr(BLOCK_ROWS)
# Units before the last when the next kernel may start: more than without adapters, for one more has to start before the
# next product.
LEAD = gl.constexpr(20)
DEPTH_BYTES = gl.constexpr(128)


@gluon.jit
def tell(present, words, told):
    """By the producer: let the consumers know which groups of columns are present."""
    ONE_WARP: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    words.store(gl.full([32], 0, gl.int32, layout=ONE_WARP) + present)
    hopper.mbarrier.arrive(told.index(0))


@gluon.jit
def count_columns(words, told):
    """By consumers, once: wait until they know, and count the groups."""
    EVERY_WARP: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    hopper.mbarrier.wait(told.index(0), 0)
    present = gl.max(words.load(EVERY_WARP), 0)
    count = present * 0
    while present != 0:
        count += 1
        present &= present - 1
    return count


@gluon.jit
def _lowest(bits):
    """The number of the lowest bit that is set. Fewer instructions than a search."""
    return ((bits & -bits).to(gl.float32).to(gl.int32, bitcast=True) >> 23) - 127


@gluon.jit
def _meets(number: gl.constexpr, tile_row, ends, TILE: gl.constexpr):
    """Whether a tile has outputs of a projection."""
    if TILE.act is not None:
        return tile_row >= 0
    else:
        ROWS: gl.constexpr = TILE.consumers * TILE.blocks * BLOCK
        met = tile_row * ROWS < ends[number]
        if number > 0:
            met = met & ((tile_row + 1) * ROWS > ends[number - 1])
        return met


@gluon.jit
def count_met(tile_row, ends, TILE: gl.constexpr, PROJECTIONS: gl.constexpr):
    """How many projections a tile has outputs of."""
    count = tile_row * 0
    for number in gl.static_range(PROJECTIONS):
        count += _meets(number, tile_row, ends, TILE).to(gl.int32)
    return count


@gluon.jit
def _copy_weights(desc, tile_row, column, first_row, half, full, w_smem, stage, TILE: gl.constexpr):
    """Start copies of a tile's rows of W, or of B, whose first row is the product's row `first_row`."""
    ROWS: gl.constexpr = TILE.blocks * BLOCK
    CONSUMERS: gl.constexpr = TILE.consumers
    for consumer in gl.static_range(CONSUMERS):
        row, part = tile_row * CONSUMERS + consumer, w_smem.index(stage * CONSUMERS + consumer)
        if TILE.act is not None:
            copy_async(desc, [row * (ROWS // 16), half, 0, column], full, part)
        else:
            copy_async(desc, [row * ROWS - first_row, column], full, part)


@gluon.jit
def _copy_adapters(
    b_descs, u_desc, tile, use, present, tokens, ends, ring, token_tiles, TILE: gl.constexpr, PROJECTIONS: gl.constexpr
):
    """Start the copies of what adapters add to a tile, in uses of the ring from number `use` on; returns the next."""
    w_smem, x_boxes, full, free = ring
    STAGES: gl.constexpr = TILE.stages
    TOKENS: gl.constexpr = TILE.tokens
    WEIGHTS: gl.constexpr = TILE.consumers * TILE.blocks * BLOCK * DEPTH_BYTES
    BOXES: gl.constexpr = TOKENS // u_desc.block_type.shape[0]
    tile_row, first_token = tile // token_tiles, tile % token_tiles * TILE.tokens
    for number in gl.static_range(PROJECTIONS):
        if _meets(number, tile_row, ends, TILE):
            first_row = 0
            if number > 0:
                first_row = ends[number - 1]
            left = present
            while left != 0:
                column, stage = _lowest(left) * TILE.depth, use % STAGES
                barrier = full.index(stage)
                hopper.mbarrier.wait(free.index(stage), (use // STAGES + 1) % 2)
                rows, row = tokens - first_token, number * tokens + first_token
                expect_rows(barrier, rows, u_desc, TOKENS, WEIGHTS)
                _copy_weights(b_descs[number], tile_row, column, first_row, -number, barrier, w_smem, stage, TILE)
                copy_rows(u_desc, row, column, rows, barrier, x_boxes, stage * BOXES, TOKENS)
                use += 1
                left &= left - 1
    return use


@gluon.jit
def _copy_units(descs, unit, count, use, start, place, ring, steps, tokens, TILE: gl.constexpr):
    """Start the copies of `count` units of one tile, from `unit` down, in uses of the ring from number `use` on."""
    w_smem, x_boxes, full, free = ring
    tile_row, first_token = place
    STAGES: gl.constexpr = TILE.stages
    TOKENS: gl.constexpr = TILE.tokens
    WEIGHTS: gl.constexpr = TILE.consumers * TILE.blocks * BLOCK * DEPTH_BYTES
    BOXES: gl.constexpr = TOKENS // descs[1].block_type.shape[0]
    rows = tokens - first_token
    for i in range(count):
        if unit - i - start + 1 == LEAD:
            gdc_launch_dependents()
        column, stage = (unit - i) % steps * TILE.depth, (use + i) % STAGES
        hopper.mbarrier.wait(free.index(stage), ((use + i) // STAGES + 1) % 2)
        barrier = full.index(stage)
        expect_rows(barrier, rows, descs[1], TOKENS, WEIGHTS)
        _copy_weights(descs[0], tile_row, column, 0, 0, barrier, w_smem, stage, TILE)
        copy_rows(descs[1], first_token, column, rows, barrier, x_boxes, stage * BOXES, TOKENS)


@gluon.jit
def produce(descs, ring, work, adapters, tokens, TILE: gl.constexpr, PROJECTIONS: gl.constexpr):
    """`hopper_kernel._produce` where tokens have adapters. descs: of W, of x, of each projection's B, of u."""
    w_desc, x_desc, b_descs, u_desc = descs
    w_smem, x_boxes, full, _ = ring
    start, end, steps, token_tiles = work
    ready_ptr, ends, words, told = adapters
    STAGES: gl.constexpr = TILE.stages
    TOKENS: gl.constexpr = TILE.tokens
    DEPTH: gl.constexpr = TILE.depth
    WEIGHTS: gl.constexpr = TILE.consumers * TILE.blocks * BLOCK * DEPTH_BYTES
    BOXES: gl.constexpr = TOKENS // x_desc.block_type.shape[0]
    tile = (end - 1) // steps
    tile_row, first_token = tile // token_tiles, tile % token_tiles * TILE.tokens
    ahead = gl.minimum(end - gl.maximum(start, tile * steps), STAGES)  # units of the first tile
    for use in range(ahead):
        expect_rows(full.index(use), tokens - first_token, x_desc, TOKENS, WEIGHTS)
        _copy_weights(w_desc, tile_row, (end - 1 - use) % steps * DEPTH, 0, 0, full.index(use), w_smem, use, TILE)
    ready_ptr += gl.program_id(0)
    present = gl.atomic_xchg(ready_ptr, 0, sem="acquire")
    while present == 0:
        present = gl.atomic_xchg(ready_ptr, 0, sem="acquire")
    for use in range(ahead):
        column = (end - 1 - use) % steps * DEPTH
        copy_rows(x_desc, first_token, column, tokens - first_token, full.index(use), x_boxes, use * BOXES, TOKENS)
    present &= 0x7FFFFFFF
    tell(present, words, told)
    if end - start - ahead < LEAD:
        gdc_launch_dependents()
    use, stop, unit = ahead, end, end - 1 - ahead
    while stop > start:
        tile = (stop - 1) // steps
        place = tile // token_tiles, tile % token_tiles * TILE.tokens
        first_unit = gl.maximum(start, tile * steps)
        count = unit + 1 - first_unit
        _copy_units(descs, unit, count, use, start, place, ring, steps, tokens, TILE)
        use += count
        if stop == (tile + 1) * steps:
            gdc_wait()
            use = _copy_adapters(
                b_descs, u_desc, tile, use, present, tokens, ends, ring, token_tiles, TILE, PROJECTIONS
            )
        stop, unit = first_unit, first_unit - 1
    gdc_wait()


def descriptors(
    weights: AdapterSlots, u: Tensor, tile: HopperTile, layouts: tuple[gl.NVMMASharedLayout, gl.NVMMASharedLayout]
) -> tuple[tuple[TensorDescriptor | None, ...], TensorDescriptor]:
    """Of each projection's rows of B, MAX_PROJECTIONS in all, and of u. layouts: of weights, gated and not."""
    (outputs, slots, most), rows = weights.b.shape, tile.blocks * BLOCK_ROWS
    width, found, first = slots * most, [], 0
    for count in weights.rows:
        base = weights.b[first : first + count]
        if tile.act:
            groups, halves = outputs // 16, 3 - len(weights.rows)
            shape, strides = [groups, halves, 8, width], [8 * width, groups * 8 * width, width, 1]
            found.append(TensorDescriptor(base, shape, strides, [rows // 16, 2, 8, tile.depth], layouts[0]))
        else:
            found.append(TensorDescriptor(base, [count, width], [width, 1], [rows, tile.depth], layouts[1]))
        first += count
    box = [row_box(tile.tokens), tile.depth]
    of_u = TensorDescriptor(u, [u.shape[0] * u.shape[1], width], [width, 1], box, layouts[1])
    return (*found, *[None] * (MAX_PROJECTIONS - len(found))), of_u


def ends_of(rows: tuple[int, ...]) -> tuple[int, ...]:
    """The output behind the last one of each projection."""
    return tuple(itertools.accumulate(rows))
