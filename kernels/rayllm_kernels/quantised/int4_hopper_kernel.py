"""Products of tokens and weights of 4 bits for Hopper GPUs (`int4.py` has the layout): weights stream through tensor
copies and become floats in the registers from which the tensor cores take them.

    y = x W^T + bias,   or   y = act(x G^T) * (x U^T)   where W = [G; U]

x [M, K] of fp16 or bf16, codes [N, half of K] (gated: [2 N, half]) -> y [M, N]; fp32 sums, rounded once. A weight is
round(scale) * (number - zero), rounded to x's dtype, as in Marlin (Frantar, Castro, Chen, Hoefler, Alistarh, 2024), so
that one tile of sums is enough whatever the groups.

Programs, units, the ring and barriers are those of `linear/hopper_kernel.py`. A unit is so many bytes of a tile's rows,
the inputs of the first half that belong to them, and those of the second.

The instruction has two neighbours of each eight inputs in a thread. Of a row's bytes, which are one input of each half,
a thread therefore loads pairs, and exchanges bytes of two pairs; nothing moves between threads.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

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
from ..hopper import activate, barriers
from ..linear.hopper_kernel import CHUNK, LEAD, flags
from ..linear.plans import BLOCK_ROWS, HopperPlan
from .int4 import MIDDLE, Int4Weight

INPUTS = gl.constexpr(64)  # of each half, in a product: 128 bytes of tokens, the widest swizzle
SYMMETRIC_ZERO = gl.constexpr(MIDDLE)
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))

# The instruction's rows of 16 inputs are two eights, of each of which a thread has two neighbours in one register. A
# thread loads these two as a pair of bytes. (pair of the first eight, pair of the second), 32 bits each -> (both bytes
# of the first, both of the second), 16 bits each.
SPREAD = gl.constexpr("prmt.b32 $0, $2, 0, 0x4140; prmt.b32 $1, $3, 0, 0x4140;")
# 16 bits each: (byte, zero point, scale) -> weight of a half. A number with the exponent of a power of two before it is
# that power plus the number, from which the same power plus the zero point is taken.
DECODE = """
{{
.reg .b32 a;
{shift} a, $1, {bits};
lop3.b32 a, a, 0x000f000f, {power}, 0xea;
sub.{dtype} a, a, $2;
mul.{dtype} $0, a, $3;
}}
"""
BF16 = {"power": "0x43004300", "dtype": "bf16x2"}
FP16 = {"power": "0x64006400", "dtype": "f16x2"}
DECODE_BF16 = gl.constexpr(tuple(DECODE.format(shift="shr.u32", bits=bits, **BF16) for bits in (0, 4)))
DECODE_FP16 = gl.constexpr(tuple(DECODE.format(shift="shr.u32", bits=bits, **FP16) for bits in (0, 4)))


@gluon.constexpr_function
def _codes_layout(rows):
    """Of pairs of bytes [rows, 32]: each thread has those whose inputs the instruction takes from it."""
    registers, lanes = [[0, 4], [0, 8], [0, 16], [8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0], [64, 0]][: rows // 64 + 1], [], [rows, 32])


@gluon.jit
def _load_codes(tile, PART: gl.constexpr):
    """Bytes of 64 inputs of each half, in 16 bits each, as two tensors [rows, 32], of first and of second eights.

    A column is (16 inputs, neighbour, place of the pair in its eight).
    """
    codes = tile.slice(PART * (INPUTS // 2), INPUTS // 2, dim=1).load(_codes_layout(tile.shape[0]))
    return gl.inline_asm_elementwise(
        SPREAD, "=r,=r,r,r", [codes.to(gl.int32)], dtype=(gl.int16, gl.int16), is_pure=True, pack=2
    )


@gluon.jit
def _decode_eights(codes, zeros, scales, HALF: gl.constexpr, DTYPE: gl.constexpr):
    if gl.bfloat16 == DTYPE:
        return gl.inline_asm_elementwise(
            DECODE_BF16[HALF], "=r,r,r,r", [codes, zeros, scales], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            DECODE_FP16[HALF], "=r,r,r,r", [codes, zeros, scales], dtype=gl.float16, is_pure=True, pack=2
        )


@gluon.jit
def _decode(codes, zeros, scales, HALF: gl.constexpr, LAYOUT: gl.constexpr, DTYPE: gl.constexpr):
    """Weights of a half [rows, 64]. codes: of `_load_codes`; zeros, scales: [rows]."""
    ROWS: gl.constexpr = codes[0].shape[0]
    first = _decode_eights(codes[0], zeros[:, None], scales[:, None], HALF, DTYPE)
    second = _decode_eights(codes[1], zeros[:, None], scales[:, None], HALF, DTYPE)
    # As (16 inputs, eight, place of the pair, neighbour), which is the order of inputs: only names change.
    both = gl.join(first, second).reshape([ROWS, 4, 2, 4, 2]).permute((0, 1, 4, 3, 2)).reshape([ROWS, 64])
    return gl.convert_layout(both, LAYOUT, assert_trivial=True)


@gluon.jit
def _of_groups(pointers, first_input, half, inputs, rows, GROUP: gl.constexpr):
    """What rows, of so many, have at `pointers`, which are of the first group, for inputs of both halves; past the end
    of K, where inputs are zero, anything.
    """
    if GROUP == 0:
        found = gl.load(pointers)
        return found, found
    else:
        low = gl.minimum(first_input, half - 1) // GROUP
        high = gl.minimum(half + first_input, inputs - 1) // GROUP
        return gl.load(pointers + low * rows), gl.load(pointers + high * rows)


@gluon.jit
def _rows_of(first, outputs, TILE: gl.constexpr):
    """A block's rows, those of outputs from `first` on; past the end the last repeats."""
    ROWS: gl.constexpr = TILE.consumers * 64
    place = gl.arange(0, ROWS, layout=gl.SliceLayout(1, _codes_layout(ROWS)))
    if TILE.act is not None:
        return gl.minimum(first + place // 16 * 8 + place % 8, outputs - 1) + place // 8 % 2 * outputs
    else:
        return gl.minimum(first + place, outputs - 1)


@gluon.jit
def _load_groups(weight, rows, first_input, halves, GROUP: gl.constexpr, DTYPE: gl.constexpr):
    """(scales, zero points as of DECODE) of rows for inputs of both halves."""
    POWER: gl.constexpr = 128.0 if gl.bfloat16 == DTYPE else 1024.0
    scales_ptr, zeros_ptr, count = weight
    low, high = _of_groups(scales_ptr + rows, first_input, halves[0], halves[1], count, GROUP)
    if zeros_ptr is None:
        zeros = gl.full(low.shape, POWER + SYMMETRIC_ZERO, DTYPE, low.type.layout)
        return low, high, zeros, zeros
    else:
        low_zeros, high_zeros = _of_groups(zeros_ptr + rows, first_input, halves[0], halves[1], count, GROUP)
        return low, high, (low_zeros.to(gl.float32) + POWER).to(DTYPE), (high_zeros.to(gl.float32) + POWER).to(DTYPE)


@gluon.constexpr_function
def _parts_of(tokens):
    """A tile's tokens as powers of two, of which there are one or two."""
    most = 1 << tokens.bit_length() - 1
    return (most,) if most == tokens else (most, tokens - most)


@gluon.constexpr_function
def _sums_layout(tokens, tile):
    """Of sums of so many tokens."""
    return gl.NVMMADistributedLayout([3, 0], [4 * tile.consumers, 1], [16, tokens, 16])


@gluon.jit
def _zeros(TOKENS: gl.constexpr, TILE: gl.constexpr):
    return gl.zeros([TILE.consumers * 64, TOKENS], gl.float32, layout=_sums_layout(TOKENS, TILE))


@gluon.jit
def _add_product(operand, tokens, acc):
    """Start adding products of weights [rows, inputs] and tokens [tokens, inputs] in shared memory to their sums."""
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    operand = gl.convert_layout(operand, LAYOUT, assert_trivial=True)
    return hopper.warpgroup_mma(operand, tokens.permute((1, 0)), acc, is_async=True)


@gluon.jit
def _add_products(accs, operand, x_smems, x, BLOCK: gl.constexpr):
    """The same of a block's weights and all tokens of a part of a stage, number x."""
    COUNT: gl.constexpr = len(x_smems)
    found = ()
    for i in gl.static_range(len(accs)):
        acc = _add_product(operand, x_smems[i % COUNT].index(x), accs[i]) if i // COUNT == BLOCK else accs[i]
        found = found + (acc,)  # type: ignore[assignment]  # noqa: RUF005 - Triton has no stars
    return found


@gluon.jit
def _wait(accs, outstanding: gl.constexpr):
    if len(accs) == 1:
        return (hopper.warpgroup_mma_wait(outstanding, deps=accs),)
    else:
        return hopper.warpgroup_mma_wait(outstanding, deps=accs)


@gluon.jit
def _load_groups_of_blocks(
    weight, first, first_input, halves, outputs, TILE: gl.constexpr, GROUP: gl.constexpr, DTYPE: gl.constexpr
):
    """`_load_groups` of each block."""
    WIDTH: gl.constexpr = TILE.consumers * (32 if TILE.act is not None else 64)
    BLOCKS: gl.constexpr = TILE.blocks
    found = ()
    for block in gl.static_range(BLOCKS):
        rows = _rows_of(first + block * WIDTH, outputs, TILE)
        found = found + (_load_groups(weight, rows, first_input, halves, GROUP, DTYPE),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@gluon.jit
def _multiply(use, count, last, first, weight, halves, outputs, ring, TILE: gl.constexpr, GROUP: gl.constexpr):
    """fp32 [rows, tokens] of each block and, within one, each part of the tokens: the products of `count` stages from
    use number `use` on, which end with `last` of K.

    first: output. weight: (scales, zeros or None, rows). halves: (half, inputs).
    """
    STAGES: gl.constexpr = TILE.stages
    BLOCKS: gl.constexpr = TILE.blocks
    ROWS: gl.constexpr = TILE.consumers * 64
    PARTS: gl.constexpr = TILE.depth // INPUTS
    SIZES: gl.constexpr = _parts_of(TILE.tokens)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, _sums_layout(SIZES[0], TILE), 2)
    w_smem, x_smems, full, free = ring
    DTYPE: gl.constexpr = x_smems[0].dtype
    accs = ()
    for i in gl.static_range(BLOCKS * len(SIZES)):
        accs = accs + (_zeros(SIZES[i % len(SIZES)], TILE),)  # type: ignore[assignment]  # noqa: RUF005
    following = _load_groups_of_blocks(weight, first, last * TILE.depth, halves, outputs, TILE, GROUP, DTYPE)
    for i in range(count):
        stage = (use + i) % STAGES
        before = gl.maximum(last - i - 1, 0) * TILE.depth
        groups = ()
        for block in gl.static_range(BLOCKS):
            low, high, low_zeros, high_zeros = following[block]
            groups = groups + ((low.to(DTYPE), high.to(DTYPE), low_zeros, high_zeros),)  # type: ignore[assignment]  # noqa: RUF005
        following = _load_groups_of_blocks(weight, first, before, halves, outputs, TILE, GROUP, DTYPE)
        hopper.mbarrier.wait(full.index(stage), (use + i) // STAGES % 2)
        for part in gl.static_range(PARTS):
            codes = ()
            for half in gl.static_range(2):
                for block in gl.static_range(BLOCKS):
                    if half == 0:
                        own = w_smem.index(stage * BLOCKS + block).reshape([ROWS, TILE.depth // 2])
                        codes = codes + (_load_codes(own, part),)  # type: ignore[assignment]  # noqa: RUF005
                    operand = _decode(codes[block], groups[block][2 + half], groups[block][half], half, OPERAND, DTYPE)
                    accs = _add_products(accs, operand, x_smems, (stage * PARTS + part) * 2 + half, block)
                    accs = _wait(accs, len(SIZES))
                    if part + half + block == 0:  # the products of the stage before are done
                        hopper.mbarrier.arrive(free.index((use + i + STAGES - 1) % STAGES), pred=i > 0)
    accs = _wait(accs, 0)
    hopper.mbarrier.arrive(free.index((use + count - 1) % STAGES))
    return accs


@gluon.jit
def _columns(acc):
    """Its parts of at most CHUNK columns."""
    if acc.shape[1] > CHUNK:
        HALF: gl.constexpr = acc.shape[1] // 2
        OLD: gl.constexpr = acc.type.layout
        LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], OLD.warps_per_cta, [16, HALF, 16])
        low, high = acc.reshape([acc.shape[0], 2, HALF]).permute((0, 2, 1)).split()
        return _columns(gl.convert_layout(low, LAYOUT)) + _columns(gl.convert_layout(high, LAYOUT))
    else:
        return (acc,)


@gluon.jit
def _places(acc):
    """Where partial sums lie in memory: each warp touches whole cache lines."""
    LAYOUT: gl.constexpr = acc.type.layout
    row = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, LAYOUT))[:, None]
    token = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, LAYOUT))[None, :]
    return token // 8 * (8 * acc.shape[0]) + row * 8 + token % 8


