"""Attention of the deterministic mode: a token's result depends on its own sequence alone, to the bit."""

from __future__ import annotations

import torch

from rayllm.layers.attention import KVCache
from rayllm.layers.batch import ForwardBatch
from rayllm_kernels import ops


def attend_deterministic(
    q: torch.Tensor,
    kv_cache: KVCache,
    batch: ForwardBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `attention.attend`, with every sequence, decoding or not, a chunk for the prefill kernel.

    The decode kernel adds up a context in pieces that depend on the batch, so it has no part here. Raises ValueError
    for a captured step with room for decodes, whose rows `query_start_loc` does not tell.
    """
    if batch.num_decodes and batch.prefill_row is not None:
        raise ValueError(f"captured steps must hold decodes as chunks, not {batch.num_decodes} decodes")
    return ops.paged_prefill_attention(
        q,
        kv_cache.k,
        kv_cache.v,
        batch.block_tables,
        batch.seq_lens,
        batch.query_start_loc,
        max(batch.max_query_len, 1),
        scale=scale,
        sliding_window=sliding_window,
        alibi_slopes=alibi_slopes,
        kv_scales=kv_cache.scales,
        deterministic=True,
    )
