"""Calls the kernel that `plans.py` chooses for a projection."""

from __future__ import annotations

import torch
from torch import Tensor

from ..device import is_hopper, multiprocessors, shared_memory
from ..dispatch import TritonModule
from . import plans
from .rows_kernel import linear_rows
from .tiles_kernel import linear_tiles

# Imported only where they can run.
_hopper = TritonModule("rayllm_kernels.linear.hopper_kernel")
_gated_hopper = TritonModule("rayllm_kernels.linear.gated_hopper_kernel")


def project(x: Tensor, weight: Tensor, bias: Tensor | None, *, gated: bool, out: Tensor | None = None) -> Tensor | None:
    """The projection of checked arguments by one of this package's kernels, None where those are not the fastest.

    gated: weight holds gate and up, and the result is silu(gate) * up.
    """
    tokens, inputs = x.shape
    rows = weight.shape[0]
    if plans.rows_take(x, weight, norm=False):
        row_tiles = plans.choose_rows(tokens, inputs, gated=gated, norm=False)
        return linear_rows(x, weight, row_tiles, bias, gated=gated, out=out)[0]
    if is_hopper(x.device) and plans.hopper_takes(x, weight, gated):
        plan = plans.plan_hopper(tokens, rows, inputs, gated, multiprocessors(x.device))
        if plan is not None:
            return _hopper.linear_hopper(x, weight, *plan, bias, gated=gated, out=out)
        consumers = plans.plan_gated(tokens, rows, inputs, multiprocessors(x.device)) if gated else None
        if consumers is not None:
            return _gated_hopper.linear_gated_hopper(x, weight, consumers, multiprocessors(x.device))
    few = 0 < tokens <= plans.MAX_TILES_TOKENS and rows > 0 and inputs > 0
    if few and x.dtype != torch.float32 and shared_memory(x.device) >= plans.MIN_SHARED_MEMORY:
        tiles = plans.choose_tiles(tokens, rows // 2 if gated else rows, gated, multiprocessors(x.device))
        return linear_tiles(x, weight, tiles, bias, gated=gated, out=out)
    return None
