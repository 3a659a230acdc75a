"""RMSNorm, alone and after adding the residual: Triton against the reference, and that against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.closeness import check_close

from rayllm_kernels import ops

ON_GPU = torch.cuda.is_available()
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ROWS = [(7, 64), (3, 100), (1, 5), (33, 128), (2, 3, 48), (5, 1536)]
if ON_GPU:
    ROWS += [(1000, 4096), (333, 5120), (20, 16384), (4096, 24, 128)]


def llama_rms_norm(x, weight, eps):
    wide = x.double()
    wide = wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ROWS)
def test_rms_norm(randn, kernels, reference, shape, dtype):
    x, weight = randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype)
    expected = reference.rms_norm(x, weight, 1e-5)
    check_close(expected, llama_rms_norm(x, weight, 1e-5))
    check_close(kernels.rms_norm(x, weight, 1e-5), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ROWS)
def test_fused_add_rms_norm(randn, kernels, reference, shape, dtype):
    x, residual, weight = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype)
    x_before, residual_before = x.clone(), residual.clone()
    y, total = kernels.fused_add_rms_norm(x, residual, weight, 1e-6)
    expected_y, expected_total = reference.fused_add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(expected_total, x + residual)
    check_close(expected_y, llama_rms_norm(x + residual, weight, 1e-6))
    check_close(total, expected_total)
    check_close(y, expected_y)
    assert torch.equal(x, x_before)
    assert torch.equal(residual, residual_before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ROWS)
def test_weights_in_fp32_multiply_what_is_not_rounded(randn, kernels, reference, shape, dtype):
    """As in transformers' Gemma, to the bit."""
    x, residual, weight = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype), 1.0 + randn(shape[-1])
    wide = x.float()
    expected = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * weight).to(dtype)
    assert torch.equal(reference.rms_norm(x, weight, 1e-6), expected)
    check_close(kernels.rms_norm(x, weight, 1e-6), expected)
    added = kernels.rms_norm_add(x, residual, weight, 1e-6)
    check_close(added, reference.rms_norm_add(x, residual, weight, 1e-6), terms=2)
    pair = kernels.fused_add_rms_norm(x, residual, weight, 1e-6)
    for ours, theirs in zip(pair, reference.fused_add_rms_norm(x, residual, weight, 1e-6), strict=True):
        check_close(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ROWS)
def test_rms_norm_add(randn, kernels, reference, shape, dtype):
    x, residual, weight = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype)
    before = x.clone(), residual.clone()
    expected = reference.rms_norm_add(x, residual, weight, 1e-6)
    check_close(expected, llama_rms_norm(x, weight, 1e-6) + residual, terms=2)
    check_close(kernels.rms_norm_add(x, residual, weight, 1e-6), expected, terms=2)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


def test_norms_of_strided_rows(randn, kernels):
    """Heads of a fused qkv tensor, and rows of a wider buffer."""
    qkv = randn(5, 12, 32)
    weight = randn(32)
    for heads in (qkv[:, :8], qkv[:, 8:10], qkv[:, 10:]):
        check_close(kernels.rms_norm(heads, weight, 1e-6), llama_rms_norm(heads, weight, 1e-6))
    wide, other = randn(6, 80), randn(6, 50)
    y, total = kernels.fused_add_rms_norm(wide[:, 5:37], other[:, :32], weight, 1e-6)
    assert torch.equal(total, wide[:, 5:37] + other[:, :32])
    check_close(y, llama_rms_norm(total, weight, 1e-6))
    y = kernels.rms_norm_add(wide[:, 5:37], other[:, :32], weight, 1e-6)
    check_close(y, llama_rms_norm(wide[:, 5:37], weight, 1e-6) + other[:, :32], terms=2)
    y, total = kernels.fused_add_rms_norm(qkv[:, :3], randn(5, 3, 32), weight, 1e-6)
    check_close(y, llama_rms_norm(total, weight, 1e-6))
    deep = randn(2, 3, 2, 32)
    check_close(kernels.rms_norm(deep, weight, 1e-6), llama_rms_norm(deep, weight, 1e-6))
    check_close(kernels.rms_norm(deep[0, 0, 0], weight, 1e-6), llama_rms_norm(deep[0, 0, 0], weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [96, 256, 1024, 4096])
def test_rows_do_not_know_of_other_rows(randn, assert_rows_independent, dim, dtype):
    """As the deterministic mode asks; of layer_norm, too, which is PyTorch's."""
    x, residual, weight = randn(300, dim, dtype=dtype), randn(300, dim, dtype=dtype), randn(dim, dtype=dtype)
    assert_rows_independent(lambda x: (ops.rms_norm(x, weight, 1e-6),), x)
    assert_rows_independent(lambda x, residual: ops.fused_add_rms_norm(x, residual, weight, 1e-6), x, residual)
    assert_rows_independent(lambda x: (F.layer_norm(x, (dim,), weight, weight, 1e-5),), x)
