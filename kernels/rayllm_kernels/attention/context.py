"""What both kinds of attention over the paged KV cache take beside queries and cache, and the checks of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..cache.kv_cache import KVCache
from ..checks import check_last_dim, check_out, check_table, check_vectors, fail
from ..device import Hardware

MAX_HEAD_DIM = 512  # of values, and of keys that are no wider
MAX_REST = 128  # entries of the keys of a cache of latents that are not values too
MAX_WINDOW = 1 << 30  # positions are 32-bit numbers, and windows are added to them


class Contexts(NamedTuple):
    """Where the keys of B sequences lie in the cache."""

    block_tables: Tensor  # [B, max_blocks] int32: the ids of each sequence's blocks; past its end anything
    seq_lens: Tensor  # [B] int32: each sequence's keys, all of them cached; 0 marks a padding row


class Scoring(NamedTuple):
    """How scores are made from the products of queries and keys, which keys a query sees, and what else has weight."""

    scale: float  # factor of the products, positive
    # A query at position p sees keys in (p - window, p]. Blocks wholly before that are not read, and their table
    # entries may hold anything. None: all keys up to p.
    sliding_window: int | None = None
    alibi_slopes: Tensor | None = None  # [Hq] fp32: slope * (key position - query position) is added to a score
    # Positive: a product s, scaled, becomes softcap * tanh(s / softcap), before slopes are added (Gemma 2).
    softcap: float | None = None
    # [Hq] in q's dtype: one more score of each head's softmax, whose value is zero ("attention sinks", gpt-oss). It is
    # neither scaled nor capped.
    sinks: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether scores are products times the scale, of all keys, and nothing else has weight."""
        return all(part is None for part in self[1:])


class Tiles(NamedTuple):
    """What one program of an attention kernel works with."""

    rows: int  # queries times heads
    keys: int
    num_warps: int
    num_stages: int  # of the pipeline that loads keys and values
    programs: int = 2  # that a multiprocessor runs at once; asked of decodes only

    def fitted(
        self,
        head_dim: int,
        itemsize: int,
        cache_itemsize: int,
        gpu: Hardware,
        *,
        queries_move: bool,
        rest: int = 0,
        value_dim: int | None = None,
    ) -> Tiles:
        """These, with as many keys and stages as a program has room for.

        itemsizes: bytes of an element of queries, and of keys and values. queries_move: they are loaded as keys are,
        stage by stage. Two stages are on their way while one is used; rather than fewer of them, there are fewer keys.
        rest: entries of keys behind these. value_dim: entries of values of their own; None for as many as head_dim or,
        where keys have a rest, for none: then they are a part of the keys.
        """
        keys, stages = self.keys, self.num_stages
        least = min(3, stages)
        width = padded_dim(head_dim) + padded_dim(rest)
        values = padded_dim((0 if rest else head_dim) if value_dim is None else value_dim)

        def taken() -> int:
            # By Triton at most: keys of each stage, values of all but one, queries, and weights on their way.
            queries = width * (stages if queries_move else 1)
            loaded = stages * width + (stages - 1) * values
            return keys * loaded * cache_itemsize + self.rows * (queries + keys) * itemsize

        while taken() > gpu.shared_memory and (keys > 16 or stages > 1):
            if keys > 16 and stages <= least:
                keys //= 2
            else:
                stages -= 1
        return self._replace(keys=keys, num_stages=stages)


def padded_dim(size: int, least: int = 16) -> int:
    """The width of a tile's row of so many entries, a power of two; 0 for none."""
    return max(least, 1 << (size - 1).bit_length()) if size else 0


def check_attention(q: Tensor, cache: KVCache, contexts: Contexts, scoring: Scoring, out: Tensor | None) -> None:
    """What decodes and prefills have in common; the batch size is taken from `seq_lens`."""
    cache.check(q, "q")
    _, kv_heads, _, head_dim = cache.k.shape
    if q.dim() != 3:
        fail("q", "must have 3 dimensions", q.shape)
    if q.shape[2] != head_dim:
        fail("q", f"must have the head_dim of the cache, {head_dim}", q.shape)
    value_dim = cache.v.shape[3]
    if value_dim > MAX_HEAD_DIM or head_dim - value_dim > MAX_REST:
        limit = f"{MAX_HEAD_DIM} (and {MAX_REST} more that are no values)"
        fail("q", f"must have a head_dim of at most {limit}", q.shape)
    if q.shape[1] % kv_heads != 0:
        fail("q", f"must have a multiple of {kv_heads} heads", q.shape)
    check_last_dim(q, "q")
    block_tables, seq_lens = contexts
    check_vectors(seq_lens.numel(), torch.int32, q.device, seq_lens=seq_lens)
    check_table(block_tables, "block_tables", q.device)
    if block_tables.shape[0] != seq_lens.shape[0]:
        fail("block_tables", f"must be [{seq_lens.shape[0]}, max_blocks]", block_tables.shape)
    if scoring.scale <= 0.0:
        fail("scale", "must be positive", scoring.scale)
    window = scoring.sliding_window
    if window is not None and not 1 <= window <= MAX_WINDOW:
        fail("sliding_window", f"must be 1 to {MAX_WINDOW} or None", window)
    if scoring.alibi_slopes is not None:
        check_vectors(q.shape[1], torch.float32, q.device, alibi_slopes=scoring.alibi_slopes)
    if scoring.softcap is not None and scoring.softcap <= 0.0:
        fail("softcap", "must be positive or None", scoring.softcap)
    if scoring.sinks is not None:
        check_vectors(q.shape[1], q.dtype, q.device, sinks=scoring.sinks)
    check_out(out, q.shape if value_dim == head_dim else torch.Size((*q.shape[:2], value_dim)), q, "q")


def new_out(q: Tensor, cache: KVCache) -> Tensor:
    """Room for the output of these queries: [.., Hq, D] of the values."""
    return torch.empty((*q.shape[:-1], cache.v.shape[3]), dtype=q.dtype, device=q.device)


def check_decodes(q: Tensor, cache: KVCache, contexts: Contexts, scoring: Scoring, out: Tensor | None) -> None:
    """`check_attention` of one query a sequence."""
    check_attention(q, cache, contexts, scoring, out)
    if q.shape[0] != contexts.seq_lens.shape[0]:
        fail("q", f"must have one row per sequence, {contexts.seq_lens.shape[0]}", q.shape)
