"""The gated activation of Llama's feed-forward layer (SwiGLU: Shazeer, 2020).

y = round(silu(gate)) * up,   silu(g) = g / (1 + exp(-g)),   gate, up = x[..., :d], x[..., d:]
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..checks import check_rows, fail
from ..dispatch import TritonModule, on_triton

_kernel = TritonModule("rayllm_kernels.norm.silu_and_mul_kernel")


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(x[..., :d]) * x[..., d:] for x [..., 2d], strides as for `rms_norm` -> a new tensor [..., d]."""
    check_rows(x, "x")
    if x.shape[-1] % 2 != 0:
        fail("x", "must have an even last dimension", x.shape)
    if on_triton(x):
        return _kernel.silu_and_mul(x)
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
