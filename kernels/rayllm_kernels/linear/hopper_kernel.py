"""Projections for Hopper GPUs: a matrix product whose weights stream through tensor copies and warp groups.

    y = x W^T + bias,   or   y = act(x G^T) * (x U^T)   where W = [G; U]

x [M, K], W [N, K] (gated: [2 N, K]), bias [N] -> y [M, N]; fp32 sums, rounded once. x and W may both be e4m3 with
scales, as in `quantised/fp8_product_kernel.py`: a token's and a row's for finished sums, or one for each block of K.
Sums of e4m3 with a scale a row may have the bits that tensor cores add with (`HopperTile.own_sums`).

The weights are the first operand of the products: 64 of their rows make a tile of a warp group, however few the tokens,
which are the second operand. A gated tile interleaves eight rows of G and eight of U, so that a thread holds both
factors of an output.

Work is cut into units, 128 bytes of K of one tile, and every program takes the same number of consecutive units,
wherever a tile ends (stream-K: Osama, Merrill, Cecka, Garland, Owens, 2023). A program that ends inside a tile leaves
its sums to the program that holds the tile's last unit, which adds them in the order of programs: results do not vary.
Programs run through their units backwards, so that what they leave is there before it is wanted, and they wait for
programs of lower number only, which start first.

One warp of a program, the producer, copies tiles into a ring in shared memory, and fills it with weights before the
previous kernel ends; one or two warp groups, the consumers, multiply. Barriers come in pairs: `full` says that a stage
holds data, `free` that the consumers are done with it. The n-th use of a stage completes phase n, and a wait names the
parity of the phase.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..compat import copy_async, reinterpret, thread_barrier
from ..compile_ahead import launch
from ..hopper import activate, barriers, copy_rows, expect_rows, row_box
from . import shrink_kernel
from .hopper_adapters import count_columns, count_met, descriptors, ends_of, produce
from .plans import BLOCK_ROWS, MAX_GROUPS, HopperPlan, HopperTile

if TYPE_CHECKING:
    from ..lora.lora import TokenAdapters
    from ..quantised.fp8_operands import Fp8Rows, Fp8Weight

BLOCK = gl.constexpr(BLOCK_ROWS)
DEPTH_BYTES = gl.constexpr(128)  # of a stage, the widest swizzle
CHUNK = gl.constexpr(64)  # tokens stored at a time
LEAD = gl.constexpr(6)  # uses of the ring before the last when the next kernel may start, to read its weights in time
MAX_PROGRAMS = 1024
SHARING_REGISTERS = 128  # of a thread, so that programs of the launches before and after fit beside one
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
SHARED_GATED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 4))
SHARED_FP8 = gl.constexpr(gl.NVMMASharedLayout(128, 8, 2))


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
def _produce(w_desc, x_desc, ring, work, tokens, TILE: gl.constexpr):
    w_smem, x_boxes, full, free = ring
    start, end, steps, token_tiles = work
    TOKENS: gl.constexpr = TILE.tokens
    STAGES: gl.constexpr = TILE.stages
    DEPTH: gl.constexpr = TILE.depth
    WEIGHTS: gl.constexpr = TILE.consumers * TILE.blocks * BLOCK * DEPTH_BYTES
    BOXES: gl.constexpr = TOKENS // x_desc.block_type.shape[0]
    ahead = gl.minimum(end - start, STAGES)
    for use in range(ahead):
        unit = end - 1 - use
        left = tokens - unit // steps % token_tiles * TOKENS
        expect_rows(full.index(use), left, x_desc, TOKENS, WEIGHTS)
        _copy_weights(w_desc, unit // steps // token_tiles, unit % steps, full.index(use), w_smem, use, TILE)
    gdc_wait()
    for use in range(ahead):
        unit = end - 1 - use
        first = unit // steps % token_tiles * TOKENS
        copy_rows(x_desc, first, unit % steps * DEPTH, tokens - first, full.index(use), x_boxes, use * BOXES, TOKENS)
    if end - start <= STAGES + LEAD:
        gdc_launch_dependents()
    for use in range(ahead, end - start):
        if end - start - use == LEAD:
            gdc_launch_dependents()
        unit = end - 1 - use
        tile, step, stage = unit // steps, unit % steps, use % STAGES
        first = tile % token_tiles * TOKENS
        hopper.mbarrier.wait(free.index(stage), (use // STAGES + 1) % 2)
        expect_rows(full.index(stage), tokens - first, x_desc, TOKENS, WEIGHTS)
        _copy_weights(w_desc, tile // token_tiles, step, full.index(stage), w_smem, stage, TILE)
        copy_rows(x_desc, first, step * DEPTH, tokens - first, full.index(stage), x_boxes, stage * BOXES, TOKENS)


@gluon.jit
def _produce_all(descs, ring, work, adapters, tokens, TILE: gl.constexpr, PROJECTIONS: gl.constexpr):
    if PROJECTIONS == 0:
        _produce(descs[0], descs[1], ring, work, tokens, TILE)
    else:
        produce(descs, ring, work, adapters, tokens, TILE, PROJECTIONS)


@gluon.jit
def _multiply(use, count, ring, CONSUMER: gl.constexpr, TILE: gl.constexpr):
    """fp32 [ROWS, TOKENS], the products of `count` stages from use number `use` on."""
    ROWS: gl.constexpr = TILE.blocks * BLOCK
    STAGES: gl.constexpr = TILE.stages
    TOKENS: gl.constexpr = TILE.tokens
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 32 if TILE.scale_rows else 16])
    w_smem, x_smem, full, free = ring
    acc = gl.zeros([ROWS, TOKENS], gl.float32, layout=ACC)
    for i in range(count):
        stage = (use + i) % STAGES
        hopper.mbarrier.wait(full.index(stage), (use + i) // STAGES % 2)
        weights = w_smem.index(stage * TILE.consumers + CONSUMER).reshape([ROWS, TILE.depth])
        acc = hopper.warpgroup_mma(weights, x_smem.index(stage).permute((1, 0)), acc, is_async=True)
        acc = hopper.warpgroup_mma_wait(1, deps=(acc,))
        hopper.mbarrier.arrive(free.index((use + i + STAGES - 1) % STAGES), pred=i > 0)
    acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
    hopper.mbarrier.arrive(free.index((use + count - 1) % STAGES))
    return acc


@gluon.jit
def _multiply_fp8(use, count, last, place, scales, ring, CONSUMER: gl.constexpr, TILE: gl.constexpr):
    """The same of e4m3, whose stages end with number `last` of K. place: (first row, first token, tokens, outputs).

    The instruction adds with fewer bits than fp32 has, so each stage's sums begin at zero and are added to the others
    here, times their block's scales if there are any.
    """
    ROWS: gl.constexpr = TILE.blocks * BLOCK
    STAGES: gl.constexpr = TILE.stages
    TOKENS: gl.constexpr = TILE.tokens
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 32])
    w_smem, x_smem, full, free = ring
    x_scales_ptr, weight_scales_ptr, groups, x_scale_stride, x_group_stride = scales
    first, first_token, tokens, outputs = place
    token = gl.minimum(first_token + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, ACC)), tokens - 1)
    row = gl.minimum(first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, ACC)), outputs - 1)
    x_scales_ptr += token * x_scale_stride
    weight_scales_ptr += row // TILE.scale_rows * groups
    acc = gl.zeros([ROWS, TOKENS], gl.float32, layout=ACC)
    for i in range(count):
        stage = (use + i) % STAGES
        if TILE.scale_rows > 1:
            x_scales = gl.load(x_scales_ptr + (last - i) * x_group_stride)
            weight_scales = gl.load(weight_scales_ptr + (last - i))
        hopper.mbarrier.wait(full.index(stage), (use + i) // STAGES % 2)
        weights = w_smem.index(stage * TILE.consumers + CONSUMER)
        part = gl.zeros([ROWS, TOKENS], gl.float32, layout=ACC)
        part = hopper.warpgroup_mma(
            weights, x_smem.index(stage).permute((1, 0)), part, use_acc=False, max_num_imprecise_acc=TILE.depth,
            is_async=True,
        )  # fmt: skip
        part = hopper.warpgroup_mma_wait(0, deps=(part,))
        hopper.mbarrier.arrive(free.index(stage))
        if TILE.scale_rows > 1:
            acc += part * weight_scales[:, None] * x_scales[None, :]
        else:
            acc += part
    return acc


@gluon.jit
def _halves(tile):
    """Its columns' lower and upper halves, in the layout of a tile of that width."""
    HALF: gl.constexpr = tile.shape[1] // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, tile.type.layout.instr_shape[2]])
    low, high = tile.reshape([BLOCK, 2, HALF]).permute((0, 2, 1)).split()
    return gl.convert_layout(low, LAYOUT), gl.convert_layout(high, LAYOUT)