@gluon.constexpr_function
def _first_of(i, tile):
    """Sums of a tile before those that `_multiply` gives as number i."""
    sizes = _parts_of(tile.tokens)
    return 64 * tile.consumers * (i // len(sizes) * tile.tokens + sum(sizes[: i % len(sizes)]))


@gluon.jit
def _add_partial(partial_ptr, accs, TILE: gl.constexpr):
    found = ()
    for i in gl.static_range(len(accs)):
        part = gl.load(partial_ptr + _first_of(i, TILE) + _places(accs[i]), cache_modifier=".cg")
        found = found + (accs[i] + part,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@gluon.jit
def _store(acc, y_smem, y_ptr, bias_ptr, first_token, first, tokens, outputs, TILE: gl.constexpr):
    """Store outputs `first`... of tokens `first_token`...: through shared memory, so that threads write 16 bytes."""
    ACT: gl.constexpr = TILE.act
    ROWS: gl.constexpr = acc.shape[0]
    WIDTH: gl.constexpr = ROWS // 2 if ACT is not None else ROWS
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4 * TILE.consumers, 1], [1, 0])
    parts = _columns(acc)
    for i in gl.static_range(len(parts)):
        part = parts[i]
        if bias_ptr is not None:
            row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, part.type.layout))
            part += gl.load(bias_ptr + row, mask=row < outputs, other=0.0).to(gl.float32)[:, None]
        if ACT is not None:
            gate, up = part.reshape([ROWS // 16, 2, 8, part.shape[1]]).permute((0, 2, 3, 1)).split()
            part = (activate(gate, ACT) * up).reshape([WIDTH, part.shape[1]])
        own = y_smem.slice(0, part.shape[1])
        own.store(part.to(y_smem.dtype).permute((1, 0)))
        token = first_token + i * CHUNK + gl.arange(0, part.shape[1], layout=gl.SliceLayout(1, WIDE))[:, None]
        output = first + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, WIDE))[None, :]
        target = y_ptr + token.to(gl.int64) * outputs + output
        gl.store(target, own.load(WIDE), mask=(token < tokens) & (output < outputs))


