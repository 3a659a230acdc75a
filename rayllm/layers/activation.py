"""Activation functions by the names that config.json uses."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from rayllm_kernels import ops

Activation = Callable[[torch.Tensor], torch.Tensor]


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


_ACTIVATIONS: dict[str, Activation] = {
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
}


def activation(name: str) -> Activation:
    """An elementwise function. Raises KeyError for names that `ModelSpec` does not let through."""
    return _ACTIVATIONS[name]


def gated_activation(name: str) -> Activation:
    """[..., 2d] -> [..., d]: act(gate) * up, gate and up being the halves of the last dimension."""
    if name in ("silu", "swish"):
        return ops.silu_and_mul
    act = _ACTIVATIONS[name]

    def gated(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return act(gate) * up

    return gated
