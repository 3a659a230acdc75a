"""Gemma 4's text model.

Beside what Gemma 3 has: layers without a window have larger heads, and may have one projection for keys and values;
values are normed too; the last layers may attend to keys and values of earlier ones; each layer is fed an embedding of
its own of each token; a layer may have experts beside its MLP; what a layer gives is multiplied by a number.
"""

from __future__ import annotations

import torch
from torch import nn

from rayllm.config.model_spec import ModelSpec
from rayllm.layers.activation import activation
from rayllm.layers.attention import Attention, AttentionPlan, LayerCache
from rayllm.layers.batch import ForwardBatch
from rayllm.layers.embedding import Embedding, LMHead
from rayllm.layers.experts import Experts
from rayllm.layers.layer import BuildContext, Layer
from rayllm.layers.linear import ColumnLinear, RowLinear, column_part, qkv_parts
from rayllm.layers.norm import RMSNorm
from rayllm.layers.rotary import cos_sin_table
from rayllm.layers.router import Router
from rayllm.layers.weights import WeightSource
from rayllm.models.base import CausalLM, heads_of
from rayllm.models.llama import LlamaMLP
from rayllm_kernels import ops
from rayllm_kernels.ops import Scoring


def _norm(build: BuildContext, spec: ModelSpec, name: str, size: int | None = None) -> RMSNorm:
    """Of the residual's width unless another size is given."""
    return RMSNorm(build.at(name), size or spec.hidden_size, spec.norm_eps, wide=True)


def _whole_linear(build: BuildContext, name: str, inputs: int, outputs: int) -> ColumnLinear:
    """One that every rank has whole."""
    whole = build.replicated
    return ColumnLinear(whole, inputs, [column_part(whole, name, outputs)], bias=False)


