"""The Triton kernels of `gated_delta_rule` for chunks of prompts: as matrix products over some tokens at a time.

With G_i = sum of log decays of tokens 1..i of a tile, and S the state before it, the tokens' corrections d solve

    d_i + beta_i sum_(j<i) exp(G_i - G_j) <k_i, k_j> d_j = beta_i (v_i - exp(G_i) k_i^T S)

    o_i = exp(G_i) q_i^T S + sum_(j<=i) exp(G_i - G_j) <q_i, k_j> d_j
    S' = exp(G_n) S + sum_i exp(G_n - G_i) k_i d_i^T

as in Yang, Wang, Zhang, Shen, Kim, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length" (2024)
and "Gated Delta Networks" (2024). The inverse of the system's matrix, unit lower triangular, and the products of q and
k do not depend on S: two kernels compute them for all tiles side by side, the inverse by forward substitution, which is
exact where powers of the matrix would cancel. A third one takes the tiles of a sequence one after the other, as
`delta_rule_kernel.py` takes tokens.

In fp16 and bf16 what is multiplied is rounded to tf32, whose 11 bits are those of fp16; sums and states are fp32. q and
k are multiplied as they come, without any rounding, and what norms them is a factor of a row of the product.

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
from .delta_rule_kernel import beta_of, norm_factor, softplus
from .state import Chunks, StateCache

VARYING = [*Contexts._fields, "starts_ptr", "stride_table"]


class Tile(NamedTuple):
    """What a program that takes tiles in order works with."""

    tokens: int
    columns: int  # of a state
    num_warps: int
    num_stages: int  # of what it loads


def choose_tile(dtype: torch.dtype) -> Tile:
    """With states of 128 rows in registers; exact products of fp32 need more of them."""
    return Tile(16, 16, 8, 1) if dtype == torch.float32 else Tile(32, 16, 2, 2)


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
    stages: int
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
    """Heads [tokens, key_padded] from this column on, in fp32, which tf32 has all bits of; zeros in other rows."""
    key = tl.arange(0, FORM.key_padded)
    mask = valid[:, None] & (key < FORM.key_dim)[None, :]
    return tl.load(qkv_ptr + row[:, None] * stride + column + key[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _find_chunk(seq_lens, starts_ptr, sequence):
    """(its first row, its first position, the one behind it), no positions for padding."""
    first_row = tl.load(starts_ptr + sequence).to(tl.int64)
    count = (tl.load(starts_ptr + sequence + 1) - first_row).to(tl.int32)
    length = tl.load(seq_lens + sequence)
    return first_row, tl.where(length == 0, 0, length - count), length


@triton.jit
def _tile_of(position, FORM: tl.constexpr):
    """The number of the tile that a position is in."""
    TILES: tl.constexpr = (FORM.block_size + FORM.tokens - 1) // FORM.tokens  # of a block
    return position // FORM.block_size * TILES + position % FORM.block_size // FORM.tokens


@triton.jit
def _tile_bounds(tile, begin, length, FORM: tl.constexpr):
    """(first position, the one behind the last) of what a tile has of a chunk."""
    TILES: tl.constexpr = (FORM.block_size + FORM.tokens - 1) // FORM.tokens
    block_start = tile // TILES * FORM.block_size
    start = block_start + tile % TILES * FORM.tokens
    end = tl.minimum(start + FORM.tokens, block_start + FORM.block_size)
    return tl.maximum(start, begin), tl.minimum(end, length)


@triton.jit
def _decays(sums, mask):
    """exp(G_i - G_j) where mask, else 0."""
    return tl.where(mask, tl.exp(tl.where(mask, sums[:, None] - sums[None, :], 0.0)), 0.0)


@triton.jit(do_not_specialize=VARYING)
def _chunk_products_kernel(
    qkv_ptr, gates, seq_lens, starts_ptr, matrix_ptr, scores_ptr, vectors_ptr, strides, FORM: tl.constexpr
):
    """What does not depend on states, of one tile.

    matrix, scores [T, Hv, tokens] fp32: a token's rows of the system's matrix less its diagonal, negative, and of the
    products of q and k with their decays. vectors [T, Hv, 4] fp32: its G, what norms its q and its k, beta.
    """
    a_ptr, b_ptr, a_log_ptr, dt_bias_ptr = gates
    stride_qkv, stride_a, stride_b = strides
    head = tl.program_id(1)
    first_row, begin, length = _find_chunk(seq_lens, starts_ptr, tl.program_id(2))
    start, end = _tile_bounds(_tile_of(begin, FORM) + tl.program_id(0), begin, length, FORM)
    if start >= end:
        return
    i = tl.arange(0, FORM.tokens)
    valid = start + i < end
    row = first_row + (start - begin) + i
    column = head // (FORM.value_heads // FORM.key_heads) * FORM.key_dim
    q = _load_keys(qkv_ptr, row, valid, column, stride_qkv, FORM)
    k = _load_keys(qkv_ptr, row, valid, column + FORM.key_heads * FORM.key_dim, stride_qkv, FORM)
    q_norm, k_norm = norm_factor(q), norm_factor(k)
    a = tl.load(a_ptr + row * stride_a + head, mask=valid, other=0.0).to(tl.float32)
    rate = -tl.exp(tl.load(a_log_ptr + head))
    sums = tl.cumsum(tl.where(valid, rate * softplus(a + tl.load(dt_bias_ptr + head)), 0.0), 0)
    beta = beta_of(tl.load(b_ptr + row * stride_b + head, mask=valid, other=0.0))
    products = tl.dot(k, tl.trans(k), input_precision=FORM.precision) * k_norm[:, None] * k_norm[None, :]
    matrix = -products * _decays(sums, i[:, None] > i[None, :]) * beta[:, None]
    scores = tl.dot(q, tl.trans(k), input_precision=FORM.precision) * q_norm[:, None] * k_norm[None, :]
    scores = _factor(scores * _decays(sums, i[:, None] >= i[None, :]), FORM)
    place = row * FORM.value_heads + head
    tl.store(matrix_ptr + place[:, None] * FORM.tokens + i[None, :], matrix, mask=valid[:, None])
    tl.store(scores_ptr + place[:, None] * FORM.tokens + i[None, :], scores, mask=valid[:, None])
    tl.store(vectors_ptr + place * 4, sums, mask=valid)
    tl.store(vectors_ptr + place * 4 + 1, q_norm, mask=valid)
    tl.store(vectors_ptr + place * 4 + 2, k_norm, mask=valid)
    tl.store(vectors_ptr + place * 4 + 3, beta, mask=valid)


@triton.jit(do_not_specialize=VARYING)
def _chunk_inverse_kernel(seq_lens, starts_ptr, matrix_ptr, FORM: tl.constexpr):
    """The matrix of `_chunk_products_kernel` becomes the inverse of the system's, in place."""
    first_row, begin, length = _find_chunk(seq_lens, starts_ptr, tl.program_id(2))
    start, end = _tile_bounds(_tile_of(begin, FORM) + tl.program_id(0), begin, length, FORM)
    if start >= end:
        return
    i = tl.arange(0, FORM.tokens)
    valid = start + i < end
    place = (first_row + (start - begin) + i) * FORM.value_heads + tl.program_id(1)
    pointers = matrix_ptr + place[:, None] * FORM.tokens + i[None, :]
    inverse = tl.load(pointers, mask=valid[:, None], other=0.0)
    for step in range(1, FORM.tokens):
        own = (i == step)[:, None]
        of_row = tl.sum(tl.where(own, inverse, 0.0), 0)
        of_row += tl.sum(of_row[:, None] * tl.where(i[:, None] < step, inverse, 0.0), 0)
        inverse = tl.where(own, of_row[None, :], inverse)
    inverse += tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    tl.store(pointers, _factor(inverse, FORM), mask=valid[:, None])


