"""The weighted sum of a token's experts, not yet added up: whoever reads it does so, alone or in one pass with a norm.

total[t] = onto[t] + sum over i of weights[t, i] * outputs[t * k + i]

in fp32, in the order of i, rounded once to the dtype of the outputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..dispatch import TritonModule, on_triton

_kernel = TritonModule("rayllm_kernels.experts.combine_kernel")


class PairSum(NamedTuple):
    """outputs: [T * k, H]; weights: [T, k] fp32; onto: [T, H], None for zeros.

    owned: (the first of the experts that outputs are of, how many these are), of experts [T, k]; None for all.
    """

    outputs: Tensor
    weights: Tensor
    onto: Tensor | None = None
    experts: Tensor | None = None
    owned: tuple[int, int] | None = None

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.weights.shape[0], self.outputs.shape[1]))

    @property
    def dtype(self) -> torch.dtype:
        return self.outputs.dtype

    @property
    def device(self) -> torch.device:
        return self.outputs.device

    def total(self) -> Tensor:
        """[T, H]."""
        if on_triton(self.outputs):
            total: Tensor = _kernel.combine(self)
            return total
        return weighted_sum(self.outputs.unflatten(0, (-1, self.weights.shape[1])), self.weights, self.onto)


def of_kernels(x: Tensor | PairSum) -> tuple[Any, ...] | None:
    """As `device_functions.add_pairs` takes it; None for what is a tensor."""
    if isinstance(x, Tensor):
        return None
    outputs, weights, onto, experts, owned = x
    return outputs, weights, None if owned is None else experts, owned, onto, 0 if onto is None else onto.stride(0)


def row_warps(x: Tensor | PairSum, entries: int) -> int:
    """Warps of a program that has a row of x, so many entries: 16 of them a thread, or 8 that are sums of pairs, as it
    reads 16 bytes of each pair.
    """
    return min(16, max(4, entries // (256 if isinstance(x, PairSum) else 512)))


def weighted_sum(outputs: Tensor, weights: Tensor, onto: Tensor | None) -> Tensor:
    """onto + sum over i of weights[:, i] * outputs[:, i] -> [T, H]: in fp32, in the order of i, rounded once.

    outputs: [T, k, H]; onto: [T, H], None for zeros; weights: [T, k] fp32.
    """
    total = torch.zeros_like(outputs[:, 0], dtype=torch.float32) if onto is None else onto.float()
    for i in range(outputs.shape[1]):
        total = total + outputs[:, i].float() * weights[:, i, None]
    return total.to(outputs.dtype)
