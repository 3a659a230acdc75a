"""RMSNorm and LayerNorm. Neither is split: every rank normalises whole rows."""

from __future__ import annotations

from dataclasses import replace
from typing import overload

import torch
import torch.nn.functional as F

from rayllm.layers.layer import BuildContext, Layer
from rayllm.layers.weights import WeightSource
from rayllm_kernels import ops

Summand = torch.Tensor | ops.PairSum  # [T, size], of a sum that its reader makes


class RMSNorm(Layer):
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension, of `size` entries (Zhang and Sennrich, 2019).

    wide: the product with the weight is in fp32, and only then rounded (Gemma).
    offset: so it is, and checkpoints hold the weight less 1 in the model's dtype (Gemma 2 and 3). The sum is made once,
    in fp32, where it is as exact as in a norm that adds 1 each time.
    """

    def __init__(self, context: BuildContext, size: int, eps: float, *, wide: bool = False, offset: bool = False):
        super().__init__(context)
        self.eps, self.wide, self.offset, self.dtype = eps, wide or offset, offset, context.dtype
        self.weight = (replace(context, dtype=torch.float32) if self.wide else context).parameter(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., size]."""
        return ops.rms_norm(x, self.weight, self.eps)

    @overload
    def add_partial(self, x: Summand, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]: ...

    @overload
    def add_partial(
        self, x: Summand, residual: torch.Tensor | None, rounding: ops.Rounding | None
    ) -> tuple[torch.Tensor | ops.Fp8Rows, torch.Tensor]: ...

    def add_partial(
        self, x: Summand, residual: torch.Tensor | None, rounding: ops.Rounding | None = None
    ) -> tuple[torch.Tensor | ops.Fp8Rows, torch.Tensor]:
        """(norm(total), total), total = sum over the ranks of x + residual, in one pass; all [T, size].

        x may be overwritten; residual is the same on all ranks. If it is None, x is the total. A `PairSum`, of one
        rank and with a residual, is added up in the same pass.
        rounding: how the norm is to be rounded to fp8; None for not at all.
        """
        if isinstance(x, ops.PairSum):
            assert residual is not None
            assert self.tp.size == 1
            if rounding is not None:
                return ops.rms_norm_fp8(x, residual, self.weight, self.eps, rounding)
            return ops.fused_add_rms_norm(x, residual, self.weight, self.eps)
        if rounding is not None:
            x = x if residual is None else self.tp.all_reduce(x)
            return ops.rms_norm_fp8(x, residual, self.weight, self.eps, rounding)
        if residual is None:
            return self(x), x
        return self.tp.all_reduce_add_rms_norm(x, residual, self.weight, self.eps)

    def load(self, source: WeightSource) -> None:
        if not self.wide:
            return super().load(source)
        stored = source.tensor(self.prefix + "weight", tuple(self.weight.shape)).to(self.dtype).float()
        source.write(self.weight, stored + 1.0 if self.offset else stored)

    def onto(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """norm(x) + residual, in one pass; all [T, size]."""
        return ops.rms_norm_add(x, residual, self.weight, self.eps)


class LayerNorm(Layer):
    """weight * (x - mean) / sqrt(variance + eps) + bias over the last dimension; weight and bias only if `affine`."""

    def __init__(self, context: BuildContext, size: int, eps: float, *, affine: bool = True):
        super().__init__(context)
        self.size, self.eps = size, eps
        self.weight = context.parameter(size) if affine else None
        self.bias = context.parameter(size) if affine else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., size]."""
        return F.layer_norm(x, (self.size,), self.weight, self.bias, self.eps)
