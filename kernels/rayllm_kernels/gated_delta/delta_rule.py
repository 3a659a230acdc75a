"""The gated delta rule (Yang, Kautz, Hatamizadeh, "Gated Delta Networks", 2024), which a recurrent layer computes.

q' = q / |q| / sqrt(K);  k' = k / |k|;  decay = exp(-exp(a_log) * softplus(a + dt_bias));  beta = round(sigmoid(b))
S_t = decay_t S_(t-1) + k'_t (beta_t (v_t - decay_t k'_t^T S_(t-1)))^T;  o_t = S_t^T q'_t

|x| is sqrt(sum x^2 + 1e-6). S is [K, V] of a value head, in fp32; Hv / Hk value heads in a row share a key head.
Everything is fp32, except that long chunks may multiply numbers rounded to tf32 in fp16, and to pairs of bf16 in bf16
(`chunk_kernel.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import check_float, check_last_dim, check_out, check_vectors, fail
from ..dispatch import TritonModule, on_triton
from .state import Chunks, StateCache, check_chunks, check_state, spans

NORM_EPS = 1e-6

_kernel = TritonModule("rayllm_kernels.gated_delta.delta_rule_kernel")


class Gates(NamedTuple):
    """What decides how much of a state stays and how much of a token enters it."""

    a: Tensor  # [T, Hv] of any row stride, in the dtype of qkv
    b: Tensor  # the same
    a_log: Tensor  # [Hv] fp32
    dt_bias: Tensor  # [Hv] fp32


def gated_delta_rule(
    qkv: Tensor, gates: Gates, cache: StateCache, chunks: Chunks, out: Tensor, *, deterministic: bool = False
) -> None:
    """As above, and the cache's states brought up to these tokens (`state.py`).

    qkv: [T, 2 Hk K + Hv V], all query heads, then all key heads, then all value heads, contiguous.
    out: [T, Hv, V] in qkv's dtype, contiguous, where o goes. Without chunks.starts, rows of padding become zero; with
    them, rows outside of every sequence keep what they held.
    deterministic: a token's bits depend on its sequence alone, and not on how that is cut into chunks. Slower for long
    chunks, and in fp32 throughout.
    """
    _, value_heads, key_dim, value_dim = cache.recurrent.shape
    check_float(qkv, "qkv")
    keys = qkv.shape[1] - value_heads * value_dim
    if qkv.dim() != 2 or keys <= 0 or keys % (2 * key_dim) or value_heads % (keys // (2 * key_dim)):
        rule = f"must be [T, 2 Hk * {key_dim} + {value_heads} * {value_dim}], {value_heads} a multiple of Hk"
        fail("qkv", rule, qkv.shape)
    if not qkv.is_contiguous():
        fail("qkv", "must be contiguous", qkv.stride())
    for name, part in (("a", gates.a), ("b", gates.b)):
        if part.shape != (qkv.shape[0], value_heads) or part.dtype != qkv.dtype or part.device != qkv.device:
            fail(name, f"must be [{qkv.shape[0]}, {value_heads}] of qkv's dtype", (*part.shape, part.dtype))
        check_last_dim(part, name)
    check_vectors(value_heads, torch.float32, qkv.device, a_log=gates.a_log, dt_bias=gates.dt_bias)
    check_state(cache.recurrent, "cache.recurrent", (value_heads, key_dim, value_dim), torch.float32, qkv.device)
    check_chunks(chunks, qkv.shape[0], qkv.device)
    check_out(out, torch.Size((qkv.shape[0], value_heads, value_dim)), qkv, "qkv")
    if not out.is_contiguous():
        fail("out", "must be contiguous", out.stride())
    if on_triton(qkv):
        _kernel.gated_delta_rule(qkv, gates, cache, chunks, out, deterministic)
        return
    q, k, v = split_heads(qkv, value_heads, key_dim, value_dim)
    decay, beta = decay_and_beta(gates)
    if chunks.starts is None:
        _step(q, k, v, decay, beta, cache, chunks, out)
        return
    for rows, source, targets in spans(chunks, cache.block_size):
        state = cache.recurrent[source].clone() if source is not None else torch.zeros_like(cache.recurrent[0])
        done = 0
        for block, computed in targets:
            for row in range(rows.start + done, rows.start + computed):
                token = tuple(part[row] for part in (q, k, v, decay, beta))
                if deterministic:  # because the order of sums, and of roundings, follows the shape
                    one = slice(row, row + 1)
                    own = Gates(gates.a[one].clone(), gates.b[one].clone(), gates.a_log, gates.dt_bias)
                    heads = split_heads(qkv[one].clone(), value_heads, key_dim, value_dim)
                    token = tuple(part[0] for part in (*heads, *decay_and_beta(own)))
                state, out[row] = advance(state, *token)
            cache.recurrent[block], done = state, computed


def split_heads(qkv: Tensor, value_heads: int, key_dim: int, value_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """q', k' [T, Hv, K] and v [T, Hv, V], in fp32."""
    values = value_heads * value_dim
    keys = (qkv.shape[1] - values) // 2
    q, k, v = qkv.float().split([keys, keys, values], dim=1)

    def normed(x: Tensor) -> Tensor:
        heads = x.unflatten(1, (-1, key_dim))
        heads = heads * torch.rsqrt(heads.pow(2).sum(-1, keepdim=True) + NORM_EPS)
        return heads.repeat_interleave(value_heads // heads.shape[1], dim=1)

    return normed(q) * key_dim**-0.5, normed(k), v.unflatten(1, (-1, value_dim))


def decay_and_beta(gates: Gates) -> tuple[Tensor, Tensor]:
    """[T, Hv] each, in fp32."""
    decay = torch.exp(-gates.a_log.exp() * F.softplus(gates.a.float() + gates.dt_bias))
    return decay, gates.b.float().sigmoid().to(gates.b.dtype).float()


def advance(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """(the next state [..., K, V], its output [..., V]) of one token."""
    state = state * decay[..., None, None]
    known = (state * k[..., None]).sum(-2)
    state = state + k[..., None] * ((v - known) * beta[..., None])[..., None, :]
    return state, (state * q[..., None]).sum(-2)


def _step(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, cache: StateCache, chunks: Chunks, out: Tensor
) -> None:
    """One token of each sequence, all at once."""
    tables, lengths = chunks.contexts
    position = lengths.to(torch.int64) - 1
    source = tables.gather(1, ((position - 1).clamp_min(0) // cache.block_size)[:, None])[:, 0].to(torch.int64)
    target = tables.gather(1, (position.clamp_min(0) // cache.block_size)[:, None])[:, 0].to(torch.int64)
    live, known = position >= 0, position > 0
    source = torch.where(known, source, 0)
    before = torch.where(known[:, None, None, None], cache.recurrent[source], 0.0)
    state, result = advance(before, q, k, v, decay, beta)
    out.copy_(torch.where(live[:, None, None], result, 0.0))
    cache.recurrent[target[live]] = state[live]