@gluon.jit
def _columns(acc):
    """Its parts of at most CHUNK columns."""
    if acc.shape[1] > CHUNK:
        return _halves(acc)
    else:
        return (acc,)


@gluon.jit
def _parts(acc):
    """Its parts of 64 rows and at most CHUNK columns, row by row."""
    LAYOUT: gl.constexpr = acc.type.layout
    if acc.shape[0] > BLOCK:
        top, bottom = acc.reshape([2, BLOCK, acc.shape[1]]).permute((1, 2, 0)).split()
        return _columns(gl.convert_layout(top, LAYOUT)) + _columns(gl.convert_layout(bottom, LAYOUT))
    else:
        return _columns(acc)


@gluon.jit
def _places(acc):
    """Where a consumer's partial sums lie in memory: each warp touches whole cache lines."""
    LAYOUT: gl.constexpr = acc.type.layout
    row = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, LAYOUT))[:, None]
    token = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, LAYOUT))[None, :]
    return token // 8 * (8 * acc.shape[0]) + row * 8 + token % 8


@gluon.jit
def _store(part, y_smem, y_ptr, bias_ptr, scales, first_token, first, tokens, outputs, TILE: gl.constexpr):
    """Store outputs `first`... of tokens `first_token`...: through shared memory, so that threads write 16 bytes."""
    LAYOUT: gl.constexpr = part.type.layout
    ACT: gl.constexpr = TILE.act
    GATED: gl.constexpr = ACT is not None
    WIDTH: gl.constexpr = BLOCK // 2 if GATED else BLOCK
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    if TILE.scale_rows == 1:
        x_scales_ptr, weight_scales_ptr, _, _, _ = scales
        row = first + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, LAYOUT))
        column = first_token + gl.arange(0, part.shape[1], layout=gl.SliceLayout(0, LAYOUT))
        part *= gl.load(weight_scales_ptr + row, mask=row < outputs, other=0.0)[:, None]
        part *= gl.load(x_scales_ptr + column, mask=column < tokens, other=0.0)[None, :]
    if bias_ptr is not None:
        row = first + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, LAYOUT))
        part += gl.load(bias_ptr + row, mask=row < outputs, other=0.0).to(gl.float32)[:, None]
    if GATED:
        gate, up = part.reshape([BLOCK // 16, 2, 8, part.shape[1]]).permute((0, 2, 3, 1)).split()
        part = (activate(gate, ACT) * up).reshape([BLOCK // 2, part.shape[1]])
    y_smem.store(part.to(y_smem.dtype).permute((1, 0)))
    token = first_token + gl.arange(0, y_smem.shape[0], layout=gl.SliceLayout(1, WIDE))[:, None]
    output = first + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, WIDE))[None, :]
    gl.store(y_ptr + token * outputs + output, y_smem.load(WIDE), mask=(token < tokens) & (output < outputs))


@gluon.jit
def _consume(
    y_ptr, bias_ptr, scales, shared, y_smem, ring, work, sizes, adapters,
    CONSUMER: gl.constexpr, TILE: gl.constexpr, PROJECTIONS: gl.constexpr,
):  # fmt: skip
    partial_ptr, flags_ptr = shared
    start, end, steps, token_tiles = work
    tokens, outputs, units = sizes
    TOKENS: gl.constexpr = TILE.tokens
    CONSUMERS: gl.constexpr = TILE.consumers
    ACT: gl.constexpr = TILE.act
    GATED: gl.constexpr = ACT is not None
    ROWS: gl.constexpr = TILE.blocks * BLOCK
    WIDTH: gl.constexpr = BLOCK // 2 if GATED else BLOCK
    SIZE: gl.constexpr = CONSUMERS * ROWS * TOKENS
    COLUMNS: gl.constexpr = max(1, TOKENS // CHUNK)
    program, programs = gl.program_id(0), gl.num_programs(0)
    partial_ptr += CONSUMER * (ROWS * TOKENS)
    if scales is not None:
        gdc_wait()  # the tokens' scales are of the kernel before
    if PROJECTIONS > 0:
        columns = count_columns(adapters[2], adapters[3])
    use, stop = 0, end
    while stop > start:
        tile = (stop - 1) // steps
        tile_start, tile_end = tile * steps, (tile + 1) * steps
        first_unit = gl.maximum(start, tile_start)
        first_token = tile % token_tiles * TOKENS
        first = (tile // token_tiles * CONSUMERS + CONSUMER) * (TILE.blocks * WIDTH)
        count = stop - first_unit
        if PROJECTIONS > 0:  # noqa: SIM102, it is the compiler's
            if stop == tile_end:
                count += columns * count_met(tile // token_tiles, adapters[1], TILE, PROJECTIONS)
        if scales is None or TILE.own_sums:
            acc = _multiply(use, count, ring, CONSUMER, TILE)
        else:
            place = (first, first_token, tokens, outputs)
            last = (stop - 1) % steps
            acc = _multiply_fp8(use, count, last, place, scales, ring, CONSUMER, TILE)
        if stop < tile_end:
            gl.store(partial_ptr + program * SIZE + _places(acc), acc, cache_modifier=".cg")
            owner = (tile_end * programs - 1) // units
            thread_barrier()
            gl.atomic_add(flags_ptr + owner * CONSUMERS + CONSUMER, 1, sem="release")
        else:
            helper = ((tile_start + 1) * programs - 1) // units
            flag_ptr = flags_ptr + program * CONSUMERS + CONSUMER
            if helper < program:
                while gl.atomic_add(flag_ptr, 0, sem="acquire") < program - helper:
                    pass
                gl.atomic_xchg(flag_ptr, 0, sem="relaxed")
                for other in range(helper, program):
                    acc += gl.load(partial_ptr + other * SIZE + _places(acc), cache_modifier=".cg")
            parts = _parts(acc)
            for i in gl.static_range(len(parts)):
                token, output = first_token + i % COLUMNS * CHUNK, first + i // COLUMNS * WIDTH
                _store(parts[i], y_smem, y_ptr, bias_ptr, scales, token, output, tokens, outputs, TILE)
        use, stop = use + count, first_unit


@gluon.jit(do_not_specialize=["x_scale_stride", "x_group_stride", "tokens", "units", "steps", "token_tiles"])
def _linear_hopper_kernel(
    w_desc, x_desc, y_ptr, bias_ptr, scales, x_scale_stride, x_group_stride, shared, tokens, outputs, units, steps,
    token_tiles, b_desc_0, b_desc_1, b_desc_2, b_desc_3, u_desc, ready_ptr, ends,
    TILE: gl.constexpr, PROJECTIONS: gl.constexpr,
):  # fmt: skip
    """scales: (of x, of W, how many a row of W has), None without. shared: pointers to (partial sums, flags).

    units: of the whole product. steps: units of a tile. Of adapters, None without: descriptors of each projection's B
    and of u, `ready` of `shrink_kernel`, and where each projection's outputs end.
    """
    STAGES: gl.constexpr = TILE.stages
    CONSUMERS: gl.constexpr = TILE.consumers
    GATED: gl.constexpr = TILE.act is not None
    DTYPE: gl.constexpr = w_desc.dtype
    OUT: gl.constexpr = y_ptr.dtype.element_ty
    DEPTH: gl.constexpr = TILE.depth
    LAYOUT: gl.constexpr = SHARED if TILE.scale_rows == 0 else SHARED_FP8
    WIDTH: gl.constexpr = BLOCK // 2 if GATED else BLOCK
    ROWS: gl.constexpr = TILE.blocks * BLOCK
    PRODUCER: gl.constexpr = 24 if PROJECTIONS == 0 else 40  # registers
    if GATED:
        w_smem = gl.allocate_shared_memory(DTYPE, [STAGES * CONSUMERS, ROWS // 16, 2, 8, DEPTH], SHARED_GATED)
    else:
        w_smem = gl.allocate_shared_memory(DTYPE, [STAGES * CONSUMERS, ROWS, DEPTH], LAYOUT)
    BOX: gl.constexpr = x_desc.block_type.shape[0]
    x_boxes = gl.allocate_shared_memory(DTYPE, [STAGES * (TILE.tokens // BOX), BOX, DEPTH], LAYOUT)
    x_smem = reinterpret(x_boxes, DTYPE, [STAGES, TILE.tokens, DEPTH], LAYOUT)
    Y_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(WIDTH * 2, 16, 2)
    y_smem = gl.allocate_shared_memory(OUT, [CONSUMERS, min(TILE.tokens, CHUNK), WIDTH], Y_LAYOUT)
    full, free = barriers(STAGES, 1), barriers(STAGES, CONSUMERS)
    ring = (w_smem, x_smem, full, free)
    filled = (w_smem, x_boxes, full, free)  # the same, as the producer fills it
    added, b_descs = None, None
    if PROJECTIONS > 0:
        words = gl.allocate_shared_memory(gl.int32, [32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        added = ready_ptr, ends, words, barriers(1, 1)
        b_descs = b_desc_0, b_desc_1, b_desc_2, b_desc_3
    hopper.fence_async_shared()
    if scales is not None:
        scales = (scales[0], scales[1], scales[2], x_scale_stride, x_group_stride)
    program = gl.program_id(0)
    start = program * units // gl.num_programs(0)
    end = (program + 1) * units // gl.num_programs(0)
    work, sizes = (start, end, steps, token_tiles), (tokens, outputs, units)
    y_0 = y_smem.index(0)
    copied = w_desc, x_desc, b_descs, u_desc
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_consume, (y_ptr, bias_ptr, scales, shared, y_0, ring, work, sizes, added, 0, TILE, PROJECTIONS)),
                (_produce_all, (copied, filled, work, added, tokens, TILE, PROJECTIONS)),
            ],
            [1],
            [PRODUCER],
        )
    else:
        y_1 = y_smem.index(1)
        gl.warp_specialize(
            [
                (_consume, (y_ptr, bias_ptr, scales, shared, y_0, ring, work, sizes, added, 0, TILE, PROJECTIONS)),
                (_consume, (y_ptr, bias_ptr, scales, shared, y_1, ring, work, sizes, added, 1, TILE, PROJECTIONS)),
                (_produce_all, (copied, filled, work, added, tokens, TILE, PROJECTIONS)),
            ],
            [4, 1],
            [(3 * TILE.registers - PRODUCER) // 16 * 8, PRODUCER],
        )


@cache
def flags(device: torch.device) -> Tensor:
    """A counter for each consumer of a program, then a word for each program and counters of `shrink_kernel`.

    All are zero between kernels: who waits for one sets it back.

    All calls on a device share them, so these must follow one another in one stream, or wait for one another. Who takes
    memory from a pool that captured graphs use too must have called `ops.prepare` outside of it.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("the first projection on a device must not be captured: its counters would not be there yet")
    return torch.zeros(3 * MAX_PROGRAMS + MAX_GROUPS, dtype=torch.int32, device=device)


def linear_hopper(
    x: Tensor,
    weight: Tensor,
    plan: HopperPlan,
    bias: Tensor | None = None,
    *,
    act: str | None,
    out: Tensor | None = None,
    adapters: TokenAdapters | None = None,
) -> Tensor:
    """y of checked arguments that `hopper_takes`, by at most the planned programs, which are MAX_PROGRAMS or fewer.

    adapters: which `hopper_takes_adapters`; the sum is rounded once, u before.
    """
    outputs = weight.shape[0] // 2 if act else weight.shape[0]
    y = torch.empty((x.shape[0], outputs), dtype=x.dtype, device=x.device) if out is None else out
    _launch(x, weight, plan, bias, None, y, plan[0]._replace(act=act), adapters)
    return y


def linear_hopper_fp8(
    x: Fp8Rows, weight: Fp8Weight, plan: HopperPlan, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The same of e4m3, for checked arguments that `plans.plan_fp8_hopper` takes."""
    values, outputs = x.values, weight.values.shape[0]
    y = torch.empty((values.shape[0], outputs), dtype=dtype, device=values.device)
    tile = plan[0]._replace(depth=DEPTH_BYTES.value, scale_rows=weight.rows)
    _launch(values, weight.values, plan, bias, (x.scales, weight.scales, weight.scales.shape[1]), y, tile)
    return y


def _launch(
    x: Tensor,
    weight: Tensor,
    plan: HopperPlan,
    bias: Tensor | None,
    scales: tuple[Tensor, Tensor, int] | None,
    y: Tensor,
    tile: HopperTile,
    adapters: TokenAdapters | None = None,
) -> None:
    if adapters is not None and tile.blocks == 1:
        tile = tile._replace(registers=min(tile.registers, SHARING_REGISTERS))
    (tokens, inputs), (_, programs), depth = x.shape, plan, tile.depth
    rows, stride, outputs = tile.blocks * BLOCK_ROWS, weight.stride(0), y.shape[1]
    layout = (SHARED if scales is None else SHARED_FP8).value
    if tile.act:
        shape, strides = [outputs // 8, 2, 8, inputs], [8 * stride, outputs * stride, stride, 1]
        w_desc = TensorDescriptor(weight, shape, strides, [rows // 16, 2, 8, depth], SHARED_GATED.value)
    else:
        w_desc = TensorDescriptor(weight, [outputs, inputs], [stride, 1], [rows, depth], layout)
    x_desc = TensorDescriptor(x, [tokens, inputs], [x.stride(0), 1], [row_box(tile.tokens), depth], layout)
    steps, token_tiles = triton.cdiv(inputs, depth), triton.cdiv(tokens, tile.tokens)
    units = triton.cdiv(weight.shape[0], tile.rows) * token_tiles * steps
    programs = min(units, programs)
    # One sum for each entry of a program's tile: every program leaves at most one tile to another.
    partial = torch.empty(programs * tile.rows * tile.tokens, dtype=torch.float32, device=x.device)
    shared = partial, flags(x.device)
    of_adapters: tuple[object, ...] = (None,) * 7
    projections = 0
    if adapters is not None:
        weights = adapters.weights
        ready, counters = shared[1][2 * MAX_PROGRAMS :], shared[1][3 * MAX_PROGRAMS :]
        u = shrink_kernel.shrink(x, adapters, counters, ready, programs)
        b_descs, u_desc = descriptors(weights, u, tile, (SHARED_GATED.value, SHARED.value))
        of_adapters = *b_descs, u_desc, ready, ends_of(weights.rows)
        projections = len(weights.rows)
    scale_strides = (0, 0) if scales is None else scales[0].stride()
    options = {"num_warps": 4, "maxnreg": tile.registers, "launch_pdl": True}
    launch(_linear_hopper_kernel, (programs,))(
        w_desc, x_desc, y, bias, scales, *scale_strides, shared, tokens, outputs, units, steps, token_tiles,
        *of_adapters, TILE=tile, PROJECTIONS=projections, **options,
    )  # fmt: skip
