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

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .checks import check_linear
from .dependent_launch import can_overlap, wait_for_predecessor

GROUP = 8  # token tiles that share their weight tiles in L2


class Tiles(NamedTuple):
    """A tile: tokens, outputs, depth (of K), warps, pipeline stages, weights as the first operand, tensor copies."""

    tokens: int
    outputs: int
    depth: int
    num_warps: int
    num_stages: int
    weights_first: bool
    copied: bool = False


@triton.jit
def _program_tiles(tokens, outputs, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, GROUP: tl.constexpr):
    """(token tile, output tile) of this program: GROUP token tiles go through all output tiles together."""
    token_tiles, output_tiles = tl.cdiv(tokens, TOKENS), tl.cdiv(outputs, OUTPUTS)
    program = tl.program_id(0)
    first = program // (GROUP * output_tiles) * GROUP
    width = tl.minimum(token_tiles - first, GROUP)
    inside = program % (GROUP * output_tiles)
    return first + inside % width, inside // width


@triton.jit
def _add_products(acc, weights, x, WEIGHTS_FIRST: tl.constexpr):
    if WEIGHTS_FIRST:
        return tl.dot(weights, tl.trans(x), acc, input_precision="ieee")
    else:
        return tl.dot(x, tl.trans(weights), acc, input_precision="ieee")


