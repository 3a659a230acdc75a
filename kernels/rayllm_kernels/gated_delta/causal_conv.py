"""The causal convolution before a recurrent layer, each channel by itself, and the inputs that it keeps between steps.

y[t, c] = silu(round(sum_i weight[i, c] * x[t - width + 1 + i, c]))

Inputs before a sequence's first are zero, those before a step's first come from the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import check_float, check_last_dim, check_like, check_out, fail
from ..dispatch import TritonModule, on_triton
from .state import Chunks, StateCache, check_chunks, check_state, spans

_kernel = TritonModule("rayllm_kernels.gated_delta.causal_conv_kernel")


def causal_conv(
    x: Tensor, weight: Tensor, cache: StateCache, chunks: Chunks, out: Tensor, *, deterministic: bool = False
) -> None:
    """As above, and the cache's inputs brought up to these tokens (`state.py`).

    x: [T, C] of any row stride. weight: [width, C] in x's dtype, contiguous, of width 2 or more. out: [T, C], where y
    goes; rows outside of every sequence keep what it held. Sums are fp32, in the order of the inputs.
    deterministic: a token's bits depend on its inputs alone. On CUDA they always do.
    """
    check_float(x, "x")
    if x.dim() != 2:
        fail("x", "must be [T, C]", x.shape)
    check_last_dim(x, "x")
    check_like(weight, "weight", x, "x")
    if weight.dim() != 2 or weight.shape[1] != x.shape[1] or not weight.is_contiguous():
        fail("weight", f"must be [width, {x.shape[1]}], contiguous", weight.shape)
    width = weight.shape[0]
    if width < 2:
        fail("weight", "must have a width of 2 or more", width)
    check_state(cache.conv, "cache.conv", (width - 1, x.shape[1]), x.dtype, x.device)
    check_chunks(chunks, x.shape[0], x.device)
    check_out(out, x.shape, x, "x")
    if on_triton(x):
        _kernel.causal_conv(x, weight, cache, chunks, out)
        return
    for rows, source, targets in spans(chunks, cache.block_size):
        before = cache.conv[source] if source is not None else x.new_zeros(width - 1, x.shape[1])
        inputs = torch.cat((before, x[rows]))
        count = inputs.shape[0] - (width - 1)
        total = inputs[:count].float() * weight[0].float()
        for i in range(1, width):
            total += inputs[i : i + count].float() * weight[i].float()
        total = total.to(x.dtype)
        # An exponential's last bit may follow from the place in a tensor, see `layers.activation`.
        parts = [part.clone() for part in total.split(1)] if deterministic else [total]
        out[rows] = torch.cat([torch.nn.functional.silu(part) for part in parts])
        for block, computed in targets:
            cache.conv[block] = inputs[computed : computed + width - 1]
