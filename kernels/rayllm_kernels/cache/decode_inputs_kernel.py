"""The Triton kernel of `decode_inputs`: a program gathers a row for a group. The op's module has formula and shapes."""

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
    stride_tokens, stride_group, stride_blocks, stride_slots, stride_out_group, stride_out = strides
    index, group = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + index)
    position = tl.load(positions_ptr + index)
    real = position >= 0
    block_ptr += group * stride_group + row * stride_blocks
    block = tl.load(block_ptr + position // block_size, mask=real, other=0).to(tl.int64)
    tl.store(out.slots + group * stride_slots + index, tl.where(real, block * block_size + position % block_size, -1))
    if group == 0:
        token = tl.load(token_ptr + row * stride_tokens + position, mask=real, other=0)
        tl.store(out.input_ids + index, token.to(tl.int64))
        tl.store(out.seq_lens + index, tl.where(real, position + 1, 0).to(tl.int32))
    used = tl.where(real, position // block_size + 1, 0)
    for start in range(0, tl.minimum(used, max_blocks), TILE):
        lane = start + tl.arange(0, TILE)
        blocks = tl.load(block_ptr + lane, mask=lane < used, other=0)
        tl.store(out.block_tables + group * stride_out_group + index * stride_out + lane, blocks, mask=lane < used)


def decode_inputs(
    rows: Tensor, positions: Tensor, token_table: Tensor, tables: Tensor, block_size: int, out: DecodeInputs
) -> None:
    """Fill `out`; the arguments are checked."""
    if not rows.shape[0]:
        return
    groups, _, max_blocks = tables.shape
    strides = (token_table.stride(0), *tables.stride()[:2], out.slots.stride(0), *out.block_tables.stride()[:2])
    tile = min(TILE, triton.next_power_of_2(max_blocks))
    launch(_decode_inputs_kernel, (rows.shape[0], groups))(
        rows, positions, token_table, tables, out, strides, max_blocks, block_size, TILE=tile, num_warps=4
    )
