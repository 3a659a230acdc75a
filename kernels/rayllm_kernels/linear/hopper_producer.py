"""The producer of `hopper_kernel`: one warp that copies tiles of weights and tokens into the ring.

It fills the ring with weights before the previous kernel ends. Rows of adapters' first matrices come before all weights
(`hopper_adapters`).
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..compat import copy_async, reinterpret
from .hopper_adapters import copy_blocks, prefetch_weights, present_slots, shrinks
from .plans import ADAPTER_ROWS as ADAPTER_BLOCK
from .plans import BLOCK_ROWS

ADAPTER_ROWS = gl.constexpr(ADAPTER_BLOCK)
BLOCK = gl.constexpr(BLOCK_ROWS)
DEPTH_BYTES = gl.constexpr(128)  # of a stage, the widest swizzle
LEAD = gl.constexpr(6)  # uses of the ring before the last when the next kernel may start, to read its weights in time
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


@gluon.jit
def _copy_weights(desc, tile_row, step, full, w_smem, stage, TILE: gl.constexpr):
    ROWS: gl.constexpr = TILE.blocks * BLOCK
    CONSUMERS: gl.constexpr = TILE.consumers
    for consumer in gl.static_range(CONSUMERS):
        row, part = tile_row * CONSUMERS + consumer, w_smem.index(stage * CONSUMERS + consumer)
        if TILE.act is not None:
            copy_async(desc, [row * (ROWS // 16), 0, 0, step * TILE.depth], full, part)
        else:
            copy_async(desc, [row * ROWS, step * TILE.depth], full, part)


@gluon.jit
def _start_weights(w_desc, a_desc, use, ring, work, of_adapters, TILE: gl.constexpr, ADAPTERS: gl.constexpr):
    """Start the copies of weights of use number `use` of the ring."""
    w_smem, _, full, _ = ring
    _, end, steps, token_tiles = work
    stage = use % TILE.stages
    X_BYTES: gl.constexpr = TILE.tokens * DEPTH_BYTES
    ROWS: gl.constexpr = TILE.consumers * TILE.blocks * BLOCK
    BYTES: gl.constexpr = ROWS * DEPTH_BYTES + X_BYTES
    if ADAPTERS is None:
        unit = end - 1 - use
        hopper.mbarrier.expect(full.index(stage), BYTES)
        _copy_weights(w_desc, unit // steps // token_tiles, unit % steps, full.index(stage), w_smem, stage, TILE)
    else:
        uses, count, first, blocks, present = of_adapters
        BLOCKS: gl.constexpr = ROWS // ADAPTER_ROWS
        a_smem = reinterpret(w_smem, w_smem.dtype, [TILE.stages * BLOCKS, ADAPTER_ROWS, TILE.depth], SHARED)
        if use < uses:
            block = use // count // token_tiles * BLOCKS
            filled = gl.minimum(blocks - block, BLOCKS)
            for i in gl.static_range(1, BLOCKS + 1):  # because the number of bytes must be a constant
                hopper.mbarrier.expect(full.index(stage), X_BYTES + i * ADAPTER_ROWS * DEPTH_BYTES, pred=filled == i)
            column, at = (first + use % count) * TILE.depth, stage * BLOCKS
            copy_blocks(a_desc, block, filled, present, column, full.index(stage), a_smem, at, ADAPTERS)
        else:
            unit = end - 1 - (use - uses)
            hopper.mbarrier.expect(full.index(stage), BYTES)
            _copy_weights(w_desc, unit // steps // token_tiles, unit % steps, full.index(stage), w_smem, stage, TILE)


@gluon.jit
def _start_tokens(x_desc, use, ring, work, of_adapters, TILE: gl.constexpr, ADAPTERS: gl.constexpr):
    """Start the copy of tokens of the same."""
    _, x_smem, full, _ = ring
    _, end, steps, token_tiles = work
    uses, count, first, _, _ = of_adapters
    stage, unit = use % TILE.stages, end - 1 - (use - uses)
    token_tile, step = unit // steps % token_tiles, unit % steps
    if ADAPTERS is not None:
        token_tile = gl.where(use < uses, use // count % token_tiles, token_tile)
        step = gl.where(use < uses, first + use % count, step)
    copy_async(x_desc, [token_tile * TILE.tokens, step * TILE.depth], full.index(stage), x_smem.index(stage))


@gluon.jit
def _prefetch(work, sizes, adapters, TILE: gl.constexpr, ADAPTERS: gl.constexpr):
    """Ask L2 for what the program's tiles need of adapters' second matrices."""
    start, end, steps, token_tiles = work
    tokens, outputs, _, slots_ptr, _ = sizes
    GATED: gl.constexpr = TILE.act is not None
    ROWS: gl.constexpr = TILE.consumers * TILE.blocks * BLOCK
    WIDTH: gl.constexpr = ROWS // 2 if GATED else ROWS
    present = present_slots(slots_ptr, tokens)
    stop = end
    while stop > start:
        tile = (stop - 1) // steps
        if stop == (tile + 1) * steps:
            prefetch_weights(adapters[0], present, tile // token_tiles * WIDTH, outputs, ROWS, GATED, ADAPTERS)
        stop = gl.maximum(start, tile * steps)


@gluon.jit
def produce(w_desc, x_desc, a_desc, adapters, ring, work, sizes, TILE: gl.constexpr, ADAPTERS: gl.constexpr):
    _, _, _, free = ring
    start, end, _, _ = work
    STAGES: gl.constexpr = TILE.stages
    of_adapters = 0, 1, 0, 0, 0
    if ADAPTERS is not None:
        present = 0
        if gl.program_id(0) < ADAPTERS.parts:  # others begin with their weights at once
            present = present_slots(sizes[3], sizes[0])
        of_adapters = shrinks(present, work, TILE, ADAPTERS) + (present,)  # noqa: RUF005
    uses = of_adapters[0] + end - start
    ahead = gl.minimum(uses, STAGES)
    for use in range(ahead):
        _start_weights(w_desc, a_desc, use, ring, work, of_adapters, TILE, ADAPTERS)
    gdc_wait()
    for use in range(ahead):
        _start_tokens(x_desc, use, ring, work, of_adapters, TILE, ADAPTERS)
    if uses <= STAGES + LEAD:
        gdc_launch_dependents()
    if ADAPTERS is not None:
        _prefetch(work, sizes, adapters, TILE, ADAPTERS)
    for use in range(ahead, uses):
        if uses - use == LEAD:
            gdc_launch_dependents()
        hopper.mbarrier.wait(free.index(use % STAGES), (use // STAGES + 1) % 2)
        _start_weights(w_desc, a_desc, use, ring, work, of_adapters, TILE, ADAPTERS)
        _start_tokens(x_desc, use, ring, work, of_adapters, TILE, ADAPTERS)
