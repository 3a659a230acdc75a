"""Single tokens of many inputs times weights in e4m3 for Hopper GPUs: weights stream through a ring in shared memory.

    y = (x W^T) * scales of W + bias

x [1, K], W [N, K] with scales a row or a block of some rows and 128 inputs, bias [N] -> y [1, N]; K is a multiple of
128. x is not rounded to fp8 (`fp8_vector_kernel.py`).

In `fp8_vector_kernel`, a program has a few outputs and reads all of x: of 14,336 inputs as many bytes as weights. Here
programs stay resident, keep x in registers, and take many outputs: tensor copies bring `rows` rows of W, 2,048 inputs
at a time, into a ring that is filled before the previous kernel ends. Each thread has the same inputs of each row, and
adds up its own products until a row ends.
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

from ..compat import copy_async, thread_barrier
from ..compile_ahead import launch
from ..device import hardware
from ..hopper import barriers
from . import plans
from .fp8_operands import Fp8Weight

LINE_BYTES = plans.STREAM_LINE
LINE = gl.constexpr(LINE_BYTES)  # inputs of a row that lie side by side in shared memory, the widest swizzle
LINES = gl.constexpr(16)  # of each row in a stage
SHARED = gl.constexpr(gl.NVMMASharedLayout(LINE_BYTES, 8, 3))
REGISTERS = 128  # of a thread: two programs of 256 threads fit a multiprocessor


class Form(NamedTuple):
    """The compile-time argument of the kernel."""

    inputs: int
    rows: int  # of a stage
    stages: int  # of the ring
    num_warps: int
    weight_rows: int  # outputs that share a scale of each line; 1: a scale a row, for all of it


@gluon.jit
def _fill(w_desc, use, first, ring, FORM: gl.constexpr):
    """Start the copy of stage number `use` of a program whose outputs begin with tile `first`."""
    smem, full = ring
    CHUNKS: gl.constexpr = (FORM.inputs + LINES * LINE - 1) // (LINES * LINE)
    stage = use % FORM.stages
    hopper.mbarrier.expect(full.index(stage), FORM.rows * LINES * LINE)
    place = [(first + use // CHUNKS) * FORM.rows, use % CHUNKS * LINES, 0]
    copy_async(w_desc, place, full.index(stage), smem.index(stage))


@gluon.jit
def _token(x_ptr, FORM: gl.constexpr, LAYOUT: gl.constexpr):
    """The token's chunks [LINES, LINE] in fp32, 0 past the end of K."""
    CHUNKS: gl.constexpr = (FORM.inputs + LINES * LINE - 1) // (LINES * LINE)
    line = gl.arange(0, LINES, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, LINE, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    chunks = ()
    for chunk in gl.static_range(CHUNKS):
        at = (chunk * LINES + line) * LINE + column
        chunks = chunks + (gl.load(x_ptr + at, mask=at < FORM.inputs, other=0.0).to(gl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    return chunks


@gluon.jit
def _line_scales(scales_ptr, tile, FORM: gl.constexpr, LAYOUT: gl.constexpr):
    """[1, LINES, 1] of each chunk: of a tile's rows, which share them."""
    COUNT: gl.constexpr = FORM.inputs // LINE
    CHUNKS: gl.constexpr = (FORM.inputs + LINES * LINE - 1) // (LINES * LINE)
    lines = gl.arange(0, LINES, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    scales_ptr += tile * FORM.rows // FORM.weight_rows * COUNT
    scales = ()
    for chunk in gl.static_range(CHUNKS):
        line = chunk * LINES + lines
        found = gl.load(scales_ptr + line, mask=line < COUNT, other=0.0)
        scales = scales + (found[None, :, None],)  # type: ignore[assignment]  # noqa: RUF005
    return scales


@gluon.jit
def _fp8_stream_kernel(w_desc, x_ptr, scales_ptr, bias_ptr, y_ptr, outputs, tiles, FORM: gl.constexpr):
    """tiles: of `rows` outputs, shared out evenly."""
    ROWS: gl.constexpr = FORM.rows
    STAGES: gl.constexpr = FORM.stages
    CHUNKS: gl.constexpr = (FORM.inputs + LINES * LINE - 1) // (LINES * LINE)
    SIZE: gl.constexpr = LINES * LINE // (32 * FORM.num_warps)  # neighbouring inputs of a thread
    TILE: gl.constexpr = gl.BlockedLayout(
        [1, 1, SIZE], [1, 32 * SIZE // LINE, LINE // SIZE], [1, FORM.num_warps, 1], [2, 1, 0]
    )
    OUTPUT: gl.constexpr = gl.BlockedLayout([1], [32], [FORM.num_warps], [0])
    smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, ROWS, LINES, LINE], SHARED)
    ring = (smem, barriers(STAGES, 1))
    hopper.fence_async_shared()
    program, programs = gl.program_id(0), gl.num_programs(0)
    first, end = program * tiles // programs, (program + 1) * tiles // programs
    uses = (end - first) * CHUNKS
    for use in range(gl.minimum(uses, STAGES)):
        _fill(w_desc, use, first, ring, FORM)
    gdc_wait()
    gdc_launch_dependents()
    chunks = _token(x_ptr, FORM, gl.SliceLayout(0, TILE))
    use = first * 0
    for tile in range(first, end):
        output = tile * ROWS + gl.arange(0, ROWS, layout=OUTPUT)
        inside = output < outputs
        # Asked for before they are wanted.
        if FORM.weight_rows == 1:
            scales = gl.load(scales_ptr + output, mask=inside, other=0.0)
        else:
            line_scales = _line_scales(scales_ptr, tile, FORM, TILE)
        if bias_ptr is not None:
            bias = gl.load(bias_ptr + output, mask=inside, other=0.0).to(gl.float32)
        acc = gl.zeros([ROWS, LINES, LINE], gl.float32, layout=TILE)
        for chunk in gl.static_range(CHUNKS):
            x = chunks[chunk][None, :, :]
            if FORM.weight_rows > 1:
                x *= line_scales[chunk]
            hopper.mbarrier.wait(ring[1].index(use % STAGES), use // STAGES % 2)
            codes = smem.index(use % STAGES).load(TILE)
            thread_barrier()
            if use + STAGES < uses:
                _fill(w_desc, use + STAGES, first, ring, FORM)
            acc += codes.to(gl.float32) * x
            use += 1
        y = gl.convert_layout(gl.sum(acc.reshape([ROWS, LINES * LINE]), 1), OUTPUT)
        if FORM.weight_rows == 1:
            y *= scales
        if bias_ptr is not None:
            y += bias
        gl.store(y_ptr + output, y.to(y_ptr.dtype.element_ty), mask=inside)


def linear_fp8_stream(
    x: Tensor, weight: Fp8Weight, bias: Tensor | None, *, plan: plans.StreamPlan | None = None
) -> Tensor:
    """y of checked arguments that `plans.stream_takes`. plan: None for that of `plans`."""
    rows, stages, num_warps, programs = plan or plans.plan_fp8_stream(hardware(x.device))
    outputs, inputs = weight.values.shape
    y = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    form = Form(inputs, rows, stages, num_warps, weight.rows)
    shape, strides = [outputs, inputs // LINE_BYTES, LINE_BYTES], [inputs, LINE_BYTES, 1]
    w_desc = TensorDescriptor(weight.values, shape, strides, [rows, LINES.value, LINE_BYTES], SHARED.value)
    tiles = triton.cdiv(outputs, rows)
    launch(_fp8_stream_kernel, (min(tiles, programs),))(
        w_desc,
        x,
        weight.scales,
        bias,
        y,
        outputs,
        tiles,
        FORM=form,
        num_warps=num_warps,
        maxnreg=REGISTERS,
        launch_pdl=True,
    )
    return y
