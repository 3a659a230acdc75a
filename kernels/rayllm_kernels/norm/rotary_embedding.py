"""Rotary position embedding (Su et al., 2021) of queries and keys, in place, both in one launch.

a' = a cos - b sin,  b' = b cos + a sin,   a = row[:r/2], b = row[r/2:r]   (half-split, as in GPT-NeoX and Llama)
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import check_float, check_last_dim, check_like, check_vectors, fail
from ..dispatch import TritonModule, on_triton

_kernel = TritonModule("rayllm_kernels.norm.rotary_embedding_kernel")


def rotary_embedding(positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor) -> None:
    """Rotate the first rotary_dim entries of every query and key head by their position's angles, in place.

    positions: [T] int64, each below max_pos (padding rows too). q: [T, Hq, D], k: [T, Hkv, D], last dimension
    contiguous. cos_sin_cache: [max_pos, rotary_dim] fp32, cos in the first half, sin in the second; half-split pairs.
    """
    if q.dim() != 3:
        fail("q", "must be [T, heads, head_dim]", q.shape)
    check_float(q, "q")
    check_last_dim(q, "q")
    tokens, _, head_dim = q.shape
    if k.dim() != 3 or k.shape[0] != tokens or k.shape[2] != head_dim:
        fail("k", f"must be [{tokens}, heads, {head_dim}]", k.shape)
    check_like(k, "k", q, "q")
    check_last_dim(k, "k")
    check_angles(positions, cos_sin_cache, tokens, head_dim, q.device)
    if on_triton(q):
        _kernel.rotary_embedding(positions, q, k, cos_sin_cache)
        return
    half = cos_sin_cache.shape[1] // 2
    cos, sin = cos_sin_cache[positions].unsqueeze(1).split(half, dim=-1)
    for heads in (q, k):
        first, second = heads[..., :half].float(), heads[..., half : 2 * half].float()
        # Both results before either is stored: in fp32 `first` and `second` are views of `heads`.
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        heads[..., : 2 * half] = turned


def check_angles(positions: Tensor, cos_sin_cache: Tensor, tokens: int, head_dim: int, device: torch.device) -> None:
    """The positions of so many tokens, and the table of angles of heads of this size."""
    check_vectors(tokens, torch.int64, device, positions=positions)
    if cos_sin_cache.dim() != 2:
        fail("cos_sin_cache", "must be [max_pos, rotary_dim]", cos_sin_cache.shape)
    if cos_sin_cache.shape[1] % 2 != 0 or not 0 < cos_sin_cache.shape[1] <= head_dim:
        fail("cos_sin_cache", f"must have an even rotary_dim of 2 to {head_dim}", cos_sin_cache.shape)
    if cos_sin_cache.dtype != torch.float32:
        fail("cos_sin_cache", "must be torch.float32", cos_sin_cache.dtype)
    if cos_sin_cache.device != device:
        fail("cos_sin_cache", f"must be on {device}", cos_sin_cache.device)
    check_last_dim(cos_sin_cache, "cos_sin_cache")
