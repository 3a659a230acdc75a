"""OPT (Zhang et al., 2022): learned positions, LayerNorm before or after each part, plain MLP, biases throughout."""

from __future__ import annotations

import torch
from torch import nn

from rayllm.config.model_spec import ModelSpec, OPTSpec
from rayllm.layers.activation import activation
from rayllm.layers.attention import AttentionPlan, KVCache, attention
from rayllm.layers.attention_deterministic import attend_deterministic
from rayllm.layers.batch import ForwardBatch
from rayllm.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from rayllm.layers.kv_scales import load_kv_scales
from rayllm.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from rayllm.layers.norm import LayerNorm
from rayllm.layers.weights import WeightSource
from rayllm.models.base import CausalLM, name_prefix
from rayllm.parallel.tp_group import TPGroup
from rayllm_kernels import ops

# OPT's position table has two rows before position 0, a heritage of fairseq's padding index.
POSITION_OFFSET = 2


class OPTLayer(nn.Module):
    """One block: attention and MLP, each with its residual and its norm before (or, in OPT-350m, after)."""

    def __init__(
        self, spec: ModelSpec, opt: OPTSpec, tp: TPGroup, device: torch.device, dtype: torch.dtype, deterministic: bool
    ):
        super().__init__()
        hidden, inner, self.deterministic = spec.hidden_size, spec.intermediate_size, deterministic
        self.pre_norm, self.scoring = opt.pre_norm, ops.Scoring(spec.head_dim**-0.5)
        self.qkv_proj = QKVParallelLinear(
            hidden,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            bias=spec.qkv_bias,
            tp=tp,
            device=device,
            dtype=dtype,
            deterministic=deterministic,
        )
        self.out_proj = RowParallelLinear(
            hidden, hidden, bias=spec.attention_out_bias, tp=tp, device=device, dtype=dtype, deterministic=deterministic
        )
        self.fc1 = ColumnParallelLinear(
            hidden, inner, bias=spec.mlp_bias, tp=tp, device=device, dtype=dtype, deterministic=deterministic
        )
        self.fc2 = RowParallelLinear(
            inner, hidden, bias=spec.mlp_bias, tp=tp, device=device, dtype=dtype, deterministic=deterministic
        )
        self.act = activation(spec.hidden_act, deterministic)
        self.self_attn_layer_norm = LayerNorm(hidden, spec.norm_eps, affine=opt.norm_affine, device=device, dtype=dtype)
        self.final_layer_norm = LayerNorm(hidden, spec.norm_eps, affine=opt.norm_affine, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor, kv_cache: KVCache, plan: AttentionPlan) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        if self.pre_norm:
            x = x + self._attend(self.self_attn_layer_norm(x), kv_cache, plan)
            return x + self._mlp(self.final_layer_norm(x))
        x = self.self_attn_layer_norm(x + self._attend(x, kv_cache, plan))
        return self.final_layer_norm(x + self._mlp(x))

    def _attend(self, x: torch.Tensor, kv_cache: KVCache, plan: AttentionPlan) -> torch.Tensor:
        q, k, v = self.qkv_proj(x)
        if self.deterministic:
            ops.reshape_and_cache(k, v, kv_cache, plan.batch.slot_mapping)
            out = attend_deterministic(q, kv_cache, plan.batch, self.scoring)
        else:
            out = attention(q, k, v, kv_cache, plan, self.scoring)
        return self.out_proj(out.flatten(1))

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.act(self.fc1(x)))

    def load(self, source: WeightSource, prefix: str) -> None:
        self.qkv_proj.load(source, prefix + "self_attn.")
        self.out_proj.load(source, prefix + "self_attn.out_proj")
        self.fc1.load(source, prefix + "fc1")
        self.fc2.load(source, prefix + "fc2")
        self.self_attn_layer_norm.load(source, prefix + "self_attn_layer_norm")
        self.final_layer_norm.load(source, prefix + "final_layer_norm")


class OPTForCausalLM(CausalLM):
    """See `CausalLM`. The projection from hidden_size to the embeddings' width is a part of `local_logits`."""

    def __init__(
        self, spec: ModelSpec, tp: TPGroup, device: torch.device, dtype: torch.dtype, deterministic: bool = False
    ):
        super().__init__(spec, tp, deterministic)
        opt = spec.opt
        if opt is None:
            raise ValueError(f"{spec.architecture} needs the fields of OPT")
        alone = TPGroup.single()
        self.embed_tokens = VocabParallelEmbedding(spec.vocab_size, opt.embed_dim, tp=tp, device=device, dtype=dtype)
        self.embed_positions = VocabParallelEmbedding(
            spec.max_position_embeddings + POSITION_OFFSET, spec.hidden_size, tp=alone, device=device, dtype=dtype
        )
        self.project_in: ColumnParallelLinear | None = None
        self.project_out: ColumnParallelLinear | None = None
        if opt.embed_dim != spec.hidden_size:
            self.project_in = ColumnParallelLinear(
                opt.embed_dim,
                spec.hidden_size,
                bias=False,
                tp=alone,
                device=device,
                dtype=dtype,
                deterministic=deterministic,
            )
            self.project_out = ColumnParallelLinear(
                spec.hidden_size,
                opt.embed_dim,
                bias=False,
                tp=alone,
                device=device,
                dtype=dtype,
                deterministic=deterministic,
            )
        self.layers = nn.ModuleList(
            OPTLayer(spec, opt, tp, device, dtype, deterministic) for _ in range(spec.num_layers)
        )
        self.final_layer_norm: LayerNorm | None = None
        if opt.final_norm:
            self.final_layer_norm = LayerNorm(
                spec.hidden_size, spec.norm_eps, affine=opt.norm_affine, device=device, dtype=dtype
            )
        self.lm_head = ParallelLMHead(
            spec.vocab_size,
            opt.embed_dim,
            tied=self.embed_tokens if spec.tie_word_embeddings else None,
            tp=tp,
            device=device,
            dtype=dtype,
            deterministic=deterministic,
        )

    def forward(self, batch: ForwardBatch, kv_caches: list[KVCache]) -> torch.Tensor:
        plan = AttentionPlan.of(batch)
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
        return self.lm_head(hidden if self.project_out is None else self.project_out(hidden), room)

    def load(self, source: WeightSource) -> None:
        prefix = name_prefix(source, "decoder.embed_tokens.weight") + "decoder."
        self.embed_tokens.load(source, prefix + "embed_tokens")
        self.embed_positions.load(source, prefix + "embed_positions")
        if self.project_in is not None and self.project_out is not None:
            self.project_in.load(source, prefix + "project_in")
            self.project_out.load(source, prefix + "project_out")
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, OPTLayer)
            layer.load(source, f"{prefix}layers.{i}.")
            names = f"{prefix}layers.{i}.self_attn."
            self.kv_scales[i] = load_kv_scales(source, names, self.spec.num_kv_heads, self.tp)
        if self.final_layer_norm is not None:
            self.final_layer_norm.load(source, prefix + "final_layer_norm")
        self.lm_head.load(source, "lm_head")
