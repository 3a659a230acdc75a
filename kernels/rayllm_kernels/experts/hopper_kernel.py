"""The experts' products of many tokens for Hopper GPUs: persistent grouped products, fed by tensor copies.

    h[p] = act(G_e x[t], U_e x[t]),   z[q] = round(D_e h[p])

The list of pairs and its tiles of rows are those of `products_kernel.py`, and so is the mathematics; with e4m3 on both
sides, `quantised/fp8_experts_kernel.py` has it. The first product reads its rows of x from a copy in which each token
lies at the places of its pairs (`spread`): tensor copies take rows that lie side by side, and a tile is read once for
every tile of outputs.

A tile is 64 rows for each of three warp groups, the consumers, by one or two parts of 128 outputs: gate and up, whose
sums one thread has, or neighbours. A consumer whose rows are all past the end of the expert's multiplies nothing. One
warp, the producer, copies both operands into a ring in shared memory, which runs on from tile to tile: while the
consumers store, the next tile's first stages arrive. L2 has not the rate for smaller tiles.

Programs stay resident and take every n-th tile, few tiles of rows through all tiles of outputs at a time. Barriers come
in pairs, as in `linear/hopper_kernel.py`.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..compat import copy_async
from ..compile_ahead import launch
from ..device import hardware
from ..hopper import activate, barriers, sigmoid
from .group_kernel import Groups
from .plans import HOPPER_OUTPUTS, HOPPER_ROWS

BLOCK = gl.constexpr(64)  # rows of a consumer, by one instruction
CONSUMERS = gl.constexpr(HOPPER_ROWS // 64)
OUTPUTS = gl.constexpr(HOPPER_OUTPUTS)  # of a part
LINE = gl.constexpr(128)  # bytes of a row in a stage, the widest swizzle
TOGETHER = gl.constexpr(8)  # tiles of rows that go through all tiles of outputs at a time
E4M3_MAX = gl.constexpr(448.0)
# Two numbers of fp32 to bf16 and back: single ones would take a unit that makes 16 a clock.
TO_BF16 = gl.constexpr(
    "{ .reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; shl.b32 $0, both, 16; and.b32 $1, both, 0xffff0000; }"
)
LEAST_PEAK = gl.constexpr(1e-12)  # as in `quantised/fp8.py`
RESERVED = 2560  # bytes for barriers and for what threads exchange
REGISTERS = 128  # of a thread when a program starts: the consumers take the producer's


class Form(NamedTuple):
    """The compile-time argument of the kernel."""

    parts: int  # of OUTPUTS rows of the weights, in a tile
    stages: int  # of the ring
    depth: int  # inputs of a stage
    even: bool  # tiles of outputs end where the outputs end
    act: str | None  # of the first product; None makes it the second
    alpha: float  # these of the activation "clamped"
    limit: float
    top_k: int
    scaled: str  # "" in the model's dtype; e4m3: "rows" if x has a scale a row, "groups" if one for each `depth` inputs
    dtype: str  # of the model


@gluon.jit
def _find_tile(index, groups, grid):
    """(expert, tile of outputs, first place, end of the expert's places) of tile number `index`, or of the last one."""
    _, tiles_ptr, _, _ = groups
    row_tiles, columns, most = grid
    index = gl.maximum(gl.minimum(index, row_tiles * columns - 1), 0)
    first = index // (TOGETHER * columns) * TOGETHER
    width = gl.maximum(gl.minimum(row_tiles - first, TOGETHER), 1)
    inside = index % (TOGETHER * columns)
    tile = first + inside % width
    expert = gl.load(tiles_ptr + tile)
    place = gl.load(tiles_ptr + most + tile)
    end = gl.load(tiles_ptr + 2 * most + tile)
    return expert, inside // width, place, end


@gluon.jit
def _produce(x_desc, w_desc, ring, groups, sizes, FORM: gl.constexpr):
    x_smem, w_smem, full, free = ring
    outputs, columns, steps, most = sizes
    PARTS: gl.constexpr = FORM.parts
    BYTES: gl.constexpr = (CONSUMERS * BLOCK + PARTS * OUTPUTS) * LINE
    gdc_wait()
    row_tiles = gl.load(groups[2])
    grid = (row_tiles, columns, most)
    use = most * 0
    programs = gl.num_programs(0)
    following = _find_tile(gl.program_id(0), groups, grid)
    for index in range(gl.program_id(0), row_tiles * columns, programs):
        expert, column, place, _ = following
        following = _find_tile(index + programs, groups, grid)
        if FORM.act is not None:
            row, to_next = expert * (2 * outputs) + column * OUTPUTS, outputs
        else:
            row, to_next = expert * outputs + column * (PARTS * OUTPUTS), outputs * 0 + OUTPUTS
        for step in range(steps):
            stage = use % FORM.stages
            hopper.mbarrier.wait(free.index(stage), (use // FORM.stages + 1) % 2)
            hopper.mbarrier.expect(full.index(stage), BYTES)
            for part in gl.static_range(PARTS):
                at = [row + part * to_next, step * FORM.depth]
                copy_async(w_desc, at, full.index(stage), w_smem.index(stage * PARTS + part))
            for consumer in gl.static_range(CONSUMERS):
                at = [place + consumer * BLOCK, step * FORM.depth]
                copy_async(x_desc, at, full.index(stage), x_smem.index(stage * CONSUMERS + consumer))
            use += 1
    gdc_launch_dependents()


@gluon.jit
def _pass(use, steps, ring, FORM: gl.constexpr):
    """Leave the stages to the others."""
    _, _, full, free = ring
    for i in range(steps):
        stage = (use + i) % FORM.stages
        hopper.mbarrier.wait(full.index(stage), (use + i) // FORM.stages % 2)
        hopper.mbarrier.arrive(free.index(stage))


@gluon.jit
def _begin(use, ring, CONSUMER: gl.constexpr, FORM: gl.constexpr):
    """The products of the stage of use number `use`, on their way: fp32 [BLOCK, OUTPUTS] of each part."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OUTPUTS, FORM.depth // 4])
    x_smem, w_smem, full, _ = ring
    stage = use % FORM.stages
    first = gl.zeros([BLOCK, OUTPUTS], gl.float32, layout=ACC)
    second = gl.zeros([BLOCK, OUTPUTS], gl.float32, layout=ACC)
    hopper.mbarrier.wait(full.index(stage), use // FORM.stages % 2)
    x = x_smem.index(stage * CONSUMERS + CONSUMER)
    weights = w_smem.index(stage * FORM.parts).permute((1, 0))
    first = hopper.warpgroup_mma(x, weights, first, use_acc=False, is_async=True)
    if FORM.parts == 2:
        weights = w_smem.index(stage * FORM.parts + 1).permute((1, 0))
        second = hopper.warpgroup_mma(x, weights, second, use_acc=False, is_async=True)
    return first, second


@gluon.jit
def _multiply(first, second, use, steps, ring, CONSUMER: gl.constexpr, FORM: gl.constexpr):
    """fp32 [BLOCK, OUTPUTS] of each of two parts: the products of `steps` stages, of which `_begin` began the first."""
    STAGES: gl.constexpr = FORM.stages
    x_smem, w_smem, full, free = ring
    first, second = hopper.warpgroup_mma_wait(2, deps=(first, second))
    for i in range(1, steps):
        stage = (use + i) % STAGES
        hopper.mbarrier.wait(full.index(stage), (use + i) // STAGES % 2)
        x = x_smem.index(stage * CONSUMERS + CONSUMER)
        first = hopper.warpgroup_mma(x, w_smem.index(stage * 2).permute((1, 0)), first, is_async=True)
        second = hopper.warpgroup_mma(x, w_smem.index(stage * 2 + 1).permute((1, 0)), second, is_async=True)
        first, second = hopper.warpgroup_mma_wait(2, deps=(first, second))
        hopper.mbarrier.arrive(free.index((use + i + STAGES - 1) % STAGES))
    first, second = hopper.warpgroup_mma_wait(0, deps=(first, second))
    hopper.mbarrier.arrive(free.index((use + steps - 1) % STAGES))
    return first, second


@gluon.jit
def _multiply_scaled(sums, use, steps, x_scales_ptr, ring, CONSUMER: gl.constexpr, FORM: gl.constexpr):
    """The same of one part, each stage's sums times the scales of its rows of x, of which a row has `steps`."""
    STAGES: gl.constexpr = FORM.stages
    x_smem, w_smem, full, free = ring
    scales = gl.load(x_scales_ptr)
    following = gl.load(x_scales_ptr + gl.minimum(1, steps - 1))
    sums = hopper.warpgroup_mma_wait(0, deps=(sums,))
    hopper.mbarrier.arrive(free.index(use % STAGES))
    acc = sums * scales[:, None]
    for i in range(1, steps):
        stage = (use + i) % STAGES
        scales = following
        following = gl.load(x_scales_ptr + gl.minimum(i + 1, steps - 1))
        hopper.mbarrier.wait(full.index(stage), (use + i) // STAGES % 2)
        x = x_smem.index(stage * CONSUMERS + CONSUMER)
        sums = hopper.warpgroup_mma(x, w_smem.index(stage).permute((1, 0)), sums, use_acc=False, is_async=True)
        sums = hopper.warpgroup_mma_wait(0, deps=(sums,))
        hopper.mbarrier.arrive(free.index(stage))
        acc += sums * scales[:, None]
    return acc


@gluon.jit
def _load_columns(pointer, first_output, outputs, FORM: gl.constexpr):
    """What belongs to a part's outputs, of the weights' scales or the bias.

    Before the products, which take longer than memory: each thread has one output's.
    """
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    column = first_output + gl.arange(0, OUTPUTS, layout=FLAT)
    if FORM.even:
        return gl.load(pointer + column)
    else:
        return gl.load(pointer + column, mask=column < outputs, other=0.0)


@gluon.jit
def _finish(acc, x_scales, scales, bias):
    """A part's sums, times the scales that are not in them yet, plus the bias. scales, bias: of `_load_columns`."""
    LAYOUT: gl.constexpr = acc.type.layout
    if x_scales is not None:
        acc = acc * x_scales[:, None]
    if scales is not None:
        acc = acc * gl.convert_layout(scales, gl.SliceLayout(0, LAYOUT))[None, :]
    if bias is not None:
        acc += gl.convert_layout(bias.to(gl.float32), gl.SliceLayout(0, LAYOUT))[None, :]
    return acc


@gluon.jit
def _activate_gated(gate, up, FORM: gl.constexpr):
    """As `device_functions.activate_gated`, which is Triton's."""
    ACT: gl.constexpr = FORM.act
    if ACT == "clamped":
        gate = gl.minimum(gate, FORM.limit)
        up = gl.minimum(gl.maximum(up, -FORM.limit), FORM.limit)
        return (up + 1.0) * (gate * sigmoid(gate * FORM.alpha))
    else:
        return activate(gate, ACT) * up


@gluon.jit
def _store(y, y_ptr, rows, first_output, outputs, FORM: gl.constexpr):
    """A part [BLOCK, OUTPUTS]; rows: (of y, whether there is one)."""
    row, real = rows
    LAYOUT: gl.constexpr = row.type.layout.parent
    y = gl.convert_layout(y, LAYOUT)
    column = first_output + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(0, LAYOUT))
    target = y_ptr + row.to(gl.int64)[:, None] * outputs + column[None, :]
    if FORM.even:
        gl.store(target, y, mask=real[:, None])
    else:
        gl.store(target, y, mask=real[:, None] & (column < outputs)[None, :])


@gluon.jit
def _store_rounded(y, y_ptr, y_scales_ptr, rows, place, end, column, outputs, FORM: gl.constexpr):
    """A part in e4m3, which is a group that shares a scale."""
    LAYOUT: gl.constexpr = y.type.layout
    if FORM.dtype == "bfloat16":
        y = gl.inline_asm_elementwise(TO_BF16, "=f,=f,f,f", [y], dtype=gl.float32, is_pure=True, pack=2)
    else:
        y = y.to(gl.float16).to(gl.float32)
    if not FORM.even:
        inside = column * OUTPUTS + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(0, LAYOUT)) < outputs
        y = gl.where(inside[None, :], y, 0.0)
    peaks = gl.maximum(gl.max(gl.abs(y), 1), LEAST_PEAK)
    scales = gl.div_rn(peaks, gl.full_like(peaks, E4M3_MAX))
    codes = (y * gl.div_rn(gl.full_like(scales, 1.0), scales)[:, None]).to(gl.float8e4nv).to(gl.uint8, bitcast=True)
    _store(codes, y_ptr, rows, column * OUTPUTS, outputs, FORM)
    row = place + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, LAYOUT))
    target = y_scales_ptr + row.to(gl.int64) * gl.cdiv(outputs, OUTPUTS) + column
    gl.store(target, scales, mask=row < end)


@gluon.jit
def _consume(y, bias_ptr, scales, ring, groups, sizes, CONSUMER: gl.constexpr, FORM: gl.constexpr):
    order_ptr, _, count_ptr, _ = groups
    y_ptr, y_scales_ptr = y
    x_scales_ptr, w_scales_ptr = scales
    outputs, columns, steps, most = sizes
    GATED: gl.constexpr = FORM.act is not None
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OUTPUTS, FORM.depth // 4])
    # As the products leave them, but for an exchange among four threads, each of which stores four neighbours.
    WIDE: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 16], [0, 32], [0, 64], [8, 0]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [BLOCK, OUTPUTS],
    )
    OUT: gl.constexpr = y_ptr.dtype.element_ty
    gdc_wait()
    row_tiles = gl.load(count_ptr)
    grid = (row_tiles, columns, most)
    use = most * 0
    programs = gl.num_programs(0)
    following = _find_tile(gl.program_id(0), groups, grid)
    for index in range(gl.program_id(0), row_tiles * columns, programs):
        expert, column, place, end = following
        place += CONSUMER * BLOCK
        if place < end:
            first, other = _begin(use, ring, CONSUMER, FORM)
            # While the first products are made.
            following = _find_tile(index + programs, groups, grid)
            row = place + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, WIDE))
            real = row < end
            if not GATED:
                row = gl.load(order_ptr + row, mask=real, other=0)
            rows = (row, real)
            of_expert = expert * (outputs * (2 if GATED else 1))
            first_output = column * (OUTPUTS if GATED else FORM.parts * OUTPUTS)
            other_output = first_output if GATED else first_output + OUTPUTS
            x_scales, first_scales, first_bias, other_scales, other_bias = None, None, None, None, None
            if w_scales_ptr is not None:
                first_scales = _load_columns(w_scales_ptr + of_expert, first_output, outputs, FORM)
                if FORM.parts == 2:
                    pointer = w_scales_ptr + of_expert + (outputs if GATED else 0)
                    other_scales = _load_columns(pointer, other_output, outputs, FORM)
            if bias_ptr is not None:
                first_bias = _load_columns(bias_ptr + of_expert, first_output, outputs, FORM)
                if FORM.parts == 2:
                    pointer = bias_ptr + of_expert + (outputs if GATED else 0)
                    other_bias = _load_columns(pointer, other_output, outputs, FORM)
            if FORM.scaled == "groups":
                at = gl.minimum(place + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, ACC)), end - 1)
                first = _multiply_scaled(first, use, steps, x_scales_ptr + at * steps, ring, CONSUMER, FORM)
                first = _finish(first, None, first_scales, first_bias)
                _store(first.to(OUT), y_ptr, rows, first_output, outputs, FORM)
            else:
                if FORM.scaled == "rows":
                    at = gl.minimum(place + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, ACC)), end - 1)
                    x_scales = gl.load(x_scales_ptr + gl.load(order_ptr + at) // FORM.top_k)
                first, other = _multiply(first, other, use, steps, ring, CONSUMER, FORM)
                first = _finish(first, x_scales, first_scales, first_bias)
                if GATED:
                    h = _activate_gated(first, _finish(other, x_scales, other_scales, other_bias), FORM)
                    if y_scales_ptr is not None:
                        _store_rounded(h, y_ptr, y_scales_ptr, rows, place, end, column, outputs, FORM)
                    else:
                        _store(h.to(OUT), y_ptr, rows, first_output, outputs, FORM)
                else:
                    _store(first.to(OUT), y_ptr, rows, first_output, outputs, FORM)
                    other = _finish(other, x_scales, other_scales, other_bias)
                    _store(other.to(OUT), y_ptr, rows, other_output, outputs, FORM)
        else:
            following = _find_tile(index + programs, groups, grid)
            _pass(use, steps, ring, FORM)
        use += steps


@gluon.jit(do_not_specialize=["steps", "columns", "most"])
def _experts_hopper_kernel(
    x_desc, w_desc, y, bias_ptr, scales, groups, outputs, columns, steps, most, FORM: gl.constexpr
):
    """x_desc: rows in the order of places. w_desc: all experts' rows. y: (values, scales or None). scales: of x, a row
    or a group, and of W's rows; (None, None) without.

    groups, most: as in `products_kernel.py`. columns: tiles of outputs. steps: stages of K.
    """
    DTYPE: gl.constexpr = w_desc.dtype
    LAYOUT: gl.constexpr = w_desc.layout
    x_smem = gl.allocate_shared_memory(DTYPE, [FORM.stages * CONSUMERS, BLOCK, FORM.depth], LAYOUT)
    w_smem = gl.allocate_shared_memory(DTYPE, [FORM.stages * FORM.parts, OUTPUTS, FORM.depth], LAYOUT)
    ring = (x_smem, w_smem, barriers(FORM.stages, 1), barriers(FORM.stages, CONSUMERS))
    hopper.fence_async_shared()
    sizes = (outputs, columns, steps, most)
    gl.warp_specialize(
        [
            (_consume, (y, bias_ptr, scales, ring, groups, sizes, 0, FORM)),
            (_consume, (y, bias_ptr, scales, ring, groups, sizes, 1, FORM)),
            (_consume, (y, bias_ptr, scales, ring, groups, sizes, 2, FORM)),
            (_produce, (x_desc, w_desc, ring, groups, sizes, FORM)),
        ],
        [4, 4, 1],
        [160, 160, 24],
    )


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    groups: Groups,
    top_k: int,
    activation: tuple[str | None, float, float],
    *,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
    dtype: torch.dtype,
    rounded: bool = False,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(h [P, I], its scales if rounded to e4m3) if there is an activation, of `activation_of`, else (z [P, H], None).

    x: [P, K] in the order of places. weight: [E, N, K]. groups: in tiles of HOPPER_ROWS. scales, for e4m3: of x, [T, 1]
    of tokens for the first product and [P, groups of 128] for the second, and of the weights' rows. dtype: the model's.
    rounded: with a scale for each 128 outputs. out: for z, instead of a new tensor; rows of other experts' pairs stay
    as they are.
    """
    (pairs, inputs), (_, rows, _) = x.shape, weight.shape
    gated, gpu, most = activation[0] is not None, hardware(x.device), groups.tiles.shape[1]
    outputs = rows // 2 if gated else rows
    scaled = "" if scales[0] is None else "rows" if gated else "groups"
    parts = 1 if scaled == "groups" else 2
    depth = LINE.value // weight.element_size()
    room = gpu.shared_memory - RESERVED
    stages = min(5, room // ((HOPPER_ROWS + parts * HOPPER_OUTPUTS) * LINE.value))
    columns = triton.cdiv(outputs, HOPPER_OUTPUTS * (1 if gated else parts))
    even = outputs % (HOPPER_OUTPUTS * (1 if gated else parts)) == 0
    form = Form(parts, stages, depth, even, *activation, top_k, scaled, str(dtype).removeprefix("torch."))
    y = out
    if y is None:
        y = torch.empty((pairs, outputs), dtype=torch.uint8 if rounded else dtype, device=x.device)
    y_scales = None
    if rounded:
        y_scales = torch.empty((pairs, triton.cdiv(outputs, HOPPER_OUTPUTS)), dtype=torch.float32, device=x.device)
    layout = gl.NVMMASharedLayout(LINE.value, 8 * weight.element_size(), 2)
    flat = weight.view(-1, inputs)
    x_desc = TensorDescriptor(x, [pairs, inputs], [inputs, 1], [BLOCK.value, depth], layout)
    w_desc = TensorDescriptor(flat, list(flat.shape), [inputs, 1], [HOPPER_OUTPUTS, depth], layout)
    launch(_experts_hopper_kernel, (min(gpu.multiprocessors, most * columns),))(
        x_desc,
        w_desc,
        (y, y_scales),
        bias,
        scales,
        groups,
        outputs,
        columns,
        triton.cdiv(inputs, depth),
        most,
        FORM=form,
        num_warps=4,
        maxnreg=REGISTERS,
        launch_pdl=True,
    )
    return y.view(torch.float8_e4m3fn) if rounded else y, y_scales
