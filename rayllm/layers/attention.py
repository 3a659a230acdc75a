"""Attention of one step's tokens over the paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from rayllm.layers.batch import ForwardBatch
from rayllm_kernels import ops
from rayllm_kernels.decode_work import DecodeSchedule
from rayllm_kernels.kv_format import KVScales


class KVCache(NamedTuple):
    """Keys and values of one layer, each [num_blocks, kv heads, block_size, head_dim], in the model's dtype or in fp8.

    scales: of the rank's KV heads, exactly if they are in fp8.
    """

    k: torch.Tensor
    v: torch.Tensor
    scales: KVScales | None = None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A batch cut into its decodes and its prefill chunks, once a step rather than once a layer.

    decode_*: the first batch.num_decodes sequences, one token each. prefill_*: the rest; prefill_starts counts from row
    prefill_row and is [number of prefill sequences + 1].
    """

    batch: ForwardBatch
    prefill_row: int
    decode_tables: torch.Tensor
    decode_lens: torch.Tensor
    prefill_tables: torch.Tensor
    prefill_lens: torch.Tensor
    prefill_starts: torch.Tensor
    _schedules: dict[int | None, DecodeSchedule] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: ForwardBatch) -> AttentionPlan:
        decodes = batch.num_decodes
        # Each decode is one token, so the prefill tokens begin at row `decodes` unless some decodes are padding.
        prefill_row = decodes if batch.prefill_row is None else batch.prefill_row
        starts = batch.query_start_loc[decodes:]
        return cls(
            batch=batch,
            prefill_row=prefill_row,
            decode_tables=batch.block_tables[:decodes],
            decode_lens=batch.seq_lens[:decodes],
            prefill_tables=batch.block_tables[decodes:],
            prefill_lens=batch.seq_lens[decodes:],
            prefill_starts=starts - prefill_row if prefill_row and starts.shape[0] > 1 else starts,
        )

    def decode_schedule(self, q: torch.Tensor, k_cache: torch.Tensor, sliding_window: int | None) -> DecodeSchedule:
        """How the decodes' attention is cut; the first layer of each window makes it, the others share it."""
        schedule = self._schedules.get(sliding_window)
        if schedule is None:
            schedule = self._schedules[sliding_window] = ops.decode_schedule(
                q[: self.batch.num_decodes], k_cache, self.decode_lens, sliding_window=sliding_window
            )
        return schedule


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: KVCache,
    plan: AttentionPlan,
    *,
    scale: float,
    sliding_window: int | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Store k, v [T, kv heads, head_dim] in the cache, then attend q [T, heads, head_dim] -> [T, heads, head_dim], new.

    kv_cache is written in place. The rest: as for `attend`.
    """
    ops.reshape_and_cache(k, v, kv_cache.k, kv_cache.v, plan.batch.slot_mapping, kv_scales=kv_cache.scales)
    return attend(q, kv_cache, plan, scale=scale, sliding_window=sliding_window, alibi_slopes=alibi_slopes)


def attend(
    q: torch.Tensor,
    kv_cache: KVCache,
    plan: AttentionPlan,
    *,
    scale: float,
    sliding_window: int | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend q [T, heads, head_dim] to a cache that holds this step's keys and values -> a new tensor like q.

    alibi_slopes: [heads] float32, of the rank's heads.
    """
    batch, (k_cache, v_cache, scales) = plan.batch, kv_cache
    out = q.new_empty(q.shape)
    decodes = batch.num_decodes
    if decodes:
        ops.paged_decode_attention(
            q[:decodes],
            k_cache,
            v_cache,
            plan.decode_tables,
            plan.decode_lens,
            scale=scale,
            sliding_window=sliding_window,
            alibi_slopes=alibi_slopes,
            kv_scales=scales,
            schedule=plan.decode_schedule(q, k_cache, sliding_window),
            out=out[:decodes],
        )
    first = plan.prefill_row
    if first < q.shape[0]:  # after the decodes, whose padding rows are zeroed there
        ops.paged_prefill_attention(
            q[first:],
            k_cache,
            v_cache,
            plan.prefill_tables,
            plan.prefill_lens,
            plan.prefill_starts,
            batch.max_query_len,
            scale=scale,
            sliding_window=sliding_window,
            alibi_slopes=alibi_slopes,
            kv_scales=scales,
            out=out[first:],
        )
    return out
