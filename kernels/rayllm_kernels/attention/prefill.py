"""Causal attention of a chunk of new tokens of each sequence over its context. `reference.py` has the formula."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cache.kv_cache import KVCache
from ..checks import check_vectors, fail
from ..dispatch import TritonModule, on_triton
from .context import Contexts, Scoring, check_attention, new_out
from .reference import attend, gather

# The reference holds a score matrix of [heads, this many queries, context] in fp32 at a time.
QUERY_CHUNK = 256

_kernel = TritonModule("rayllm_kernels.attention.prefill_kernel")


def paged_prefill_attention(
    q: Tensor,
    cache: KVCache,
    contexts: Contexts,
    scoring: Scoring,
    query_start_loc: Tensor,
    max_query_len: int,
    *,
    deterministic: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of a chunk of new tokens per sequence over its context -> [T, Hq, D] in q's dtype.

    q: [T, Hq, D], the chunks packed one after the other, last dimension contiguous; D of the result is that of values,
    which is less in a cache of latents. contexts: with the chunks, whose
    keys and values are already cached: query i of chunk b is at position seq_lens[b] - chunk length + i.
    query_start_loc: [B + 1] int32, chunk b is rows query_start_loc[b] to query_start_loc[b + 1]; chunks may have any
    length, 0 and 1 included. max_query_len: at least the longest chunk's length (queries beyond it are not computed).
    out: where the result goes. Rows of q outside every chunk, and those of a sequence of length 0, are not computed:
    they keep what `out` held, or are unspecified if `out` is not given.
    deterministic: a query's result depends on its context alone, to the bit, and not on how its sequence is cut into
    chunks or what else is in the batch. Slower for short chunks.
    """
    check_attention(q, cache, contexts, scoring, out)
    check_vectors(contexts.seq_lens.shape[0] + 1, torch.int32, q.device, query_start_loc=query_start_loc)
    if max_query_len < 0:
        fail("max_query_len", "must not be negative", max_query_len)
    if out is None:
        out = new_out(q, cache)
    if on_triton(q):
        _kernel.prefill(q, cache, contexts, scoring, query_start_loc, max_query_len, deterministic, out)
    else:
        # Of one query if `deterministic`, because the order of a matrix product's sums follows its shape.
        _attend(q, cache, contexts, scoring, query_start_loc, 1 if deterministic else QUERY_CHUNK, out)
    return out


def _attend(
    q: Tensor, cache: KVCache, contexts: Contexts, scoring: Scoring, query_start_loc: Tensor, step: int, out: Tensor
) -> None:
    """The reference: sequence by sequence and `step` queries by `step`, each against only the keys that it may see."""
    starts = query_start_loc.tolist()
    for sequence, seq_len in enumerate(contexts.seq_lens.tolist()):
        begin, end = starts[sequence], starts[sequence + 1]
        if begin == end:
            continue
        shift = seq_len - end  # position of a query = its row in q + shift
        reach = seq_len if scoring.sliding_window is None else scoring.sliding_window
        origin = max(0, begin + shift - reach + 1)
        k_pos = torch.arange(origin, seq_len, device=q.device)
        k, v = gather(cache, contexts.block_tables[sequence : sequence + 1], k_pos[None])
        for first in range(begin, end, step):
            last = min(first + step, end)
            keys = slice(max(0, first + shift - reach + 1) - origin, last + shift - origin)
            q_pos = torch.arange(first + shift, last + shift, device=q.device)
            distance = k_pos[keys] - q_pos[:, None]
            # Copies, because the order of sums may follow the layout too.
            seen_k, seen_v = k[:, :, keys].contiguous(), v[:, :, keys].contiguous()
            out[first:last] = attend(q[None, first:last], seen_k, seen_v, distance[None], scoring)[0]
