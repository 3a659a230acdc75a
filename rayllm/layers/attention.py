"""Attention of one step's tokens over the paged KV cache."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

from rayllm.layers.batch import ForwardBatch
from rayllm.layers.kv_scales import load_kv_scales
from rayllm.layers.layer import BuildContext, Heads, Layer
from rayllm.layers.norm import RMSNorm
from rayllm.layers.weights import WeightSource
from rayllm_kernels import ops
from rayllm_kernels.ops import Contexts, DecodeSchedule, HeadNorms, KVCache, KVScales, Scoring

T = TypeVar("T")


class LayerCache(NamedTuple):
    """The KV cache of one layer. group: whose block tables and slots of a batch lead to its blocks."""

    kv: KVCache
    group: int = 0

    @property
    def num_blocks(self) -> int:
        """Of the pool."""
        return self.kv.k.shape[0]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A batch cut into its decodes and its prefill chunks, once a step rather than once a layer."""

    batch: ForwardBatch
    # Sequences of one token each that the decode kernel attends; rows [0, num_decodes).
    num_decodes: int
    # By group.
    decodes: tuple[Contexts, ...]
    # The rest, by group.
    prefills: tuple[Contexts, ...]
    prefill_row: int  # of the first prefill token
    prefill_starts: torch.Tensor  # [number of prefill sequences + 1], counts from prefill_row
    max_query_len: int  # of a prefill sequence, at least
    _schedules: dict[int | None, DecodeSchedule | None] = field(default_factory=dict)
    _made: dict[Hashable, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: ForwardBatch, context: BuildContext) -> AttentionPlan:
        """The plan for layers of this context.

        The decode kernel adds up a context in pieces that depend on the batch, so in the deterministic mode every
        sequence is a prefill chunk. Raises ValueError for a captured step with room for decodes then: its
        `query_start_loc` does not tell their rows.
        """
        decodes, longest = batch.num_decodes, batch.max_query_len
        # Each decode is one token, so the prefill tokens begin at row `decodes` unless some decodes are padding.
        prefill_row = decodes if batch.prefill_row is None else batch.prefill_row
        if context.deterministic:
            if decodes and batch.prefill_row is not None:
                raise ValueError(f"captured steps must hold decodes as chunks, not {decodes} decodes")
            decodes, prefill_row, longest = 0, 0, max(longest, 1)
        starts, lens = batch.query_start_loc[decodes:], batch.seq_lens
        return cls(
            batch=batch,
            num_decodes=decodes,
            decodes=tuple(Contexts(tables[:decodes], lens[:decodes]) for tables in batch.block_tables),
            prefills=tuple(Contexts(tables[decodes:], lens[decodes:]) for tables in batch.block_tables),
            prefill_row=prefill_row,
            prefill_starts=starts - prefill_row if prefill_row and starts.shape[0] > 1 else starts,
            max_query_len=longest,
        )

    def shared(self, key: Hashable, make: Callable[[], T]) -> T:
        """What the first layer of the step that asks for `key` makes; later ones get the same."""
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made

    def decode_schedule(self, q: torch.Tensor, cache: LayerCache, scoring: Scoring) -> DecodeSchedule | None:
        """How the decodes' attention is cut; the first layer of each window makes it, the others share it."""
        window = scoring.sliding_window
        if window not in self._schedules:
            contexts = self.decodes[cache.group]
            self._schedules[window] = ops.decode_schedule(q[: self.num_decodes], cache.kv, contexts, scoring)
        return self._schedules[window]


