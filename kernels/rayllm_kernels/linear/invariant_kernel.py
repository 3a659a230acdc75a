"""Matrix products whose rows do not know of each other: the bits of a row of y depend on its row of x and on W alone.

    y = x W^T + bias

x [M, K], W [N, K], bias [N] -> y [M, N]; fp32 sums, rounded once. Every output element is one chain of tensor-core
steps over K in ascending order, 16 entries a step, beginning at zero: no split of K, and the same steps whatever the
tile. The tile may therefore follow the number of tokens: small ones, which read the weights fastest, for few tokens,
large ones, on Hopper filled by tensor copies, for many. That all tiles give the same bits is the hardware's doing (a
step's sum depends neither on the instruction's shape nor on which operand the weights are), so the tests compare every
tile that may be chosen.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..compile_ahead import launch
from ..dependent_launch import wait_for_predecessor
from ..device import hardware
from .device_functions import add_products, no_sums, sums
from .plans import Tiles, choose_invariant_tiles

GROUP = tl.constexpr(8)  # token tiles that share their weight tiles in L2


@triton.jit
def program_tiles(tokens, outputs, TILES: tl.constexpr):
    """(token tile, output tile) of this program: GROUP token tiles go through all output tiles together."""
    token_tiles, output_tiles = tl.cdiv(tokens, TILES.tokens), tl.cdiv(outputs, TILES.outputs)
    program = tl.program_id(0)
    first = program // (GROUP * output_tiles) * GROUP
    width = tl.minimum(token_tiles - first, GROUP)
    inside = program % (GROUP * output_tiles)
    return first + inside % width, inside // width


@triton.jit
def _finish(acc, bias_ptr, y_ptr, token, output, tokens, outputs, TILES: tl.constexpr):
    """Store a tile at `token` [TOKENS] and `output` [OUTPUTS], with the bias."""
    column = output[None, :]
    y = sums(acc, bias_ptr, column, outputs, TILES)
    target = y_ptr + token.to(tl.int64)[:, None] * outputs + column
    tl.store(target, y.to(y_ptr.dtype.element_ty), mask=(token < tokens)[:, None] & (column < outputs))


@triton.jit(do_not_specialize=["tokens"])
def _linear_invariant_kernel(
    operands, strides, tokens, inputs, outputs, TILES: tl.constexpr, EVEN: tl.constexpr, OVERLAP: tl.constexpr
):
    """operands: (x, weight, bias or None, y). strides: of x and weight. EVEN: the tiles' depth divides K."""
    x_ptr, weight_ptr, bias_ptr, y_ptr = operands
    stride_x, stride_weight = strides
    token_tile, output_tile = program_tiles(tokens, outputs, TILES)
    token = token_tile * TILES.tokens + tl.arange(0, TILES.tokens)
    output = output_tile * TILES.outputs + tl.arange(0, TILES.outputs)
    depth = tl.arange(0, TILES.depth)[None, :]
    # Weight rows past the end repeat the last one and are not stored.
    weights_ptr = weight_ptr + tl.minimum(output, outputs - 1).to(tl.int64)[:, None] * stride_weight + depth
    inputs_ptr = x_ptr + token.to(tl.int64)[:, None] * stride_x + depth
    real = (token < tokens)[:, None]
    wait_for_predecessor(OVERLAP)
    acc = no_sums(TILES)
    for start in range(0, inputs, TILES.depth):
        # Padding tokens are not read: many programs that repeat one row would crowd the part of L2 that holds it.
        if EVEN:
            weights = tl.load(weights_ptr)
            x = tl.load(inputs_ptr, mask=real, other=0.0)
        else:
            weights = tl.load(weights_ptr, mask=start + depth < inputs, other=0.0)
            x = tl.load(inputs_ptr, mask=real & (start + depth < inputs), other=0.0)
        acc = add_products(acc, weights, x, TILES)
        weights_ptr += TILES.depth
        inputs_ptr += TILES.depth
    _finish(acc, bias_ptr, y_ptr, token, output, tokens, outputs, TILES)


@triton.jit(do_not_specialize=["tokens"])
def _linear_copied_kernel(
    x_desc, weight_desc, bias_ptr, y_ptr, tokens, inputs, outputs, TILES: tl.constexpr, OVERLAP: tl.constexpr
):
    """The same with tensor copies, which read past an end as zeros."""
    token_tile, output_tile = program_tiles(tokens, outputs, TILES)
    wait_for_predecessor(OVERLAP)
    acc = no_sums(TILES)
    for start in range(0, inputs, TILES.depth):
        weights = weight_desc.load([output_tile * TILES.outputs, start])
        x = x_desc.load([token_tile * TILES.tokens, start])
        acc = add_products(acc, weights, x, TILES)
    token = token_tile * TILES.tokens + tl.arange(0, TILES.tokens)
    output = output_tile * TILES.outputs + tl.arange(0, TILES.outputs)
    _finish(acc, bias_ptr, y_ptr, token, output, tokens, outputs, TILES)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, tiles: Tiles, *, wide: bool = False) -> Tensor:
    """y of checked arguments, by one choice of tiles; in fp32 if `wide`."""
    (tokens, inputs), outputs = x.shape, weight.shape[0]
    y = torch.empty((tokens, outputs), dtype=torch.float32 if wide else x.dtype, device=x.device)
    if not y.numel():
        return y
    gpu = hardware(x.device)
    overlap = gpu.can_overlap
    stage_bytes = (tiles.tokens + tiles.outputs) * tiles.depth * x.element_size()
    stages = gpu.stages(tiles.num_stages, stage_bytes)
    options = {"num_warps": tiles.num_warps, "num_stages": stages, "launch_pdl": overlap}
    grid = (triton.cdiv(tokens, tiles.tokens) * triton.cdiv(outputs, tiles.outputs),)
    if tiles.copied:
        x_desc = TensorDescriptor(x, list(x.shape), list(x.stride()), [tiles.tokens, tiles.depth])
        weight_desc = TensorDescriptor(weight, list(weight.shape), list(weight.stride()), [tiles.outputs, tiles.depth])
        launch(_linear_copied_kernel, grid)(
            x_desc, weight_desc, bias, y, tokens, inputs, outputs, TILES=tiles, OVERLAP=overlap, **options
        )
    else:
        strides, even = (x.stride(0), weight.stride(0)), inputs % tiles.depth == 0
        launch(_linear_invariant_kernel, grid)(
            (x, weight, bias, y), strides, tokens, inputs, outputs, TILES=tiles, EVEN=even, OVERLAP=overlap, **options
        )
    return y


def can_copy(tensor: Tensor) -> bool:
    """Whether tensor copies can read this [N, K]: Hopper and later, and only rows at multiples of 16 bytes."""
    row_bytes = tensor.stride(0) * tensor.element_size()
    copies = tensor.device.type == "cpu" or hardware(tensor.device).can_overlap
    return copies and tensor.data_ptr() % 16 == 0 and row_bytes % 16 == 0 and tensor.stride(1) == 1


def linear_invariant(x: Tensor, weight: Tensor, bias: Tensor | None, *, wide: bool = False) -> Tensor:
    """x W^T + bias, in fp32 if `wide`; the arguments are checked."""
    tiles = choose_invariant_tiles(x.shape[0], weight.shape[0], x.dtype, hardware(x.device).multiprocessors)
    if tiles.copied and not (can_copy(x) and can_copy(weight)):
        tiles = tiles._replace(copied=False)
    return multiply(x, weight, bias, tiles, wide=wide)
