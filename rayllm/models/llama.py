"""Llama, Mistral, Qwen2 and Qwen3: one decoder whose differences are flags of `ModelSpec`.

Pre-norm blocks of grouped-query attention with rotary positions and a gated MLP. Qwen2 has biases on q, k and v; Qwen3
normalises each query and key head; Mistral (and Qwen, where its config asks for it) attends to a sliding window.
"""

from __future__ import annotations

import torch
from torch import nn

from rayllm.config.model_spec import ModelSpec
from rayllm.layers.activation import gated_activation
from rayllm.layers.attention import AttentionPlan, KVCache, attend
from rayllm.layers.attention_deterministic import attend_deterministic
from rayllm.layers.batch import ForwardBatch
from rayllm.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from rayllm.layers.kv_scales import load_kv_scales
from rayllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from rayllm.layers.norm import RMSNorm
from rayllm.layers.rotary import RotaryEmbedding
from rayllm.layers.weights import WeightSource
from rayllm.models.base import CausalLM, name_prefix
from rayllm.parallel.tp_group import TPGroup
from rayllm_kernels import ops


class LlamaAttention(nn.Module):
    """Projections, optional head norms, rotary positions and attention of one layer."""

    def __init__(
        self, spec: ModelSpec, layer: int, tp: TPGroup, device: torch.device, dtype: torch.dtype, deterministic: bool
    ):
        super().__init__()
        self.deterministic = deterministic
        self.scoring = ops.Scoring(spec.head_dim**-0.5, spec.sliding_windows[layer])
        self.norm_eps = spec.norm_eps
        self.qkv_proj = QKVParallelLinear(
            spec.hidden_size,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            bias=spec.qkv_bias,
            tp=tp,
            device=device,
            dtype=dtype,
            deterministic=deterministic,
        )
        self.o_proj = RowParallelLinear(
            spec.num_heads * spec.head_dim,
            spec.hidden_size,
            bias=spec.attention_out_bias,
            tp=tp,
            device=device,
            dtype=dtype,
            deterministic=deterministic,
        )
        # Norms of one head: every rank has the same.
        self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps, device=device, dtype=dtype) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps, device=device, dtype=dtype) if spec.qk_norm else None

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm: RMSNorm,
        rotary: RotaryEmbedding,
        kv_cache: KVCache,
        plan: AttentionPlan,
        rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """total + attention over norm(total), total = x + residual: in two parts, as x and residual themselves."""
        qkv, residual = self.qkv_proj.after_norm(x, residual, norm)
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = ops.HeadNorms(self.q_norm.weight, self.k_norm.weight, self.norm_eps)
        q = ops.qk_norm_rope_cache(
            qkv,
            norms,
            plan.batch.positions,
            rotary.cos_sin,
            kv_cache,
            plan.batch.slot_mapping,
            deterministic=self.deterministic,
        )
        del qkv  # the largest tensor of many a step, and nobody needs it any more
        if self.deterministic:
            out = attend_deterministic(q, kv_cache, plan.batch, self.scoring)
        else:
            out = attend(q, kv_cache, plan, self.scoring)
        out = out.flatten(1)
        if rows is not None:
            out, residual = out[rows], residual[rows]
        return self.o_proj.onto(out, residual)

    def load(self, source: WeightSource, prefix: str) -> None:
        self.qkv_proj.load(source, prefix)
        self.o_proj.load(source, prefix + "o_proj")
        if self.q_norm is not None and self.k_norm is not None:
            self.q_norm.load(source, prefix + "q_norm")
            self.k_norm.load(source, prefix + "k_norm")


class LlamaMLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, spec: ModelSpec, tp: TPGroup, device: torch.device, dtype: torch.dtype, deterministic: bool):
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            spec.hidden_size,
            {"gate_proj": spec.intermediate_size, "up_proj": spec.intermediate_size},
            bias=spec.mlp_bias,
            tp=tp,
            device=device,
            dtype=dtype,
            deterministic=deterministic,
        )
        self.down_proj = RowParallelLinear(
            spec.intermediate_size,
            spec.hidden_size,
            bias=spec.mlp_bias,
            tp=tp,
            device=device,
            dtype=dtype,
            deterministic=deterministic,
        )
        self.act = gated_activation(spec.hidden_act, deterministic)
        self.tp = tp
        self.fuses = spec.hidden_act in ("silu", "swish") and not spec.mlp_bias and not deterministic

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, norm: RMSNorm
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """total + MLP of norm(total), total = x + residual: in two parts, as x and residual themselves."""
        weight = self.gate_up_proj.weight
        if self.fuses and self.tp.size == 1:
            x, total = ops.add_rms_norm_linear_silu_mul(x, residual, norm.weight, norm.eps, weight)
        else:
            x, total = norm.add_partial(x, residual, self.tp)
            x = ops.linear_silu_mul(x, weight) if self.fuses else self.act(self.gate_up_proj(x))
        return self.down_proj.onto(x, total)

    def load(self, source: WeightSource, prefix: str) -> None:
        self.gate_up_proj.load(source, prefix)
        self.down_proj.load(source, prefix + "down_proj")


