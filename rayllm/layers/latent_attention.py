"""Multi-head latent attention (DeepSeek-V2, 2024) over a paged cache of latents."""

from __future__ import annotations

import torch

from rayllm.config.model_spec import LatentSpec
from rayllm.layers.attention import Attention, AttentionPlan, LayerCache
from rayllm.layers.latent_plan import LatentRun, latent_runs, piece_room
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

    neither need be computed: queries are brought to the latents' space, every head attends to the rows themselves, and
    what it finds is brought back ("absorbed"). Long chunks of prompts are faster with keys and values made of all rows
    that they see ("expanded"); `latent_plan.py` says which. The cache has one row a token for all heads, which every
    rank holds whole, while ranks share the heads.

    kv_up: [heads, nope_dim + value_dim, kv_rank] of the rank's heads, the rows of W_uk before those of W_uv, as
    checkpoints have them in "kv_b_proj".
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
        self.kv_up = context.parameter(self.heads, sizes.nope_dim + sizes.value_dim, sizes.kv_rank)
        # Bring queries to the latents' space, and what is found there back.
        self.key_up = self.kv_up[:, : sizes.nope_dim].transpose(1, 2)
        self.value_up = self.kv_up[:, sizes.nope_dim :]
        self.room = piece_room(sizes, self.heads, context.dtype.itemsize)

    def store(self, q: torch.Tensor, kv: torch.Tensor, kv_cache: LayerCache, plan: AttentionPlan) -> list[torch.Tensor]:
        """Write the step's latents and keys into the cache -> the queries of each run of rows, for `attend`.

        q: [T, heads * (nope_dim + rope_dim)] of the rank, some of which is overwritten. kv: [T, kv_rank + rope_dim],
        not yet normed and rotated.
        """
        heads = q.view(q.shape[0], self.heads, self.sizes.query_dim)
        return [
            self._store(heads, kv, kv_cache, plan.batch.positions, plan.batch.slot_mappings[kv_cache.group], run)
            if run.rows is None
            else self._store(
                heads[run.rows],
                kv[run.rows],
                kv_cache,
                plan.batch.positions[run.rows],
                plan.batch.slot_mappings[kv_cache.group][run.rows],
                run,
            )
            for run in self._runs(kv_cache, plan)
        ]

    def attend(self, queries: list[torch.Tensor], kv_cache: LayerCache, plan: AttentionPlan) -> torch.Tensor:
        """Attend queries of `store` to a cache that holds this step's rows -> values [T, heads * value_dim]."""
        sizes, runs = self.sizes, self._runs(kv_cache, plan)
        tokens = sum(part.shape[0] for part in queries)
        out = queries[0].new_empty(tokens, self.heads, sizes.value_dim)
        for part, run in zip(queries, runs, strict=True):
            target = out if run.rows is None else out[run.rows]
            if run.absorbed is None:
                ops.expanded_prefill_attention(
                    part, kv_cache.kv, self.kv_up, self.attention.scoring.scale, run.pieces, self.room, target
                )
            else:
                found = self.attention.attend(part, kv_cache, run.absorbed).unflatten(1, (self.heads, sizes.kv_rank))
                ops.linear_heads(found, self.value_up, out=target, deterministic=self.deterministic)
        return out.flatten(1)

    def _runs(self, kv_cache: LayerCache, plan: AttentionPlan) -> tuple[LatentRun, ...]:
        """One form has to serve all chunks where a token's bits may not depend on how its sequence is cut into them."""
        if self.deterministic:
            return (LatentRun(None, plan),)
        return plan.shared(("latent runs", kv_cache.group), lambda: latent_runs(plan, self.sizes, kv_cache, self.room))

    def _store(
        self,
        heads: torch.Tensor,
        kv: torch.Tensor,
        kv_cache: LayerCache,
        positions: torch.Tensor,
        slots: torch.Tensor,
        run: LatentRun,
    ) -> torch.Tensor:
        """Queries of a run: [N, heads, kv_rank + rope_dim] in the latents' space or, expanded, as projected."""
        sizes, rotary = self.sizes, self.attention.rotary
        assert rotary is not None
        rotated = heads[:, :, sizes.nope_dim :]
        queries, out = heads, rotated
        if run.absorbed is not None:
            queries = heads.new_empty(heads.shape[0], self.heads, sizes.row_dim)
            out = queries[:, :, sizes.kv_rank :]
        ops.latent_norm_rope_cache(
            rotated,
            kv,
            self.norm.weight,
            self.norm.eps,
            positions,
            rotary,
            kv_cache.kv,
            slots,
            out=out,
            interleaved=self.interleaved,
        )
        if run.absorbed is not None:
            nope, latent = heads[:, :, : sizes.nope_dim], queries[:, :, : sizes.kv_rank]
            ops.linear_heads(nope, self.key_up, out=latent, deterministic=self.deterministic)
        if self.query_scale is not None:
            queries *= self.query_scale[positions].to(queries.dtype)[:, None, None]
        return queries

    def load(self, source: WeightSource) -> None:
        rows, rank = self.sizes.nope_dim + self.sizes.value_dim, self.sizes.kv_rank
        start, stop = ((self.tp.rank + part) * self.heads * rows for part in (0, 1))
        shape = self.num_heads * rows, rank
        stored = source.slice(self.prefix + "kv_b_proj.weight", shape, 0, start, stop)
        source.write(self.kv_up, stored.unflatten(0, (self.heads, rows)))
