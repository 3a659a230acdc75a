"""A layer's keys or values as rows of the whole pool, from which one `index_select` gathers any.

That is several times faster than indexing by block and head.
"""

from __future__ import annotations

import math

from torch import Tensor

from .kv_cache import as_bytes


def pool_rows(part: Tensor) -> Tensor:
    """keys or values [num_blocks, Hkv, block_size, D] -> a view [rows, D], of bytes if they are in fp8."""
    last = sum((size - 1) * stride for size, stride in zip(part.shape[:3], part.stride()[:3], strict=True))
    unit = _unit(part)
    return as_bytes(part).as_strided((last // unit + 1, part.shape[3]), (unit, 1))


def row_index(part: Tensor, blocks: Tensor, offsets: Tensor) -> Tensor:
    """Which of `pool_rows`(part) are the slots at these offsets of these blocks, int64 of any shape, for head 0."""
    stride_block, _, stride_slot, _ = part.stride()
    unit = _unit(part)
    return blocks * (stride_block // unit) + offsets * (stride_slot // unit)


def head_rows(part: Tensor) -> int:
    """By how many rows the heads of a slot are apart."""
    return part.stride(1) // _unit(part)


def _unit(part: Tensor) -> int:
    return math.gcd(*part.stride()[:3])
