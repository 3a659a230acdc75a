"""Rotary positions: Triton and the reference against products of complex numbers."""

from __future__ import annotations

import pytest
import torch

ON_GPU = torch.cuda.is_available()


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
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
    randn, assert_close, assert_kernel_close, kernels, reference, device, tokens, heads, head_dim, rotary_dim, dtype
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
