"""The Triton kernel of `token_inputs`: a lane gathers a token. The op's module has the formula and the shapes."""

# mypy: allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..compile_ahead import launch

TILE = 128


@triton.jit(do_not_specialize=["rows_ptr", "positions_ptr", "ids_ptr", "slots_ptr", "count"])
def _token_inputs_kernel(
    rows_ptr, positions_ptr, token_ptr, block_ptr, ids_ptr, slots_ptr, strides, count, block_size, TILE: tl.constexpr
):
    stride_tokens, stride_blocks = strides
    index = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = index < count
    row = tl.load(rows_ptr + index, mask=inside, other=0)
    position = tl.load(positions_ptr + index, mask=inside, other=-1)
    real = position >= 0
    token = tl.load(token_ptr + row * stride_tokens + position, mask=real, other=0)
    block = tl.load(block_ptr + row * stride_blocks + position // block_size, mask=real, other=0).to(tl.int64)
    tl.store(ids_ptr + index, token.to(tl.int64), mask=inside)
    tl.store(slots_ptr + index, tl.where(real, block * block_size + position % block_size, -1), mask=inside)


def token_inputs(
    rows: Tensor,
    positions: Tensor,
    token_table: Tensor,
    block_table: Tensor,
    block_size: int,
    input_ids: Tensor,
    slots: Tensor,
) -> None:
    """Fill input_ids and slots; the arguments are checked."""
    count, strides = rows.shape[0], (token_table.stride(0), block_table.stride(0))
    if count:
        launch(_token_inputs_kernel, (triton.cdiv(count, TILE),))(
            rows,
            positions,
            token_table,
            block_table,
            input_ids,
            slots,
            strides,
            count,
            block_size,
            TILE=TILE,
            num_warps=4,
        )
