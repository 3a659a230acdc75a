"""Single tokens times weights of 4 bits for Hopper GPUs (`int4.py` has the layout), with the norm before them and the
activation behind them: weights stream through a ring in shared memory to tensor cores.

    y = f((n W^T) + bias),   n = x,   or   n = RMS norm of total,   total = round(x + residual);
    f, where W = [gate; up]: act(gate) * up

x, residual [1, K] of fp16 or bf16, W [N, K] (gated: [2 N, K]), bias [N] -> y [1, N], total [1, K]. Sums are fp32 and
rounded once; what a norm multiplies all of a token by is multiplied into them.

A number becomes an operand of bf16 by one AND for two of them: four bits, all others cleared, are number * 2^-133 as a
bf16, or * 2^-129 if they are bits 4 to 7; denormals go on in equal steps in the first normal numbers, and tensor cores
take both. Scales are applied to sums of 32 inputs or more, from which zero points, times sums of the token, are taken
off.

The instruction multiplies 16 rows by 8 columns. Each thread has 32 neighbouring bytes of a row, and two columns of the
sums: the token is there twice, as bf16, and what that leaves over (16 bits of a number altogether). Where a line of 128
inputs may have several scales of a row, the token is zero for other threads' inputs, so that each thread's sums have
one. Else each thread has the whole line's sum, and what adds up threads finds it several times.

Programs stay resident, with the token in shared memory. One warp of a program, the producer, copies weights into a
ring, and their scales where a tensor copy takes them, from before the previous kernel ends on. The others, its
consumers, have a line of 128 bytes of each row of a stage each; their sums meet when a tile of rows ends.
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

from ..compat import copy_async, reinterpret, thread_barrier
from ..compile_ahead import launch
from ..device import hardware
from ..hopper import activate, barriers
from . import plans
from .int4 import MIDDLE, Int4Weight

Norm = tuple[Tensor | None, Tensor | None, float]  # (residual, weight, eps), none of them without a weight

SYMMETRIC_ZERO = gl.constexpr(float(MIDDLE))
LINE = gl.constexpr(plans.INT4_LINE)
ROWS = gl.constexpr(plans.INT4_STREAM_ROWS)  # of a stage
# The token is multiplied by 2^64: products are normal numbers from |x| = 2^-57 on, and finite up to 2^62.
SCALE = gl.constexpr(2.0**64)
NUMBER_SCALE = gl.constexpr(2.0**-133)
UNSCALE = gl.constexpr(2.0 ** (133 - 64))
UPPER = gl.constexpr(2.0**-4)  # upper numbers are so many times too large
SHARED = gl.constexpr(gl.NVMMASharedLayout(plans.INT4_LINE, 16, 3))
SHARED_GATED = gl.constexpr(gl.NVMMASharedLayout(plans.INT4_LINE, 16, 4))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0]))
PLAIN_PAIRS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0]))
TIMES_SCALE = gl.constexpr("{.reg .b32 a; mov.b32 a, 0x5F805F80; mul.rn.bf16x2 $0, $1, a;}")  # of two bf16, exact
# Of two pairs of bytes in a register, the numbers of both first bytes, or of both second ones, of one half.
TAKE = gl.constexpr(
    tuple(
        f"{{.reg .b32 a; shr.u32 a, $1, {8 * byte}; and.b32 $0, a, {0x000F000F << 4 * half:#010x};}}"
        for byte in (0, 1)
        for half in (0, 1)
    )
)
# Copies 16 registers, and has the warp wait until all 16 are loaded: a branch needs one of each four that a thread
# loads at once. Which way it goes does not matter; a warp that finds this number in its codes sleeps for a nanosecond.
AWAIT = gl.constexpr(
    "{.reg .b32 a; .reg .pred p; or.b32 a, $16, $20; or.b32 a, a, $24; or.b32 a, a, $28; setp.eq.u32 p, a, 0x5eadbeef;"
    + "@p nanosleep.u32 1;"
    + "".join(f"mov.b32 ${i}, ${16 + i};" for i in range(16))
    + "}"
)
AWAIT_REGISTERS = gl.constexpr(",".join(["=r"] * 16 + ["r"] * 16))
# The same of four scales, of two rows and both halves.
AWAIT_SCALES = gl.constexpr(
    "{.reg .f32 a; .reg .pred p; min.f32 a, $4, $5; min.f32 a, a, $6; min.f32 a, a, $7; setp.eq.f32 p, a, 0fDEADBEEF;"
    + "@p nanosleep.u32 1;"
    + "".join(f"mov.f32 ${i}, ${4 + i};" for i in range(4))
    + "}"
)
AWAIT_SCALES_REGISTERS = gl.constexpr(",".join(["=f"] * 4 + ["f"] * 4))


class Form(NamedTuple):
    """The compile-time argument of the kernel."""

    inputs: int
    half: int  # bytes of a row, whole lines
    group: int  # inputs that share a scale; 0 for all
    act: str | None
    parts: int  # of the token: 1 if it is exact in bf16
    stages: int  # of the ring
    num_warps: int


@gluon.constexpr_function
def _warp_bases(rank, num_warps):
    return [[1 << i] + [0] * (rank - 1) for i in range(num_warps.bit_length() - 1)]


@gluon.constexpr_function
def _codes_layout(num_warps):
    """Of pairs of bytes [warps, ROWS, 64]: 16 of each of two rows in a thread."""
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 8, 0]]
    lanes = [[0, 0, 16], [0, 0, 32], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, _warp_bases(3, num_warps), [], [num_warps, 16, 64])


@gluon.constexpr_function
def _token_layout(num_warps):
    """Of one kind of numbers' inputs [warps, columns / 2, eights, parts, threads of a row, 8 pairs of bytes]."""
    registers = [[0] * 5 + [1], [0] * 5 + [2], [0] * 5 + [4], [0, 0, 1, 0, 0, 0]]
    lanes = [[0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 2, 0], [0, 0, 0, 1, 0, 0], [0, 1, 0, 0, 0, 0], [0, 2, 0, 0, 0, 0]]
    shape = [num_warps, 4, 2, 2, 4, 8]
    return gl.DistributedLinearLayout(registers, lanes, _warp_bases(6, num_warps), [], shape)


