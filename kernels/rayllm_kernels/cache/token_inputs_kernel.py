"""The Triton kernel of `token_inputs`: a lane gathers a token for a group. The op's module has formula and shapes."""

# mypy: allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..compile_ahead import launch

TILE = 128


@triton.jit(do_not_specialize=["rows_ptr", "positions_ptr", "ids_ptr", "slots_ptr", "stride_slots", "count"])
def _token_inputs_kernel(
    rows_ptr,
    positions_ptr,
    token_ptr,
    block_ptr,
    ids_ptr,
    slots_ptr,
    strides,
    stride_slots,
    count,
    block_size,
    TILE: tl.constexpr,
):
    stride_tokens, stride_group, stride_blocks = strides
    group = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = index < count
    row = tl.load(rows_ptr + index, mask=inside, other=0)
    position = tl.load(positions_ptr + index, mask=inside, other=-1)
    real = position >= 0
    block_ptr += group * stride_group
    block = tl.load(block_ptr + row * stride_blocks + position // block_size, mask=real, other=0).to(tl.int64)
    slot = tl.where(real, block * block_size + position % block_size, -1)
    tl.store(slots_ptr + group * stride_slots + index, slot, mask=inside)
    if group == 0:
        token = tl.load(token_ptr + row * stride_tokens + position, mask=real, other=0)
        tl.store(ids_ptr + index, token.to(tl.int64), mask=inside)


def token_inputs(
    rows: Tensor,
    positions: Tensor,
    token_table: Tensor,
    tables: Tensor,
    block_size: int,
    input_ids: Tensor,
    slots: Tensor,
) -> None:
    """Fill input_ids and slots; the arguments are checked."""
    count, strides = rows.shape[0], (token_table.stride(0), *tables.stride()[:2])
    if count:
        launch(_token_inputs_kernel, (triton.cdiv(count, TILE), tables.shape[0]))(
            rows,
            positions,
            token_table,
            tables,
            input_ids,
            slots,
            strides,
            slots.stride(0),
            count,
            block_size,
            TILE=TILE,
            num_warps=4,
        )