class Attention(Layer):
    """Attention of one layer's heads: `store` the keys and values of a step, then `attend` to them.

    heads: of the whole model. scoring: its ALiBi slopes are the rank's.
    rotary: the table of angles by which queries and keys are turned (`rotary.cos_sin_table`); None leaves them alone.
    norm_eps: of the RMS norms "q_norm" and "k_norm" of each query and key head; None for none. norm_wide, norm_offset:
    as for `RMSNorm`. norm_values: value heads are normed too, without a weight.
    reads_only: keys and values are in the cache already, which is another layer's; there are queries alone.
    sinks: each head has one, as `Scoring.sinks`, called "sinks".
    value_dim: entries of a value; None for as many as of a key. Fewer are for a cache of latents.
    interleaved, query_scale: how queries and keys are turned, as for `ops.qk_norm_rope_cache`.
    scales: the checkpoint's for a cache in fp8, of the rank's KV heads, on the CPU; None if it has none.
    """

    def __init__(
        self,
        context: BuildContext,
        heads: Heads,
        scoring: Scoring,
        rotary: torch.Tensor | None = None,
        norm_eps: float | None = None,
        *,
        interleaved: bool = False,
        query_scale: torch.Tensor | None = None,
        norm_wide: bool = False,
        norm_offset: bool = False,
        norm_values: bool = False,
        reads_only: bool = False,
        sinks: bool = False,
        value_dim: int | None = None,
    ):
        super().__init__(context)
        self.sinks = context.parameter(context.shard(heads.num_heads, "heads")) if sinks else None
        scoring = scoring if self.sinks is None else scoring._replace(sinks=self.sinks)
        self.heads, self.scoring, self.rotary, self.value_dim = heads, scoring, rotary, value_dim
        self.interleaved, self.query_scale = interleaved, query_scale
        self.deterministic, self.reads_only = context.deterministic, reads_only
        if reads_only and rotary is None:
            raise ValueError("a layer that only reads the cache must have rotary positions")
        self.norms: HeadNorms | None = None
        if norm_eps is not None:
            kind = {"wide": norm_wide, "offset": norm_offset}
            self.q_norm = RMSNorm(context.at("q_norm"), heads.head_dim, norm_eps, **kind)
            self.k_norm = None if reads_only else RMSNorm(context.at("k_norm"), heads.head_dim, norm_eps, **kind)
            k_weight = None if self.k_norm is None else self.k_norm.weight
            self.norms = HeadNorms(self.q_norm.weight, k_weight, norm_eps, norm_values)
        self.scales: KVScales | None = None

    def store(self, qkv: torch.Tensor, kv_cache: LayerCache, plan: AttentionPlan) -> torch.Tensor:
        """Norm and turn the heads, write keys and values into the cache -> queries [T, heads, head_dim].

        qkv: [T, (heads + 2 KV heads) * head_dim] of the rank, those of queries first, then keys, then values; queries
        alone if the layer only reads the cache.
        """
        batch, cache = plan.batch, kv_cache.kv
        slots = None if self.reads_only else batch.slot_mappings[kv_cache.group]
        if self.rotary is not None:
            return ops.qk_norm_rope_cache(
                qkv,
                self.norms,
                batch.positions,
                self.rotary,
                cache,
                slots,
                interleaved=self.interleaved,
                query_scale=self.query_scale,
                deterministic=self.deterministic,
            )
        assert slots is not None
        all_heads, kv = qkv.view(qkv.shape[0], -1, self.heads.head_dim), cache.k.shape[1]
        q, k, v = all_heads.split([all_heads.shape[1] - 2 * kv, kv, kv], dim=1)
        ops.reshape_and_cache(k, v, cache, slots)
        return q

    def attend(self, q: torch.Tensor, kv_cache: LayerCache, plan: AttentionPlan) -> torch.Tensor:
        """Attend q [T, heads, head_dim] to a cache that holds this step's keys and values -> [T, heads * value_dim]."""
        out = q.new_empty(q.shape if self.value_dim is None else (*q.shape[:2], self.value_dim))
        decodes, first, (cache, group) = plan.num_decodes, plan.prefill_row, kv_cache
        if decodes:
            schedule = plan.decode_schedule(q, kv_cache, self.scoring)
            ops.paged_decode_attention(
                q[:decodes], cache, plan.decodes[group], self.scoring, schedule=schedule, out=out[:decodes]
            )
        if first < q.shape[0]:  # after the decodes, whose padding rows are zeroed there
            # A slice costs the host a microsecond a layer, so none is made of a batch without decodes.
            chunks, target = (q[first:], out[first:]) if first else (q, out)
            ops.paged_prefill_attention(
                chunks,
                cache,
                plan.prefills[group],
                self.scoring,
                plan.prefill_starts,
                plan.max_query_len,
                deterministic=self.deterministic,
                out=target,
            )
        return out.flatten(1)

    def load(self, source: WeightSource) -> None:
        self.scales = load_kv_scales(source, self.prefix, self.heads.num_kv_heads, self.tp)
        if self.sinks is not None:
            (count,), first = self.sinks.shape, self.tp.rank * self.sinks.shape[0]
            stored = source.slice(self.prefix + "sinks", (self.heads.num_heads,), 0, first, first + count)
            source.write(self.sinks, stored)
