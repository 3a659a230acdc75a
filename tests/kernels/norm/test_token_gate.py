"""The gate of one number a token: Triton against the reference, and both against float64."""

from __future__ import annotations

import pytest
import torch
from support.closeness import unit_of

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "inputs", "dim"), [(1, 2048, 2048), (5, 64, 64), (3, 2500, 100), (2, 33, 4100), (0, 8, 8)]
)
def test_token_gate(randn, each, rows, inputs, dim, dtype):
    x, weight = randn(rows, inputs + 3, dtype=dtype)[:, :inputs], randn(inputs, dtype=dtype) / inputs**0.5
    values = randn(rows, dim + 5, dtype=dtype)[:, :dim]
    found = each.token_gate(x, weight, values)
    logits = x.double() @ weight.double()
    exact = torch.sigmoid(logits)[:, None] * values.double()
    assert found.dtype == dtype
    assert found.is_contiguous()
    # The gate is off by what rounds the logit, at most its size times a quarter, and three roundings.
    allowed = (3 + 2 * logits.abs()[:, None]) * unit_of(dtype) * values.double().abs() + 1e-7
    assert ((found.double() - exact).abs() <= allowed).all()


def test_large_gates_are_zero_and_one(each, device):
    x, weight = torch.tensor([[3e4], [-3e4], [0.0]], device=device), torch.ones(1, device=device)
    values = torch.full((3, 7), 5.0, device=device)
    assert torch.equal(each.token_gate(x, weight, values)[:, 0].cpu(), torch.tensor([5.0, 0.0, 2.5]))


def test_rows_do_not_know_of_other_rows(randn, assert_rows_independent):
    from rayllm_kernels import ops

    weight = randn(96) / 10
    assert_rows_independent(
        lambda x: (ops.token_gate(x[:, :96], weight, x[:, 96:], deterministic=True),), randn(300, 116)
    )


def test_errors(randn, each):
    x, weight, values = randn(3, 8), randn(8), randn(3, 5)
    for arguments, name in (
        ((x[0], weight, values), "x"),
        ((x, weight[:7], values), "weight"),
        ((x, weight, values[:2]), "values"),
        ((x, weight, values.half()), "values"),
        ((x, weight, values.t().contiguous().t()), "values"),
    ):
        with pytest.raises(ValueError, match=f"^{name} must"):
            each.token_gate(*arguments)
