"""BLOOM (BigScience, 2022): ALiBi instead of positions, LayerNorm also after the embedding, a plain MLP, biases."""

from __future__ import annotations

import torch
from torch import nn

from rayllm.config.model_spec import BloomSpec, ModelSpec
from rayllm.layers.activation import activation
from rayllm.layers.alibi import rank_slopes
from rayllm.layers.attention import Attention, AttentionPlan, LayerCache
from rayllm.layers.batch import ForwardBatch
from rayllm.layers.embedding import Embedding, LMHead
from rayllm.layers.layer import BuildContext
from rayllm.layers.linear import ColumnLinear, InterleavedQKVLinear, RowLinear, column_part
from rayllm.layers.norm import LayerNorm
from rayllm.models.base import CausalLM, heads_of
from rayllm_kernels.ops import Scoring


class BloomLayer(nn.Module):
    """One block: attention and MLP, each with a norm before it, and a residual from before that norm or after it."""

    def __init__(self, build: BuildContext, spec: ModelSpec, bloom: BloomSpec, slopes: torch.Tensor):
        super().__init__()
        hidden, inner, heads, eps = spec.hidden_size, spec.intermediate_size, heads_of(spec), spec.norm_eps
        self_attention, mlp = build.at("self_attention"), build.at("mlp")
        self.residual_after_norm = bloom.residual_after_norm
        self.qkv_proj = InterleavedQKVLinear(self_attention.at("query_key_value"), hidden, heads, bias=True)
        self.attention = Attention(self_attention, heads, Scoring(spec.head_dim**-0.5, alibi_slopes=slopes))
        self.dense = RowLinear(self_attention.at("dense"), hidden, hidden, bias=True)
        self.dense_h_to_4h = ColumnLinear(mlp, hidden, [column_part(mlp, "dense_h_to_4h", inner)], bias=True)
        self.dense_4h_to_h = RowLinear(mlp.at("dense_4h_to_h"), inner, hidden, bias=True)
        self.act = activation(spec.hidden_act, build)
        self.input_layernorm = LayerNorm(build.at("input_layernorm"), hidden, eps)
        self.post_attention_layernorm = LayerNorm(build.at("post_attention_layernorm"), hidden, eps)

    def forward(self, x: torch.Tensor, kv_cache: LayerCache, plan: AttentionPlan) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        normed = self.input_layernorm(x)
        q = self.attention.store(self.qkv_proj(normed), kv_cache, plan)
        attended = self.dense(self.attention.attend(q, kv_cache, plan))
        x = (normed if self.residual_after_norm else x) + attended
        normed = self.post_attention_layernorm(x)
        hidden = self.dense_4h_to_h(self.act(self.dense_h_to_4h(normed)))
        return (normed if self.residual_after_norm else x) + hidden


class BloomForCausalLM(CausalLM):
    """See `CausalLM`."""

    def __init__(self, build: BuildContext, spec: ModelSpec):
        super().__init__(build, spec)
        bloom, hidden, eps = spec.bloom, spec.hidden_size, spec.norm_eps
        assert bloom is not None
        body, slopes = build.at("transformer"), rank_slopes(build, spec.num_heads)
        self.word_embeddings = Embedding(body.at("word_embeddings"), spec.vocab_size, hidden)
        self.word_embeddings_layernorm = LayerNorm(body.at("word_embeddings_layernorm"), hidden, eps)
        self.layers = nn.ModuleList(BloomLayer(body.at(f"h.{i}"), spec, bloom, slopes) for i in range(spec.num_layers))
        self.ln_f = LayerNorm(body.at("ln_f"), hidden, eps)
        tied = self.word_embeddings if spec.tie_word_embeddings else None
        self.lm_head = LMHead(build.at("lm_head"), spec.vocab_size, hidden, tied=tied)

    def forward(self, batch: ForwardBatch, kv_caches: list[LayerCache]) -> torch.Tensor:
        plan = AttentionPlan.of(batch, self.build)
        x = self.word_embeddings_layernorm(self.word_embeddings(batch.input_ids))
        for layer, kv_cache in zip(self.layers, kv_caches, strict=False):
            x = layer(x, kv_cache, plan)
        if batch.logit_rows is not None:
            x = x[batch.logit_rows]
        return self.ln_f(x)
