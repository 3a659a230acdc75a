"""Llama and its relatives: one decoder whose differences are flags of `ModelSpec`.

Pre-norm blocks of grouped-query attention with rotary positions and a gated MLP. Qwen2 has biases on q, k and v; Qwen3
normalises each query and key head; Mistral (and Qwen, where its config asks for it) attends to a sliding window. GLM-4
normalises what attention and MLP give once more. Checkpoints of Phi-3 and GLM-4 have several projections as one. Some
layers of SmolLM3 have no rotary positions. Gemma scales its embeddings, has norms where GLM-4 has them, whose weights
are stored less 1, soft caps, and, from 3 on, rotary positions of another kind in layers with a window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rayllm.config.model_spec import ModelSpec
from rayllm.layers.activation import activation
from rayllm.layers.attention import Attention, AttentionPlan, LayerCache
from rayllm.layers.batch import ForwardBatch
from rayllm.layers.embedding import Embedding, LMHead
from rayllm.layers.layer import BuildContext
from rayllm.layers.linear import (
    ColumnLinear,
    GatedLinear,
    RowLinear,
    column_part,
    gated_qkv_parts,
    qkv_parts,
    stored_as_one,
)
from rayllm.layers.norm import RMSNorm, Summand
from rayllm.layers.projection_norms import ProjectionNorms
from rayllm.layers.rotary import cos_sin_table, query_scales
from rayllm.models.base import CausalLM, heads_of
from rayllm_kernels.ops import Scoring


class LlamaAttention(nn.Module):
    """Projections, optional head norms, rotary positions and attention of one layer.

    rotary, query_scale: see `Attention`. post_norm: of the output, before it is added to the residual.
    """

    def __init__(
        self,
        build: BuildContext,
        spec: ModelSpec,
        layer: int,
        rotary: torch.Tensor | None,
        query_scale: torch.Tensor | None = None,
        post_norm: RMSNorm | None = None,
    ):
        super().__init__()
        heads, hidden, norm_eps = heads_of(spec), spec.hidden_size, spec.norm_eps if spec.qk_norm else None
        num_heads, _, head_dim = heads
        self.gate_width = build.shard(num_heads, "heads") * head_dim if spec.attention_gate else 0
        self.gate_act = activation("sigmoid", build)
        parts = gated_qkv_parts(build, heads) if spec.attention_gate else qkv_parts(build, heads)
        if spec.fused_qkv:
            parts = stored_as_one("qkv_proj", parts)
        self.qkv_proj = ColumnLinear(build, hidden, parts, bias=spec.qkv_bias)
        scale = head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale
        scoring = Scoring(scale, spec.sliding_windows[layer], softcap=spec.attention_softcap)
        interleaved = spec.rope is not None and spec.rope.interleaved
        self.attention = Attention(
            build,
            heads,
            scoring,
            rotary,
            norm_eps,
            interleaved=interleaved,
            query_scale=query_scale,
            norm_offset=spec.norm_offset,
            sinks=spec.attention_sinks,
        )
        self.projection_norms = ProjectionNorms(build, heads, spec.norm_eps) if spec.qk_norm_whole else None
        self.o_proj = RowLinear(build.at("o_proj"), num_heads * head_dim, hidden, bias=spec.attention_out_bias)
        self.post_norm = post_norm

    def forward(
        self,
        x: Summand,
        residual: torch.Tensor | None,
        norm: RMSNorm,
        kv_cache: LayerCache,
        plan: AttentionPlan,
        rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """total + attention over norm(total), total = x + residual: in two parts, as x and residual themselves."""
        qkv, residual = self.qkv_proj.after_norm(x, residual, norm)
        if self.projection_norms is not None:
            qkv = self.projection_norms(qkv)
        attention, gate = self.attention, None
        if self.gate_width:
            gate, qkv = qkv.tensor_split([self.gate_width], dim=1)
        q = attention.store(qkv, kv_cache, plan)
        del qkv  # the largest tensor of many a step, and nobody needs it any more
        out = attention.attend(q, kv_cache, plan)
        if gate is not None:
            out *= self.gate_act(gate)
        return end_attention(out, residual, rows, self.o_proj, self.post_norm)


def end_attention(
    out: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor | None, o_proj: RowLinear, post_norm: RMSNorm | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """residual + o_proj(out), normed first if there is a post_norm, of these rows or of all: as two summands."""
    if rows is not None:
        out, residual = out[rows], residual[rows]
    if post_norm is not None:
        return post_norm.onto(o_proj(out), residual), None
    return o_proj.onto(out, residual)


# (context of the layer, spec, number of the layer, the last three arguments of `LlamaAttention`) -> what the layer has
# before its MLP, called as `LlamaAttention` is.
MakeAttention = Callable[..., nn.Module]


def full_attention(build: BuildContext, spec: ModelSpec, layer: int, *rest: Any) -> nn.Module:
    """A `MakeAttention`."""
    return LlamaAttention(build.at("self_attn"), spec, layer, *rest)


class LlamaMLP(nn.Module):
    """down(act(gate(x)) * up(x)). post_norm: as for `LlamaAttention`.

    inner: the size in between; None for the model's intermediate_size.
    """

    def __init__(
        self, build: BuildContext, spec: ModelSpec, post_norm: RMSNorm | None = None, *, inner: int | None = None
    ):
        super().__init__()
        hidden, inner, bias = spec.hidden_size, inner or spec.intermediate_size, spec.mlp_bias
        parts = [column_part(build, name, inner) for name in ("gate_proj", "up_proj")]
        if spec.fused_gate_up:
            parts = stored_as_one("gate_up_proj", parts)
        self.gate_up_proj = GatedLinear(build, hidden, parts, spec.hidden_act, bias=bias)
        self.down_proj = RowLinear(build.at("down_proj"), inner, hidden, bias=bias)
        self.gate_up_proj.feeds(self.down_proj)
        self.post_norm = post_norm

    def forward(
        self, x: Summand, residual: torch.Tensor | None, norm: RMSNorm
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """total + MLP of norm(total), total = x + residual: in two parts, as x and residual themselves."""
        inner, total = self.gate_up_proj.after_norm(x, residual, norm)
        if self.post_norm is not None:
            return self.post_norm.onto(self.down_proj(inner), total), None
        return self.down_proj.onto(inner, total)

    def summand(self, x: torch.Tensor) -> torch.Tensor:
        """The rank's summand of the output, for x [T, hidden_size] that is normed already."""
        return self.down_proj.partial(self.gate_up_proj(x))


