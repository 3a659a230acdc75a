"""The Triton kernels of `causal_conv`, which has the formula.

A program takes some channels of some tokens of a sequence. Chunks get a second launch for what the cache is to hold: in
one, a program could overwrite inputs that another one has not read yet. A decode is one program's, which reads first.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..attention.context import Contexts
from ..compile_ahead import launch
from .state import Chunks, StateCache

COLUMNS = 256  # channels of a program
# Of a chunk; a thread takes 16 bytes of each token's inputs.
CHUNK_ROWS, CHUNK_COLUMNS = 4, 1024
# What differs from step to step.
VARYING = [*Contexts._fields, "starts_ptr", "stride_table"]


class Form(NamedTuple):
    """The compile-time argument of the kernels."""

    width: int  # of the convolution
    channels: int
    block_size: int
    rows: int
    columns: int


@triton.jit
def _silu(total, dtype):
    rounded = total.to(dtype).to(tl.float32)
    # A sigmoid by two instructions of the unit for special functions; a division takes eight more.
    root = tl.rsqrt(1.0 + tl.exp2(rounded * -1.4426950408889634))
    return (rounded * root * root).to(dtype)


@triton.jit(do_not_specialize=VARYING)
def _conv_step_kernel(
    x_ptr, weight_ptr, conv_ptr, block_tables, seq_lens, y_ptr, strides, stride_table, FORM: tl.constexpr
):
    """One token of each sequence. strides: of rows of x and y, and of blocks."""
    stride_x, stride_y, stride_block = strides
    row = tl.program_id(1).to(tl.int64)
    position = tl.load(seq_lens + row) - 1
    if position < 0:
        return
    WIDTH: tl.constexpr = FORM.width
    channel = tl.program_id(0) * FORM.columns + tl.arange(0, FORM.columns)
    mask = channel < FORM.channels
    table = block_tables + row * stride_table
    target = tl.load(table + position // FORM.block_size).to(tl.int64) * stride_block
    source = tl.load(table + tl.maximum(position - 1, 0) // FORM.block_size).to(tl.int64) * stride_block
    known = channel < tl.where(position > 0, FORM.channels, 0)
    newest = tl.load(x_ptr + row * stride_x + channel, mask=mask, other=0.0)
    COLUMNS: tl.constexpr = FORM.columns
    total = tl.zeros([COLUMNS], tl.float32)
    for i in tl.static_range(WIDTH - 1):
        kept = tl.load(conv_ptr + source + i * FORM.channels + channel, mask=known, other=0.0)
        total += kept.to(tl.float32) * tl.load(weight_ptr + i * FORM.channels + channel, mask=mask, other=0.0).to(
            tl.float32
        )
        if i > 0:  # read before, so that it may be where the one after it was
            tl.store(conv_ptr + target + (i - 1) * FORM.channels + channel, kept, mask=mask)
    total += newest.to(tl.float32) * tl.load(
        weight_ptr + (WIDTH - 1) * FORM.channels + channel, mask=mask, other=0.0
    ).to(tl.float32)
    tl.store(conv_ptr + target + (WIDTH - 2) * FORM.channels + channel, newest, mask=mask)
    tl.store(y_ptr + row * stride_y + channel, _silu(total, y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=VARYING)
def _conv_chunk_kernel(
    x_ptr, weight_ptr, conv_ptr, block_tables, seq_lens, starts_ptr, y_ptr, strides, stride_table, FORM: tl.constexpr
):
    """Some tokens of a chunk. strides: as above."""
    stride_x, stride_y, stride_block = strides
    sequence = tl.program_id(2)
    first_row = tl.load(starts_ptr + sequence).to(tl.int64)
    count = (tl.load(starts_ptr + sequence + 1) - first_row).to(tl.int32)
    first = tl.program_id(0) * FORM.rows
    length = tl.load(seq_lens + sequence)
    if (first >= count) | (length == 0):
        return
    WIDTH: tl.constexpr = FORM.width
    ROWS: tl.constexpr = FORM.rows  # fields as ranges do not compile in every version of Triton
    begin = length - count
    channel = tl.program_id(1) * FORM.columns + tl.arange(0, FORM.columns)
    mask = channel < FORM.channels
    table = block_tables + sequence.to(tl.int64) * stride_table
    source = tl.load(table + tl.maximum(begin - 1, 0) // FORM.block_size).to(tl.int64) * stride_block
    weights = ()
    for i in tl.static_range(WIDTH):
        weights += (tl.load(weight_ptr + i * FORM.channels + channel, mask=mask, other=0.0),)  # type: ignore[assignment]
    # All inputs are asked for before the first output is stored, since a store may not be overtaken by loads.
    inputs = ()
    for i in tl.static_range(WIDTH - 1 + ROWS):
        place = first - (WIDTH - 1) + i
        of_step = channel < tl.where((place >= 0) & (place < count), FORM.channels, 0)
        values = tl.load(x_ptr + (first_row + place) * stride_x + channel, mask=of_step, other=0.0)
        if i < WIDTH - 1:
            kept = channel < tl.where((place < 0) & (place + begin >= 0), FORM.channels, 0)
            old_ptrs = conv_ptr + source + (place + WIDTH - 1) * FORM.channels + channel
            values = tl.where(kept, tl.load(old_ptrs, mask=kept, other=0.0), values)
        inputs += (values,)  # type: ignore[assignment]
    for row in tl.static_range(ROWS):
        total = inputs[row].to(tl.float32) * weights[0].to(tl.float32)  # type: ignore[misc]
        for i in tl.static_range(1, WIDTH):
            total += inputs[row + i].to(tl.float32) * weights[i].to(tl.float32)
        stored = channel < tl.where(first + row < count, FORM.channels, 0)
        y_ptrs = y_ptr + (first_row + first + row) * stride_y + channel
        tl.store(y_ptrs, _silu(total, y_ptr.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=VARYING)
def _conv_state_kernel(
    x_ptr, conv_ptr, block_tables, seq_lens, starts_ptr, stride_x, stride_block, stride_table, FORM: tl.constexpr
):
    """What the blocks of a chunk are to hold, one after the other, each from the one before it."""
    sequence = tl.program_id(1)
    first_row = tl.load(starts_ptr + sequence).to(tl.int64)
    count = (tl.load(starts_ptr + sequence + 1) - first_row).to(tl.int32)
    length = tl.load(seq_lens + sequence)
    if (count == 0) | (length == 0):
        return
    WIDTH: tl.constexpr = FORM.width
    begin = length - count
    channel = tl.program_id(0) * FORM.columns + tl.arange(0, FORM.columns)
    mask = channel < FORM.channels
    table = block_tables + sequence.to(tl.int64) * stride_table
    before = tl.load(table + tl.maximum(begin - 1, 0) // FORM.block_size).to(tl.int64) * stride_block
    position = begin
    while position < length:
        end = tl.minimum((position // FORM.block_size + 1) * FORM.block_size, length)
        target = tl.load(table + position // FORM.block_size).to(tl.int64) * stride_block
        for i in tl.static_range(WIDTH - 1):
            place = end - (WIDTH - 1) + i  # in the sequence; an input is kept further back than it is read from
            new = channel < tl.where(place >= position, FORM.channels, 0)
            kept = channel < tl.where((place < position) & (place >= 0), FORM.channels, 0)
            values = tl.load(x_ptr + (first_row + place - begin) * stride_x + channel, mask=new, other=0.0)
            old = tl.load(
                conv_ptr + before + (place - position + WIDTH - 1) * FORM.channels + channel, mask=kept, other=0.0
            )
            tl.store(conv_ptr + target + i * FORM.channels + channel, tl.where(new, values, old), mask=mask)
        before = target
        position = end


def causal_conv(x: Tensor, weight: Tensor, cache: StateCache, chunks: Chunks, out: Tensor) -> None:
    """Write the convolution to `out` and its inputs to the cache; the arguments are checked."""
    (tables, seq_lens), starts, longest = chunks
    batch, (width, channels) = seq_lens.shape[0], weight.shape
    if not batch:
        return
    strides, stride_table = (x.stride(0), out.stride(0), cache.conv.stride(0)), tables.stride(0)
    columns = min(COLUMNS, triton.next_power_of_2(channels))
    grid = (triton.cdiv(channels, columns), batch)
    form = Form(width, channels, cache.block_size, 1, columns)
    if starts is None:
        launch(_conv_step_kernel, grid)(x, weight, cache.conv, tables, seq_lens, out, strides, stride_table, FORM=form)
        return
    wide = min(CHUNK_COLUMNS, triton.next_power_of_2(channels))
    of_chunks = form._replace(rows=CHUNK_ROWS, columns=wide)
    launch(_conv_chunk_kernel, (triton.cdiv(longest, CHUNK_ROWS), triton.cdiv(channels, wide), batch))(
        x, weight, cache.conv, tables, seq_lens, starts, out, strides, stride_table, FORM=of_chunks
    )
    launch(_conv_state_kernel, grid)(
        x, cache.conv, tables, seq_lens, starts, x.stride(0), cache.conv.stride(0), stride_table, FORM=form
    )
