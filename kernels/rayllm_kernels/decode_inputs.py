"""What one decode step needs of each of its sequences, gathered from the persistent batch in one launch.

    input_ids[i]    = token_table[rows[i], positions[i]]
    slots[i]        = block_table[rows[i], positions[i] // block_size] * block_size + positions[i] % block_size
    seq_lens[i]     = positions[i] + 1
    block_tables[i] = block_table[rows[i]]

positions[i] = -1 marks a padding row: id 0, slot -1, length 0, its block table left as it was.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .checks import check_decode_inputs

TILE = 1024


@triton.jit
def _decode_inputs_kernel(
    rows_ptr,
    positions_ptr,
    token_table_ptr,
    block_table_ptr,
    input_ids_ptr,
    slots_ptr,
    seq_lens_ptr,
    block_tables_ptr,
    stride_tokens,
    stride_blocks,
    stride_out,
    max_blocks,
    block_size,
    TILE: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index)
    position = tl.load(positions_ptr + index)
    real = position >= 0
    token = tl.load(token_table_ptr + row * stride_tokens + position, mask=real, other=0)
    block = tl.load(block_table_ptr + row * stride_blocks + position // block_size, mask=real, other=0).to(tl.int64)
    tl.store(input_ids_ptr + index, token.to(tl.int64))
    tl.store(slots_ptr + index, tl.where(real, block * block_size + position % block_size, -1))
    tl.store(seq_lens_ptr + index, tl.where(real, position + 1, 0).to(tl.int32))
    used = tl.where(real, position // block_size + 1, 0)
    for start in range(0, tl.minimum(used, max_blocks), TILE):
        lane = start + tl.arange(0, TILE)
        blocks = tl.load(block_table_ptr + row * stride_blocks + lane, mask=lane < used, other=0)
        tl.store(block_tables_ptr + index * stride_out + lane, blocks, mask=lane < used)


def decode_inputs(
    rows: Tensor,
    positions: Tensor,
    token_table: Tensor,
    block_table: Tensor,
    block_size: int,
    *,
    input_ids: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
) -> None:
    """Fill the four outputs; see `ops.decode_inputs` for the contract."""
    check_decode_inputs(rows, positions, token_table, block_table, input_ids, slots, seq_lens, block_tables)
    if rows.shape[0]:
        _decode_inputs_kernel[(rows.shape[0],)](
            rows,
            positions,
            token_table,
            block_table,
            input_ids,
            slots,
            seq_lens,
            block_tables,
            token_table.stride(0),
            block_table.stride(0),
            block_tables.stride(0),
            block_table.shape[1],
            block_size,
            TILE=min(TILE, triton.next_power_of_2(block_table.shape[1])),
            num_warps=4,
        )
