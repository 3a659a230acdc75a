"""OPT (Zhang et al., 2022): learned positions, LayerNorm before or after each part, plain MLP, biases throughout."""

from __future__ import annotations

import torch
from torch import nn

from rayllm.config.model_spec import ModelSpec, OPTSpec
from rayllm.layers.activation import activation
from rayllm.layers.attention import Attention, AttentionPlan, LayerCache
from rayllm.layers.batch import ForwardBatch
from rayllm.layers.embedding import Embedding, LMHead
from rayllm.layers.layer import BuildContext
from rayllm.layers.linear import ColumnLinear, RowLinear, column_part, qkv_parts
from rayllm.layers.norm import LayerNorm
from rayllm.models.base import CausalLM, heads_of
from rayllm_kernels.ops import Scoring

# OPT's position table has two rows before position 0, a heritage of fairseq's padding index.
POSITION_OFFSET = 2


class OPTLayer(nn.Module):
    """One block: attention and MLP, each with its residual and its norm before (or, in OPT-350m, after)."""

    def __init__(self, build: BuildContext, spec: ModelSpec, opt: OPTSpec):
        super().__init__()
        hidden, inner, heads, eps = spec.hidden_size, spec.intermediate_size, heads_of(spec), spec.norm_eps
        self_attn = build.at("self_attn")
        self.pre_norm = opt.pre_norm
        self.qkv_proj = ColumnLinear(self_attn, hidden, qkv_parts(self_attn, heads), bias=spec.qkv_bias)
        self.attention = Attention(self_attn, heads, Scoring(spec.head_dim**-0.5))
        self.out_proj = RowLinear(self_attn.at("out_proj"), hidden, hidden, bias=spec.attention_out_bias)
        self.fc1 = ColumnLinear(build, hidden, [column_part(build, "fc1", inner)], bias=spec.mlp_bias)
        self.fc2 = RowLinear(build.at("fc2"), inner, hidden, bias=spec.mlp_bias)
        self.act = activation(spec.hidden_act, build)
        self.self_attn_layer_norm = LayerNorm(build.at("self_attn_layer_norm"), hidden, eps, affine=opt.norm_affine)
        self.final_layer_norm = LayerNorm(build.at("final_layer_norm"), hidden, eps, affine=opt.norm_affine)

    def forward(self, x: torch.Tensor, kv_cache: LayerCache, plan: AttentionPlan) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        if self.pre_norm:
            x = x + self._attend(self.self_attn_layer_norm(x), kv_cache, plan)
            return x + self._mlp(self.final_layer_norm(x))
        x = self.self_attn_layer_norm(x + self._attend(x, kv_cache, plan))
        return self.final_layer_norm(x + self._mlp(x))

    def _attend(self, x: torch.Tensor, kv_cache: LayerCache, plan: AttentionPlan) -> torch.Tensor:
        q = self.attention.store(self.qkv_proj(x), kv_cache, plan)
        return self.out_proj(self.attention.attend(q, kv_cache, plan))

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.act(self.fc1(x)))


class OPTForCausalLM(CausalLM):
    """See `CausalLM`. The projection from hidden_size to the embeddings' width is a part of `local_logits`."""

    def __init__(self, build: BuildContext, spec: ModelSpec):
        super().__init__(build, spec)
        opt, hidden, positions = spec.opt, spec.hidden_size, spec.max_position_embeddings + POSITION_OFFSET
        assert opt is not None
        body, embed_dim, affine = build.at("model.decoder"), opt.embed_dim, opt.norm_affine
        whole = body.replicated
        self.embed_tokens = Embedding(body.at("embed_tokens"), spec.vocab_size, embed_dim)
        self.embed_positions = Embedding(whole.at("embed_positions"), positions, hidden)
        self.project_in: ColumnLinear | None = None
        self.project_out: ColumnLinear | None = None
        if embed_dim != hidden:
            self.project_in = ColumnLinear(whole, embed_dim, [column_part(whole, "project_in", hidden)], bias=False)
            self.project_out = ColumnLinear(whole, hidden, [column_part(whole, "project_out", embed_dim)], bias=False)
        self.layers = nn.ModuleList(OPTLayer(body.at(f"layers.{i}"), spec, opt) for i in range(spec.num_layers))
        self.final_layer_norm: LayerNorm | None = None
        if opt.final_norm:
            self.final_layer_norm = LayerNorm(body.at("final_layer_norm"), hidden, spec.norm_eps, affine=affine)
        tied = self.embed_tokens if spec.tie_word_embeddings else None
        self.lm_head = LMHead(build.at("lm_head"), spec.vocab_size, embed_dim, tied=tied)

    def forward(self, batch: ForwardBatch, kv_caches: list[LayerCache]) -> torch.Tensor:
        plan = AttentionPlan.of(batch, self.build)
        x = self.embed_tokens(batch.input_ids)
        if self.project_in is not None:
            x = self.project_in(x)
        x = x + self.embed_positions(batch.positions + POSITION_OFFSET)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=False):
            x = layer(x, kv_cache, plan)
        if batch.logit_rows is not None:
            x = x[batch.logit_rows]
        return x if self.final_layer_norm is None else self.final_layer_norm(x)

    def local_logits(self, hidden: torch.Tensor, room: torch.Tensor | None = None) -> torch.Tensor:
        return super().local_logits(hidden if self.project_out is None else self.project_out(hidden), room)
