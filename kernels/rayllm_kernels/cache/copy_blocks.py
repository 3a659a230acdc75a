"""Copy whole blocks inside one pool, all pairs in one launch (copy on write, swaps).

pool[dst[i]] = pool[src[i]]
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import check_vectors, fail
from ..dispatch import TritonModule, on_triton

_kernel = TritonModule("rayllm_kernels.cache.copy_blocks_kernel")


def copy_blocks(pool: Tensor, src: Tensor, dst: Tensor) -> None:
    """pool[dst] = pool[src] for N whole blocks in one launch, in place.

    pool: [num_blocks, ...] of any dtype, contiguous within a block. src, dst: [N] int64. No block may be both a
    source and a destination of one call, nor a destination twice: the copies run in no order.
    """
    if pool.dim() < 2:
        fail("pool", "must be [num_blocks, ...]", pool.shape)
    if pool.shape[0] > 0 and not pool[0].is_contiguous():
        fail("pool", "must be contiguous within a block", pool.stride())
    check_vectors(src.numel(), torch.int64, pool.device, src=src, dst=dst)
    if on_triton(pool):
        _kernel.copy_blocks(pool, src, dst)
    else:
        pool[dst] = pool[src]
