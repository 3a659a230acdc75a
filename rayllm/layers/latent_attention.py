"""Multi-head latent attention (DeepSeek-V2, 2024) over a paged cache of latents."""

from __future__ import annotations

import torch

from rayllm.config.model_spec import LatentSpec
from rayllm.layers.attention import Attention, AttentionPlan, LayerCache
from rayllm.layers.layer import BuildContext, Heads, Layer
from rayllm.layers.norm import RMSNorm
from rayllm.layers.weights import WeightSource
from rayllm_kernels import ops
from rayllm_kernels.ops import Scoring

NORM_EPS = 1e-6  # whatever config.json says of the others


class LatentAttention(Layer):
    """Attention whose keys and values are all made of one short row a token: a latent, and a rotated key behind it.

    A head's key is W_uk latent and, behind it, the rotated key; its value is W_uv latent. Since

        <q, W_uk latent> = <W_uk^T q, latent>,  sum_j w_j W_uv latent_j = W_uv sum_j w_j latent_j

    neither is ever computed: queries are brought to the latents' space, every head attends to the rows themselves, and
    what it finds is brought back. So the cache has one row a token for all heads, which every rank holds whole, while
    ranks share the heads.

    key_up: W_uk^T [heads, kv_rank, nope_dim] and value_up: W_uv [heads, value_dim, kv_rank] of the rank's heads. In
    checkpoints they are one, "kv_b_proj": head by head, the rows of W_uk before those of W_uv.
    scoring, rotary, interleaved: as for `Attention`. query_scale: [max_position] float32, what queries of each position
    are multiplied by, or None.
    """

    def __init__(
        self,
        context: BuildContext,
        num_heads: int,
        sizes: LatentSpec,
        scoring: Scoring,
        rotary: torch.Tensor,
        *,
        interleaved: bool,
        query_scale: torch.Tensor | None = None,
    ):
        super().__init__(context)
        self.num_heads, self.sizes = num_heads, sizes
        self.interleaved, self.query_scale = interleaved, query_scale
        self.deterministic = context.deterministic
        self.heads = context.shard(num_heads, "heads")
        self.attention = Attention(
            context, Heads(num_heads, 1, sizes.row_dim), scoring, rotary, value_dim=sizes.kv_rank
        )
        self.norm = RMSNorm(context.at("kv_a_layernorm"), sizes.kv_rank, NORM_EPS)
        self.key_up = context.parameter(self.heads, sizes.kv_rank, sizes.nope_dim)
        self.value_up = context.parameter(self.heads, sizes.value_dim, sizes.kv_rank)

    def store(self, q: torch.Tensor, kv: torch.Tensor, kv_cache: LayerCache, plan: AttentionPlan) -> torch.Tensor:
        """Write the step's latents and keys into the cache -> queries [T, heads, kv_rank + rope_dim] in their space.

        q: [T, heads * (nope_dim + rope_dim)] of the rank. kv: [T, kv_rank + rope_dim], not yet normed and rotated.
        """
        sizes, rotary, batch = self.sizes, self.attention.rotary, plan.batch
        assert rotary is not None
        heads = q.view(q.shape[0], self.heads, sizes.query_dim)
        queries = q.new_empty(q.shape[0], self.heads, sizes.row_dim)
        ops.latent_norm_rope_cache(
            heads[:, :, sizes.nope_dim :],
            kv,
            self.norm.weight,
            self.norm.eps,
            batch.positions,
            rotary,
            kv_cache.kv,
            batch.slot_mappings[kv_cache.group],
            out=queries[:, :, sizes.kv_rank :],
            interleaved=self.interleaved,
        )
        nope, latent = heads[:, :, : sizes.nope_dim], queries[:, :, : sizes.kv_rank]
        ops.linear_heads(nope, self.key_up, out=latent, deterministic=self.deterministic)
        if self.query_scale is not None:
            queries *= self.query_scale[batch.positions].to(queries.dtype)[:, None, None]
        return queries

    def attend(self, queries: torch.Tensor, kv_cache: LayerCache, plan: AttentionPlan) -> torch.Tensor:
        """Attend queries of `store` to a cache that holds this step's rows -> values [T, heads * value_dim]."""
        found = self.attention.attend(queries, kv_cache, plan).unflatten(1, (self.heads, self.sizes.kv_rank))
        return ops.linear_heads(found, self.value_up, deterministic=self.deterministic).flatten(1)

    def load(self, source: WeightSource) -> None:
        nope, value, rank = self.sizes.nope_dim, self.sizes.value_dim, self.sizes.kv_rank
        start, rows = self.tp.rank * self.heads * (nope + value), self.heads * (nope + value)
        shape = self.num_heads * (nope + value), rank
        stored = source.slice(self.prefix + "kv_b_proj.weight", shape, 0, start, start + rows)
        keys, values = stored.unflatten(0, (self.heads, nope + value)).split([nope, value], dim=1)
        source.write(self.key_up, keys.transpose(1, 2))
        source.write(self.value_up, values)
