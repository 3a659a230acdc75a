"""RMSNorm and LayerNorm. Neither is split: every rank normalises whole rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from rayllm.layers.weights import WeightSource, empty_parameter
from rayllm.parallel.tp_group import TPGroup
from rayllm_kernels import ops


class RMSNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension, of `size` entries (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float, *, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter(size, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., size]."""
        return ops.rms_norm(x, self.weight, self.eps)

    def add_partial(
        self, x: torch.Tensor, residual: torch.Tensor | None, tp: TPGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(total), total), total = sum over the ranks of x + residual, in one pass; all [T, size].

        x may be overwritten; residual is the same on all ranks. If it is None, x is the total.
        """
        if residual is None:
            return self(x), x
        return tp.all_reduce_add_rms_norm(x, residual, self.weight, self.eps)

    def load(self, source: WeightSource, prefix: str) -> None:
        source.write(self.weight, source.tensor(prefix + ".weight", tuple(self.weight.shape)))


class LayerNorm(nn.Module):
    """weight * (x - mean) / sqrt(variance + eps) + bias over the last dimension; weight and bias only if `affine`."""

    def __init__(self, size: int, eps: float, *, affine: bool, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.size, self.eps = size, eps
        self.weight = empty_parameter(size, device=device, dtype=dtype) if affine else None
        self.bias = empty_parameter(size, device=device, dtype=dtype) if affine else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., size]."""
        return F.layer_norm(x, (self.size,), self.weight, self.bias, self.eps)

    def load(self, source: WeightSource, prefix: str) -> None:
        if self.weight is not None and self.bias is not None:
            source.write(self.weight, source.tensor(prefix + ".weight", (self.size,)))
            source.write(self.bias, source.tensor(prefix + ".bias", (self.size,)))
