"""The soft cap of logits: Triton against the reference, and that against float64."""

from __future__ import annotations

import pytest
import torch
from support.closeness import check_close

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in:RuntimeWarning")  # of the interpreter
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 259), (2, 5000), (0, 7)])
def test_soft_cap(randn, kernels, reference, shape, dtype):
    """Logits far below, around and far above the cap."""
    logits = (randn(*shape) * 10.0 ** randn(*shape).clamp(-3, 3)).to(dtype)
    for cap in (0.5, 30.0):
        expected = (cap * torch.tanh(logits.double() / cap)).to(dtype)
        ours, theirs = logits.clone(), logits.clone()
        assert reference.soft_cap_(theirs, cap) is theirs
        assert kernels.soft_cap_(ours, cap) is ours
        check_close(theirs, expected)
        check_close(ours, expected)


def test_edges(each, device):
    logits = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, 1e30], device=device)
    assert each.soft_cap_(logits, 30.0)[[0, 1, 3, 4]].tolist() == [30.0, -30.0, 0.0, 30.0]
    assert logits[2].isnan()


def test_errors(randn, each):
    with pytest.raises(ValueError, match=r"^cap must be positive"):
        each.soft_cap_(randn(2, 3), 0.0)
    with pytest.raises(ValueError, match=r"^logits must be contiguous"):
        each.soft_cap_(randn(2, 3).t(), 1.0)
    with pytest.raises(ValueError, match=r"^logits must be float32"):
        each.soft_cap_(randn(2, 3).long(), 1.0)
