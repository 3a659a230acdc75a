"""Matrix-vector products: a few tokens times a weight matrix, as fast as the weights can be read.

    y = act(norm(x + residual) W^T + bias),   norm and residual, bias, act each optional
    act: f(gate) * up, where W = [gate; up] and f is an activation

x, residual [M, K], norm weight [K], W [N, K] (gated: [2 N, K]), bias [N] -> y [M, N], total = x + residual [M, K]. The
sum is rounded to x's dtype, everything after it fp32, rounded once: the norm's factor is a scalar of the row, so it is
applied to the finished product, in the same pass over K that finds it.

One program owns some outputs and runs along K; there are no partial results to add. Its threads hold 16 bytes of each
weight row; a tile is multiplied while the next is on its way, the first is asked for before the previous kernel ends.
What adapters give is added to the finished sums, before all that follows (`rows_adapters.py`).
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..activation import activate
from ..compile_ahead import launch
from ..dependent_launch import wait_for_predecessor
from ..device import hardware
from ..lora.lora import TokenAdapters
from . import rows_adapters
from .rows_adapters import expand, shrink, take

VECTOR_BYTES = 16  # of one row, by one thread
FEW_REGISTERS = 32  # of a thread: what two rows take, which adapters must not add to
Norm = tuple[Tensor | None, Tensor | None, float]  # (residual, weight, eps), none of them without a weight


class Form(NamedTuple):
    """The compile-time argument of the kernel."""

    tokens: int  # padded to a power of two
    rows: int  # outputs of a program
    depth: int  # of K
    vector: int  # entries of a row that a thread holds
    even: bool  # the first tile lies wholly in K
    act: str | None  # of a gate; None where there is none
    overlap: bool  # launches overlap (`dependent_launch.py`)


@triton.jit
def _load_weights(weight_ptr, rows, depth, inputs, EVEN: tl.constexpr):
    """[1, ROWS, DEPTH] at pointers' rows; entries past the end of K are zero."""
    if EVEN:
        return tl.load(weight_ptr + rows + depth)
    else:
        return tl.load(weight_ptr + rows + depth, mask=depth < inputs, other=0.0)


