"""Sums of pairs that are added up in one pass with a norm: what the two passes give."""

from __future__ import annotations

import pytest
import torch
from support.closeness import check_close

from rayllm_kernels import ops

ON_GPU = torch.cuda.is_available()


@pytest.fixture
def case(randn):
    """(tokens, top_k, size, dtype, whether there is something to add to, owned) -> a `PairSum`, residual and weight."""

    def make(tokens, top_k, size, dtype, *, onto=False, owned=None):
        outputs, weights = randn(tokens * top_k, size, dtype=dtype), randn(tokens, top_k).softmax(-1)
        experts = randn(tokens, 6).topk(top_k).indices.to(torch.int32)
        if owned is not None:  # what is another's is undefined, and nobody reads it
            first, count = owned
            others = (experts < first) | (experts >= first + count)
            outputs[others.flatten()] = float("nan")
        before = randn(tokens, size + 8, dtype=dtype)[:, :size] if onto else None
        pairs = ops.PairSum(outputs, weights, before, experts, owned)
        return pairs, randn(tokens, size + 4, dtype=dtype)[:, :size], randn(size, dtype=dtype)

    return make


def total_of(pairs):
    """In fp64."""
    (tokens, _), outputs = pairs.shape, pairs.outputs.double()
    if pairs.owned is not None:
        outputs = outputs.nan_to_num(0)
    total = (outputs.unflatten(0, (tokens, -1)) * pairs.weights.double()[..., None]).sum(1)
    return (total if pairs.onto is None else total + pairs.onto.double()).to(pairs.outputs.dtype)


# tokens, top_k, size
SHAPES = [(1, 1, 40), (5, 3, 33), (7, 2, 2048)]


@pytest.mark.parametrize("options", [{}, {"onto": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_norms(case, each, shape, dtype, options):
    pairs, residual, weight = case(*shape, dtype, **options)
    check_close(pairs.total(), total_of(pairs), terms=10, slack=2)
    expected = ops.fused_add_rms_norm(pairs.total(), residual, weight, 1e-5)
    for found, wanted in zip(each.fused_add_rms_norm(pairs, residual, weight, 1e-5), expected, strict=True):
        check_close(found, wanted, terms=shape[2], slack=2)


@pytest.mark.skipif(not ON_GPU, reason="the reference has outputs of all experts")
def test_only_what_is_owned_is_read(case):
    pairs, residual, weight = case(9, 3, 256, torch.bfloat16, onto=True, owned=(1, 3))
    total, summed = pairs.total(), ops.fused_add_rms_norm(pairs, residual, weight, 1e-5)
    check_close(total, total_of(pairs), terms=10, slack=2)
    for found, wanted in zip(summed, ops.fused_add_rms_norm(total, residual, weight, 1e-5), strict=True):
        check_close(found, wanted, terms=256, slack=2)


@pytest.mark.parametrize("how", [ops.Rounding(None), ops.Rounding(32)], ids=str)
def test_norms_that_are_rounded(case, each, how):
    pairs, residual, weight = case(6, 2, 96, torch.float16, onto=True)
    rows, total = each.rms_norm_fp8(pairs, residual, weight, 1e-5, how)
    expected, wanted = ops.rms_norm_fp8(pairs.total(), residual, weight, 1e-5, how)
    check_close(total, wanted, terms=10, slack=2)
    check_close(rows.scales, expected.scales, terms=96, slack=64)
    assert (rows.dequantised() - expected.dequantised()).norm() <= 0.02 * expected.dequantised().norm()


def test_errors(case):
    pairs, residual, weight = case(3, 2, 32, torch.float32)
    with pytest.raises(ValueError, match=r"^residual "):
        ops.fused_add_rms_norm(pairs, residual[:2], weight, 1e-5)
    with pytest.raises(ValueError, match=r"^weight "):
        ops.rms_norm_fp8(pairs, residual, weight[:5], 1e-5, ops.Rounding(None))
