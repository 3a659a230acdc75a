"""DeepSeek-V2 and V3, and what is built like them: a Llama with latent attention, whose later layers have experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rayllm.config.model_spec import ModelSpec
from rayllm.layers.attention import AttentionPlan, LayerCache
from rayllm.layers.latent_attention import NORM_EPS, LatentAttention
from rayllm.layers.layer import BuildContext
from rayllm.layers.linear import ColumnLinear, Part, RowLinear, column_part
from rayllm.layers.norm import RMSNorm, Summand
from rayllm.models.base import CausalLM
from rayllm.models.llama import LlamaForCausalLM, end_attention
from rayllm.models.sparse_mlp import SparseNames, sparse_mlps
from rayllm_kernels.ops import Scoring


class DeepseekAttention(nn.Module):
    """Projections and latent attention of one layer, called as `LlamaAttention` is.

    Queries are projected at once or, with a q_rank, by way of a normed row of so many entries, which every rank
    computes whole, as it does the latents.
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
        assert spec.latent is not None
        assert spec.rope is not None
        assert rotary is not None
        sizes, hidden, num_heads = spec.latent, spec.hidden_size, spec.num_heads
        queries = num_heads * sizes.query_dim
        latents = _whole("kv_a_proj_with_mqa", sizes.row_dim)
        self.q_norm: RMSNorm | None = None
        self.q_b_proj: ColumnLinear | None = None
        if sizes.q_rank is None:
            first = column_part(build, "q_proj", queries)
        else:
            first = _whole("q_a_proj", sizes.q_rank)
            self.q_norm = RMSNorm(build.at("q_a_layernorm"), sizes.q_rank, NORM_EPS)
            self.q_b_proj = ColumnLinear(build, sizes.q_rank, [column_part(build, "q_b_proj", queries)], bias=False)
        self.widths = [first.rows, latents.rows]
        self.proj = ColumnLinear(build, hidden, [first, latents], bias=spec.qkv_bias)
        scale = sizes.query_dim**-0.5 if spec.attention_scale is None else spec.attention_scale
        self.attention = LatentAttention(
            build,
            num_heads,
            sizes,
            Scoring(scale, spec.sliding_windows[layer]),
            rotary,
            interleaved=spec.rope.interleaved,
            query_scale=query_scale,
        )
        width = num_heads * sizes.value_dim
        self.o_proj = RowLinear(build.at("o_proj"), width, hidden, bias=spec.attention_out_bias)
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
        both, residual = self.proj.after_norm(x, residual, norm)
        q, kv = both.split(self.widths, dim=1)
        if self.q_b_proj is not None and self.q_norm is not None:
            q, _ = self.q_b_proj.after_norm(q, None, self.q_norm)
        queries = self.attention.store(q, kv, kv_cache, plan)
        del both, q, kv  # large, and nobody needs them any more
        out = self.attention.attend(queries, kv_cache, plan)
        return end_attention(out, residual, rows, self.o_proj, self.post_norm)


def _whole(name: str, rows: int) -> Part:
    """A projection of which every rank has all rows."""
    return Part(name, rows, 0, rows)


def _attention(build: BuildContext, spec: ModelSpec, layer: int, *rest: Any) -> nn.Module:
    """A `MakeAttention`."""
    return DeepseekAttention(build.at("self_attn"), spec, layer, *rest)


def deepseek(build: BuildContext, spec: ModelSpec) -> CausalLM:
    return LlamaForCausalLM(build, spec, sparse_mlps(SparseNames()), _attention)
