"""The Triton kernel of `decode_inputs`: one program gathers one row. The op's module has the formula and the shapes."""

# mypy: allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..compile_ahead import launch
from .decode_inputs import DecodeInputs

TILE = 1024


@triton.jit
def _decode_inputs_kernel(
    rows_ptr, positions_ptr, token_ptr, block_ptr, out, strides, max_blocks, block_size, TILE: tl.constexpr
):
    stride_tokens, stride_blocks, stride_out = strides
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index)
    position = tl.load(positions_ptr + index)
    real = position >= 0
    token = tl.load(token_ptr + row * stride_tokens + position, mask=real, other=0)
    block = tl.load(block_ptr + row * stride_blocks + position // block_size, mask=real, other=0).to(tl.int64)
    tl.store(out.input_ids + index, token.to(tl.int64))
    tl.store(out.slots + index, tl.where(real, block * block_size + position % block_size, -1))
    tl.store(out.seq_lens + index, tl.where(real, position + 1, 0).to(tl.int32))
    used = tl.where(real, position // block_size + 1, 0)
    for start in range(0, tl.minimum(used, max_blocks), TILE):
        lane = start + tl.arange(0, TILE)
        blocks = tl.load(block_ptr + row * stride_blocks + lane, mask=lane < used, other=0)
        tl.store(out.block_tables + index * stride_out + lane, blocks, mask=lane < used)


def decode_inputs(
    rows: Tensor, positions: Tensor, token_table: Tensor, block_table: Tensor, block_size: int, out: DecodeInputs
) -> None:
    """Fill `out`; the arguments are checked."""
    if not rows.shape[0]:
        return
    max_blocks = block_table.shape[1]
    strides = (token_table.stride(0), block_table.stride(0), out.block_tables.stride(0))
    tile = min(TILE, triton.next_power_of_2(max_blocks))
    launch(_decode_inputs_kernel, (rows.shape[0],))(
        rows, positions, token_table, block_table, out, strides, max_blocks, block_size, TILE=tile, num_warps=4
    )
