"""Projections of each head by a matrix of its own."""

from __future__ import annotations

import pytest
import torch
from support.closeness import check_close


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "inputs", "outputs", "dtype"),
    [(5, 3, 20, 7, torch.float32), (17, 2, 128, 65, torch.float16), (0, 2, 8, 8, torch.float32)],
)
def test_products(randn, each, tokens, heads, inputs, outputs, dtype, deterministic):
    x, weight = randn(tokens, heads, inputs + 4, dtype=dtype)[..., 4:], randn(heads, outputs, inputs, dtype=dtype)
    weight *= inputs**-0.5
    expected = torch.einsum("thi,hoi->tho", x.float(), weight.float()).to(dtype)
    check_close(each.linear_heads(x, weight, deterministic=deterministic), expected, terms=inputs)
    room = torch.full((tokens, heads, outputs + 3), float("nan"), dtype=dtype, device=x.device)
    out = room[..., :outputs]
    assert each.linear_heads(x, weight, out=out, deterministic=deterministic) is out
    check_close(out, expected, terms=inputs)
    assert room[..., outputs:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_tokens_do_not_know_of_each_other(randn, each, assert_rows_independent, places, dtype):
    x, weight = randn(201, 2, 72, dtype=dtype), randn(2, 33, 72, dtype=dtype)
    assert_rows_independent(lambda part: (each.linear_heads(part, weight, deterministic=True),), x, places=places)


def test_errors(randn, each):
    x = randn(5, 3, 8)
    for message, weight in (
        ("^weight must be", randn(2, 4, 8)),
        ("^weight must have the dtype", randn(3, 4, 8).half()),
    ):
        with pytest.raises(ValueError, match=message):
            each.linear_heads(x, weight)
    with pytest.raises(ValueError, match=r"^x must be"):
        each.linear_heads(x[0], randn(3, 4, 8))
    with pytest.raises(ValueError, match=r"^out must have shape"):
        each.linear_heads(x, randn(3, 4, 8), out=randn(5, 3, 5))
