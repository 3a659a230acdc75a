"""What a recurrent layer does to its output: an RMS norm of each head, and a gate.

y = round(weight * round(x / sqrt(mean(x^2) + eps))) * silu(z)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import check_last_dim, check_rows, check_vectors, fail
from ..dispatch import TritonModule, on_triton

_kernel = TritonModule("rayllm_kernels.gated_delta.gated_norm_kernel")


def rms_norm_gated(x: Tensor, z: Tensor, weight: Tensor, eps: float, *, deterministic: bool = False) -> Tensor:
    """As above, over the last dimension -> a new contiguous [T, H, D].

    x: [T, H, D] of any strides but the last. z: [T, H D] of any row stride. weight: [D]. All of one dtype, fp32 inside.
    deterministic: a token's bits do not depend on the number of tokens. On CUDA they never do.
    """
    if x.dim() != 3:
        fail("x", "must be [T, H, D]", x.shape)
    check_rows(x, "x")
    if z.shape != (x.shape[0], x.shape[1] * x.shape[2]) or z.dtype != x.dtype or z.device != x.device:
        fail("z", f"must be [{x.shape[0]}, {x.shape[1] * x.shape[2]}] of x's dtype and device", (*z.shape, z.dtype))
    check_last_dim(z, "z")
    check_vectors(x.shape[2], x.dtype, x.device, weight=weight)
    if on_triton(x):
        return _kernel.rms_norm_gated(x, z, weight, eps)
    if deterministic and x.shape[0] > 1:
        return torch.cat([rms_norm_gated(*pair, weight, eps) for pair in zip(x.split(1), z.split(1), strict=True)])
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return ((weight * wide.to(x.dtype)).float() * F.silu(z.unflatten(1, x.shape[1:]).float())).to(x.dtype)
