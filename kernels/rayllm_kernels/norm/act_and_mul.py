"""The gated activation of feed-forward layers (GLU variants: Shazeer, 2020): SwiGLU of Llama's, GEGLU of Gemma's.

y = round(act(gate)) * up,   gate, up = x[..., :d], x[..., d:]

act is silu(g) = g / (1 + exp(-g)), gelu(g) = g * (1 + erf(g / sqrt(2))) / 2, or the latter's approximation by tanh.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from ..checks import check_rows, fail
from ..dispatch import TritonModule, on_triton

_kernel = TritonModule("rayllm_kernels.norm.act_and_mul_kernel")


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": _gelu_tanh}
# What config.json calls them.
_KINDS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def kind_of(act: str) -> str:
    """What kernels call an activation, by config.json's name: "silu", "gelu" or "gelu_tanh"."""
    if act not in _KINDS:
        fail("act", f"must be one of {', '.join(_KINDS)}", act)
    return _KINDS[act]


def act_and_mul(x: Tensor, act: str) -> Tensor:
    """act(x[..., :d]) * x[..., d:] for x [..., 2d], strides as for `rms_norm` -> a new tensor [..., d].

    act: by config.json's name.
    """
    kind = kind_of(act)
    check_rows(x, "x")
    if x.shape[-1] % 2 != 0:
        fail("x", "must have an even last dimension", x.shape)
    if on_triton(x):
        return _kernel.act_and_mul(x, kind)
    (gate, up), function = x.chunk(2, dim=-1), _FUNCTIONS[kind]
    return function(gate) * up
