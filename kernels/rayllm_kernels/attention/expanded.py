"""Attention of chunks of prompts over a cache of latents, with the keys and values of each head made of them.

    k_j = W_k latent_j and, behind it, the rotated key of j, which is the same for all heads;   v_j = W_v latent_j

and then `reference.py`'s formula. Beside attention over the latents themselves (`prefill.py`) it takes D + R + Dv
multiplications a query, key and head rather than 2 L + R, but L (D + Dv) a key and head first, L being the size of a
latent. So it is for many queries.

Keys and values are made in pieces, so that a long context takes no more memory than a short one. What a softmax has
summed up (`SoftmaxState`) goes from piece to piece, unrounded: pieces do not change the result, not even its last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..cache.kv_cache import KVCache
from ..cache.pool_rows import pool_rows, row_index
from ..checks import check_last_dim, check_like, check_out, check_table, check_vectors, fail
from ..dispatch import TritonModule, on_triton
from .context import MAX_HEAD_DIM, MAX_REST

# Where pieces may part a sequence's keys: at multiples of this, which are multiples of any tile of keys.
PIECE_KEYS = 128
# The reference holds scores of [heads, this many queries, keys of a piece] in fp32 at a time.
QUERY_CHUNK = 256

_kernel = TritonModule("rayllm_kernels.attention.prefill_kernel")


class KeyPiece(NamedTuple):
    """Keys of B neighbouring sequences that are made at once: all of some, a part of others."""

    rows: Tensor  # [P] int64: where each key's latent is in the cache (`latent_rows`)
    # [B, 3] int32: of each sequence the position of the first key that is here, a multiple of PIECE_KEYS, that behind
    # the last one, another multiple unless it is the sequence's end, and which of the P the first one is.
    bounds: Tensor
    seq_lens: Tensor  # [B] int32, the whole context of each
    query_starts: Tensor  # [B + 1] int32: sequence b has the rows query_starts[b] to query_starts[b + 1] of q
    max_query_len: int  # of a sequence, at least


class ExpandedKeys(NamedTuple):
    """Keys and values of a piece. k and v have the same strides."""

    k: Tensor  # [P, H, D], what is made of latents
    v: Tensor  # [P, H, Dv]
    rest: Tensor  # [P, R], what the keys of all heads end with


class SoftmaxState(NamedTuple):
    """What a softmax has summed up over the keys so far. For whichever implementation computes it alone to read."""

    acc: Tensor  # [T, H, Dv] fp32
    norms: Tensor  # [T, H, 2] fp32


def latent_rows(cache: KVCache, block_tables: Tensor, sequences: Tensor, positions: Tensor) -> Tensor:
    """`KeyPiece.rows` of keys at these positions [P] int64 of these sequences [P] int64, rows of the block tables.

    It is the same for all layers whose caches lie alike in one pool.
    """
    block_size = cache.k.shape[2]
    blocks = block_tables[sequences, positions // block_size].to(torch.int64)
    return row_index(cache.k, blocks, positions % block_size)


def expanded_prefill_attention(
    q: Tensor, cache: KVCache, weight: Tensor, scale: float, pieces: Sequence[KeyPiece], room: int, out: Tensor
) -> None:
    """Write causal attention of the pieces' sequences to `out` [T, H, Dv].

    q: [T, H, D + R], last dimension contiguous. cache: of latents; the chunks' own are in it. weight: [H, D + Dv, L],
    contiguous, the rows of W_k before those of W_v of each head; D is what of q is not R, the width of the rotated key.
    scale: factor of the products, positive. pieces: that have each key of their sequences once, in ascending order.
    room: keys of the largest piece, at least. The memory that a call takes depends on T and `room` alone.
    """
    heads, key_dim, value_dim, rest = _check(q, cache, weight, scale, out)
    latent = cache.v.shape[3]
    state = SoftmaxState(*(q.new_empty(q.shape[0], heads, size, dtype=torch.float32) for size in (value_dim, 2)))
    latents, made = q.new_empty(room, latent + rest), q.new_empty(room, heads, key_dim + value_dim)
    pool, flat = pool_rows(cache.k), weight.view(-1, latent)
    for piece in pieces:
        count, batch = piece.rows.shape[0], piece.seq_lens.shape[0]
        if count > room:
            fail("room", f"must be at least {count}, the keys of a piece", room)
        check_vectors(count, torch.int64, q.device, rows=piece.rows)
        check_vectors(batch, torch.int32, q.device, seq_lens=piece.seq_lens)
        check_vectors(batch + 1, torch.int32, q.device, query_starts=piece.query_starts)
        check_table(piece.bounds, "bounds", q.device)
        if piece.bounds.shape != (batch, 3):
            fail("bounds", f"must be [{batch}, 3]", piece.bounds.shape)
        found = torch.index_select(pool, 0, piece.rows, out=latents[:count])
        # The vendor's product, which is the fastest for so many rows.
        torch.mm(found[:, :latent], flat.t(), out=made[:count].view(count, -1))
        keys = ExpandedKeys(made[:count, :, :key_dim], made[:count, :, key_dim:], found[:, latent:])
        if on_triton(q):
            _kernel.prefill_expanded(q, keys, piece, state, scale, out)
        else:
            _fold(q, keys, piece, state, scale, out)


def _check(q: Tensor, cache: KVCache, weight: Tensor, scale: float, out: Tensor) -> tuple[int, int, int, int]:
    """Heads, D, Dv and R."""
    if not cache.is_latent or cache.k.shape[1] != 1:
        fail("cache", "must be one of latents, of one head", cache.k.shape)
    cache.check(q, "q")
    latent, rest = cache.v.shape[3], cache.k.shape[3] - cache.v.shape[3]
    if q.dim() != 3:
        fail("q", "must have 3 dimensions", q.shape)
    check_last_dim(q, "q")
    heads, key_dim = q.shape[1], q.shape[2] - rest
    if weight.dim() != 3 or weight.shape[0] != heads or weight.shape[1] <= key_dim or weight.shape[2] != latent:
        fail("weight", f"must be [{heads}, more than {key_dim}, {latent}]", weight.shape)
    check_like(weight, "weight", q, "q")
    if not weight.is_contiguous():
        fail("weight", "must be contiguous", weight.stride())
    value_dim = weight.shape[1] - key_dim
    if not 0 < key_dim <= MAX_HEAD_DIM or value_dim > MAX_HEAD_DIM or rest > MAX_REST:
        limit = f"must have 1 to {MAX_HEAD_DIM} entries a head, values too, and {MAX_REST} more that are rotated"
        fail("q", limit, (key_dim, value_dim, rest))
    if scale <= 0.0:
        fail("scale", "must be positive", scale)
    check_out(out, torch.Size((q.shape[0], heads, value_dim)), q, "q")
    return heads, key_dim, value_dim, rest


def _fold(q: Tensor, keys: ExpandedKeys, piece: KeyPiece, state: SoftmaxState, scale: float, out: Tensor) -> None:
    """The reference of a piece: sequence by sequence and some queries at a time."""
    starts = piece.query_starts.tolist()
    bounds = zip(piece.bounds.tolist(), piece.seq_lens.tolist(), strict=True)
    for sequence, ((begin, end, row), seq_len) in enumerate(bounds):
        own = slice(row, row + end - begin)
        rest = keys.rest[own, None].expand(-1, q.shape[1], -1)
        k, v = torch.cat([keys.k[own], rest], dim=2).float(), keys.v[own].float()
        k_pos = torch.arange(begin, end, device=q.device)
        shift = seq_len - starts[sequence + 1]  # position of a query = its row in q + shift
        for first in range(starts[sequence], starts[sequence + 1], QUERY_CHUNK):
            rows = slice(first, min(first + QUERY_CHUNK, starts[sequence + 1]))
            acc, norms = state.acc[rows], state.norms[rows]
            if begin == 0:
                acc.zero_()
                norms[..., 0], norms[..., 1] = 0.0, float("-inf")
            scores = torch.einsum("qhd,khd->qhk", q[rows].float() * scale, k)
            hidden = k_pos > torch.arange(rows.start, rows.stop, device=q.device)[:, None] + shift
            scores.masked_fill_(hidden[:, None], float("-inf"))
            before = norms[..., 1].clone()
            peak = torch.maximum(before, scores.amax(2))
            base = torch.where(peak == float("-inf"), 0.0, peak)  # of what sees nothing yet
            weights, decay = torch.exp(scores - base[..., None]), torch.exp(before - base)
            norms[..., 0] = norms[..., 0] * decay + weights.sum(2)
            norms[..., 1] = peak
            acc.mul_(decay[..., None]).add_(torch.einsum("qhk,khd->qhd", weights, v))
            if end == seq_len:
                out[rows] = acc / norms[..., :1]