# (context of the layer, spec, number of the layer) -> what the layer has after attention, called as `LlamaMLP` is.
MakeMLP = Callable[[BuildContext, ModelSpec, int], nn.Module]


def dense_mlp(build: BuildContext, spec: ModelSpec, _layer: int) -> nn.Module:
    """A `MakeMLP`."""
    post_norm = _norm(build, spec, spec.norm_names.after_mlp) if spec.post_norms else None
    return LlamaMLP(build.at("mlp"), spec, post_norm)


def _norm(build: BuildContext, spec: ModelSpec, name: str) -> RMSNorm:
    """A norm of the residual's width. build: of the layer."""
    return RMSNorm(build.at(name), spec.hidden_size, spec.norm_eps, offset=spec.norm_offset)


class LlamaLayer(nn.Module):
    """One block. The residual stream travels beside the activations: each addition fuses with what follows it."""

    def __init__(
        self,
        build: BuildContext,
        spec: ModelSpec,
        layer: int,
        rotary: torch.Tensor | None,
        query_scale: torch.Tensor | None,
        make_mlp: MakeMLP,
        make_attention: MakeAttention,
    ):
        super().__init__()
        names = spec.norm_names
        after_attention = _norm(build, spec, names.after_attention) if spec.post_norms else None
        self.input_layernorm = _norm(build, spec, "input_layernorm")
        self.self_attn = make_attention(build, spec, layer, rotary, query_scale, after_attention)
        self.post_attention_layernorm = _norm(build, spec, names.before_mlp)
        self.mlp = make_mlp(build, spec, layer)

    def forward(
        self,
        x: Summand,
        residual: torch.Tensor | None,
        kv_cache: LayerCache,
        plan: AttentionPlan,
        rows: torch.Tensor | None = None,
    ) -> tuple[Summand, torch.Tensor | None]:
        """x: the rank's summand of what is not yet added to `residual`; both [T, hidden_size], and so returned.

        Without a residual, x is the whole sum, the same on all ranks. rows [N]: of the tokens to go on with after
        attention, the others being there for their keys and values alone; None for all.
        """
        x, residual = self.self_attn(x, residual, self.input_layernorm, kv_cache, plan, rows)
        x, residual = self.mlp(x, residual, self.post_attention_layernorm)
        return x, residual


class LlamaForCausalLM(CausalLM):
    """See `CausalLM`. make_mlp, make_attention: of the layers."""

    def __init__(
        self,
        build: BuildContext,
        spec: ModelSpec,
        make_mlp: MakeMLP = dense_mlp,
        make_attention: MakeAttention = full_attention,
    ):
        super().__init__(build, spec)
        body = build.at("model")
        assert spec.rope is not None
        rotary = cos_sin_table(spec.rope, build.max_model_len).to(build.device)
        window_rotary = rotary
        if spec.window_rope is not None:
            window_rotary = cos_sin_table(spec.window_rope, build.max_model_len).to(build.device)
        query_scale = query_scales(spec.rope, build.max_model_len)
        if query_scale is not None:
            query_scale = query_scale.to(build.device)
        self.embed_tokens = Embedding(
            body.at("embed_tokens"), spec.vocab_size, spec.hidden_size, scale=spec.embedding_scale
        )

        def rotary_of(layer: int) -> torch.Tensor | None:
            if spec.rope_layers is not None and not spec.rope_layers[layer]:
                return None
            return rotary if spec.sliding_windows[layer] is None else window_rotary

        self.layers = nn.ModuleList(
            LlamaLayer(body.at(f"layers.{i}"), spec, i, rotary_of(i), query_scale, make_mlp, make_attention)
            for i in range(spec.num_layers)
        )
        self.norm = _norm(body, spec, "norm")
        tied = self.embed_tokens if spec.tie_word_embeddings else None
        self.lm_head = LMHead(
            build.at("lm_head"), spec.vocab_size, spec.hidden_size, tied=tied, softcap=spec.logit_softcap
        )

    def forward(self, batch: ForwardBatch, kv_caches: list[LayerCache]) -> torch.Tensor:
        plan = AttentionPlan.of(batch, self.build)
        x: Summand = self.embed_tokens(batch.input_ids)
        residual: torch.Tensor | None = None
        *layers, last = zip(self.layers, kv_caches, strict=False)
        for layer, kv_cache in layers:
            x, residual = layer(x, residual, kv_cache, plan)
        # In the last layer a prompt's tokens matter for their keys and values alone. A captured step may have room for
        # more rows than it has tokens.
        rows = batch.logit_rows
        few = rows is not None and rows.shape[0] < x.shape[0]
        x, residual = last[0](x, residual, last[1], plan, rows if few else None)
        hidden, _ = self.norm.add_partial(x, residual)
        return hidden if rows is None or few else hidden[rows]

    def local_logits(self, hidden: torch.Tensor, room: torch.Tensor | None = None) -> torch.Tensor:
        scale = self.spec.logits_scale
        return super().local_logits(hidden if scale == 1 else hidden * scale, room)
