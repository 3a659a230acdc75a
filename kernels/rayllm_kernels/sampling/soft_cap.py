"""The soft cap of final logits, as Gemma 2 has it: y = cap * tanh(x / cap)."""

from __future__ import annotations

from torch import Tensor

from ..checks import check_float, fail
from ..dispatch import TritonModule, on_triton

_kernel = TritonModule("rayllm_kernels.sampling.soft_cap_kernel")


def soft_cap_(logits: Tensor, cap: float) -> Tensor:
    """cap * tanh(logits / cap), which replaces the contiguous `logits`; returns them. fp32 inside, rounded once."""
    check_float(logits, "logits")
    if not logits.is_contiguous():
        fail("logits", "must be contiguous", logits.stride())
    if cap <= 0.0:
        fail("cap", "must be positive", cap)
    if on_triton(logits):
        _kernel.soft_cap_(logits, cap)
        return logits
    return logits.copy_(logits.float().div(cap).tanh_().mul_(cap))
