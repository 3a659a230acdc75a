"""The comparison that all tests of kernels use sees one wrong element among many."""

from __future__ import annotations

import pytest
import torch
from support.closeness import FP32, GROWTH, ROUNDINGS, SPREAD, check_close, unit_of

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture
def logits(randn):
    """(exact logits [32, 10000] float64, how many products each is the sum of)."""
    return randn(32, 256).double() @ randn(10_000, 256).double().T / 16, 256


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_close(logits, dtype):
    exact, terms = logits
    check_close((exact * (1 + torch.finfo(dtype).eps)).to(dtype), exact.to(dtype), terms=terms)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ten_wrong_logits_among_many_are_not(logits, dtype):
    """A norm over all of them does not see these."""
    exact, terms = logits
    right = exact.to(dtype)
    wrong = right.clone()
    wrong.view(-1)[::32_000] += 0.125
    assert float((wrong - right).double().norm() / exact.norm()) < 1e-3
    with pytest.raises(AssertionError, match=r"10 of 320000 elements are wrong; the first is \(0, 0\)"):
        check_close(wrong, right, terms=terms)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_is_off_as_a_whole_is_not(logits, dtype):
    """By less than the bound of its elements, so all of one row's, and not those of the others."""
    exact, terms = logits
    exact = exact / 100 + 10  # so that no element's own bound is far from its row's
    right, wrong = exact.to(dtype), exact.clone()
    wrong[7] *= 1 + 0.75 * ((ROUNDINGS + SPREAD) * unit_of(dtype) + GROWTH * FP32 * terms**0.5)
    with pytest.raises(AssertionError, match="a row is off as a whole"):
        check_close(wrong.to(dtype), right, terms=terms)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_a_number_that_is_none_is_not_close(logits, value):
    right = logits[0].float()
    wrong = right.clone()
    wrong[3, 4] = value
    with pytest.raises(AssertionError, match=r"1 of 320000 elements are wrong; the first is \(3, 4\)"):
        check_close(wrong, right, terms=256)
    with pytest.raises(AssertionError):
        check_close(wrong, wrong) if value != value else check_close(wrong, right)


def test_zeros_have_to_be_zeros(logits):
    rows = logits[0].half()
    rows[5] = 0.0
    wrong = rows.clone()
    wrong[5, 6] = 1e-3
    with pytest.raises(AssertionError, match=r"the first is \(5, 6\)"):
        check_close(wrong, rows, terms=256)


def test_shape_and_dtype_count(logits):
    right = logits[0].float()
    for other in (right[:1], right.half()):
        with pytest.raises(AssertionError):
            check_close(other, right)