@gluon.jit
def _copy_weights(desc, tile_row, step, full, w_smem, stage, TILE: gl.constexpr):
    ROWS: gl.constexpr = TILE.consumers * 64
    BLOCKS: gl.constexpr = TILE.blocks
    for block in gl.static_range(BLOCKS):
        row, part = tile_row * BLOCKS + block, w_smem.index(stage * BLOCKS + block)
        if TILE.act is not None:
            copy_async(desc, [row * (ROWS // 16), 0, 0, step * (TILE.depth // 2)], full, part)
        else:
            copy_async(desc, [row * ROWS, step * (TILE.depth // 2)], full, part)


@gluon.jit
def _copy_tokens(x_descs, token, step, full, x_smems, stage, TILE: gl.constexpr):
    PARTS: gl.constexpr = TILE.depth // INPUTS
    for part in gl.static_range(PARTS):
        at, x = step * TILE.depth + part * INPUTS, (stage * PARTS + part) * 2
        for i in gl.static_range(len(x_smems)):
            first = token if i == 0 else token + x_smems[0].shape[1]
            copy_async(x_descs[2 * i], [first, at], full, x_smems[i].index(x))
            copy_async(x_descs[2 * i + 1], [first, at], full, x_smems[i].index(x + 1))


@gluon.jit
def _produce(w_desc, x_descs, ring, work, TILE: gl.constexpr):
    w_smem, x_smems, full, free = ring
    start, end, steps, token_tiles = work
    TOKENS: gl.constexpr = TILE.tokens
    STAGES: gl.constexpr = TILE.stages
    BYTES: gl.constexpr = (TILE.consumers * TILE.blocks * 64 + 4 * TOKENS) * TILE.depth
    ahead = gl.minimum(end - start, STAGES)
    for use in range(ahead):
        unit = end - 1 - use
        hopper.mbarrier.expect(full.index(use), BYTES)
        _copy_weights(w_desc, unit // steps // token_tiles, unit % steps, full.index(use), w_smem, use, TILE)
    gdc_wait()
    for use in range(ahead):
        unit = end - 1 - use
        token = unit // steps % token_tiles * TOKENS
        _copy_tokens(x_descs, token, unit % steps, full.index(use), x_smems, use, TILE)
    if end - start <= STAGES + LEAD:
        gdc_launch_dependents()
    for use in range(ahead, end - start):
        if end - start - use == LEAD:
            gdc_launch_dependents()
        unit = end - 1 - use
        tile, step, stage = unit // steps, unit % steps, use % STAGES
        hopper.mbarrier.wait(free.index(stage), (use // STAGES + 1) % 2)
        hopper.mbarrier.expect(full.index(stage), BYTES)
        _copy_weights(w_desc, tile // token_tiles, step, full.index(stage), w_smem, stage, TILE)
        _copy_tokens(x_descs, tile % token_tiles * TOKENS, step, full.index(stage), x_smems, stage, TILE)


@gluon.jit
def _consume(
    y_ptr, bias_ptr, weight, halves, shared, y_smem, ring, work, sizes, TILE: gl.constexpr, GROUP: gl.constexpr
):
    partial_ptr, flags_ptr = shared
    start, end, steps, token_tiles = work
    tokens, outputs, units = sizes
    ROWS: gl.constexpr = TILE.consumers * 64
    BLOCKS: gl.constexpr = TILE.blocks
    COUNT: gl.constexpr = len(_parts_of(TILE.tokens))
    WIDTH: gl.constexpr = ROWS // 2 if TILE.act is not None else ROWS
    SIZE: gl.constexpr = BLOCKS * ROWS * TILE.tokens
    program, programs = gl.program_id(0), gl.num_programs(0)
    stop = end
    while stop > start:
        tile = (stop - 1) // steps
        tile_start, tile_end = tile * steps, (tile + 1) * steps
        first_unit = gl.maximum(start, tile_start)
        first_token, first = tile % token_tiles * TILE.tokens, tile // token_tiles * (BLOCKS * WIDTH)
        accs = _multiply(
            end - stop, stop - first_unit, (stop - 1) % steps, first, weight, halves, outputs, ring, TILE, GROUP
        )
        if stop < tile_end:
            for i in gl.static_range(len(accs)):
                own_ptr = partial_ptr + program * SIZE + _first_of(i, TILE)
                gl.store(own_ptr + _places(accs[i]), accs[i], cache_modifier=".cg")
            owner = (tile_end * programs - 1) // units
            thread_barrier()
            gl.atomic_add(flags_ptr + owner, 1, sem="release")
        else:
            helper = ((tile_start + 1) * programs - 1) // units
            if helper < program:
                while gl.atomic_add(flags_ptr + program, 0, sem="acquire") < program - helper:
                    pass
                gl.atomic_xchg(flags_ptr + program, 0, sem="relaxed")
                for other in range(helper, program):
                    accs = _add_partial(partial_ptr + other * SIZE, accs, TILE)
            for i in gl.static_range(len(accs)):
                token, output = first_token + _first_of(i, TILE) // ROWS % TILE.tokens, first + i // COUNT * WIDTH
                _store(accs[i], y_smem, y_ptr, bias_ptr, token, output, tokens, outputs, TILE)
        stop = first_unit


@gluon.jit(do_not_specialize=["tokens", "units", "steps", "token_tiles"])
def _int4_hopper_kernel(
    w_desc, low_desc, high_desc, low_rest_desc, high_rest_desc, y_ptr, bias_ptr, weight, halves, shared,
    tokens, outputs, units, steps, token_tiles, TILE: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """low, high: of a tile's tokens, or of the first part of them; rest: of the second part, None without one. weight:
    (scales, zeros or None, groups of a row). halves: (bytes of a row, K).

    shared, units, steps: as in `linear/hopper_kernel.py`. GROUP: inputs that share a scale, 0 for all.
    """
    STAGES: gl.constexpr = TILE.stages
    DTYPE: gl.constexpr = low_desc.dtype
    SIZES: gl.constexpr = _parts_of(TILE.tokens)
    WIDTH: gl.constexpr = TILE.consumers * (32 if TILE.act is not None else 64)
    w_smem = gl.allocate_shared_memory(w_desc.dtype, [STAGES * TILE.blocks] + w_desc.block_shape, w_desc.layout)  # noqa: RUF005 - Triton has no stars
    x_smems = ()
    for i in gl.static_range(len(SIZES)):
        own = gl.allocate_shared_memory(DTYPE, [STAGES * (TILE.depth // 32), SIZES[i], INPUTS], SHARED)
        x_smems = x_smems + (own,)  # type: ignore[assignment]  # noqa: RUF005
    Y_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(min(128, WIDTH * 2), 16, 2)
    y_smem = gl.allocate_shared_memory(DTYPE, [min(SIZES[0], CHUNK), WIDTH], Y_LAYOUT)
    ring = (w_smem, x_smems, barriers(STAGES, 1), barriers(STAGES, 1))
    hopper.fence_async_shared()
    program = gl.program_id(0)
    start = program * units // gl.num_programs(0)
    end = (program + 1) * units // gl.num_programs(0)
    work, sizes = (start, end, steps, token_tiles), (tokens, outputs, units)
    gl.warp_specialize(
        [
            (_consume, (y_ptr, bias_ptr, weight, halves, shared, y_smem, ring, work, sizes, TILE, GROUP)),
            (_produce, (w_desc, (low_desc, high_desc, low_rest_desc, high_rest_desc), ring, work, TILE)),
        ],
        [1],
        [24],
    )


def linear_int4_hopper(
    x: Tensor, weight: Int4Weight, plan: HopperPlan, bias: Tensor | None = None, *, act: str | None = None
) -> Tensor:
    """y of checked arguments for which `plans.plan_int4_hopper` has a plan. The tile's depth: bytes, 64 or 128."""
    tile, programs = plan[0]._replace(act=act), plan[1]
    (tokens, inputs), (rows, half) = x.shape, weight.codes.shape
    outputs = rows // 2 if act else rows
    y = torch.empty((tokens, outputs), dtype=x.dtype, device=x.device)
    own_rows, width = tile.consumers * BLOCK_ROWS, tile.depth // 2
    pairs = weight.codes.view(torch.int16)
    if act:
        layout = gl.NVMMASharedLayout(tile.depth, 16, 4)
        shape, strides = [outputs // 8, 2, 8, half // 2], [4 * half, outputs * (half // 2), half // 2, 1]
        w_desc = TensorDescriptor(pairs, shape, strides, [own_rows // 16, 2, 8, width], layout)
    else:
        layout = gl.NVMMASharedLayout(tile.depth, 16, 2)
        w_desc = TensorDescriptor(pairs, [outputs, half // 2], [half // 2, 1], [own_rows, width], layout)
    x_descs = [
        TensorDescriptor(part, list(part.shape), [x.stride(0), 1], [size, INPUTS.value], SHARED.value)
        for size in _parts_of(tile.tokens)
        for part in (x[:, :half], x[:, half:])
    ]
    steps, token_tiles = triton.cdiv(half, tile.depth), triton.cdiv(tokens, tile.tokens)
    units = triton.cdiv(rows, tile.rows) * token_tiles * steps
    programs = min(units, programs)
    partial = torch.empty(programs * tile.rows * tile.tokens, dtype=torch.float32, device=x.device)
    options = {"num_warps": 4 * tile.consumers, "maxnreg": tile.registers, "launch_pdl": True}
    launch(_int4_hopper_kernel, (programs,))(
        w_desc,
        *(x_descs if len(x_descs) == 4 else (*x_descs, None, None)),
        y,
        bias,
        (weight.scales, weight.zeros, rows),
        (half, inputs),
        (partial, flags(x.device)),
        tokens,
        outputs,
        units,
        steps,
        token_tiles,
        TILE=tile,
        GROUP=weight.group or 0,
        **options,
    )
    return y