@triton.jit(do_not_specialize=VARYING)
def _chunk_state_kernel(
    qkv_ptr,
    inverse_ptr,
    scores_ptr,
    vectors_ptr,
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
    """strides: of rows of qkv and out, and of blocks."""
    stride_qkv, stride_out, stride_block = strides
    KEY: tl.constexpr = FORM.key_dim
    VALUE: tl.constexpr = FORM.value_dim
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    first_row, begin, length = _find_chunk(seq_lens, starts_ptr, sequence)
    if begin >= length:
        return
    key = tl.arange(0, FORM.key_padded)
    value = tl.program_id(0) * FORM.columns + tl.arange(0, FORM.columns)
    i = tl.arange(0, FORM.tokens)
    in_value = value < VALUE
    table = block_tables + sequence.to(tl.int64) * stride_table
    of_state = head * KEY * VALUE + key[:, None] * VALUE + value[None, :]
    in_state = (key < KEY)[:, None] & in_value[None, :]
    source = tl.load(table + tl.maximum(begin - 1, 0) // FORM.block_size).to(tl.int64)
    is_there = (key < tl.where(begin > 0, KEY, 0))[:, None] & in_value[None, :]
    state = tl.load(state_ptr + source * stride_block + of_state, mask=is_there, other=0.0)
    q_column = head // (FORM.value_heads // FORM.key_heads) * KEY
    v_column = 2 * FORM.key_heads * KEY + head * VALUE
    for tile in tl.range(_tile_of(begin, FORM), _tile_of(length - 1, FORM) + 1, num_stages=FORM.stages):
        start, end = _tile_bounds(tile, begin, length, FORM)
        valid = start + i < end
        row = first_row + (start - begin) + i
        q = _load_keys(qkv_ptr, row, valid, q_column, stride_qkv, FORM)
        k = _load_keys(qkv_ptr, row, valid, q_column + FORM.key_heads * KEY, stride_qkv, FORM)
        mask = valid[:, None] & in_value[None, :]
        v_ptrs = qkv_ptr + row[:, None] * stride_qkv + v_column + value[None, :]
        v = tl.load(v_ptrs, mask=mask, other=0.0).to(tl.float32)
        place = row * FORM.value_heads + head
        of_tile = place[:, None] * FORM.tokens + i[None, :]
        inverse = tl.load(inverse_ptr + of_tile, mask=valid[:, None], other=0.0)
        scores = tl.load(scores_ptr + of_tile, mask=valid[:, None], other=0.0)
        sums = tl.load(vectors_ptr + place * 4, mask=valid, other=0.0)
        q_norm = tl.load(vectors_ptr + place * 4 + 1, mask=valid, other=0.0)
        k_norm = tl.load(vectors_ptr + place * 4 + 2, mask=valid, other=0.0)
        beta = tl.load(vectors_ptr + place * 4 + 3, mask=valid, other=0.0)
        total = tl.min(sums, 0)  # the last one's: none is above 0, nor above the one before it
        kept = tl.exp(sums)
        before = _factor(state, FORM)
        known = tl.dot(k, before, input_precision=FORM.precision) * (k_norm * kept)[:, None]
        wanted = _factor(beta[:, None] * (v - known), FORM)
        delta = tl.dot(inverse, wanted, input_precision=FORM.precision)
        later = _factor(delta * (k_norm * tl.exp(total - sums))[:, None], FORM)
        state = tl.dot(tl.trans(k), later, state * tl.exp(total), input_precision=FORM.precision)
        result = tl.dot(q, before, input_precision=FORM.precision) * (q_norm * kept)[:, None]
        result = tl.dot(scores, _factor(delta, FORM), result, input_precision=FORM.precision) * scale
        out_ptrs = out_ptr + row[:, None] * stride_out + head * VALUE + value[None, :]
        tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=mask)
        if (end % FORM.block_size == 0) | (end == length):
            target = tl.load(table + start // FORM.block_size).to(tl.int64)
            tl.store(state_ptr + target * stride_block + of_state, state, mask=in_state)


def gated_delta_rule(qkv: Tensor, gates: Gates, cache: StateCache, chunks: Chunks, out: Tensor) -> None:
    """Write the outputs to `out` and the states to the cache; the arguments are checked, chunks.starts is given."""
    (tables, seq_lens), starts, longest = chunks
    rows, batch, tile = qkv.shape[0], seq_lens.shape[0], choose_tile(qkv.dtype)
    _, value_heads, key_dim, value_dim = cache.recurrent.shape
    form = Form(
        key_dim=key_dim,
        key_padded=max(16, triton.next_power_of_2(key_dim)),
        value_dim=value_dim,
        key_heads=(qkv.shape[1] - value_heads * value_dim) // (2 * key_dim),
        value_heads=value_heads,
        block_size=cache.block_size,
        tokens=tile.tokens,
        columns=min(tile.columns, max(16, triton.next_power_of_2(value_dim))),
        stages=tile.num_stages,
        precision="ieee" if qkv.dtype == torch.float32 else "tf32",
    )
    if not batch:
        return
    matrix, scores = torch.empty(2, rows, value_heads, tile.tokens, dtype=torch.float32, device=qkv.device)
    vectors = torch.empty(rows, value_heads, 4, dtype=torch.float32, device=qkv.device)
    # Tiles of whole blocks and of two parts, or as many as there are places for, if that is less.
    blocks = longest // cache.block_size + 2
    tiles = min(blocks * triton.cdiv(cache.block_size, tile.tokens), longest // tile.tokens + 2 * blocks)
    launch(_chunk_products_kernel, (tiles, value_heads, batch))(
        qkv,
        tuple(gates),
        seq_lens,
        starts,
        matrix,
        scores,
        vectors,
        (qkv.stride(0), gates.a.stride(0), gates.b.stride(0)),
        FORM=form,
    )
    # One warp, whose threads have a column each: no step waits for other warps.
    launch(_chunk_inverse_kernel, (tiles, value_heads, batch))(seq_lens, starts, matrix, FORM=form, num_warps=1)
    launch(_chunk_state_kernel, (triton.cdiv(value_dim, form.columns), value_heads, batch))(
        qkv,
        matrix,
        scores,
        vectors,
        cache.recurrent,
        tables,
        seq_lens,
        starts,
        out,
        (qkv.stride(0), out.stride(0), cache.recurrent.stride(0)),
        tables.stride(0),
        key_dim**-0.5,
        FORM=form,
        num_warps=tile.num_warps,
    )
