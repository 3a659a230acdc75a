"""BLOOM (BigScience, 2022): ALiBi instead of positions, LayerNorm also after the embedding, a plain MLP, biases."""

from __future__ import annotations

import torch
from torch import nn

from rayllm.config.model_spec import BloomSpec, ModelSpec
from rayllm.layers.activation import activation
from rayllm.layers.alibi import ALiBi
from rayllm.layers.attention import AttentionPlan, KVCache, attention
from rayllm.layers.attention_deterministic import attend_deterministic
from rayllm.layers.batch import ForwardBatch
from rayllm.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from rayllm.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from rayllm.layers.norm import LayerNorm
from rayllm.layers.weights import WeightSource
from rayllm.models.base import CausalLM, name_prefix
from rayllm.parallel.tp_group import TPGroup
from rayllm_kernels import ops


class BloomLayer(nn.Module):
    """One block: attention and MLP, each with a norm before it, and a residual from before that norm or after it."""

    def __init__(
        self,
        spec: ModelSpec,
        bloom: BloomSpec,
        tp: TPGroup,
        device: torch.device,
        dtype: torch.dtype,
        deterministic: bool,
    ):
        super().__init__()
        hidden, inner, self.deterministic = spec.hidden_size, spec.intermediate_size, deterministic
        self.residual_after_norm, self.scale = bloom.residual_after_norm, spec.head_dim**-0.5
        self.qkv_proj = QKVParallelLinear(
            hidden,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            bias=True,
            tp=tp,
            device=device,
            dtype=dtype,
            deterministic=deterministic,
        )
        self.dense = RowParallelLinear(
            hidden, hidden, bias=True, tp=tp, device=device, dtype=dtype, deterministic=deterministic
        )
        self.dense_h_to_4h = ColumnParallelLinear(
            hidden, inner, bias=True, tp=tp, device=device, dtype=dtype, deterministic=deterministic
        )
        self.dense_4h_to_h = RowParallelLinear(
            inner, hidden, bias=True, tp=tp, device=device, dtype=dtype, deterministic=deterministic
        )
        self.act = activation(spec.hidden_act, deterministic)
        self.input_layernorm = LayerNorm(hidden, spec.norm_eps, affine=True, device=device, dtype=dtype)
        self.post_attention_layernorm = LayerNorm(hidden, spec.norm_eps, affine=True, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor, alibi: ALiBi, kv_cache: KVCache, plan: AttentionPlan) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        normed = self.input_layernorm(x)
        x = (normed if self.residual_after_norm else x) + self._attend(normed, alibi, kv_cache, plan)
        normed = self.post_attention_layernorm(x)
        hidden = self.dense_4h_to_h(self.act(self.dense_h_to_4h(normed)))
        return (normed if self.residual_after_norm else x) + hidden

    def _attend(self, x: torch.Tensor, alibi: ALiBi, kv_cache: KVCache, plan: AttentionPlan) -> torch.Tensor:
        q, k, v = self.qkv_proj(x)
        scoring = ops.Scoring(self.scale, alibi_slopes=alibi.slopes)
        if self.deterministic:
            ops.reshape_and_cache(k, v, kv_cache, plan.batch.slot_mapping)
            out = attend_deterministic(q, kv_cache, plan.batch, scoring)
        else:
            out = attention(q, k, v, kv_cache, plan, scoring)
        return self.dense(out.flatten(1))

    def load(self, source: WeightSource, prefix: str) -> None:
        self.qkv_proj.load_interleaved(source, prefix + "self_attention.query_key_value")
        self.dense.load(source, prefix + "self_attention.dense")
        self.dense_h_to_4h.load(source, prefix + "mlp.dense_h_to_4h")
        self.dense_4h_to_h.load(source, prefix + "mlp.dense_4h_to_h")
        self.input_layernorm.load(source, prefix + "input_layernorm")
        self.post_attention_layernorm.load(source, prefix + "post_attention_layernorm")


class BloomForCausalLM(CausalLM):
    """See `CausalLM`."""

    def __init__(
        self, spec: ModelSpec, tp: TPGroup, device: torch.device, dtype: torch.dtype, deterministic: bool = False
    ):
        super().__init__(spec, tp, deterministic)
        bloom = spec.bloom
        if bloom is None:
            raise ValueError(f"{spec.architecture} needs the fields of BLOOM")
        hidden, eps = spec.hidden_size, spec.norm_eps
        self.word_embeddings = VocabParallelEmbedding(spec.vocab_size, hidden, tp=tp, device=device, dtype=dtype)
        self.word_embeddings_layernorm = LayerNorm(hidden, eps, affine=True, device=device, dtype=dtype)
        self.alibi = ALiBi(spec.num_heads, tp=tp, device=device)
        self.layers = nn.ModuleList(
            BloomLayer(spec, bloom, tp, device, dtype, deterministic) for _ in range(spec.num_layers)
        )
        self.ln_f = LayerNorm(hidden, eps, affine=True, device=device, dtype=dtype)
        self.lm_head = ParallelLMHead(
            spec.vocab_size,
            hidden,
            tied=self.word_embeddings if spec.tie_word_embeddings else None,
            tp=tp,
            device=device,
            dtype=dtype,
            deterministic=deterministic,
        )

    def forward(self, batch: ForwardBatch, kv_caches: list[KVCache]) -> torch.Tensor:
        plan = AttentionPlan.of(batch)
        x = self.word_embeddings_layernorm(self.word_embeddings(batch.input_ids))
        for layer, kv_cache in zip(self.layers, kv_caches, strict=False):
            x = layer(x, self.alibi, kv_cache, plan)
        if batch.logit_rows is not None:
            x = x[batch.logit_rows]
        return self.ln_f(x)

    def local_logits(self, hidden: torch.Tensor, room: torch.Tensor | None = None) -> torch.Tensor:
        return self.lm_head(hidden, room)

    def load(self, source: WeightSource) -> None:
        prefix = name_prefix(source, "word_embeddings.weight", "transformer.")
        self.word_embeddings.load(source, prefix + "word_embeddings")
        self.word_embeddings_layernorm.load(source, prefix + "word_embeddings_layernorm")
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, BloomLayer)
            layer.load(source, f"{prefix}h.{i}.")
        self.ln_f.load(source, prefix + "ln_f")
        self.lm_head.load(source, "lm_head")
