"""Gated projection of many tokens for Hopper GPUs: a persistent matrix product that activates its sums itself.

    y = act(x G^T) * (x U^T)   where W = [G; U]

x [M, K], W [2 N, K] -> y [M, N]; fp32 sums, rounded once. Neither the products nor the factors pass through memory.

A tile is 128 outputs by 64 tokens for each of two or three warp groups, the consumers. The second operand of their
products is 128 rows of G and the same 128 of U, so that a thread holds both factors of an output. One warp, the
producer, copies both operands into a ring in shared memory, which runs on from tile to tile: while the consumers
activate and store, the next tile's first stages arrive.

Programs stay resident and take every n-th tile. Tiles are numbered so that those in work at a time are few token tiles
by few output tiles, which find each other's operands in L2.

Barriers come in pairs: `full` says that a stage holds data, `free` that the consumers are done with it. The n-th use
of a stage completes phase n, and a wait names the parity of the phase.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

from functools import cache

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
from ..hopper import activate, barriers
from .plans import GATED_BLOCK_TOKENS, GATED_TILE_OUTPUTS

BLOCK = gl.constexpr(GATED_BLOCK_TOKENS)
OUTPUTS = gl.constexpr(GATED_TILE_OUTPUTS)
DEPTH = gl.constexpr(64)  # of a stage: 128 bytes, the widest swizzle
STAGES = gl.constexpr(4)
GROUP_TOKENS = 2048  # that share their weights in L2: half and twice as many were slower for Llama-3.1-8B
REGISTERS = {2: 168, 3: 128}  # of a thread when a program starts, by consumers: they take the producer's
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
SHARED_GATED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 3))


@gluon.jit
def _find_tile(index, grid):
    """(token tile, output tile) number `index`: `group` token tiles go through all output tiles together."""
    token_tiles, output_tiles, group, _ = grid
    first = index // (group * output_tiles) * group
    width = gl.minimum(token_tiles - first, group)
    inside = index % (group * output_tiles)
    return first + inside % width, inside // width


@gluon.jit
def _produce(x_desc, w_desc, ring, grid, CONSUMERS: gl.constexpr):
    x_smem, w_smem, full, free = ring
    token_tiles, output_tiles, _, steps = grid
    BYTES: gl.constexpr = (CONSUMERS * BLOCK + 2 * OUTPUTS) * DEPTH * 2
    gdc_wait()
    use = token_tiles * 0
    for index in range(gl.program_id(0), token_tiles * output_tiles, gl.num_programs(0)):
        token_tile, output_tile = _find_tile(index, grid)
        for step in range(steps):
            stage = use % STAGES
            hopper.mbarrier.wait(free.index(stage), (use // STAGES + 1) % 2)
            hopper.mbarrier.expect(full.index(stage), BYTES)
            copy_async(w_desc, [0, output_tile * OUTPUTS, step * DEPTH], full.index(stage), w_smem.index(stage))
            for consumer in gl.static_range(CONSUMERS):
                row, part = (token_tile * CONSUMERS + consumer) * BLOCK, x_smem.index(stage * CONSUMERS + consumer)
                copy_async(x_desc, [row, step * DEPTH], full.index(stage), part)
            use += 1
    gdc_launch_dependents()


@gluon.jit
def _multiply(use, steps, ring, CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr):
    """(gate, up), fp32 [BLOCK, OUTPUTS]: the products of `steps` stages from use number `use` on."""
    # Two products a step rather than one of twice the width, which was not faster and needs more registers at a
    # program's start than three consumers can have.
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OUTPUTS, 16])
    x_smem, w_smem, full, free = ring
    gate = gl.zeros([BLOCK, OUTPUTS], gl.float32, layout=ACC)
    up = gl.zeros([BLOCK, OUTPUTS], gl.float32, layout=ACC)
    for i in range(steps):
        stage = (use + i) % STAGES
        hopper.mbarrier.wait(full.index(stage), (use + i) // STAGES % 2)
        tokens = x_smem.index(stage * CONSUMERS + CONSUMER)
        weights = w_smem.index(stage).reshape([2 * OUTPUTS, DEPTH])
        gate = hopper.warpgroup_mma(tokens, weights.slice(0, OUTPUTS, dim=0).permute((1, 0)), gate, is_async=True)
        up = hopper.warpgroup_mma(tokens, weights.slice(OUTPUTS, OUTPUTS, dim=0).permute((1, 0)), up, is_async=True)
        gate, up = hopper.warpgroup_mma_wait(2, deps=(gate, up))
        hopper.mbarrier.arrive(free.index((use + i + STAGES - 1) % STAGES), pred=i > 0)
    gate, up = hopper.warpgroup_mma_wait(0, deps=(gate, up))
    hopper.mbarrier.arrive(free.index((use + steps - 1) % STAGES))
    return gate, up


@gluon.jit
def _consume(y_ptr, ring, grid, tokens, outputs, CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, ACT: gl.constexpr):
    token_tiles, output_tiles, _, steps = grid
    # As the products leave them, but for an exchange among four threads: each stores 8 bytes, the four a whole sector.
    WIDE: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 16], [0, 32], [0, 64], [8, 0]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [BLOCK, OUTPUTS],
    )
    use = token_tiles * 0
    for index in range(gl.program_id(0), token_tiles * output_tiles, gl.num_programs(0)):
        token_tile, output_tile = _find_tile(index, grid)
        gate, up = _multiply(use, steps, ring, CONSUMER, CONSUMERS)
        y = gl.convert_layout((activate(gate, ACT) * up).to(y_ptr.dtype.element_ty), WIDE)
        first = (token_tile * CONSUMERS + CONSUMER) * BLOCK
        token = (first + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, WIDE)))[:, None]
        output = (output_tile * OUTPUTS + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(0, WIDE)))[None, :]
        gl.store(y_ptr + token.to(gl.int64) * outputs + output, y, mask=(token < tokens) & (output < outputs))
        use += steps


@gluon.jit(do_not_specialize=["tokens", "output_octets", "token_tiles", "output_tiles", "group", "steps"])
def _linear_gated_kernel(
    x_desc,
    w_desc,
    y_ptr,
    tokens,
    output_octets,
    token_tiles,
    output_tiles,
    group,
    steps,
    CONSUMERS: gl.constexpr,
    ACT: gl.constexpr,
):
    """group: tiles of tokens that share their weights in L2. steps: stages of K."""
    grid = (token_tiles, output_tiles, group, steps)
    DTYPE: gl.constexpr = y_ptr.dtype.element_ty
    x_smem = gl.allocate_shared_memory(DTYPE, [STAGES * CONSUMERS, BLOCK, DEPTH], SHARED)
    w_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 2, OUTPUTS, DEPTH], SHARED_GATED)
    ring = (x_smem, w_smem, barriers(STAGES, 1), barriers(STAGES, CONSUMERS))
    hopper.fence_async_shared()
    outputs = output_octets * 8  # so that the compiler knows of rows that start at multiples of 16 bytes
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (y_ptr, ring, grid, tokens, outputs, 0, 2, ACT)),
                (_consume, (y_ptr, ring, grid, tokens, outputs, 1, 2, ACT)),
                (_produce, (x_desc, w_desc, ring, grid, CONSUMERS)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (y_ptr, ring, grid, tokens, outputs, 0, 3, ACT)),
                (_consume, (y_ptr, ring, grid, tokens, outputs, 1, 3, ACT)),
                (_consume, (y_ptr, ring, grid, tokens, outputs, 2, 3, ACT)),
                (_produce, (x_desc, w_desc, ring, grid, CONSUMERS)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )


@cache
def _compile(dtype: torch.dtype, device: torch.device, act: str) -> None:
    """Have the kernels for both numbers of consumers, so that no later step waits for the compiler."""
    for consumers in REGISTERS:
        x, weight = (torch.zeros(rows, DEPTH.value, dtype=dtype, device=device) for rows in (1, 16))
        _launch(x, weight, consumers, 1, act)


def linear_gated_hopper(x: Tensor, weight: Tensor, consumers: int, programs: int, act: str) -> Tensor:
    """y of checked arguments that `hopper_takes`, by two or three consumers a program and at most so many programs."""
    _compile(x.dtype, x.device, act)
    return _launch(x, weight, consumers, programs, act)


def _launch(x: Tensor, weight: Tensor, consumers: int, programs: int, act: str) -> Tensor:
    tokens, inputs = x.shape
    outputs, stride = weight.shape[0] // 2, weight.stride(0)
    y = torch.empty((tokens, outputs), dtype=x.dtype, device=x.device)
    x_desc = TensorDescriptor(x, [tokens, inputs], [x.stride(0), 1], [BLOCK.value, DEPTH.value], SHARED.value)
    w_desc = TensorDescriptor(
        weight, [2, outputs, inputs], [outputs * stride, stride, 1], [2, OUTPUTS.value, DEPTH.value], SHARED_GATED.value
    )
    tile_tokens = consumers * BLOCK.value
    token_tiles, output_tiles = triton.cdiv(tokens, tile_tokens), triton.cdiv(outputs, OUTPUTS.value)
    group, steps = triton.cdiv(GROUP_TOKENS, tile_tokens), triton.cdiv(inputs, DEPTH.value)
    options = {"CONSUMERS": consumers, "ACT": act, "num_warps": 4, "maxnreg": REGISTERS[consumers], "launch_pdl": True}
    launch(_linear_gated_kernel, (min(programs, token_tiles * output_tiles),))(
        x_desc, w_desc, y, tokens, outputs // 8, token_tiles, output_tiles, group, steps, **options
    )
    return y
