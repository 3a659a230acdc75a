"""RMS normalisation (Zhang and Sennrich, 2019), alone, after adding the residual, or before.

y = weight * round((x + residual) / sqrt(mean((x + residual)^2) + eps))
y = weight * round(x / sqrt(mean(x^2) + eps)) + residual

Weights in fp32, where x is not, multiply what is not rounded yet.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import check_norm_weight, check_residual, check_rows, fail
from ..dispatch import TritonModule, on_triton
from ..experts.pair_sum import PairSum

_kernel = TritonModule("rayllm_kernels.norm.rms_norm_kernel")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension -> a new contiguous tensor.

    x: [..., D], last dimension contiguous; up to 3 dimensions of any stride, more if contiguous. weight: [D] in x's
    dtype or in fp32. fp32 inside; the quotient is rounded to x's dtype before the product with a weight of that dtype,
    as in transformers' Llama, and only the product with one of fp32, as in its Gemma.
    """
    check_rows(x, "x")
    check_norm_weight(weight, "weight", x.shape[-1], x)
    if on_triton(x):
        return _kernel.rms_norm(x, None, weight, eps, False)[0]
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype) if weight.dtype == x.dtype else (wide * weight).to(x.dtype)


def fused_add_rms_norm(x: Tensor | PairSum, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), two new tensors; neither argument is changed.

    x, residual: [..., D] of one shape and dtype, strides as for `rms_norm`. The sum is rounded to x's dtype first.
    A `PairSum` is added up in the same pass, and rounded before it is added to anything.
    """
    if isinstance(x, PairSum):
        check_norm_weight(weight, "weight", x.shape[1], x.outputs)
        check_sum_residual(residual, x)
        if on_triton(x.outputs):
            return _kernel.rms_norm(x, residual, weight, eps, False)
        x = x.total()
    check_rows(x, "x")
    check_norm_weight(weight, "weight", x.shape[-1], x)
    check_residual(residual, x)
    if on_triton(x):
        return _kernel.rms_norm(x, residual, weight, eps, False)
    total = x + residual
    return rms_norm(total, weight, eps), total


def check_norm(x: Tensor, norm: tuple[Tensor, float] | None, residual: Tensor | None) -> None:
    """Check what `normed` takes; x is checked."""
    if norm is not None:
        check_norm_weight(norm[0], "norm", x.shape[-1], x)
    if residual is not None:
        if norm is None:
            fail("residual", "needs a norm that it is added before", residual.shape)
        check_residual(residual, x)


def normed(x: Tensor, norm: tuple[Tensor, float] | None, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """(the norm of total = x + residual, total), of checked arguments; (x, x) without a norm. norm: (weight, eps)."""
    if norm is None:
        return x, x
    if residual is None:
        return rms_norm(x, *norm), x
    return fused_add_rms_norm(x, residual, *norm)


def check_sum_residual(residual: Tensor, x: PairSum) -> None:
    """As `check_residual`."""
    check_residual(residual, x.outputs[: x.shape[0]])


def rms_norm_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm(x) + residual, a new tensor; arguments as for `fused_add_rms_norm`. The norm is rounded first."""
    check_rows(x, "x")
    check_norm_weight(weight, "weight", x.shape[-1], x)
    check_residual(residual, x)
    if on_triton(x):
        return _kernel.rms_norm(x, residual, weight, eps, True)[0]
    return rms_norm(x, weight, eps) + residual
