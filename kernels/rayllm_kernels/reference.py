"""Every kernel in plain torch: what the Triton kernels must compute, and the CPU's production path.

Signatures equal those of `ops`, whose docstrings give the contracts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import (
    check_copy_blocks,
    check_gated,
    check_linear,
    check_norm_linear,
    check_qk_norm_rope_cache,
    check_reshape_and_cache,
    check_residual,
    check_rms_norm,
    check_rotary,
    check_silu_and_mul,
)
from .kv_format import KVScales, as_bytes, quantise
from .reference_attention import decode_schedule, paged_decode_attention, paged_prefill_attention
from .reference_sampling import decode_inputs, gather_logprobs, gumbel_argmax, gumbel_keys, penalise
from .reference_truncation import truncate_draws

__all__ = [
    "add_rms_norm_linear",
    "add_rms_norm_linear_silu_mul",
    "copy_blocks",
    "decode_inputs",
    "decode_schedule",
    "fused_add_rms_norm",
    "gather_logprobs",
    "gumbel_argmax",
    "gumbel_keys",
    "linear",
    "linear_invariant",
    "linear_silu_mul",
    "paged_decode_attention",
    "paged_prefill_attention",
    "penalise",
    "qk_norm_rope_cache",
    "reshape_and_cache",
    "rms_norm",
    "rotary_embedding",
    "silu_and_mul",
    "truncate_draws",
]


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    kv_scales: KVScales | None = None,
) -> None:
    """cache[slot // block_size, :, slot % block_size] = key for every slot >= 0, in the cache's format."""
    check_reshape_and_cache(key, value, k_cache, v_cache, slot_mapping, kv_scales)
    used = slot_mapping >= 0
    if not bool(used.all()):
        key, value, slot_mapping = key[used], value[used], slot_mapping[used]
    block_size = k_cache.shape[2]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    if kv_scales is not None:
        key, value = quantise(key, kv_scales.k, k_cache.dtype), quantise(value, kv_scales.v, v_cache.dtype)
    as_bytes(k_cache)[block, :, offset] = as_bytes(key)
    as_bytes(v_cache)[block, :, offset] = as_bytes(value)


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


def qk_norm_rope_cache(
    qkv: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
    num_kv_heads: int,
    *,
    kv_scales: KVScales | None = None,
    deterministic: bool = False,  # noqa: ARG001
) -> Tensor:
    """rms_norm of q and k where they have weights, rotary_embedding, reshape_and_cache.

    `deterministic` makes no difference here: a head's norm does not depend on how many there are.
    """
    check_qk_norm_rope_cache(
        qkv,
        positions,
        cos_sin_cache,
        q_weight,
        k_weight,
        k_cache,
        v_cache,
        slot_mapping,
        num_heads,
        num_kv_heads,
        kv_scales,
    )
    heads = qkv.unflatten(1, (-1, k_cache.shape[3]))
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    else:
        q, k = q.clone(memory_format=torch.contiguous_format), k.clone()
    rotary_embedding(positions, q, k, cos_sin_cache)
    reshape_and_cache(k, v, k_cache, v_cache, slot_mapping, kv_scales=kv_scales)
    return q


def linear_into(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """x W^T + bias of checked arguments, by PyTorch's own product."""
    if out is None:
        return F.linear(x, weight, bias)
    torch.mm(x, weight.t(), out=out)
    return out if bias is None else out.add_(bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """x W^T + bias."""
    check_linear(x, weight, bias, out)
    return linear_into(x, weight, bias, out)


def linear_invariant(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias, a row at a time: the order of a product's sums follows its shape, and here all have the same.

    Each row is a copy, because the order may follow the alignment too.
    """
    check_linear(x, weight, bias)
    y = x.new_empty(x.shape[0], weight.shape[0])
    for source, target in zip(x.split(1), y.split(1), strict=True):
        target.copy_(F.linear(source.clone(), weight, bias))
    return y


def linear_silu_mul(x: Tensor, weight: Tensor) -> Tensor:
    """silu_and_mul(x W^T)."""
    check_linear(x, weight, None)
    check_gated(weight)
    return silu_and_mul(F.linear(x, weight))


def add_rms_norm_linear(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(rms_norm(total) W^T + bias, total) of total = x + residual."""
    check_linear(x, weight, bias)
    check_norm_linear(x, residual, norm_weight)
    total = x if residual is None else x + residual
    return F.linear(rms_norm(total, norm_weight, eps), weight, bias), total


def add_rms_norm_linear_silu_mul(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """(silu_and_mul(rms_norm(total) W^T), total) of total = x + residual."""
    check_gated(weight)
    y, total = add_rms_norm_linear(x, residual, norm_weight, eps, weight)
    return silu_and_mul(y), total
