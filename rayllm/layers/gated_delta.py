"""The recurrence of one layer with a state in place of keys and values (gated DeltaNet), over one step's tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from rayllm.config.model_spec import GatedDeltaSpec
from rayllm.layers.attention import AttentionPlan
from rayllm.layers.layer import BuildContext, Layer
from rayllm.layers.linear import Part, column_part, stored_as_one
from rayllm.layers.weights import WeightSource
from rayllm_kernels import ops
from rayllm_kernels.ops import Chunks, Gates, StateCache


class LayerState(NamedTuple):
    """The states of one layer. group: whose block tables of a batch lead to its blocks."""

    states: StateCache
    group: int = 0

    @property
    def num_blocks(self) -> int:
        """Of the pool."""
        return self.states.recurrent.shape[0]


def qkv_parts(context: BuildContext, spec: GatedDeltaSpec) -> list[Part]:
    """The rank's rows of what has all query heads, then all key heads, then all value heads."""
    keys, values = spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim
    return [column_part(context, name, rows) for name, rows in (("q", keys), ("k", keys), ("v", values))]


class GatedDelta(Layer):
    """Convolution, gated delta rule and gated norm (`rayllm_kernels.gated_delta`) of the rank's heads.

    Weights: "conv1d.weight", "A_log", "dt_bias", "norm.weight".
    """

    def __init__(self, context: BuildContext, spec: GatedDeltaSpec, eps: float):
        super().__init__(context)
        self.spec, self.eps, self.deterministic, self.dtype = spec, eps, context.deterministic, context.dtype
        self.parts = qkv_parts(context, spec)
        heads = context.shard(spec.value_heads, "linear_num_value_heads")
        wide = replace(context, dtype=torch.float32)
        self.conv = context.parameter(spec.conv_width, sum(part.rows for part in self.parts))
        self.a_log, self.dt_bias = wide.parameter(heads), wide.parameter(heads)
        self.norm = context.parameter(spec.value_dim)

    def forward(
        self,
        qkv: torch.Tensor,
        z: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        cache: LayerState,
        plan: AttentionPlan,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """[T, channels], [T, Hv V], [T, Hv] and [T, Hv], the rank's projections -> [T, Hv V], or [N, Hv V] of `rows`.

        The states of the cache are brought up to the step's tokens.
        """
        states, group = cache
        heads, dim = a.shape[1], self.spec.value_dim
        decodes, first = plan.num_decodes, plan.prefill_row
        mixed = qkv.new_empty(qkv.shape)
        # Zeros for the rows of captured steps that belong to no sequence; steps of decodes alone have no such rows.
        has_chunks = first < qkv.shape[0]
        out = (qkv.new_zeros if has_chunks else qkv.new_empty)(qkv.shape[0], heads, dim)
        parts = []
        if decodes:
            parts.append((slice(0, decodes), Chunks(plan.decodes[group])))
        if has_chunks:
            chunks = Chunks(plan.prefills[group], plan.prefill_starts, plan.max_query_len)
            parts.append((slice(first, None), chunks))
        for own, chunks in parts:
            ops.causal_conv(qkv[own], self.conv, states, chunks, mixed[own], deterministic=self.deterministic)
            ops.gated_delta_rule(
                mixed[own],
                Gates(a[own], b[own], self.a_log, self.dt_bias),
                states,
                chunks,
                out[own],
                deterministic=self.deterministic,
            )
        if rows is not None:
            out, z = out[rows], z[rows]
        return ops.rms_norm_gated(out, z, self.norm, self.eps, deterministic=self.deterministic).flatten(1)

    def load(self, source: WeightSource) -> None:
        width, offset = self.spec.conv_width, 0
        for part in stored_as_one("conv1d.weight", self.parts):
            stored = source.slice(
                self.prefix + part.name, (part.total, 1, width), 0, part.start, part.start + part.rows
            )
            source.write(self.conv[:, offset : offset + part.rows], stored[:, 0].T)
            offset += part.rows
        (count,), first = self.a_log.shape, self.tp.rank * self.a_log.shape[0]
        for name, parameter in (("A_log", self.a_log), ("dt_bias", self.dt_bias)):
            stored = source.slice(self.prefix + name, (self.spec.value_heads,), 0, first, first + count)
            source.write(parameter, stored.to(self.dtype))  # rounded as transformers has them
        source.write(self.norm, source.tensor(self.prefix + "norm.weight", tuple(self.norm.shape)))
