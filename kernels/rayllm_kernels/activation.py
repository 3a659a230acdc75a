"""The activations of gated feed-forward layers, as Triton kernels have them behind their products."""

# mypy: allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activate(x, ACT: tl.constexpr):
    """ "silu", "gelu" or "gelu_tanh" of fp32 numbers."""
    if ACT == "silu":
        return x / (1.0 + tl.exp(-x))
    elif ACT == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        # 0.5 (1 + tanh(u)) = 1 / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
