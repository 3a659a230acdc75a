"""Attention of one new token of each sequence over its cached context. `reference.py` has the formula."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cache.kv_cache import KVCache
from ..dispatch import TritonModule, on_triton
from .context import Contexts, Scoring, check_decodes, new_out
from .reference import attend, gather
from .schedule import DecodeSchedule, decode_schedule

# The reference gathers so much of keys and values at a time, in fp32. 255 sequences of 1,409 tokens, 4 KV heads of 32,
# took one core 0.1 s like this, and 0.4 to 0.5 s in one piece.
GATHERED_BYTES = 8 << 20

_kernel = TritonModule("rayllm_kernels.attention.decode_kernel")


def paged_decode_attention(
    q: Tensor,
    cache: KVCache,
    contexts: Contexts,
    scoring: Scoring,
    *,
    schedule: DecodeSchedule | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of one new token per sequence over its cached context -> [B, Hq, D] in q's dtype (`out` if given).

    q: [B, Hq, D], last dimension contiguous; D of the result is that of values, which is less in a cache of latents.
    contexts: with the new tokens, whose keys and values are already cached; the output of a padding row is zero.
    schedule: of `decode_schedule` for these lengths, this window and caches of this dtype; None makes one for this
    call. Calls that share a schedule, which holds scratch space, must follow one another in one stream.
    """
    check_decodes(q, cache, contexts, scoring, out)
    if schedule is not None:
        schedule.check(q, cache, scoring)
    if out is None:
        out = new_out(q, cache)
    if not on_triton(q):
        _attend(q, cache, contexts, scoring, out)
    elif q.shape[0]:  # otherwise there is not even a first row to load
        if schedule is None:
            schedule = decode_schedule(q, cache, contexts, scoring)
        _kernel.decode(q, cache, contexts, scoring, schedule, out)
    return out


def _attend(q: Tensor, cache: KVCache, contexts: Contexts, scoring: Scoring, out: Tensor) -> None:
    """The reference, vectorised over so many sequences that the copies of their keys and values stay in the caches."""
    longest = int(contexts.seq_lens.max()) if len(q) else 0
    each = longest * cache.k.shape[1] * q.shape[-1] * 2 * 4
    count = max(1, GATHERED_BYTES // max(each, 1))
    for first in range(0, len(q), count):
        part = slice(first, first + count)
        some = Contexts(contexts.block_tables[part], contexts.seq_lens[part])
        _attend_together(q[part], cache, some, scoring, out[part])


def _attend_together(q: Tensor, cache: KVCache, contexts: Contexts, scoring: Scoring, out: Tensor) -> None:
    """Keys and values are gathered padded to the longest of these sequences."""
    block_tables, seq_lens = contexts
    lengths, window = seq_lens.long()[:, None], scoring.sliding_window
    first = torch.zeros_like(lengths) if window is None else (lengths - window).clamp_min_(0)
    widest = int((lengths - first).max()) if seq_lens.numel() else 0
    if widest == 0:
        out.zero_()
        return
    k_pos = first + torch.arange(widest, device=q.device)
    # Past its end a sequence repeats its last key, at weight zero: what unwritten slots hold (NaN, say) is never read.
    used = torch.minimum(k_pos, (lengths - 1).clamp_min_(0))
    k, v = gather(cache, block_tables.masked_fill(lengths == 0, 0), used)
    distance = (k_pos - (lengths - 1))[:, None]
    result = attend(q[:, None], k, v, distance, scoring._replace(sliding_window=None))[:, 0]
    out.copy_(result.masked_fill_(seq_lens[:, None, None] == 0, 0.0))