@gluon.constexpr_function
def _sums_layout(num_warps):
    """Of sums [warps, ROWS, threads of a row]."""
    lanes = [[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout([[0, 8, 0]], lanes, _warp_bases(3, num_warps), [], [num_warps, 16, 4])


@gluon.constexpr_function
def _groups_layout(groups, num_warps):
    """Of sums [warps, ROWS, groups of a line, threads of a row whose group it is]."""
    threads = 4 // groups
    lanes = [[0, 0, 1 // threads, 1 % threads], [0, 0, 2 // threads, 2 % threads]]
    lanes += [[0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    shape = [num_warps, 16, groups, threads]
    return gl.DistributedLinearLayout([[0, 8, 0, 0]], lanes, _warp_bases(4, num_warps), [], shape)


@gluon.jit
def _produce(w_desc, s_desc, ring, work, FORM: gl.constexpr):
    smem, s_smem, full, free = ring
    first, uses = work
    STAGES: gl.constexpr = FORM.stages
    CHUNKS: gl.constexpr = (FORM.half + FORM.num_warps * LINE - 1) // (FORM.num_warps * LINE)
    for use in range(uses):
        stage = use % STAGES
        hopper.mbarrier.wait(free.index(stage), (use // STAGES + 1) % 2)
        tile, line = first + use // CHUNKS, use % CHUNKS * FORM.num_warps
        if s_desc is None:
            hopper.mbarrier.expect(full.index(stage), FORM.num_warps * ROWS * LINE)
        else:
            hopper.mbarrier.expect(full.index(stage), FORM.num_warps * ROWS * LINE + 2 * s_desc.block_type.nbytes)
            for half in gl.static_range(2):
                group = (line * LINE + half * FORM.half) // FORM.group
                if FORM.act is None:
                    copy_async(s_desc, [group, tile * ROWS], full.index(stage), s_smem.index(2 * stage + half))
                else:
                    at = [group, 0, tile * (ROWS // 2)]
                    copy_async(s_desc, at, full.index(stage), s_smem.index(2 * stage + half))
        if FORM.act is None:
            copy_async(w_desc, [line, tile * ROWS, 0], full.index(stage), smem.index(stage))
        else:
            copy_async(w_desc, [line, 0, tile * (ROWS // 2), 0], full.index(stage), smem.index(stage))


@gluon.jit
def _load_groups(weight, tile, chunk, outputs, FORM: gl.constexpr):
    """(scales of both halves, zero points of both) of a stage's groups [warps, ROWS, threads of a row], without those
    that there are not.
    """
    scales_ptr, zeros_ptr = weight
    W: gl.constexpr = FORM.num_warps
    LAYOUT: gl.constexpr = _sums_layout(W)
    GROUPS: gl.constexpr = 1 if FORM.group == 0 else (FORM.inputs + FORM.group - 1) // FORM.group
    place = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    if FORM.act is None:
        row = gl.minimum(tile * ROWS + place, outputs - 1)
    else:
        row = gl.minimum(tile * (ROWS // 2) + place % 8, outputs - 1) + place // 8 * outputs
    line = chunk * W + gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    part = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    if FORM.group == 0:
        low = row + 0 * (line + part)
        high = low
    else:
        rows = outputs if FORM.act is None else 2 * outputs
        group = (line * LINE + part * 32) // FORM.group
        low = gl.minimum(group, GROUPS - 1) * rows + row
        high = gl.minimum(group + FORM.half // FORM.group, GROUPS - 1) * rows + row
    found = ()
    if scales_ptr is not None:
        found = found + (gl.load(scales_ptr + low), gl.load(scales_ptr + high))  # type: ignore[assignment]  # noqa: RUF005
    if zeros_ptr is not None:
        found = found + (gl.load(zeros_ptr + low), gl.load(zeros_ptr + high))  # type: ignore[assignment]  # noqa: RUF005
    return found


@gluon.jit
def _places(pair, FORM: gl.constexpr):
    """(inputs [4 * warps * LINE] whose numbers two stages have, (stage, half, byte), which of them there are)."""
    SIZE: gl.constexpr = FORM.num_warps * LINE
    place = gl.arange(0, 4 * SIZE, layout=gl.BlockedLayout([8], [32], [FORM.num_warps], [0]))
    byte = (2 * pair + place // (2 * SIZE)) * SIZE + place % SIZE
    at = place // SIZE % 2 * FORM.half + byte
    return at, (byte < FORM.half) & (at < FORM.inputs)


@gluon.jit
def _load_pairs(pointer, FORM: gl.constexpr):
    """What K inputs have there, as `_places` of each pair of stages; 0 where there is no input."""
    PAIRS: gl.constexpr = (FORM.half + 2 * FORM.num_warps * LINE - 1) // (2 * FORM.num_warps * LINE)
    found = ()
    for pair in gl.static_range(PAIRS):
        at, inside = _places(pair, FORM)
        found = found + (gl.load(pointer + at, mask=inside, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@gluon.jit
def _keep_token(x_ptr, norm, norm_weights, total_ptr, x_smem, sums_smem, FORM: gl.constexpr):
    """Put the token into shared memory, and sums of 32 inputs; return what sums are to be multiplied by.

    x_smem, sums_smem: a pair of stages each.
    """
    residual_ptr, norm_ptr, eps = norm
    W: gl.constexpr = FORM.num_warps
    xs = _load_pairs(x_ptr, FORM)
    residuals = ()
    if residual_ptr is not None:
        residuals = _load_pairs(residual_ptr, FORM)
    squares = gl.zeros([4 * W * LINE], gl.float32, layout=gl.BlockedLayout([8], [32], [W], [0]))
    for pair in gl.static_range(len(xs)):
        wide = xs[pair].to(gl.float32)
        # (stage, half, warp, thread of a row, eight, pair of bytes, byte, part of the token)
        if FORM.parts == 1:
            token = gl.inline_asm_elementwise(
                TIMES_SCALE, "=r,r", [xs[pair]], dtype=gl.bfloat16, is_pure=True, pack=2
            ).reshape([2, 2, W, 4, 2, 8, 2, 1])
            sums = gl.sum(wide.reshape([4, W, 4, 32]), 3) * (SCALE * NUMBER_SCALE)
        else:
            if residual_ptr is not None:
                total = (wide + residuals[pair].to(gl.float32)).to(xs[pair].dtype)
                at, inside = _places(pair, FORM)
                gl.store(total_ptr + at, total, mask=inside & (gl.program_id(0) == 0))
                wide = total.to(gl.float32)
            if norm_ptr is not None:
                squares += wide * wide
                wide *= norm_weights[pair].to(gl.float32)
            wide *= SCALE
            high = wide.to(gl.bfloat16)
            low = (wide - high.to(gl.float32)).to(gl.bfloat16)
            token = gl.join(high, low).reshape([2, 2, W, 4, 2, 8, 2, 2])
            wide = high.to(gl.float32) + low.to(gl.float32)
            sums = gl.sum(wide.reshape([4, W, 4, 32]), 3) * NUMBER_SCALE
        x_smem.index(pair).store(token.permute((0, 6, 1, 2, 4, 7, 3, 5)).reshape([8, W, 64 * FORM.parts]))
        sums_smem.index(pair).store(sums)
    if norm_ptr is not None:
        return gl.rsqrt(gl.sum(squares, 0) / FORM.inputs + eps) * UNSCALE
    else:
        return UNSCALE


@gluon.jit
def _load_codes(stage_smem, FORM: gl.constexpr):
    """Codes of a stage, all of which have been loaded: behind a barrier, the stage may be copied over.

    A barrier alone does not wait for loads from shared memory, and tensor copies are not ordered with them. Behind
    loads of scales or zero points from memory they take longer than the next copy.
    """
    codes = stage_smem.reshape([FORM.num_warps, ROWS, 64]).load(_codes_layout(FORM.num_warps))
    return gl.inline_asm_elementwise(AWAIT, AWAIT_REGISTERS, [codes], dtype=gl.int16, is_pure=False, pack=32)


@gluon.jit
def _copied_scales(s_smem, stage, FORM: gl.constexpr):
    """(scales of both halves) [warps, ROWS, threads of a row] of a stage, which have been loaded as codes have."""
    W: gl.constexpr = FORM.num_warps
    GROUPS: gl.constexpr = LINE // FORM.group
    PARENT: gl.constexpr = _groups_layout(GROUPS, W)
    LAYOUT: gl.constexpr = gl.SliceLayout(3, PARENT)
    low = s_smem.index(2 * stage).reshape([W, GROUPS, ROWS]).permute((0, 2, 1)).load(LAYOUT)
    high = s_smem.index(2 * stage + 1).reshape([W, GROUPS, ROWS]).permute((0, 2, 1)).load(LAYOUT)
    low, high = gl.inline_asm_elementwise(
        AWAIT_SCALES, AWAIT_SCALES_REGISTERS, [low, high], dtype=(gl.float32, gl.float32), is_pure=False, pack=2
    )
    low = low.expand_dims(3).broadcast_to([W, ROWS, GROUPS, 4 // GROUPS]).reshape([W, ROWS, 4])
    high = high.expand_dims(3).broadcast_to([W, ROWS, GROUPS, 4 // GROUPS]).reshape([W, ROWS, 4])
    SUMS: gl.constexpr = _sums_layout(W)
    return gl.convert_layout(low, SUMS, assert_trivial=True), gl.convert_layout(high, SUMS, assert_trivial=True)


@gluon.jit
def _numbers(codes, KIND: gl.constexpr, LAYOUT: gl.constexpr):
    """[warps, ROWS, 64] of one byte of each pair, and one half, times a power of two; by their places in the token."""
    found = gl.inline_asm_elementwise(TAKE[KIND], "=r,r", [codes], dtype=gl.bfloat16, is_pure=True, pack=2)
    # (eight, 2 pairs, 2, 4 threads, 2 neighbours): what the instruction calls neighbours is up to the token.
    places = found.reshape([found.shape[0], ROWS, 4, 2, 2, 2, 2]).permute((0, 1, 3, 4, 5, 2, 6))
    return gl.convert_layout(places.reshape(found.shape), LAYOUT, assert_trivial=True)


@gluon.jit
def _inputs(x_smem, mask, FORM: gl.constexpr, LAYOUT: gl.constexpr):
    """[warps, 64, 8] of the token, as `_numbers`. mask: None for all of it."""
    W: gl.constexpr = FORM.num_warps
    PARENT: gl.constexpr = _token_layout(W)
    x = x_smem.reshape([W, 2, FORM.parts, 4, 8]).load(gl.SliceLayout(1, PARENT))
    x = x.expand_dims(1).broadcast_to([W, 4, 2, 2, 4, 8])
    x = x.reshape([W, 4, 2, 2, 4, 2, 2, 2]).permute((0, 2, 5, 6, 4, 7, 1, 3)).reshape([W, 64, 8])
    x = gl.convert_layout(x, LAYOUT, assert_trivial=True)
    if mask is not None:
        x = gl.inline_asm_elementwise(
            "and.b32 $0, $1, $2;", "=r,r,r", [x, mask], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    return x


@gluon.jit
def _add_product(codes, KIND: gl.constexpr, x_smem, mask, acc, FORM: gl.constexpr):
    """acc [warps, ROWS, 8] and the products of one kind of numbers and the token."""
    ACC: gl.constexpr = acc.type.layout
    NUMBERS: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    INPUTS: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    return hopper.mma_v2(_numbers(codes, KIND, NUMBERS), _inputs(x_smem, mask, FORM, INPUTS), acc)


@gluon.jit
def _of_threads(acc, LAYOUT: gl.constexpr):
    """acc [warps, ROWS, 8], the sum of both parts of the token, [warps, ROWS, 4]."""
    first, second = acc.reshape([acc.shape[0], ROWS, 4, 2]).split()
    return gl.convert_layout(first + second, LAYOUT, assert_trivial=True)


@gluon.jit
def _consume(x_ptr, norm, weight, bias_ptr, y_ptr, total_ptr, outputs, token_smem, ring, work, FORM: gl.constexpr):
    W: gl.constexpr = FORM.num_warps
    STAGES: gl.constexpr = FORM.stages
    ACT: gl.constexpr = FORM.act
    CHUNKS: gl.constexpr = (FORM.half + W * LINE - 1) // (W * LINE)
    PAIRS: gl.constexpr = (CHUNKS + 1) // 2
    TIMES: gl.constexpr = 8 // FORM.parts if FORM.group % LINE == 0 else 1  # how often a line's sum is found
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    INPUTS: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    SUMS: gl.constexpr = _sums_layout(W)
    OUTPUT: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    scales_ptr, zeros_ptr = weight
    LOADED: gl.constexpr = 0 if scales_ptr is None else 2
    x_smem, sums_smem = token_smem
    smem, s_smem, full, free = ring
    first, uses = work
    following = ()
    for chunk in gl.static_range(CHUNKS):
        loaded = _load_groups(weight, first, chunk, outputs, FORM)
        following = following + (loaded,)  # type: ignore[assignment]  # noqa: RUF005
    norm_weights = ()
    if norm[1] is not None:
        norm_weights = _load_pairs(norm[1], FORM)
    mask = None
    if TIMES == 1:
        column = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, INPUTS)))[None, None, :]
        k = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(2, INPUTS)))[None, :, None]
        wanted = (column // 2 == k // 2 % 4) & (column % 2 < FORM.parts)
        mask = gl.where(wanted, -1, 0).to(gl.int16).broadcast_to([W, 64, 8])
    gdc_wait()
    gdc_launch_dependents()
    x_pairs = reinterpret(x_smem, gl.bfloat16, [PAIRS, 8, W, 64 * FORM.parts], PLAIN_PAIRS)
    sums_pairs = reinterpret(sums_smem, gl.float32, [PAIRS, 4, W, 4], PLAIN_PAIRS)
    factor = _keep_token(x_ptr, norm, norm_weights, total_ptr, x_pairs, sums_pairs, FORM)
    thread_barrier()
    use = first * 0
    last = first + uses // CHUNKS - 1
    for tile in range(first, last + 1):
        sums = gl.zeros([W, ROWS, 4], gl.float32, layout=SUMS)
        groups = following
        following = ()
        for chunk in gl.static_range(CHUNKS):
            loaded = groups[chunk]
            hopper.mbarrier.wait(full.index(use % STAGES), use // STAGES % 2)
            codes = _load_codes(smem.index(use % STAGES), FORM)
            if scales_ptr is None:
                low_scales, high_scales = _copied_scales(s_smem, use % STAGES, FORM)
            else:
                low_scales, high_scales = loaded[0], loaded[1]
            hopper.mbarrier.arrive(free.index(use % STAGES))
            low = gl.zeros([W, ROWS, 8], gl.float32, layout=ACC)
            high = gl.zeros([W, ROWS, 8], gl.float32, layout=ACC)
            low = _add_product(codes, 0, x_smem.index(chunk * 4), mask, low, FORM)
            high = _add_product(codes, 1, x_smem.index(chunk * 4 + 1), mask, high, FORM)
            low = _add_product(codes, 2, x_smem.index(chunk * 4 + 2), mask, low, FORM)
            high = _add_product(codes, 3, x_smem.index(chunk * 4 + 3), mask, high, FORM)
            low_off = sums_smem.index(chunk * 2).load(gl.SliceLayout(1, SUMS))[:, None, :]
            high_off = sums_smem.index(chunk * 2 + 1).load(gl.SliceLayout(1, SUMS))[:, None, :]
            if zeros_ptr is None:
                low_off, high_off = low_off * (TIMES * SYMMETRIC_ZERO), high_off * (TIMES * SYMMETRIC_ZERO)
            else:
                low_off *= TIMES * loaded[LOADED].to(gl.float32)
                high_off *= TIMES * loaded[LOADED + 1].to(gl.float32)
            sums += low_scales * (_of_threads(low, SUMS) - low_off)
            sums += high_scales * (_of_threads(high, SUMS) * UPPER - high_off)
            # Asked for a tile ahead: memory takes as long as several stages to answer.
            loaded = _load_groups(weight, gl.minimum(tile + 1, last), chunk, outputs, FORM)
            following = following + (loaded,)  # type: ignore[assignment]  # noqa: RUF005
            use += 1
        y = gl.sum(sums.permute((1, 0, 2)).reshape([ROWS, W * 4]), 1) * (factor * (1.0 / TIMES))
        if ACT is not None:
            gate, up = y.reshape([2, ROWS // 2]).permute((1, 0)).split()
            y = gl.convert_layout(activate(gate, ACT) * up, OUTPUT)
            output = tile * (ROWS // 2) + gl.arange(0, ROWS // 2, layout=OUTPUT)
        else:
            y = gl.convert_layout(y, OUTPUT)
            output = tile * ROWS + gl.arange(0, ROWS, layout=OUTPUT)
            if bias_ptr is not None:
                y += gl.load(bias_ptr + output, mask=output < outputs, other=0.0).to(gl.float32)
        gl.store(y_ptr + output, y.to(y_ptr.dtype.element_ty), mask=output < outputs)


@gluon.jit(do_not_specialize=["tiles"])
def _int4_stream_kernel(
    w_desc, s_desc, x_ptr, norm, weight, bias_ptr, y_ptr, total_ptr, outputs, tiles, FORM: gl.constexpr
):
    """s_desc: of scales, or None. norm: (residual or None, weight of the norm or None, eps). weight: (scales without
    s_desc, zeros or None). tiles: of ROWS rows, shared out evenly.
    """
    W: gl.constexpr = FORM.num_warps
    STAGES: gl.constexpr = FORM.stages
    CHUNKS: gl.constexpr = (FORM.half + W * LINE - 1) // (W * LINE)
    STAGE: gl.constexpr = w_desc.block_shape
    smem = gl.allocate_shared_memory(w_desc.dtype, [STAGES] + STAGE, w_desc.layout)  # noqa: RUF005
    PAIRS: gl.constexpr = (CHUNKS + 1) // 2
    x_smem = gl.allocate_shared_memory(gl.bfloat16, [PAIRS * 8, W, 64 * FORM.parts], PLAIN)
    sums_smem = gl.allocate_shared_memory(gl.float32, [PAIRS * 4, W, 4], PLAIN)
    s_smem = ()
    if s_desc is not None:
        S_BLOCK: gl.constexpr = s_desc.block_shape
        s_smem = gl.allocate_shared_memory(gl.float32, [2 * STAGES] + S_BLOCK, s_desc.layout)  # noqa: RUF005
    ring = (smem, s_smem, barriers(STAGES, 1), barriers(STAGES, 1))
    hopper.fence_async_shared()
    program, programs = gl.program_id(0), gl.num_programs(0)
    first, end = program * tiles // programs, (program + 1) * tiles // programs
    work = (first, (end - first) * CHUNKS)
    token_smem = (x_smem, sums_smem)
    gl.warp_specialize(
        [
            (_consume, (x_ptr, norm, weight, bias_ptr, y_ptr, total_ptr, outputs, token_smem, ring, work, FORM)),
            (_produce, (w_desc, s_desc, ring, work, FORM)),
        ],
        [1],
        [24],
    )


def linear_int4_stream(
    x: Tensor,
    norm: Norm,
    weight: Int4Weight,
    bias: Tensor | None,
    act: str | None,
    *,
    plan: plans.Int4StreamPlan | None = None,
) -> tuple[Tensor, Tensor]:
    """(y, total) of one token, of checked arguments that `plans.int4_stream_takes`; total is x without a residual.

    plan: None for that of `plans`.
    """
    inputs, (rows, half) = x.shape[1], weight.codes.shape
    parts = 1 if x.dtype == torch.bfloat16 and norm[1] is None else 2
    num_warps, stages, programs, registers = plan or plans.plan_int4_stream(hardware(x.device))
    outputs = rows // 2 if act else rows
    y = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    total = x if norm[0] is None else torch.empty_like(x)
    scales, s_desc = weight.scales, None
    groups = plans.int4_stream_groups(scales, weight.group, num_warps, gated=act is not None)
    pairs, line = weight.codes.view(torch.int16), plans.INT4_LINE // 2
    if act:
        shape, strides = [half // (2 * line), 2, outputs, line], [line, outputs * (half // 2), half // 2, 1]
        w_desc = TensorDescriptor(pairs, shape, strides, [num_warps, 2, ROWS.value // 2, line], SHARED_GATED.value)
        if groups:
            shape, layout = [scales.shape[0], 2, outputs], gl.NVMMASharedLayout(2 * ROWS.value, 32, 3)
            s_desc = TensorDescriptor(scales, shape, [rows, outputs, 1], [groups, 2, ROWS.value // 2], layout)
    else:
        shape, strides = [half // (2 * line), outputs, line], [line, half // 2, 1]
        w_desc = TensorDescriptor(pairs, shape, strides, [num_warps, ROWS.value, line], SHARED.value)
        if groups:
            layout = gl.NVMMASharedLayout(4 * ROWS.value, 32, 2)
            s_desc = TensorDescriptor(scales, list(scales.shape), [rows, 1], [groups, ROWS.value], layout)
    tiles = triton.cdiv(rows, ROWS.value)
    launch(_int4_stream_kernel, (min(tiles, programs),))(
        w_desc,
        s_desc,
        x,
        norm,
        (None if groups else scales, weight.zeros),
        bias,
        y,
        total,
        outputs,
        tiles,
        FORM=Form(inputs, half, weight.group or 0, act, parts, stages, num_warps),
        num_warps=num_warps,
        maxnreg=registers,
        launch_pdl=True,
    )
    return y, total
