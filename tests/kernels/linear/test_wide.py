"""Projections to fp32: Triton and the reference against float64."""

from __future__ import annotations

import pytest
import torch
from support.closeness import UNIT


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(1, 2048, 64), (2, 300, 33), (5, 64, 100), (70, 96, 16)])
def test_sums_are_not_rounded_to_the_dtype_of_x(randn, each, tokens, inputs, outputs, dtype, deterministic):
    x, weight = randn(tokens, inputs, dtype=dtype), randn(outputs, inputs, dtype=dtype)
    bias = randn(outputs, dtype=dtype)
    found = each.linear_wide(x, weight, bias, deterministic=deterministic)
    assert found.dtype == torch.float32
    exact = x.double() @ weight.double().t() + bias.double()
    sizes = x.double().abs() @ weight.double().abs().t() + bias.double().abs()
    assert ((found.double() - exact).abs() <= 4 * UNIT[torch.float32] * inputs**0.5 * sizes).all()


def test_rows_do_not_know_of_other_rows(randn, assert_rows_independent):
    from rayllm_kernels import ops

    weight = randn(24, 96)
    assert_rows_independent(lambda x: (ops.linear_wide(x, weight, deterministic=True),), randn(300, 96))
