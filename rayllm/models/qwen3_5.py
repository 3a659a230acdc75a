"""Qwen3.5, Qwen3.6 and Qwen3-Next: a Qwen3 whose attention is gated, and three of four layers of which keep a state.

Those of experts have a shared one too, whose result is gated.
"""

from __future__ import annotations

import torch
from torch import nn

from rayllm.config.model_spec import GatedDeltaSpec, ModelSpec
from rayllm.layers.attention import AttentionPlan
from rayllm.layers.gated_delta import GatedDelta, LayerState, qkv_parts
from rayllm.layers.layer import BuildContext
from rayllm.layers.linear import ColumnLinear, Part, RowLinear, column_part, stored_as_one
from rayllm.layers.norm import RMSNorm, Summand
from rayllm.models.base import CausalLM
from rayllm.models.llama import LlamaForCausalLM, full_attention
from rayllm.models.sparse_mlp import SparseNames, sparse_mlps

NAMES = SparseNames(shared="shared_expert")


class GatedDeltaNet(nn.Module):
    """Projections and recurrence of one layer, called as `LlamaAttention` is."""

    def __init__(self, build: BuildContext, spec: ModelSpec):
        super().__init__()
        delta, hidden = spec.gated_delta, spec.hidden_size
        assert delta is not None
        parts = _grouped_parts(build, delta) if delta.grouped else _plain_parts(build, delta)
        self.in_proj = ColumnLinear(build, hidden, parts, bias=False)
        self.delta = GatedDelta(build, delta, spec.norm_eps)
        channels, heads = self.delta.conv.shape[1], self.delta.a_log.shape[0]
        self.sizes = [channels, heads * delta.value_dim, heads, heads]
        self.out_proj = RowLinear(build.at("out_proj"), delta.value_heads * delta.value_dim, hidden, bias=False)

    def forward(
        self,
        x: Summand,
        residual: torch.Tensor | None,
        norm: RMSNorm,
        kv_cache: LayerState,
        plan: AttentionPlan,
        rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """total + recurrence over norm(total), total = x + residual: in two parts, as x and residual themselves."""
        projected, residual = self.in_proj.after_norm(x, residual, norm)
        qkv, z, b, a = projected.split(self.sizes, dim=1)
        out = self.delta(qkv, z, b, a, kv_cache, plan, rows)
        return self.out_proj.onto(out, residual if rows is None else residual[rows])


def _plain_parts(build: BuildContext, spec: GatedDeltaSpec) -> list[Part]:
    """The rank's rows of queries, keys, values, z, b and a, of checkpoints that have the first three as one."""
    rest = {
        "in_proj_z": spec.value_heads * spec.value_dim,
        "in_proj_b": spec.value_heads,
        "in_proj_a": spec.value_heads,
    }
    qkv = stored_as_one("in_proj_qkv", qkv_parts(build, spec))
    return [*qkv, *(column_part(build, name, total) for name, total in rest.items())]


def _grouped_parts(build: BuildContext, spec: GatedDeltaSpec) -> list[Part]:
    """The same of checkpoints that have them key head by key head: its q and k, and v and z of its value heads."""
    ratio, heads = spec.value_heads // spec.key_heads, build.shard(spec.key_heads, "linear_num_key_heads")
    values = ratio * spec.value_dim
    own = range(build.tp.rank * heads, (build.tp.rank + 1) * heads)

    def parts(name: str, *sizes: int) -> list[Part]:
        group, total, found = sum(sizes), spec.key_heads * sum(sizes), []
        for i, size in enumerate(sizes):
            found += [Part(name, total, head * group + sum(sizes[:i]), size) for head in own]
        return found

    return parts("in_proj_qkvz", spec.key_dim, spec.key_dim, values, values) + parts("in_proj_ba", ratio, ratio)


def _mixer(build: BuildContext, spec: ModelSpec, layer: int, *rest: object) -> nn.Module:
    """A `MakeAttention`."""
    if spec.is_recurrent(layer):
        return GatedDeltaNet(build.at("linear_attn"), spec)
    return full_attention(build, spec, layer, *rest)


def qwen3_5(build: BuildContext, spec: ModelSpec) -> CausalLM:
    return LlamaForCausalLM(build, spec, sparse_mlps(NAMES), _mixer)