class LlamaLayer(nn.Module):
    """One block. The residual stream travels beside the activations: each addition fuses with what follows it."""

    def __init__(
        self, spec: ModelSpec, layer: int, tp: TPGroup, device: torch.device, dtype: torch.dtype, deterministic: bool
    ):
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps, device=device, dtype=dtype)
        self.self_attn = LlamaAttention(spec, layer, tp, device, dtype, deterministic)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps, device=device, dtype=dtype)
        self.mlp = LlamaMLP(spec, tp, device, dtype, deterministic)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rotary: RotaryEmbedding,
        kv_cache: KVCache,
        plan: AttentionPlan,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x: the rank's summand of what is not yet added to `residual`; both [T, hidden_size], and so returned.

        Without a residual, x is the whole sum, the same on all ranks. rows [N]: of the tokens to go on with after
        attention, the others being there for their keys and values alone; None for all.
        """
        x, residual = self.self_attn(x, residual, self.input_layernorm, rotary, kv_cache, plan, rows)
        return self.mlp(x, residual, self.post_attention_layernorm)

    def load(self, source: WeightSource, prefix: str) -> None:
        self.input_layernorm.load(source, prefix + "input_layernorm")
        self.self_attn.load(source, prefix + "self_attn.")
        self.post_attention_layernorm.load(source, prefix + "post_attention_layernorm")
        self.mlp.load(source, prefix + "mlp.")


class LlamaForCausalLM(CausalLM):
    """See `CausalLM`."""

    def __init__(
        self, spec: ModelSpec, tp: TPGroup, device: torch.device, dtype: torch.dtype, deterministic: bool = False
    ):
        super().__init__(spec, tp, deterministic)
        if spec.rope is None:
            raise ValueError(f"{spec.architecture} needs rotary positions")
        self.embed_tokens = VocabParallelEmbedding(spec.vocab_size, spec.hidden_size, tp=tp, device=device, dtype=dtype)
        # yarn may reach less far than max_position_embeddings claims; the table covers both.
        max_position = max(spec.max_model_len, spec.max_position_embeddings)
        self.rotary = RotaryEmbedding(spec.rope, max_position, device=device)
        self.layers = nn.ModuleList(
            LlamaLayer(spec, i, tp, device, dtype, deterministic) for i in range(spec.num_layers)
        )
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps, device=device, dtype=dtype)
        self.lm_head = ParallelLMHead(
            spec.vocab_size,
            spec.hidden_size,
            tied=self.embed_tokens if spec.tie_word_embeddings else None,
            tp=tp,
            device=device,
            dtype=dtype,
            deterministic=deterministic,
        )

    def forward(self, batch: ForwardBatch, kv_caches: list[KVCache]) -> torch.Tensor:
        plan = AttentionPlan.of(batch)
        x = self.embed_tokens(batch.input_ids)
        residual: torch.Tensor | None = None
        *layers, last = zip(self.layers, kv_caches, strict=False)
        for layer, kv_cache in layers:
            x, residual = layer(x, residual, self.rotary, kv_cache, plan)
        # In the last layer a prompt's tokens matter for their keys and values alone. A captured step may have room for
        # more rows than it has tokens.
        rows = batch.logit_rows
        few = rows is not None and rows.shape[0] < x.shape[0]
        x, residual = last[0](x, residual, self.rotary, last[1], plan, rows if few else None)
        hidden, _ = self.norm.add_partial(x, residual, self.tp)
        return hidden if rows is None or few else hidden[rows]

    def local_logits(self, hidden: torch.Tensor, room: torch.Tensor | None = None) -> torch.Tensor:
        return self.lm_head(hidden, room)

    def load(self, source: WeightSource) -> None:
        prefix = name_prefix(source, "embed_tokens.weight")
        self.embed_tokens.load(source, prefix + "embed_tokens")
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, LlamaLayer)
            layer.load(source, f"{prefix}layers.{i}.")
            names = f"{prefix}layers.{i}.self_attn."
            self.kv_scales[i] = load_kv_scales(source, names, self.spec.num_kv_heads, self.tp)
        self.norm.load(source, prefix + "norm")
        self.lm_head.load(source, "lm_head")