@triton.jit
def _finish(acc, bias_ptr, y_ptr, token, output, tokens, outputs, WEIGHTS_FIRST: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Store a tile at `token` [TOKENS] and `output` [OUTPUTS], with the bias."""
    y = tl.trans(acc) if WEIGHTS_FIRST else acc
    column = output[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + column, mask=column < outputs, other=0.0).to(tl.float32)
    target = y_ptr + token.to(tl.int64)[:, None] * outputs + column
    tl.store(target, y.to(y_ptr.dtype.element_ty), mask=(token < tokens)[:, None] & (column < outputs))


@triton.jit(do_not_specialize=["tokens"])
def _linear_invariant_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    stride_x,
    stride_weight,
    tokens,
    inputs,
    outputs,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token_tile, output_tile = _program_tiles(tokens, outputs, TOKENS, OUTPUTS, GROUP)
    token = token_tile * TOKENS + tl.arange(0, TOKENS)
    output = output_tile * OUTPUTS + tl.arange(0, OUTPUTS)
    depth = tl.arange(0, DEPTH)[None, :]
    # Weight rows past the end repeat the last one and are not stored.
    weights_ptr = weight_ptr + tl.minimum(output, outputs - 1).to(tl.int64)[:, None] * stride_weight + depth
    inputs_ptr = x_ptr + token.to(tl.int64)[:, None] * stride_x + depth
    real = (token < tokens)[:, None]
    wait_for_predecessor(OVERLAP)
    acc = tl.zeros([OUTPUTS, TOKENS] if WEIGHTS_FIRST else [TOKENS, OUTPUTS], tl.float32)
    for start in range(0, inputs, DEPTH):
        # Padding tokens are not read: many programs that repeat one row would crowd the part of L2 that holds it.
        if EVEN:
            weights = tl.load(weights_ptr)
            x = tl.load(inputs_ptr, mask=real, other=0.0)
        else:
            weights = tl.load(weights_ptr, mask=start + depth < inputs, other=0.0)
            x = tl.load(inputs_ptr, mask=real & (start + depth < inputs), other=0.0)
        acc = _add_products(acc, weights, x, WEIGHTS_FIRST)
        weights_ptr += DEPTH
        inputs_ptr += DEPTH
    _finish(acc, bias_ptr, y_ptr, token, output, tokens, outputs, WEIGHTS_FIRST, HAS_BIAS)


@triton.jit(do_not_specialize=["tokens"])
def _linear_copied_kernel(
    x_desc,
    weight_desc,
    bias_ptr,
    y_ptr,
    tokens,
    inputs,
    outputs,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The same with tensor copies, which read past an end as zeros."""
    token_tile, output_tile = _program_tiles(tokens, outputs, TOKENS, OUTPUTS, GROUP)
    wait_for_predecessor(OVERLAP)
    acc = tl.zeros([OUTPUTS, TOKENS] if WEIGHTS_FIRST else [TOKENS, OUTPUTS], tl.float32)
    for start in range(0, inputs, DEPTH):
        weights = weight_desc.load([output_tile * OUTPUTS, start])
        x = x_desc.load([token_tile * TOKENS, start])
        acc = _add_products(acc, weights, x, WEIGHTS_FIRST)
    token = token_tile * TOKENS + tl.arange(0, TOKENS)
    output = output_tile * OUTPUTS + tl.arange(0, OUTPUTS)
    _finish(acc, bias_ptr, y_ptr, token, output, tokens, outputs, WEIGHTS_FIRST, HAS_BIAS)


def launch(x: Tensor, weight: Tensor, bias: Tensor | None, tiles: Tiles) -> Tensor:
    """y of checked arguments, by one choice of tiles."""
    tokens, inputs = x.shape
    outputs = weight.shape[0]
    y = torch.empty((tokens, outputs), dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    overlap = can_overlap(x.device)
    stage_bytes = (tiles.tokens + tiles.outputs) * tiles.depth * x.element_size()
    stages = max(1, min(tiles.num_stages, _shared_memory(x.device) // stage_bytes))
    grid = (triton.cdiv(tokens, tiles.tokens) * triton.cdiv(outputs, tiles.outputs),)
    if tiles.copied:
        x_desc = TensorDescriptor(x, list(x.shape), list(x.stride()), [tiles.tokens, tiles.depth])
        weight_desc = TensorDescriptor(weight, list(weight.shape), list(weight.stride()), [tiles.outputs, tiles.depth])
        _linear_copied_kernel[grid](
            x_desc,
            weight_desc,
            x if bias is None else bias,
            y,
            tokens,
            inputs,
            outputs,
            TOKENS=tiles.tokens,
            OUTPUTS=tiles.outputs,
            DEPTH=tiles.depth,
            GROUP=GROUP,
            WEIGHTS_FIRST=tiles.weights_first,
            HAS_BIAS=bias is not None,
            OVERLAP=overlap,
            num_warps=tiles.num_warps,
            num_stages=stages,
            launch_pdl=overlap,
        )
        return y
    _linear_invariant_kernel[grid](
        x,
        weight,
        x if bias is None else bias,
        y,
        x.stride(0),
        weight.stride(0),
        tokens,
        inputs,
        outputs,
        TOKENS=tiles.tokens,
        OUTPUTS=tiles.outputs,
        DEPTH=tiles.depth,
        GROUP=GROUP,
        WEIGHTS_FIRST=tiles.weights_first,
        EVEN=inputs % tiles.depth == 0,
        HAS_BIAS=bias is not None,
        OVERLAP=overlap,
        num_warps=tiles.num_warps,
        num_stages=stages,
        launch_pdl=overlap,
    )
    return y


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that a program may take."""
    if device.type != "cuda":
        return 1 << 30
    # torch's stubs lack the name.
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 48 << 10))


def choose_tiles(tokens: int, outputs: int, dtype: torch.dtype, multiprocessors: int) -> Tiles:
    """The fastest tiles on H200 of those that the tests prove equal: as large as leaves no multiprocessor idle."""
    if dtype == torch.float32:  # no tensor cores in exact fp32
        return Tiles(32, 32, 32, 4, 2, False)
    narrow = outputs <= 16 * multiprocessors
    if tokens <= 16:
        return Tiles(16, 16, 512, 2, 3, False) if narrow else Tiles(16, 64, 128, 4, 6, True)
    if tokens <= 32:
        return Tiles(32, 16, 256, 2, 4, False) if narrow else Tiles(32, 64, 128, 4, 6, True)
    if tokens <= 64:
        few = outputs <= 32 * multiprocessors
        return Tiles(64, 32, 128, 4, 5, False) if few else Tiles(64, 64, 128, 4, 5, True)
    columns = triton.cdiv(outputs, 128)
    programs, enough = triton.cdiv(tokens, 128) * columns, multiprocessors * 7 // 10
    if programs // 2 >= 19 * multiprocessors // 10:
        return Tiles(128, 256, 64, 8, 4, True, copied=True)
    if programs >= 2 * multiprocessors:
        return Tiles(128, 128, 64, 8, 3, False, copied=True)  # two to a multiprocessor
    if programs >= enough:
        return Tiles(128, 128, 64, 8, 4, False, copied=True)
    if triton.cdiv(tokens, 64) * columns >= enough:
        return Tiles(64, 128, 64, 4, 5, False, copied=True)
    return Tiles(64, 64, 128, 4, 5, False)


def can_copy(tensor: Tensor) -> bool:
    """Whether tensor copies can read this [N, K]: Hopper and later, and only rows at multiples of 16 bytes."""
    row_bytes = tensor.stride(0) * tensor.element_size()
    hardware = tensor.device.type == "cpu" or can_overlap(tensor.device)
    return hardware and tensor.data_ptr() % 16 == 0 and row_bytes % 16 == 0 and tensor.stride(1) == 1


def linear_invariant(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias; see `ops.linear_invariant` for the contract."""
    check_linear(x, weight, bias)
    tiles = choose_tiles(x.shape[0], weight.shape[0], x.dtype, _multiprocessors(x.device))
    if tiles.copied and not (can_copy(x) and can_copy(weight)):
        tiles = tiles._replace(copied=False)
    return launch(x, weight, bias, tiles)
