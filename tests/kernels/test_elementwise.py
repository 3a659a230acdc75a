"""Normalisation, rotary embedding and activation: Triton against the references, and the references against theirs."""

from __future__ import annotations

import pytest
import torch

from rayllm_kernels import reference

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
def test_rms_norm(randn, assert_close, assert_kernel_close, kernels, shape, dtype):
    x, weight = randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype)
    expected = reference.rms_norm(x, weight, 1e-5)
    assert_close(expected, llama_rms_norm(x, weight, 1e-5))
    assert_kernel_close(kernels.rms_norm(x, weight, 1e-5), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ROWS)
def test_fused_add_rms_norm(randn, assert_close, assert_kernel_close, kernels, shape, dtype):
    x, residual, weight = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype)
    x_before, residual_before = x.clone(), residual.clone()
    y, total = kernels.fused_add_rms_norm(x, residual, weight, 1e-6)
    expected_y, expected_total = reference.fused_add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(expected_total, x + residual)
    assert_close(expected_y, llama_rms_norm(x + residual, weight, 1e-6))
    assert_kernel_close(total, expected_total)
    assert_kernel_close(y, expected_y)
    assert torch.equal(x, x_before)
    assert torch.equal(residual, residual_before)


def test_norms_of_strided_rows(randn, assert_kernel_close, kernels):
    """Heads of a fused qkv tensor, and rows of a wider buffer."""
    qkv = randn(5, 12, 32)
    weight = randn(32)
    for heads in (qkv[:, :8], qkv[:, 8:10], qkv[:, 10:]):
        assert_kernel_close(kernels.rms_norm(heads, weight, 1e-6), llama_rms_norm(heads, weight, 1e-6))
    wide, other = randn(6, 80), randn(6, 50)
    y, total = kernels.fused_add_rms_norm(wide[:, 5:37], other[:, :32], weight, 1e-6)
    assert torch.equal(total, wide[:, 5:37] + other[:, :32])
    assert_kernel_close(y, llama_rms_norm(total, weight, 1e-6))
    y, total = kernels.fused_add_rms_norm(qkv[:, :3], randn(5, 3, 32), weight, 1e-6)
    assert_kernel_close(y, llama_rms_norm(total, weight, 1e-6))
    deep = randn(2, 3, 2, 32)
    assert_kernel_close(kernels.rms_norm(deep, weight, 1e-6), llama_rms_norm(deep, weight, 1e-6))
    assert_kernel_close(kernels.rms_norm(deep[0, 0, 0], weight, 1e-6), llama_rms_norm(deep[0, 0, 0], weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 64), (3, 10), (2, 3, 48), (1, 2), (2, 2400)])
def test_silu_and_mul(randn, assert_close, assert_kernel_close, kernels, shape, dtype):
    x = 4 * randn(*shape, dtype=dtype)
    gate, up = x.double().chunk(2, dim=-1)
    expected = reference.silu_and_mul(x)
    assert_close(expected, (gate / (1 + torch.exp(-gate)) * up).to(dtype))
    assert_kernel_close(kernels.silu_and_mul(x), expected)
    assert_kernel_close(
        kernels.silu_and_mul(x[..., : shape[-1] // 4 * 2]), reference.silu_and_mul(x[..., : shape[-1] // 4 * 2])
    )


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_silu_saturates_without_nan(kernels, device):
    x = torch.tensor([[-3e4, -100.0, 0.0, 3e4, 1.0, 1.0, 1.0, 1.0]], device=device)
    assert torch.equal(kernels.silu_and_mul(x), reference.silu_and_mul(x))


def rope_cache(max_pos, rotary_dim, device):
    frequencies = 10000.0 ** (-torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    angles = torch.arange(max_pos).double()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1).float().to(device)


def rotate_by_complex(x, positions, cos_sin_cache):
    """Pairs (i, i + r/2) as complex numbers times exp(i angle)."""
    half = cos_sin_cache.shape[1] // 2
    cos, sin = cos_sin_cache[positions].double().unsqueeze(1).split(half, dim=-1)
    wide = x.double()
    turned = torch.complex(wide[..., :half], wide[..., half : 2 * half]) * torch.complex(cos, sin)
    return torch.cat([turned.real, turned.imag, wide[..., 2 * half :]], dim=-1).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "rotary_dim"),
    [
        (7, (4, 2), 64, 64),
        (1, (8, 8), 128, 128),
        (3, (5, 1), 80, 32),
        (9, (3, 3), 96, 96),
        (0, (4, 2), 32, 32),
        (5, (40, 4), 64, 64),
    ]
    + ([(4096, (32, 8), 128, 128)] if ON_GPU else []),
)
def test_rotary_embedding(
    randn, assert_close, assert_kernel_close, kernels, device, tokens, heads, head_dim, rotary_dim, dtype
):
    query_heads, kv_heads = heads
    qkv = randn(tokens, query_heads + 2 * kv_heads, head_dim, dtype=dtype)
    cache = rope_cache(50, rotary_dim, device)
    positions = torch.randint(0, 50, (tokens,), generator=torch.Generator().manual_seed(3)).to(device)
    before = qkv.clone()
    for module, check in ((reference, assert_close), (kernels, assert_kernel_close)):
        qkv.copy_(before)
        q, k, v = qkv.split([query_heads, kv_heads, kv_heads], dim=1)
        module.rotary_embedding(positions, q, k, cache)
        check(q, rotate_by_complex(before[:, :query_heads], positions, cache))
        check(k, rotate_by_complex(before[:, query_heads : query_heads + kv_heads], positions, cache))
        assert torch.equal(v, before[:, query_heads + kv_heads :])
        assert torch.equal(q[..., rotary_dim:], before[:, :query_heads, rotary_dim:])
