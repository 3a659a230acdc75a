"""The Triton kernel of `copy_blocks`: one program copies a tile of one block.

    pool[dst[i]] = pool[src[i]]

pool [num_blocks, ...] of any dtype, contiguous within a block; src, dst [N] int64.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..compile_ahead import launch

TILE_ELEMENTS = 8192


@triton.jit(do_not_specialize=["src_ptr", "dst_ptr"])
def _copy_blocks_kernel(pool_ptr, src_ptr, dst_ptr, stride_block, block_elements, TILE: tl.constexpr):
    pair = tl.program_id(1)
    source = tl.load(src_ptr + pair) * stride_block
    target = tl.load(dst_ptr + pair) * stride_block
    element = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = element < block_elements
    tl.store(pool_ptr + target + element, tl.load(pool_ptr + source + element, mask=mask), mask=mask)


def copy_blocks(pool: Tensor, src: Tensor, dst: Tensor) -> None:
    """Copy N blocks; the arguments are checked."""
    if pool.numel() == 0 or src.numel() == 0:
        return
    block_elements = pool.numel() // pool.shape[0]
    tile = min(TILE_ELEMENTS, triton.next_power_of_2(block_elements))
    launch(_copy_blocks_kernel, (triton.cdiv(block_elements, tile), src.shape[0]))(
        pool, src, dst, pool.stride(0), block_elements, TILE=tile, num_warps=8
    )
