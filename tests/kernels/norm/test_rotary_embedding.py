"""Rotary positions: the reference against products of complex numbers. The fused kernel is compared with it."""

from __future__ import annotations

import pytest
import torch
from support.closeness import check_close

from rayllm_kernels.norm.qk_norm_rope_cache import rotate


def rope_cache(max_pos, rotary_dim, device):
    frequencies = 10000.0 ** (-torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    angles = torch.arange(max_pos).double()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1).float().to(device)


def rotate_by_complex(x, positions, cos_sin_cache, interleaved):
    """Pairs (i, i + r/2), or (2i, 2i + 1), as complex numbers times exp(i angle)."""
    half = cos_sin_cache.shape[1] // 2
    cos, sin = cos_sin_cache[positions].double().unsqueeze(1).split(half, dim=-1)
    wide = x.double()
    if interleaved:
        pairs = torch.view_as_complex(wide[..., : 2 * half].unflatten(-1, (half, 2)).contiguous())
        turned = torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2)
        return torch.cat([turned, wide[..., 2 * half :]], dim=-1).to(x.dtype)
    turned = torch.complex(wide[..., :half], wide[..., half : 2 * half]) * torch.complex(cos, sin)
    return torch.cat([turned.real, turned.imag, wide[..., 2 * half :]], dim=-1).to(x.dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "rotary_dim"),
    [(7, 4, 64, 64), (1, 8, 128, 128), (3, 5, 80, 32), (9, 3, 96, 96), (0, 4, 32, 32)],
)
def test_rotate(randn, device, tokens, heads, head_dim, rotary_dim, dtype, interleaved):
    """A slice of a fused qkv tensor is rotated in place; entries past rotary_dim, and other heads, are left alone."""
    qkv = randn(tokens, heads + 2, head_dim, dtype=dtype)
    cache = rope_cache(50, rotary_dim, device)
    positions = torch.randint(0, 50, (tokens,), generator=torch.Generator().manual_seed(3)).to(device)
    before, part = qkv.clone(), qkv[:, :heads]
    rotate(part, positions, cache, interleaved=interleaved)
    check_close(part, rotate_by_complex(before[:, :heads], positions, cache, interleaved), terms=2)
    assert torch.equal(qkv[:, heads:], before[:, heads:])
    assert torch.equal(part[..., rotary_dim:], before[:, :heads, rotary_dim:])
