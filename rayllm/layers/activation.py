"""Activation functions by the names that config.json uses."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from rayllm.layers.layer import BuildContext
from rayllm_kernels import ops

Activation = Callable[[torch.Tensor], torch.Tensor]


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


_ACTIVATIONS: dict[str, Activation] = {
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
}


def activation(name: str, context: BuildContext) -> Activation:
    """An elementwise function. Raises KeyError for names that `ModelSpec` does not let through."""
    return _row_by_row(_ACTIVATIONS[name]) if context.deterministic else _ACTIVATIONS[name]


def gated_activation(name: str, context: BuildContext) -> Activation:
    """[..., 2d] -> [..., d]: act(gate) * up, gate and up being the halves of the last dimension; as `activation`."""

    def gated(x: torch.Tensor) -> torch.Tensor:
        return ops.act_and_mul(x, name)

    return _row_by_row(gated) if context.deterministic else gated


def soft_cap(cap: float, context: BuildContext) -> Activation:
    """cap * tanh(x / cap) of a contiguous tensor, which is overwritten; as `activation`."""

    def capped(x: torch.Tensor) -> torch.Tensor:
        return ops.soft_cap_(x, cap)

    return _row_by_row(capped) if context.deterministic else capped


def _row_by_row(act: Activation) -> Activation:
    """`act` of [T, d], on the CPU a row at a time.

    There torch computes a tensor's last few elements, and those at the borders between threads, by other code than the
    rest, whose exp may differ in the last bit. CUDA has one code for all elements.
    """

    def by_rows(x: torch.Tensor) -> torch.Tensor:
        if x.device.type != "cpu" or not x.shape[0]:
            return act(x)
        return torch.cat([act(row.clone()) for row in x.split(1)])

    return by_rows
