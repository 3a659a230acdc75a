"""The Triton kernel that adds up a token's experts (`pair_sum.py`): a program has a part of a token's outputs."""

# mypy: allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compile_ahead import launch
from ..dependent_launch import wait_for_predecessor
from ..device import hardware
from .device_functions import add_pairs
from .pair_sum import PairSum, of_kernels

COLUMNS = 1024  # of a token's output that a program adds up


@triton.jit
def _combine_kernel(pairs, y_ptr, columns, TOP_K: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr):
    wait_for_predecessor(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    total = add_pairs(pairs, token, columns, column, TOP_K)
    tl.store(y_ptr + token * columns + column, total.to(y_ptr.dtype.element_ty), mask=column < columns)


def combine(pairs: PairSum) -> Tensor:
    """[T, H]."""
    (tokens, columns), outputs = pairs.shape, pairs.outputs
    y = torch.empty((tokens, columns), dtype=outputs.dtype, device=outputs.device)
    tile, overlap = min(COLUMNS, triton.next_power_of_2(columns)), hardware(outputs.device).can_overlap
    options = {"TOP_K": pairs.weights.shape[1], "TILE": tile, "OVERLAP": overlap, "num_warps": 4, "launch_pdl": overlap}
    launch(_combine_kernel, (tokens, triton.cdiv(columns, tile)))(of_kernels(pairs), y, columns, **options)
    return y
