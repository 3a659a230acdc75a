"""A gate that has one number a token, as the shared expert of Qwen2-MoE and later ones has.

y = round(sigmoid(round(<x, weight>))) * values
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import check_last_dim, check_like, check_rows, check_vectors, fail
from ..dispatch import TritonModule, on_triton

_kernel = TritonModule("rayllm_kernels.norm.token_gate_kernel")


def token_gate(x: Tensor, weight: Tensor, values: Tensor, *, deterministic: bool = False) -> Tensor:
    """As above -> a new contiguous [T, D].

    x: [T, K]. weight: [K]. values: [T, D]. All of one dtype, fp32 inside, last dimensions contiguous. deterministic: a
    token's bits do not depend on the number of tokens. On CUDA they never do.
    """
    if x.dim() != 2:
        fail("x", "must be [T, K]", x.shape)
    check_rows(x, "x")
    check_vectors(x.shape[1], x.dtype, x.device, weight=weight)
    if values.dim() != 2 or values.shape[0] != x.shape[0]:
        fail("values", f"must be [{x.shape[0]}, D]", values.shape)
    check_like(values, "values", x, "x")
    check_last_dim(values, "values")
    if on_triton(x):
        return _kernel.token_gate(x, weight, values)
    if deterministic and x.shape[0] > 1:
        rows = zip(x.split(1), values.split(1), strict=True)
        return torch.cat([token_gate(row.clone(), weight, own.clone()) for row, own in rows])
    return torch.sigmoid(F.linear(x, weight[None])) * values