@triton.jit
def _add_products(acc, weights, x, FORM: tl.constexpr):
    """acc [tokens, rows, depth / vector] plus the products of weights [1, rows, depth] and x [tokens, 1, depth].

    Only entries of one thread are added here; the sum over threads waits until the end.
    """
    products = tl.reshape(weights.to(tl.float32) * x, [FORM.tokens, FORM.rows, FORM.depth // FORM.vector, FORM.vector])
    return acc + tl.sum(products, 3)


@triton.jit
def _multiply(program, operands, adapters, strides, sizes, FORM: tl.constexpr, RANKS: tl.constexpr):
    """A program's outputs. Arguments as of the kernel."""
    x_ptr, norm, weight_ptr, bias_ptr, y_ptr, total_ptr = operands
    residual_ptr, norm_ptr, eps = norm
    stride_x, stride_residual, stride_weight = strides
    tokens, inputs, outputs = sizes
    TOKENS: tl.constexpr = FORM.tokens
    ROWS: tl.constexpr = FORM.rows
    DEPTH: tl.constexpr = FORM.depth
    VEC: tl.constexpr = FORM.vector
    ACT: tl.constexpr = FORM.act
    GATED: tl.constexpr = ACT is not None
    output = program * ROWS + tl.arange(0, ROWS)[None, :, None]
    # Rows past the end repeat the last one and are not stored.
    rows = tl.minimum(output, outputs - 1).to(tl.int64) * stride_weight
    up_rows = rows + tl.cast(outputs, tl.int64) * stride_weight
    token = tl.arange(0, TOKENS)[:, None, None]
    x_row = tl.minimum(token, tokens - 1) * stride_x
    residual_row = tl.minimum(token, tokens - 1) * stride_residual
    depth = tl.arange(0, DEPTH)[None, None, :]
    first_tokens = tl.where(program == 0, tokens, 0)  # one program stores the sums for all

    weights = _load_weights(weight_ptr, rows, depth, inputs, FORM.even)
    up_weights = _load_weights(weight_ptr, up_rows, depth, inputs, FORM.even) if GATED else weights
    wait_for_predecessor(FORM.overlap)
    acc = tl.zeros([TOKENS, ROWS, DEPTH // VEC], tl.float32)
    up_acc = tl.zeros([TOKENS, ROWS, DEPTH // VEC], tl.float32)
    squares = tl.zeros([TOKENS, 1, DEPTH // VEC], tl.float32)
    for start in range(0, inputs, DEPTH):
        at = start + depth
        mask = at < inputs
        x = tl.load(x_ptr + x_row + at, mask=mask, other=0.0)
        if residual_ptr is not None:
            residual = tl.load(residual_ptr + residual_row + at, mask=mask, other=0.0)
        if norm_ptr is not None:
            norm_weight = tl.load(norm_ptr + at, mask=mask, other=0.0)
        # The tile after the last one is not read: its mask is false throughout.
        following = tl.load(weight_ptr + rows + at + DEPTH, mask=at + DEPTH < inputs, other=0.0)
        up_following = following
        if GATED:
            up_following = tl.load(weight_ptr + up_rows + at + DEPTH, mask=at + DEPTH < inputs, other=0.0)
        wide = x.to(tl.float32)
        if residual_ptr is not None:
            total = (wide + residual.to(tl.float32)).to(x.dtype)
            tl.store(total_ptr + token * inputs + at, total, mask=mask & (token < first_tokens))
            wide = total.to(tl.float32)
        if norm_ptr is not None:
            squares += tl.sum(tl.reshape(wide * wide, [TOKENS, 1, DEPTH // VEC, VEC]), 3)
            wide = wide * norm_weight.to(tl.float32)
        acc = _add_products(acc, weights, wide, FORM)
        if GATED:
            up_acc = _add_products(up_acc, up_weights, wide, FORM)
        weights, up_weights = following, up_following

    y = tl.sum(acc, 2)
    up = tl.sum(up_acc, 2) if GATED else y
    if RANKS is not None:
        added = take(program, adapters, sizes, FORM, RANKS)
        if GATED:
            added, up_added = tl.split(added)
            up += up_added
        y += added
    if norm_ptr is not None:
        scale = tl.rsqrt(tl.sum(squares, 2) / inputs + eps)
        y, up = y * scale, up * scale
    column = program * ROWS + tl.arange(0, ROWS)[None, :]
    row = tl.arange(0, TOKENS)[:, None]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + column, mask=column < outputs, other=0.0).to(tl.float32)
    if GATED:
        y = activate(y, ACT) * up
    tl.store(y_ptr + row * outputs + column, y.to(y_ptr.dtype.element_ty), mask=(row < tokens) & (column < outputs))


@triton.jit(do_not_specialize=["slots_ptr"])
def _linear_rows_kernel(operands, slots_ptr, adapters, strides, sizes, FORM: tl.constexpr, RANKS: tl.constexpr):
    """operands: (x, (residual or None, weight of the norm or None, eps), weight, bias or None, y, total).

    slots_ptr, adapters, RANKS: of `rows_adapters`, None without adapters. strides: of x, residual and weight. sizes:
    (tokens, inputs, outputs).
    """
    program = tl.program_id(0)
    if RANKS is None:
        _multiply(program, operands, adapters, strides, sizes, FORM, RANKS)
    else:
        shrinking, expanding = adapters[7], adapters[8]
        first = shrinking + expanding
        if program < shrinking:
            shrink(program, operands[0], operands[1], slots_ptr, adapters, strides, sizes, FORM.overlap, RANKS)
        elif program < first:
            expand(program - shrinking, slots_ptr, adapters, sizes, FORM.overlap, RANKS)
        else:
            _multiply(program - first, operands, adapters, strides, sizes, FORM, RANKS)


def linear_rows(
    x: Tensor,
    weight: Tensor,
    tiles: tuple[int, int],
    bias: Tensor | None,
    norm: Norm,
    act: str | None,
    out: Tensor | None,
    adapters: TokenAdapters | None = None,
) -> tuple[Tensor, Tensor]:
    """(y, total) of checked arguments, total being x where there is no residual.

    tiles: outputs and warps of a program. act: of `kind_of`; None for no gate. adapters: that `rows_take`.
    """
    (tokens, inputs), residual, (rows, num_warps) = x.shape, norm[0], tiles
    outputs = weight.shape[0] // 2 if act else weight.shape[0]
    y = torch.empty((tokens, outputs), dtype=x.dtype, device=x.device) if out is None else out
    total = x if residual is None else torch.empty((tokens, inputs), dtype=x.dtype, device=x.device)
    vector = VECTOR_BYTES // x.element_size()
    depth = min(32 * num_warps * vector, max(vector, triton.next_power_of_2(inputs)))
    overlap = hardware(x.device).can_overlap
    form = Form(triton.next_power_of_2(tokens), rows, depth, vector, inputs >= depth, act, overlap)
    strides = (x.stride(0), 0 if residual is None else residual.stride(0), weight.stride(0))
    sizes = (tokens, inputs, outputs)
    operands, programs = (x, norm, weight, bias, y, total), triton.cdiv(outputs, rows)
    slots = given = ranks = registers = None
    if adapters is not None:
        slots, registers = adapters.slots, FEW_REGISTERS if rows == 2 else None
        given, ranks, others = rows_adapters.arguments(adapters.weights, tokens, num_warps)
        programs += others
    options = {"num_warps": num_warps, "launch_pdl": overlap, "maxnreg": registers}
    launch(_linear_rows_kernel, (programs,))(operands, slots, given, strides, sizes, FORM=form, RANKS=ranks, **options)
    return y, total
