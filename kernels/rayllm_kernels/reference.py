"""Every kernel in plain torch: what the Triton kernels must compute, and the CPU's production path.

Signatures equal those of `ops`, whose docstrings give the contracts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import (
    check_copy_blocks,
    check_reshape_and_cache,
    check_residual,
    check_rms_norm,
    check_rotary,
    check_silu_and_mul,
)
from .reference_attention import paged_decode_attention, paged_prefill_attention
from .reference_sampling import decode_inputs, gumbel_argmax

__all__ = [
    "copy_blocks",
    "decode_inputs",
    "fused_add_rms_norm",
    "gumbel_argmax",
    "paged_decode_attention",
    "paged_prefill_attention",
    "reshape_and_cache",
    "rms_norm",
    "rotary_embedding",
    "silu_and_mul",
]


def reshape_and_cache(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """cache[slot // block_size, :, slot % block_size] = key for every slot >= 0."""
    check_reshape_and_cache(key, value, k_cache, v_cache, slot_mapping)
    used = slot_mapping >= 0
    if not bool(used.all()):
        key, value, slot_mapping = key[used], value[used], slot_mapping[used]
    block_size = k_cache.shape[2]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    k_cache[block, :, offset] = key
    v_cache[block, :, offset] = value


def copy_blocks(pool: Tensor, src: Tensor, dst: Tensor) -> None:
    """pool[dst[i]] = pool[src[i]]."""
    check_copy_blocks(pool, src, dst)
    pool[dst] = pool[src]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * (x / sqrt(mean(x^2) + eps)), the quotient in fp32 and rounded to x's dtype before the product."""
    check_rms_norm(x, weight)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), the sum rounded to x's dtype first."""
    check_rms_norm(x, weight)
    check_residual(x, residual)
    total = x + residual
    return rms_norm(total, weight, eps), total


def rotary_embedding(positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor) -> None:
    """(a, b) -> (a cos - b sin, b cos + a sin), a and b the halves of the first rotary_dim entries; in place."""
    check_rotary(positions, q, k, cos_sin_cache)
    half = cos_sin_cache.shape[1] // 2
    cos, sin = cos_sin_cache[positions].unsqueeze(1).split(half, dim=-1)
    for heads in (q, k):
        first, second = heads[..., :half].float(), heads[..., half : 2 * half].float()
        # Both results before either is stored: in fp32 `first` and `second` are views of `heads`.
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        heads[..., : 2 * half] = turned


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up, gate and up the halves of the last dimension."""
    check_silu_and_mul(x)
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
