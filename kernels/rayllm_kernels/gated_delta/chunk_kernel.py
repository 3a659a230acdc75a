"""The Triton kernels of `gated_delta_rule` for chunks of prompts: as matrix products over some tokens at a time.

With G_i = sum of log decays of tokens 1..i of a tile, and S the state before it, the tokens' corrections d solve

    d_i + sum_(j<i) L_ij d_j = beta_i (v_i - exp(G_i) k_i^T S),    L_ij = beta_i exp(G_i - G_j) <k_i, k_j>

    o_i = exp(G_i) q_i^T S + sum_(j<=i) A_ij d_j,                  A_ij = exp(G_i - G_j) <q_i, k_j>
    S' = exp(G_n) S + sum_i exp(G_n - G_i) k_i d_i^T

as in Yang, Wang, Zhang, Shen, Kim, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length" (2024)
and "Gated Delta Networks" (2024). What does not depend on S is computed for all tiles side by side: by a first kernel
L, A and factors of the tokens, by a second one (1 + L)^-1. A third one takes the tiles of a sequence one after the
other, as `delta_rule_kernel.py` takes tokens.

q and k are multiplied as they are, and their norms are factors of rows of products. So only what is in fp32 is rounded
for tensor cores: in bf16 to pairs, high and low, of which all products but that of two low ones are summed, and in fp16
to tf32, whose 11 bits are those of fp16. With qkv in fp32 products are exact. Sums and states are fp32.

The state is held as [V, K]: each product then has as its left side what the one before it left in registers, and as its
right side what was loaded. So no warp waits for another one, but for tiles to come, which are loaded ahead.

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
from .delta_rule_kernel import EPS, beta_of, softplus
from .state import Chunks, StateCache

VARYING = [*Contexts._fields, "starts_ptr", "stride_table", "num_rows"]
FACTORS = tl.constexpr(5)  # of a token and value head, see `_chunk_products_kernel`
BLOCK = tl.constexpr(16)  # rows of a matrix that is inverted in registers


class Tile(NamedTuple):
    """What the programs take that go through a sequence. num_stages: of the pipeline that loads tiles."""

    tokens: int
    columns: int  # of a state
    num_warps: int
    num_stages: int


# As much as stays in registers, for states of 128 rows.
TILES = {torch.float32: Tile(16, 16, 8, 1), torch.float16: Tile(32, 32, 4, 2), torch.bfloat16: Tile(32, 64, 4, 2)}


def are_pairs(dtype: torch.dtype) -> bool:
    """Whether what is fp32 is multiplied as two numbers of this dtype, which has to have its exponents."""
    return dtype == torch.bfloat16


class Form(NamedTuple):
    """The compile-time argument of the kernels."""

    key_dim: int
    key_padded: int
    value_dim: int
    key_heads: int
    value_heads: int
    block_size: int
    width: int  # of qkv
    tokens: int
    columns: int
    precision: str  # of products of fp32
    in_pairs: bool  # whether these are of pairs of qkv's dtype instead


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
def _pair(x, dtype):
    """fp32 -> two numbers of this dtype whose sum it is, of bf16 up to 2^-16 of it."""
    high = x.to(dtype)
    return high, (x - high.to(tl.float32)).to(dtype)


@triton.jit
def _product(x, a, total, FORM: tl.constexpr):
    """total + x a, of x in fp32 and a in the dtype of qkv."""
    if FORM.in_pairs:
        high, low = _pair(x, a.dtype)
        return tl.dot(high, a, tl.dot(low, a, total))
    else:
        return tl.dot(_factor(x, FORM), a.to(tl.float32), total, input_precision=FORM.precision)


@triton.jit
def _store_factor(ptr, i, x, mask, FORM: tl.constexpr):
    """Rows i of a matrix [.., tokens] in fp32, to be multiplied; as pairs [.., 2 tokens] of their dtype."""
    j = tl.arange(0, FORM.tokens)
    if FORM.in_pairs:
        high, low = _pair(x, ptr.dtype.element_ty)
        ptrs = ptr + i[:, None] * (2 * FORM.tokens) + j
        tl.store(ptrs, high, mask=mask[:, None])
        tl.store(ptrs + FORM.tokens, low, mask=mask[:, None])
    else:
        tl.store(ptr + i[:, None] * FORM.tokens + j, _factor(x, FORM), mask=mask[:, None])


@triton.jit
def _product_with_stored(x, ptr, mask, total, FORM: tl.constexpr):
    """total + x a^T, of x in fp32 and what `_store_factor` has left of a."""
    i, j = tl.arange(0, FORM.tokens)[:, None], tl.arange(0, FORM.tokens)[None, :]
    if FORM.in_pairs:
        ptrs = ptr + i * (2 * FORM.tokens) + j
        a_high = tl.trans(tl.load(ptrs, mask=mask[:, None], other=0.0))
        a_low = tl.trans(tl.load(ptrs + FORM.tokens, mask=mask[:, None], other=0.0))
        high, low = _pair(x, ptr.dtype.element_ty)
        return tl.dot(high, a_high, tl.dot(high, a_low, tl.dot(low, a_high, total)))
    else:
        a = tl.trans(tl.load(ptr + i * FORM.tokens + j, mask=mask[:, None], other=0.0))
        return tl.dot(_factor(x, FORM), a, total, input_precision=FORM.precision)


@triton.jit
def _load_heads(qkv_ptr, first_row, count, column, FORM: tl.constexpr):
    """Heads [tokens, key_padded] of rows from the first one on, from this column on; zeros in rows after `count`."""
    i, key = tl.arange(0, FORM.tokens), tl.arange(0, FORM.key_padded)
    mask = (i < count)[:, None] & (key < FORM.key_dim)[None, :]
    return tl.load(qkv_ptr + first_row * FORM.width + column + (i[:, None] * FORM.width + key), mask=mask, other=0.0)


@triton.jit
def _norm_factor(x):
    """What rows are to be multiplied by to be of length 1."""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1) + EPS)


@triton.jit
def _chunk(seq_lens, starts_ptr, sequence):
    """(first row, position of the first token, position after the last one) of a sequence; no tokens of padding."""
    row = tl.load(starts_ptr + sequence).to(tl.int64)
    length = tl.load(seq_lens + sequence)
    return row, tl.maximum(length - (tl.load(starts_ptr + sequence + 1) - row).to(tl.int32), 0), length


@triton.jit
def _tile_number(position, FORM: tl.constexpr):
    """Of the tile that a position is in."""
    TILES: tl.constexpr = (FORM.block_size + FORM.tokens - 1) // FORM.tokens  # of a block
    return position // FORM.block_size * TILES + position % FORM.block_size // FORM.tokens


@triton.jit
def _tile_bounds(number, begin, length, FORM: tl.constexpr):
    """(position of a tile's first token, position after its last one) of those from begin on; none past the end."""
    TILES: tl.constexpr = (FORM.block_size + FORM.tokens - 1) // FORM.tokens
    block = number // TILES * FORM.block_size
    start = number % TILES * FORM.tokens
    end = block + tl.minimum(start + FORM.tokens, FORM.block_size)
    return tl.maximum(block + start, begin), tl.minimum(end, length)


@triton.jit(do_not_specialize=VARYING)
def _chunk_products_kernel(
    qkv_ptr,
    gates,
    seq_lens,
    starts_ptr,
    lower_ptr,
    scores_ptr,
    factors_ptr,
    strides,
    num_rows,
    scale,
    FORM: tl.constexpr,
):
    """lower, scores [Hv, T, tokens] fp32: a token's row of its tile's L, and of A times scale, to be multiplied.

    factors [Hv, FACTORS, T] fp32: of a token's value: beta; of k^T S: beta exp(G) / |k|; of q^T S: exp(G) scale / |q|;
    of its correction, before it is multiplied with k: exp(G_n - G) / |k|; of the tile's state: exp(G_n).
    """
    a_ptr, b_ptr, a_log_ptr, dt_bias_ptr = gates
    stride_a, stride_b = strides
    first_row, begin, length = _chunk(seq_lens, starts_ptr, tl.program_id(2))
    start, end = _tile_bounds(_tile_number(begin, FORM) + tl.program_id(0), begin, length, FORM)
    if start >= end:
        return
    i = tl.arange(0, FORM.tokens)
    valid = i < end - start
    first_row += start - begin
    row = first_row + i
    column = tl.program_id(1) * FORM.key_dim
    q = _load_heads(qkv_ptr, first_row, end - start, column, FORM)
    k = _load_heads(qkv_ptr, first_row, end - start, column + FORM.key_heads * FORM.key_dim, FORM)
    of_q, of_k = _norm_factor(q) * scale, _norm_factor(k)
    of_keys = tl.dot(k, tl.trans(k), input_precision=FORM.precision) * of_k[:, None] * of_k[None, :]
    of_queries = tl.dot(q, tl.trans(k), input_precision=FORM.precision) * of_q[:, None] * of_k[None, :]
    before, seen = i[:, None] > i[None, :], i[:, None] >= i[None, :]
    WORDS: tl.constexpr = 2 if FORM.in_pairs else 1
    RATIO: tl.constexpr = FORM.value_heads // FORM.key_heads
    for member in range(RATIO):
        head = tl.program_id(1) * RATIO + member
        a = tl.load(a_ptr + row * stride_a + head, mask=valid, other=0.0).to(tl.float32)
        beta = beta_of(tl.load(b_ptr + row * stride_b + head, mask=valid, other=0.0))
        rate = -tl.exp(tl.load(a_log_ptr + head))
        sums = tl.cumsum(tl.where(valid, rate * softplus(a + tl.load(dt_bias_ptr + head)), 0.0), 0)
        total = tl.min(sums, 0)  # the last one's: none is above 0, nor above the one before it
        decays = tl.where(seen, tl.exp(tl.where(seen, sums[:, None] - sums[None, :], 0.0)), 0.0)
        tile = (head.to(tl.int64) * num_rows + first_row) * FORM.tokens
        lower = tl.where(before, of_keys * decays * beta[:, None], 0.0)
        tl.store(lower_ptr + tile + i[:, None] * FORM.tokens + i[None, :], lower, mask=valid[:, None])
        _store_factor(scores_ptr + tile * WORDS, i, of_queries * decays, valid, FORM)
        kept = tl.exp(sums)
        factors_ptrs = factors_ptr + head.to(tl.int64) * FACTORS * num_rows + row
        tl.store(factors_ptrs, beta, mask=valid)
        tl.store(factors_ptrs + num_rows, beta * kept * of_k, mask=valid)
        tl.store(factors_ptrs + 2 * num_rows, kept * of_q, mask=valid)
        tl.store(factors_ptrs + 3 * num_rows, tl.exp(total - sums) * of_k, mask=valid)
        tl.store(factors_ptrs + 4 * num_rows, tl.zeros_like(sums) + tl.exp(total), mask=valid)


@triton.jit
def _load_square(tile_ptr, row, column, count, SIZE: tl.constexpr, FORM: tl.constexpr):
    """Of a tile [tokens, tokens] of which so many rows are there; zeros for others."""
    i, j = tl.arange(0, SIZE) + row, tl.arange(0, SIZE) + column
    return tl.load(tile_ptr + i[:, None] * FORM.tokens + j[None, :], mask=(i < count)[:, None], other=0.0)


@triton.jit
def _store_square(x, tile_ptr, row, column, count, SIZE: tl.constexpr, FORM: tl.constexpr):
    i, j = tl.arange(0, SIZE) + row, tl.arange(0, SIZE) + column
    tl.store(tile_ptr + i[:, None] * FORM.tokens + j[None, :], x, mask=(i < count)[:, None])


@triton.jit
def _join(tile_ptr, block, count, SIZE: tl.constexpr, PRECISION: tl.constexpr, FORM: tl.constexpr):
    """The corner between blocks `block` and `block + 1`, of SIZE rows each, whose inverses are there."""
    first, second = block * SIZE, block * SIZE + SIZE
    corner = _load_square(tile_ptr, second, first, count, SIZE, FORM)
    corner = tl.dot(corner, _load_square(tile_ptr, first, first, count, SIZE, FORM), input_precision=PRECISION)
    corner = tl.dot(_load_square(tile_ptr, second, second, count, SIZE, FORM), corner, input_precision=PRECISION)
    _store_square(-corner, tile_ptr, second, first, count, SIZE, FORM)


@triton.jit(do_not_specialize=VARYING)
def _chunk_inverse_kernel(lower_ptr, inverse_ptr, seq_lens, starts_ptr, num_rows, FORM: tl.constexpr):
    """(1 + L)^-1, to be multiplied, in place of the tiles' L, by

        (A 0; C B)^-1 = (A^-1 0; -B^-1 C A^-1 B^-1)

    for blocks of 1, 2, 4, .. rows. What it multiplies are parts of inverses, which are as small as the whole one, where
    powers of L would cancel. Products are as good as in fp32.
    """
    PRECISION: tl.constexpr = "tf32x3" if FORM.precision == "tf32" else FORM.precision
    first_row, begin, length = _chunk(seq_lens, starts_ptr, tl.program_id(2))
    start, end = _tile_bounds(_tile_number(begin, FORM) + tl.program_id(0), begin, length, FORM)
    if start >= end:
        return
    count = end - start
    tile = (tl.program_id(1).to(tl.int64) * num_rows + first_row + (start - begin)) * FORM.tokens
    tile_ptr = lower_ptr + tile
    i = tl.arange(0, BLOCK)
    for block in tl.static_range(FORM.tokens // BLOCK):
        lower = _load_square(tile_ptr, block * BLOCK, block * BLOCK, count, BLOCK, FORM)
        inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
        for level in tl.static_range(4):
            # Of each block of 2^(level + 1) rows what is left of the second half: above the diagonal L is 0.
            corner = tl.where((i[:, None] ^ i[None, :]) >> level == 1, lower, 0.0)
            if level > 0:
                corner = tl.dot(corner, inverse, input_precision=PRECISION)
                corner = tl.dot(inverse, corner, input_precision=PRECISION)
            inverse -= corner
        _store_square(inverse, tile_ptr, block * BLOCK, block * BLOCK, count, BLOCK, FORM)
    for level in tl.static_range(2):
        if 2 * BLOCK << level <= FORM.tokens:
            tl.debug_barrier()  # for what other threads have stored
            for pair in tl.static_range(FORM.tokens // BLOCK >> level + 1):
                _join(tile_ptr, 2 * pair, count, BLOCK << level, PRECISION, FORM)
    WORDS: tl.constexpr = 2 if FORM.in_pairs else 1
    for block in tl.static_range(FORM.tokens // BLOCK):
        rows = i + block * BLOCK
        ptrs = tile_ptr + rows[:, None] * FORM.tokens + tl.arange(0, FORM.tokens)
        tl.debug_barrier()
        inverse = tl.load(ptrs, mask=(rows < count)[:, None], other=0.0)
        tl.debug_barrier()
        _store_factor(inverse_ptr + tile * WORDS, rows, inverse, rows < count, FORM)


@triton.jit(do_not_specialize=VARYING)
def _chunk_state_kernel(
    qkv_ptr,
    inverse_ptr,
    scores_ptr,
    factors_ptr,
    state_ptr,
    block_tables,
    seq_lens,
    starts_ptr,
    out_ptr,
    stride_block,
    stride_table,
    num_rows,
    FORM: tl.constexpr,
):
    """Outputs and states, from what the other kernels have left."""
    KEY: tl.constexpr = FORM.key_dim
    VALUE: tl.constexpr = FORM.value_dim
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    first_row, begin, length = _chunk(seq_lens, starts_ptr, sequence)
    if begin >= length:
        return
    key = tl.arange(0, FORM.key_padded)
    value = tl.program_id(0) * FORM.columns + tl.arange(0, FORM.columns)
    i = tl.arange(0, FORM.tokens)
    in_value = value < VALUE
    table = block_tables + sequence.to(tl.int64) * stride_table
    of_state = head * KEY * VALUE + key[None, :] * VALUE + value[:, None]
    in_state = (key < KEY)[None, :] & in_value[:, None]
    source = tl.load(table + tl.maximum(begin - 1, 0) // FORM.block_size).to(tl.int64)
    is_there = (key < tl.where(begin > 0, KEY, 0))[None, :] & in_value[:, None]
    state = tl.load(state_ptr + source * stride_block + of_state, mask=is_there, other=0.0)
    q_column = head // (FORM.value_heads // FORM.key_heads) * KEY
    v_column = 2 * FORM.key_heads * KEY + head * VALUE
    factors_ptr += head.to(tl.int64) * FACTORS * num_rows
    TOKENS: tl.constexpr = FORM.tokens  # a list of fields does not compile in every version of Triton
    COLUMNS: tl.constexpr = FORM.columns
    OUT: tl.constexpr = FORM.value_heads * VALUE
    WORDS: tl.constexpr = 2 if FORM.in_pairs else 1
    zeros = tl.zeros([COLUMNS, TOKENS], tl.float32)
    for number in range(_tile_number(begin, FORM), _tile_number(length - 1, FORM) + 1):
        start, end = _tile_bounds(number, begin, length, FORM)
        row = first_row + (start - begin)
        valid = i < end - start
        q = _load_heads(qkv_ptr, row, end - start, q_column, FORM)
        k = _load_heads(qkv_ptr, row, end - start, q_column + FORM.key_heads * KEY, FORM)
        # Each load as late as may be: all are under way before, and what they fill takes registers.
        known = _product(state, tl.trans(k), zeros, FORM)
        result = _product(state, tl.trans(q), zeros, FORM)
        factors_ptrs = factors_ptr + row + i
        result *= tl.load(factors_ptrs + 2 * num_rows, mask=valid, other=0.0)[None, :]
        mask = valid[None, :] & in_value[:, None]
        v_ptrs = qkv_ptr + row * FORM.width + v_column + (i[None, :] * FORM.width + value[:, None])
        v = tl.load(v_ptrs, mask=mask, other=0.0).to(tl.float32)
        wanted = tl.load(factors_ptrs, mask=valid, other=0.0)[None, :] * v
        wanted -= tl.load(factors_ptrs + num_rows, mask=valid, other=0.0)[None, :] * known
        tile = (head.to(tl.int64) * num_rows + row) * FORM.tokens * WORDS
        delta = _product_with_stored(wanted, inverse_ptr + tile, valid, zeros, FORM)
        later = tl.load(factors_ptrs + 3 * num_rows, mask=valid, other=0.0)[None, :] * delta
        state = _product(later, k, state * tl.load(factors_ptr + 4 * num_rows + row), FORM)
        result = _product_with_stored(delta, scores_ptr + tile, valid, result, FORM)
        out_ptrs = out_ptr + row * OUT + head * VALUE + (i[None, :] * OUT + value[:, None])
        tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=mask)
        if (end % FORM.block_size == 0) | (end == length):
            target = tl.load(table + start // FORM.block_size).to(tl.int64)
            tl.store(state_ptr + target * stride_block + of_state, state, mask=in_state)


def gated_delta_rule(qkv: Tensor, gates: Gates, cache: StateCache, chunks: Chunks, out: Tensor) -> None:
    """Write the outputs to `out` and the states to the cache; the arguments are checked, chunks.starts is given."""
    (tables, seq_lens), starts, longest = chunks
    rows, batch, tile = qkv.shape[0], seq_lens.shape[0], TILES[qkv.dtype]
    _, value_heads, key_dim, value_dim = cache.recurrent.shape
    form = Form(
        key_dim=key_dim,
        key_padded=max(16, triton.next_power_of_2(key_dim)),
        value_dim=value_dim,
        key_heads=(qkv.shape[1] - value_heads * value_dim) // (2 * key_dim),
        value_heads=value_heads,
        block_size=cache.block_size,
        width=qkv.shape[1],
        tokens=tile.tokens,
        columns=min(tile.columns, max(16, triton.next_power_of_2(value_dim))),
        precision="ieee" if qkv.dtype == torch.float32 else "tf32",
        in_pairs=are_pairs(qkv.dtype),
    )
    if not batch:
        return
    # Together half as large as qkv, for tiles of 32 tokens and heads of 128 numbers of which two share a key head.
    lower, scores = (
        torch.empty(value_heads, rows, tile.tokens, dtype=torch.float32, device=qkv.device) for _ in range(2)
    )
    stored = qkv.dtype if form.in_pairs else torch.float32
    inverse, scores = lower.view(stored), scores.view(stored)
    factors = torch.empty(value_heads, FACTORS.value, rows, dtype=torch.float32, device=qkv.device)
    # Tiles of whole blocks and of two parts, or as many as there are places for, if that is less.
    blocks = longest // cache.block_size + 2
    tiles = min(blocks * triton.cdiv(cache.block_size, tile.tokens), longest // tile.tokens + 2 * blocks)
    launch(_chunk_products_kernel, (tiles, form.key_heads, batch))(
        qkv,
        tuple(gates),
        seq_lens,
        starts,
        lower,
        scores,
        factors,
        (gates.a.stride(0), gates.b.stride(0)),
        rows,
        key_dim**-0.5,
        FORM=form,
    )
    launch(_chunk_inverse_kernel, (tiles, value_heads, batch))(
        lower, inverse, seq_lens, starts, rows, FORM=form, num_warps=1
    )
    launch(_chunk_state_kernel, (triton.cdiv(value_dim, form.columns), value_heads, batch))(
        qkv,
        inverse,
        scores,
        factors,
        cache.recurrent,
        tables,
        seq_lens,
        starts,
        out,
        cache.recurrent.stride(0),
        tables.stride(0),
        rows,
        FORM=form,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
