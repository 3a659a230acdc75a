"""The Triton kernel of `gated_delta_rule`, which has the formula: token after token, with the state in registers.

A program takes some columns of one value head's state: columns do not depend on each other, so they stay on chip from
a sequence's first token to its last, and go to memory at the borders of blocks alone. A decode reads and writes each
state once, which is all that it costs. In a chunk of a prompt each token waits for the one before it: long chunks go to
`chunk_kernel.py`, unless a token's bits are to be the same in all of them.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..attention.context import Contexts
from ..compile_ahead import launch
from ..dispatch import TritonModule
from .delta_rule import NORM_EPS, Gates
from .state import Chunks, StateCache

COLUMNS = 16  # of a state, of a program of one warp: 64 registers a thread for 128 rows
LONG = 16  # tokens of a chunk from which on the other kernels are faster
EPS = tl.constexpr(NORM_EPS)
# Imported only where it is wanted: it takes functions from here.
_chunks = TritonModule("rayllm_kernels.gated_delta.chunk_kernel")


class Form(NamedTuple):
    """The compile-time argument of the kernel."""

    key_dim: int
    key_padded: int
    value_dim: int
    key_heads: int
    value_heads: int
    block_size: int
    columns: int


@triton.jit
def normed(x):
    """fp32 rows [.., K] of length 1."""
    return x * tl.rsqrt(tl.sum(x * x, len(x.shape) - 1, keep_dims=True) + EPS)


@triton.jit
def beta_of(b):
    """fp32, of tokens' b in their dtype."""
    return tl.sigmoid(b.to(tl.float32)).to(b.dtype).to(tl.float32)


@triton.jit
def softplus(x):
    # As torch has it: the same above 20, where the exponential would only lose digits.
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit(do_not_specialize=[*Contexts._fields, "starts_ptr", "stride_table"])
def _delta_rule_kernel(
    qkv_ptr,
    gates,
    state_ptr,
    block_tables,
    seq_lens,
    starts_ptr,
    out_ptr,
    strides,
    stride_table,
    scale,
    FORM: tl.constexpr,
):
    """gates: (a, b, a_log, dt_bias). strides: of rows of qkv, a, b and out, and of blocks."""
    a_ptr, b_ptr, a_log_ptr, dt_bias_ptr = gates
    stride_qkv, stride_a, stride_b, stride_out, stride_block = strides
    KEY: tl.constexpr = FORM.key_dim
    VALUE: tl.constexpr = FORM.value_dim
    COLUMNS: tl.constexpr = FORM.columns
    head = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    key = tl.arange(0, FORM.key_padded)
    value = tl.program_id(0) * FORM.columns + tl.arange(0, FORM.columns)
    in_key, in_value = key < KEY, value < VALUE
    length = tl.load(seq_lens + sequence)
    if starts_ptr is None:
        row = sequence
        count = 1
        if length == 0:  # padding
            out_ptrs = out_ptr + row * stride_out + head * VALUE + value
            tl.store(out_ptrs, tl.zeros([COLUMNS], out_ptr.dtype.element_ty), mask=in_value)
            return
    else:
        row = tl.load(starts_ptr + sequence).to(tl.int64)
        count = (tl.load(starts_ptr + sequence + 1) - row).to(tl.int32)
        if (length == 0) | (count == 0):
            return
    table = block_tables + sequence * stride_table
    tile = head * KEY * VALUE + key[:, None] * VALUE + value[None, :]
    in_tile = in_key[:, None] & in_value[None, :]
    position = length - count
    source = tl.load(table + tl.maximum(position - 1, 0) // FORM.block_size).to(tl.int64)
    is_there = (key < tl.where(position > 0, KEY, 0))[:, None] & in_value[None, :]
    state = tl.load(state_ptr + source * stride_block + tile, mask=is_there, other=0.0)
    rate = -tl.exp(tl.load(a_log_ptr + head))
    dt_bias = tl.load(dt_bias_ptr + head)
    q_column = head // (FORM.value_heads // FORM.key_heads) * KEY + key
    k_column = FORM.key_heads * KEY + q_column
    v_column = 2 * FORM.key_heads * KEY + head * VALUE + value
    while position < length:
        block = position // FORM.block_size
        end = tl.minimum((block + 1) * FORM.block_size, length)
        for _ in range(end - position):
            qkv = qkv_ptr + row * stride_qkv
            q = normed(tl.load(qkv + q_column, mask=in_key, other=0.0).to(tl.float32)) * scale
            k = normed(tl.load(qkv + k_column, mask=in_key, other=0.0).to(tl.float32))
            v = tl.load(qkv + v_column, mask=in_value, other=0.0).to(tl.float32)
            decay = tl.exp(rate * softplus(tl.load(a_ptr + row * stride_a + head).to(tl.float32) + dt_bias))
            beta = beta_of(tl.load(b_ptr + row * stride_b + head))
            state = state * decay
            known = tl.sum(state * k[:, None], 0)
            state += k[:, None] * ((v - known) * beta)[None, :]
            result = tl.sum(state * q[:, None], 0)
            out_ptrs = out_ptr + row * stride_out + head * VALUE + value
            tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=in_value)
            row += 1
        target = tl.load(table + block).to(tl.int64)
        tl.store(state_ptr + target * stride_block + tile, state, mask=in_tile)
        position = end


def gated_delta_rule(
    qkv: Tensor, gates: Gates, cache: StateCache, chunks: Chunks, out: Tensor, deterministic: bool
) -> None:
    """Write the outputs to `out` and the states to the cache; the arguments are checked."""
    (tables, seq_lens), starts, longest = chunks
    if starts is not None and longest >= LONG and not deterministic:
        _chunks.gated_delta_rule(qkv, gates, cache, chunks, out)
        return
    _, value_heads, key_dim, value_dim = cache.recurrent.shape
    key_heads = (qkv.shape[1] - value_heads * value_dim) // (2 * key_dim)
    columns = min(COLUMNS, triton.next_power_of_2(value_dim))
    form = Form(key_dim, triton.next_power_of_2(key_dim), value_dim, key_heads, value_heads, cache.block_size, columns)
    strides = (qkv.stride(0), gates.a.stride(0), gates.b.stride(0), out.stride(0), cache.recurrent.stride(0))
    batch = seq_lens.shape[0]
    if not batch:
        return
    launch(_delta_rule_kernel, (triton.cdiv(value_dim, columns), value_heads, batch))(
        qkv,
        tuple(gates),
        cache.recurrent,
        tables,
        seq_lens,
        starts,
        out,
        strides,
        tables.stride(0),
        key_dim**-0.5,
        FORM=form,
        num_warps=1,
    )