class Gemma4Attention(nn.Module):
    """Projections, norms of heads, rotary positions and attention of one layer. rotary: see `Attention`."""

    def __init__(self, build: BuildContext, spec: ModelSpec, layer: int, rotary: torch.Tensor, post_norm: RMSNorm):
        super().__init__()
        assert spec.gemma4 is not None
        heads, window = heads_of(spec, layer), spec.sliding_windows[layer]
        reads_only = spec.kv_layer(layer) != layer
        query, key, value = qkv_parts(build, heads)
        if spec.gemma4.key_is_value and window is None:  # read twice, so that one product makes both
            value = key
        parts = [query] if reads_only else [query, key, value]
        self.qkv_proj = ColumnLinear(build, spec.hidden_size, parts, bias=spec.qkv_bias)
        assert spec.attention_scale is not None
        self.attention = Attention(
            build,
            heads,
            Scoring(spec.attention_scale, window),
            rotary,
            spec.norm_eps,
            norm_wide=True,
            norm_values=True,
            reads_only=reads_only,
        )
        width = heads.num_heads * heads.head_dim
        self.o_proj = RowLinear(build.at("o_proj"), width, spec.hidden_size, bias=spec.attention_out_bias)
        self.post_norm = post_norm

    def forward(
        self, x: torch.Tensor, norm: RMSNorm, kv_cache: LayerCache, plan: AttentionPlan, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """x + attention over norm(x), for these rows alone unless they are None."""
        qkv, x = self.qkv_proj.after_norm(x, None, norm)
        q = self.attention.store(qkv, kv_cache, plan)
        del qkv  # the largest tensor of many a step, and nobody needs it any more
        out = self.attention.attend(q, kv_cache, plan)
        if rows is not None:
            out, x = out[rows], x[rows]
        return self.post_norm.onto(self.o_proj(out), x)


class RouterNorm(Layer):
    """x / sqrt(mean(x^2) + eps) * scale / sqrt(size), in fp32 and rounded once."""

    def __init__(self, context: BuildContext, size: int, eps: float):
        super().__init__(context)
        self.size, self.eps, self.dtype = size, eps, context.dtype
        self.weight = context.parameter(size, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, size]."""
        return ops.rms_norm(x, self.weight, self.eps)

    def load(self, source: WeightSource) -> None:
        stored = source.tensor(self.prefix + "scale", (self.size,)).to(self.dtype).float()
        source.write(self.weight, stored * self.size**-0.5)


class Gemma4Experts(nn.Module):
    """Router and experts of a layer, beside its MLP. build: of the layer."""

    def __init__(self, build: BuildContext, spec: ModelSpec):
        super().__init__()
        sizes, hidden = spec.experts, spec.hidden_size
        assert sizes is not None
        self.router_norm = RouterNorm(build.at("router"), hidden, spec.norm_eps)
        self.router = Router(
            build,
            hidden,
            sizes.num_experts,
            sizes.top_k,
            sizes.router,
            ("router.proj",),
            factors=("router.per_expert_scale",),
        )
        self.experts = Experts(
            build,
            hidden,
            sizes.num_experts,
            sizes.intermediate_size,
            spec.hidden_act,
            ("experts",),
            ("gate_proj", "up_proj", "down_proj"),
        )
        self.tp = build.tp
        self.dense_norm = _norm(build, spec, "post_feedforward_layernorm_1")
        self.norm = _norm(build, spec, "pre_feedforward_layernorm_2")
        self.post_norm = _norm(build, spec, "post_feedforward_layernorm_2")

    def forward(self, x: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        """The experts' output for the residual x, and the MLP's, `dense`, each normed: all [T, hidden_size]."""
        weights, experts = self.router(self.router_norm(x))
        out = self.tp.all_reduce(self.experts(self.norm(x), weights, experts))
        return self.post_norm.onto(out, self.dense_norm(dense))


class LayerEmbeddings(nn.Module):
    """Embeddings of tokens for each layer: one that is looked up, and one from the token's embedding, added up.

    build: of the model's body. forward: ids [T], x [T, hidden_size], the tokens' embeddings
    -> [T, num_layers, layer_embedding].
    """

    def __init__(self, build: BuildContext, spec: ModelSpec):
        super().__init__()
        assert spec.gemma4 is not None
        size, hidden = spec.gemma4.layer_embedding, spec.hidden_size
        self.shape = spec.num_layers, size
        width = spec.num_layers * size
        self.embed = Embedding(build.at("embed_tokens_per_layer"), spec.gemma4.layer_vocab, width, scale=size**0.5)
        self.projection = _whole_linear(build, "per_layer_model_projection", hidden, width)
        self.norm = _norm(build, spec, "per_layer_projection_norm", size)
        self.scale = hidden**-0.5

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        projected = self.projection(x).mul_(self.scale).unflatten(1, self.shape)
        return self.norm(projected).add_(self.embed(ids).unflatten(1, self.shape)).mul_(2**-0.5)


class LayerEmbeddingInput(nn.Module):
    """x + norm(projection(act(gate(x)) * embedding)). build: of the layer."""

    def __init__(self, build: BuildContext, spec: ModelSpec):
        super().__init__()
        assert spec.gemma4 is not None
        size, hidden = spec.gemma4.layer_embedding, spec.hidden_size
        self.gate = _whole_linear(build, "per_layer_input_gate", hidden, size)
        self.act = activation(spec.hidden_act, build)
        self.projection = _whole_linear(build, "per_layer_projection", size, hidden)
        self.norm = _norm(build, spec, "post_per_layer_input_norm")

    def forward(self, x: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """x: [T, hidden_size]; embedding: [T, layer_embedding]."""
        return self.norm.onto(self.projection(self.act(self.gate(x)) * embedding), x)


class LayerScalar(Layer):
    """The number that all of a layer's output is multiplied by."""

    def __init__(self, context: BuildContext):
        super().__init__(context)
        self.layer_scalar = context.parameter(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x is overwritten."""
        return x.mul_(self.layer_scalar)


class Gemma4Layer(nn.Module):
    """One block. x [T, hidden_size] is the whole residual, the same on all ranks."""

    def __init__(self, build: BuildContext, spec: ModelSpec, layer: int, rotary: torch.Tensor):
        super().__init__()
        assert spec.gemma4 is not None
        after_attention = _norm(build, spec, "post_attention_layernorm")
        self.input_layernorm = _norm(build, spec, "input_layernorm")
        self.self_attn = Gemma4Attention(build.at("self_attn"), spec, layer, rotary, after_attention)
        is_wide = spec.gemma4.wide_readers and spec.kv_layer(layer) != layer
        inner = spec.intermediate_size * (2 if is_wide else 1)
        self.pre_feedforward_layernorm = _norm(build, spec, "pre_feedforward_layernorm")
        self.mlp = LlamaMLP(build.at("mlp"), spec, inner=inner)
        self.experts = Gemma4Experts(build, spec) if spec.is_sparse(layer) else None
        self.post_feedforward_layernorm = _norm(build, spec, "post_feedforward_layernorm")
        self.embedding_input = LayerEmbeddingInput(build, spec) if spec.gemma4.layer_embedding else None
        self.scalar = LayerScalar(build)

    def forward(
        self,
        x: torch.Tensor,
        embedding: torch.Tensor | None,
        kv_cache: LayerCache,
        plan: AttentionPlan,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """embedding: the layer's own of each token [T, layer_embedding]. rows: as for `LlamaLayer`."""
        x = self.self_attn(x, self.input_layernorm, kv_cache, plan, rows)
        inner, x = self.mlp.gate_up_proj.after_norm(x, None, self.pre_feedforward_layernorm)
        out = self.mlp.down_proj(inner)
        if self.experts is not None:
            out = self.experts(x, out)
        x = self.post_feedforward_layernorm.onto(out, x)
        if self.embedding_input is not None and embedding is not None:
            x = self.embedding_input(x, embedding if rows is None else embedding[rows])
        return self.scalar(x)


class Gemma4ForCausalLM(CausalLM):
    """See `CausalLM`."""

    def __init__(self, build: BuildContext, spec: ModelSpec):
        super().__init__(build, spec)
        assert spec.rope is not None
        assert spec.window_rope is not None
        assert spec.gemma4 is not None
        body = build.at("model")
        rotary, window_rotary = (
            cos_sin_table(rope, build.max_model_len).to(build.device) for rope in (spec.rope, spec.window_rope)
        )
        self.embed_tokens = Embedding(
            body.at("embed_tokens"), spec.vocab_size, spec.hidden_size, scale=spec.embedding_scale
        )
        self.layer_embeddings = LayerEmbeddings(body, spec) if spec.gemma4.layer_embedding else None
        self.layers = nn.ModuleList(
            Gemma4Layer(body.at(f"layers.{i}"), spec, i, rotary if window is None else window_rotary)
            for i, window in enumerate(spec.sliding_windows)
        )
        self.norm = _norm(body, spec, "norm")
        tied = self.embed_tokens if spec.tie_word_embeddings else None
        self.lm_head = LMHead(
            build.at("lm_head"), spec.vocab_size, spec.hidden_size, tied=tied, softcap=spec.logit_softcap
        )

    @property
    def active_parameters(self) -> int:
        """Without the layers' embeddings, of which a token has one row, and which may be more than all else."""
        table = 0 if self.layer_embeddings is None else self.layer_embeddings.embed.weight.numel()
        return super().active_parameters - table

    def forward(self, batch: ForwardBatch, kv_caches: list[LayerCache]) -> torch.Tensor:
        plan = AttentionPlan.of(batch, self.build)
        x = self.embed_tokens(batch.input_ids)
        embeddings = None if self.layer_embeddings is None else self.layer_embeddings(batch.input_ids, x)
        # In the last layer a prompt's tokens matter for their keys and values alone. A captured step may have room for
        # more rows than it has tokens.
        rows, last = batch.logit_rows, len(kv_caches) - 1
        few = rows is not None and rows.shape[0] < x.shape[0]
        for i, (layer, kv_cache) in enumerate(zip(self.layers, kv_caches, strict=False)):
            own = None if embeddings is None else embeddings[:, i]
            x = layer(x, own, kv_cache, plan, rows if few and i == last else None)
        hidden = self.norm(x)
        return hidden if rows is None or few else hidden[rows]
