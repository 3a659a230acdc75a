"""Attention of the deterministic mode: a token's result depends on its own sequence alone, to the bit."""

from __future__ import annotations

import torch

from rayllm.layers.batch import ForwardBatch
from rayllm_kernels import ops
from rayllm_kernels.ops import Contexts, KVCache, Scoring


def attend_deterministic(q: torch.Tensor, kv_cache: KVCache, batch: ForwardBatch, scoring: Scoring) -> torch.Tensor:
    """As `attention.attend`, with every sequence, decoding or not, a chunk for the prefill kernel.

    The decode kernel adds up a context in pieces that depend on the batch, so it has no part here. Raises ValueError
    for a captured step with room for decodes, whose rows `query_start_loc` does not tell.
    """
    if batch.num_decodes and batch.prefill_row is not None:
        raise ValueError(f"captured steps must hold decodes as chunks, not {batch.num_decodes} decodes")
    contexts, most = Contexts(batch.block_tables, batch.seq_lens), max(batch.max_query_len, 1)
    return ops.paged_prefill_attention(q, kv_cache, contexts, scoring, batch.query_start_loc, most, deterministic=True)
