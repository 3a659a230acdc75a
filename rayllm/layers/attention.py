"""Attention of one step's tokens over the paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from rayllm.layers.batch import ForwardBatch
from rayllm_kernels import ops
from rayllm_kernels.ops import Contexts, DecodeSchedule, KVCache, Scoring


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A batch cut into its decodes and its prefill chunks, once a step rather than once a layer."""

    batch: ForwardBatch
    decodes: Contexts  # of the first batch.num_decodes sequences, one token each
    prefills: Contexts  # of the rest
    prefill_row: int  # of the first prefill token
    prefill_starts: torch.Tensor  # [number of prefill sequences + 1], counts from prefill_row
    _schedules: dict[int | None, DecodeSchedule | None] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: ForwardBatch) -> AttentionPlan:
        decodes = batch.num_decodes
        # Each decode is one token, so the prefill tokens begin at row `decodes` unless some decodes are padding.
        prefill_row = decodes if batch.prefill_row is None else batch.prefill_row
        starts = batch.query_start_loc[decodes:]
        return cls(
            batch=batch,
            prefill_row=prefill_row,
            decodes=Contexts(batch.block_tables[:decodes], batch.seq_lens[:decodes]),
            prefills=Contexts(batch.block_tables[decodes:], batch.seq_lens[decodes:]),
            prefill_starts=starts - prefill_row if prefill_row and starts.shape[0] > 1 else starts,
        )

    def decode_schedule(self, q: torch.Tensor, kv_cache: KVCache, scoring: Scoring) -> DecodeSchedule | None:
        """How the decodes' attention is cut; the first layer of each window makes it, the others share it."""
        window = scoring.sliding_window
        schedule = self._schedules.get(window)
        if schedule is None:
            schedule = ops.decode_schedule(q[: self.batch.num_decodes], kv_cache, self.decodes, scoring)
            self._schedules[window] = schedule
        return schedule


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: KVCache, plan: AttentionPlan, scoring: Scoring
) -> torch.Tensor:
    """Store k, v [T, kv heads, head_dim] in the cache, then attend q [T, heads, head_dim] -> [T, heads, head_dim], new.

    kv_cache is written in place. scoring: of the rank's heads.
    """
    ops.reshape_and_cache(k, v, kv_cache, plan.batch.slot_mapping)
    return attend(q, kv_cache, plan, scoring)


def attend(q: torch.Tensor, kv_cache: KVCache, plan: AttentionPlan, scoring: Scoring) -> torch.Tensor:
    """Attend q [T, heads, head_dim] to a cache that holds this step's keys and values -> a new tensor like q.

    scoring: of the rank's heads.
    """
    batch, out = plan.batch, q.new_empty(q.shape)
    decodes = batch.num_decodes
    if decodes:
        schedule = plan.decode_schedule(q, kv_cache, scoring)
        ops.paged_decode_attention(q[:decodes], kv_cache, plan.decodes, scoring, schedule=schedule, out=out[:decodes])
    first = plan.prefill_row
    if first < q.shape[0]:  # after the decodes, whose padding rows are zeroed there
        ops.paged_prefill_attention(
            q[first:], kv_cache, plan.prefills, scoring, plan.prefill_starts, batch.max_query_len, out=out[first:]
        )
    return out
