"""The Triton kernels of `gated_delta_rule` for chunks of prompts: as matrix products over some tokens at a time.

With G_i = sum of log decays of tokens 1..i of a tile, and S the state before it, the tokens' corrections d solve

    d_i + beta_i sum_(j<i) exp(G_i - G_j) <k_i, k_j> d_j = beta_i (v_i - exp(G_i) k_i^T S)

    o_i = exp(G_i) q_i^T S + sum_(j<=i) exp(G_i - G_j) <q_i, k_j> d_j
    S' = exp(G_n) S + sum_i exp(G_n - G_i) k_i d_i^T

as in Yang, Wang, Zhang, Shen, Kim, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length" (2024)
and "Gated Delta Networks" (2024). The inverse of the system's matrix, unit lower triangular, does not depend on S: a
first kernel computes it for all tiles side by side, by forward substitution, which is exact where powers of the matrix
would cancel. A second one takes the tiles of a sequence one after the other, as `delta_rule_kernel.py` takes tokens.

In fp16 and bf16 what is multiplied is rounded to tf32, whose 11 bits are those of fp16; sums and states are fp32.

Tiles end at borders of blocks, where states go to memory, and lie at fixed places between them.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention.context import Contexts
from ..compile_ahead import launch
from .delta_rule import Gates
from .delta_rule_kernel import beta_of, normed, softplus
from .state import Chunks, StateCache

COLUMNS = 16  # of a state, of a program: with 32 its registers spill
VARYING = [*Contexts._fields, "starts_ptr", "stride_table"]


def choose_tile(dtype: torch.dtype) -> tuple[int, int]:
    """(tokens of a tile, warps of the programs that take tiles in order), which keep a state of 128 rows in registers.

    Exact products of fp32 need more of them.
    """
    return (16, 8) if dtype == torch.float32 else (32, 4)


class Form(NamedTuple):
    """The compile-time argument of the kernels."""

    key_dim: int
    key_padded: int
    value_dim: int
    key_heads: int
    value_heads: int
    block_size: int
    tokens: int
    columns: int
    precision: str  # of products


@triton.jit
def _factor(x, FORM: tl.constexpr):
    """x as it is multiplied: rounded to the 11 bits that tf32 keeps, or in fp32.

    Tensor cores ignore the lower bits of what they are given, and Triton does not round them: all products would be too
    small. In integers, because the compiler may fuse what would round in floats.
    """
    if FORM.precision == "tf32":
        bits = (x.to(tl.int32, bitcast=True) + (1 << 12)) & -(1 << 13)
        return bits.to(tl.float32, bitcast=True)
    else:
        return x


@triton.jit
def _load_keys(qkv_ptr, row, valid, column, stride, FORM: tl.constexpr):
    """Normed heads [tokens, key_padded] from this column on, to be multiplied; zeros in other rows."""
    key = tl.arange(0, FORM.key_padded)
    mask = valid[:, None] & (key < FORM.key_dim)[None, :]
    x = tl.load(qkv_ptr + row[:, None] * stride + column + key[None, :], mask=mask, other=0.0).to(tl.float32)
    return _factor(normed(x), FORM)


@triton.jit
def _load_beta(b_ptr, row, valid, stride, head):
    return tl.where(valid, beta_of(tl.load(b_ptr + row * stride + head, mask=valid, other=0.0)), 0.0)


@triton.jit
def _tile_end(position, length, FORM: tl.constexpr):
    """Where the tile ends that a position is in."""
    block_start = position // FORM.block_size * FORM.block_size
    end = block_start + ((position - block_start) // FORM.tokens + 1) * FORM.tokens
    return tl.minimum(tl.minimum(end, block_start + FORM.block_size), length)


@triton.jit
def _decays(sums, mask):
    """exp(G_i - G_j) where mask, else 0."""
    return tl.where(mask, tl.exp(tl.where(mask, sums[:, None] - sums[None, :], 0.0)), 0.0)


@triton.jit(do_not_specialize=VARYING)
def _chunk_inverse_kernel(qkv_ptr, gates, seq_lens, starts_ptr, inverse_ptr, sums_ptr, strides, FORM: tl.constexpr):
    """inverse [T, Hv, tokens] fp32: a token's row of the inverse of its tile. sums [T, Hv] fp32: its G."""
    a_ptr, b_ptr, a_log_ptr, dt_bias_ptr = gates
    stride_qkv, stride_a, stride_b = strides
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    first_row = tl.load(starts_ptr + sequence).to(tl.int64)
    count = (tl.load(starts_ptr + sequence + 1) - first_row).to(tl.int32)
    length = tl.load(seq_lens + sequence)
    begin = length - count
    tiles: tl.constexpr = (FORM.block_size + FORM.tokens - 1) // FORM.tokens  # of a block
    tile = begin // FORM.block_size * tiles + begin % FORM.block_size // FORM.tokens + tl.program_id(0)
    start = tl.maximum(tile // tiles * FORM.block_size + tile % tiles * FORM.tokens, begin)
    if (start >= length) | (count == 0):
        return
    i = tl.arange(0, FORM.tokens)
    valid = start + i < _tile_end(start, length, FORM)
    row = first_row + (start - begin) + i
    column = (FORM.key_heads + head // (FORM.value_heads // FORM.key_heads)) * FORM.key_dim
    k = _load_keys(qkv_ptr, row, valid, column, stride_qkv, FORM)
    a = tl.load(a_ptr + row * stride_a + head, mask=valid, other=0.0).to(tl.float32)
    rate = -tl.exp(tl.load(a_log_ptr + head))
    sums = tl.cumsum(tl.where(valid, rate * softplus(a + tl.load(dt_bias_ptr + head)), 0.0), 0)
    beta = _load_beta(b_ptr, row, valid, stride_b, head)
    products = tl.dot(k, tl.trans(k), input_precision=FORM.precision)
    inverse = -products * _decays(sums, i[:, None] > i[None, :]) * beta[:, None]
    for step in range(1, FORM.tokens):
        own = (i == step)[:, None]
        of_row = tl.sum(tl.where(own, inverse, 0.0), 0)
        of_row += tl.sum(of_row[:, None] * tl.where(i[:, None] < step, inverse, 0.0), 0)
        inverse = tl.where(own, of_row[None, :], inverse)
    inverse += tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    place = row * FORM.value_heads + head
    tl.store(inverse_ptr + place[:, None] * FORM.tokens + i[None, :], inverse, mask=valid[:, None])
    tl.store(sums_ptr + place, sums, mask=valid)


@triton.jit(do_not_specialize=VARYING)
def _chunk_state_kernel(
    qkv_ptr,
    b_ptr,
    inverse_ptr,
    sums_ptr,
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
    """strides: of rows of qkv, b and out, and of blocks."""
    stride_qkv, stride_b, stride_out, stride_block = strides
    KEY: tl.constexpr = FORM.key_dim
    VALUE: tl.constexpr = FORM.value_dim
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    first_row = tl.load(starts_ptr + sequence).to(tl.int64)
    count = (tl.load(starts_ptr + sequence + 1) - first_row).to(tl.int32)
    length = tl.load(seq_lens + sequence)
    if (length == 0) | (count == 0):
        return
    key = tl.arange(0, FORM.key_padded)
    value = tl.program_id(0) * FORM.columns + tl.arange(0, FORM.columns)
    i = tl.arange(0, FORM.tokens)
    in_value = value < VALUE
    seen = i[:, None] >= i[None, :]
    table = block_tables + sequence.to(tl.int64) * stride_table
    of_state = head * KEY * VALUE + key[:, None] * VALUE + value[None, :]
    in_state = (key < KEY)[:, None] & in_value[None, :]
    begin = length - count
    source = tl.load(table + tl.maximum(begin - 1, 0) // FORM.block_size).to(tl.int64)
    is_there = (key < tl.where(begin > 0, KEY, 0))[:, None] & in_value[None, :]
    state = tl.load(state_ptr + source * stride_block + of_state, mask=is_there, other=0.0)
    q_column = head // (FORM.value_heads // FORM.key_heads) * KEY
    v_column = 2 * FORM.key_heads * KEY + head * VALUE
    position = begin
    while position < length:
        end = _tile_end(position, length, FORM)
        valid = position + i < end
        row = first_row + (position - begin) + i
        q = _load_keys(qkv_ptr, row, valid, q_column, stride_qkv, FORM)
        k = _load_keys(qkv_ptr, row, valid, q_column + FORM.key_heads * KEY, stride_qkv, FORM)
        mask = valid[:, None] & in_value[None, :]
        v_ptrs = qkv_ptr + row[:, None] * stride_qkv + v_column + value[None, :]
        v = tl.load(v_ptrs, mask=mask, other=0.0).to(tl.float32)
        beta = _load_beta(b_ptr, row, valid, stride_b, head)
        place = row * FORM.value_heads + head
        inverse_ptrs = inverse_ptr + place[:, None] * FORM.tokens + i[None, :]
        inverse = tl.load(inverse_ptrs, mask=valid[:, None], other=0.0)
        sums = tl.load(sums_ptr + place, mask=valid, other=0.0)
        total = tl.min(sums, 0)  # the last one's: none is above 0, nor above the one before it
        sums = tl.where(valid, sums, total)
        kept = tl.exp(sums)[:, None]
        before = _factor(state, FORM)
        known = tl.dot(k, before, input_precision=FORM.precision) * kept
        wanted = _factor(beta[:, None] * (v - known), FORM)
        delta = tl.dot(_factor(inverse, FORM), wanted, input_precision=FORM.precision)
        scores = tl.dot(q, tl.trans(k), input_precision=FORM.precision) * _decays(sums, seen)
        result = tl.dot(q, before, input_precision=FORM.precision) * kept
        result = tl.dot(_factor(scores, FORM), _factor(delta, FORM), result, input_precision=FORM.precision) * scale
        out_ptrs = out_ptr + row[:, None] * stride_out + head * VALUE + value[None, :]
        tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=mask)
        later = _factor(delta * tl.exp(total - sums)[:, None], FORM)
        state = tl.dot(tl.trans(k), later, state * tl.exp(total), input_precision=FORM.precision)
        if (end % FORM.block_size == 0) | (end == length):
            target = tl.load(table + position // FORM.block_size).to(tl.int64)
            tl.store(state_ptr + target * stride_block + of_state, state, mask=in_state)
        position = end


def gated_delta_rule(qkv: Tensor, gates: Gates, cache: StateCache, chunks: Chunks, out: Tensor) -> None:
    """Write the outputs to `out` and the states to the cache; the arguments are checked, chunks.starts is given."""
    (tables, seq_lens), starts, longest = chunks
    rows, batch, (tokens, state_warps) = qkv.shape[0], seq_lens.shape[0], choose_tile(qkv.dtype)
    _, value_heads, key_dim, value_dim = cache.recurrent.shape
    form = Form(
        key_dim=key_dim,
        key_padded=max(16, triton.next_power_of_2(key_dim)),
        value_dim=value_dim,
        key_heads=(qkv.shape[1] - value_heads * value_dim) // (2 * key_dim),
        value_heads=value_heads,
        block_size=cache.block_size,
        tokens=tokens,
        columns=min(COLUMNS, max(16, triton.next_power_of_2(value_dim))),
        precision="ieee" if qkv.dtype == torch.float32 else "tf32",
    )
    if not batch:
        return
    inverse = torch.empty(rows, value_heads, tokens, dtype=torch.float32, device=qkv.device)
    sums = torch.empty(rows, value_heads, dtype=torch.float32, device=qkv.device)
    # Tiles of whole blocks and of two parts, or as many as there are places for, if that is less.
    blocks = longest // cache.block_size + 2
    tiles = min(blocks * triton.cdiv(cache.block_size, tokens), longest // tokens + 2 * blocks)
    launch(_chunk_inverse_kernel, (tiles, value_heads, batch))(
        qkv,
        tuple(gates),
        seq_lens,
        starts,
        inverse,
        sums,
        (qkv.stride(0), gates.a.stride(0), gates.b.stride(0)),
        FORM=form,
    )
    launch(_chunk_state_kernel, (triton.cdiv(value_dim, form.columns), value_heads, batch))(
        qkv,
        gates.b,
        inverse,
        sums,
        cache.recurrent,
        tables,
        seq_lens,
        starts,
        out,
        (qkv.stride(0), gates.b.stride(0), out.stride(0), cache.recurrent.stride(0)),
        tables.stride(0),
        key_dim**-0.5,
        FORM=form,
        num_warps=state_warps,
    )
