"""Projections of each head by a matrix of its own, as latent attention has them before and after attention."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import check_last_dim, check_like, check_out, fail
from ..dispatch import TritonModule, on_triton

_kernel = TritonModule("rayllm_kernels.linear.heads_kernel")


def linear_heads(x: Tensor, weight: Tensor, *, out: Tensor | None = None, deterministic: bool = False) -> Tensor:
    """y[t, h] = weight[h] x[t, h] -> [T, H, out], a new tensor or `out`.

    x: [T, H, in], last dimension contiguous. weight: [H, out, in] of any strides, the last or the one before it 1. Sums
    are fp32, rounded once.
    deterministic: a token's bits do not depend on the other tokens. Slower.
    """
    if x.dim() != 3:
        fail("x", "must be [T, H, in]", x.shape)
    if weight.dim() != 3 or weight.shape[0] != x.shape[1] or weight.shape[2] != x.shape[2]:
        fail("weight", f"must be [{x.shape[1]}, out, {x.shape[2]}]", weight.shape)
    check_like(weight, "weight", x, "x")
    check_last_dim(x, "x")
    if 1 not in weight.stride()[1:] and weight.numel():
        fail("weight", "must have stride 1 in one of its last two dimensions", weight.stride())
    shape = torch.Size((*x.shape[:2], weight.shape[1]))
    check_out(out, shape, x, "x")
    if out is None:
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
    if not deterministic:
        # The vendor's product of batches: a batch is a head.
        torch.bmm(x.transpose(0, 1), weight.transpose(1, 2), out=out.transpose(0, 1))
    elif on_triton(x):
        _kernel.linear_heads(x, weight, out)
    else:
        # A copy of a token at a time: the order of a product's sums follows its shape and alignment, and here all have
        # the same.
        for source, target in zip(x.unbind(), out.unbind(), strict=True):
            row = source.clone(memory_format=torch.contiguous_format)
            target.copy_(torch.bmm(weight, row[:, :, None])[:, :, 0])
    return out
