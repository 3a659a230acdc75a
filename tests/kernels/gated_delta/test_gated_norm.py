"""The gated norm: Triton against the reference, and that against float64."""

from __future__ import annotations

import pytest
import torch
from support.closeness import check_close

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 4, 12), (1, 1, 128), (3, 2, 200), (0, 2, 8)])
def test_rms_norm_gated(randn, kernels, reference, shape, dtype):
    x, z = randn(*shape, dtype=dtype), randn(shape[0], 2 * shape[1] * shape[2], dtype=dtype)
    z, weight = z[:, shape[1] * shape[2] :], randn(shape[2], dtype=dtype)
    expected = reference.rms_norm_gated(x, z, weight, 1e-5)
    check_close(kernels.rms_norm_gated(x, z, weight, 1e-5), expected)
    wide, gate = x.double(), z.double().unflatten(1, shape[1:])
    exact = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double() * gate * gate.sigmoid()
    check_close(expected, exact.to(dtype), slack=4)
