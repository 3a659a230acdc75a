"""`BuildContext`: makes the layers of a model. What a rank, a device or a mode asks of a layer is decided here."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from rayllm.config.resolved import ResolvedConfig
from rayllm.config.rope import RopeSpec
from rayllm.layers.activation import Activation, activation
from rayllm.layers.alibi import alibi_slopes
from rayllm.layers.attention import Attention
from rayllm.layers.embedding import Embedding, LMHead
from rayllm.layers.layer import Heads, LayerContext
from rayllm.layers.linear import ColumnLinear, GatedLinear, InterleavedQKVLinear, RowLinear, column_part, qkv_parts
from rayllm.layers.norm import LayerNorm, RMSNorm
from rayllm.layers.rotary import cos_sin_table
from rayllm.parallel.tp_group import TPGroup
from rayllm_kernels.ops import Scoring


@dataclass(frozen=True)
class BuildContext(LayerContext):
    """A model is handed one and makes its layers with it, in parts that `at` names as the checkpoint does.

    Sizes are of the whole model. Each layer keeps the rank's part of its weights, and reads it by itself: `name` is the
    weights' name in the checkpoint, after the context's own prefix.
    """

    @classmethod
    def of(cls, config: ResolvedConfig, tp: TPGroup, device: torch.device) -> BuildContext:
        """For the whole model of a rank."""
        return cls(tp, device, getattr(torch, config.dtype), config.options.deterministic)

    @property
    def replicated(self) -> BuildContext:
        """For layers that every rank has whole."""
        return replace(self, tp=TPGroup.single())

    def column_linear(self, name: str, in_features: int, out_features: int, *, bias: bool) -> ColumnLinear:
        """[T, in] -> [T, out / tp]."""
        return ColumnLinear(self, in_features, [column_part(self, name, out_features)], bias=bias)

    def row_linear(self, name: str, in_features: int, out_features: int, *, bias: bool) -> RowLinear:
        """[T, in / tp] -> [T, out], the same on all ranks."""
        return RowLinear(self.at(name), in_features, out_features, bias=bias)

    def gated_linear(
        self, gate: str, up: str, in_features: int, out_features: int, act: str, bias: bool
    ) -> GatedLinear:
        """[T, in] -> act(gate) * up [T, out / tp], of the projections named `gate` and `up`."""
        parts = [column_part(self, name, out_features) for name in (gate, up)]
        return GatedLinear(self, in_features, parts, act, bias=bias)

    def qkv_linear(self, in_features: int, heads: Heads, *, bias: bool) -> ColumnLinear:
        """[T, in] -> [T, (heads + 2 KV heads of the rank) * head_dim], of "q_proj", "k_proj" and "v_proj"."""
        return ColumnLinear(self, in_features, qkv_parts(self, heads), bias=bias)

    def interleaved_qkv_linear(self, name: str, in_features: int, heads: Heads, *, bias: bool) -> InterleavedQKVLinear:
        """As `qkv_linear`, from a checkpoint that has the three as one, `name`, head by head."""
        return InterleavedQKVLinear(self.at(name), in_features, heads, bias=bias)

    def attention(
        self, heads: Heads, scoring: Scoring, rotary: torch.Tensor | None = None, norm_eps: float | None = None
    ) -> Attention:
        """See `Attention`. This is the context of the layer's attention, where norms of heads and KV scales belong."""
        return Attention(self, heads, scoring, rotary, norm_eps)

    def rotary_table(self, rope: RopeSpec, max_position: int) -> torch.Tensor:
        """For `attention`, up to max_position tokens; one serves all layers."""
        return cos_sin_table(rope, max_position).to(self.device)

    def alibi_slopes(self, num_heads: int) -> torch.Tensor:
        """For the `Scoring` of `attention`: [num_heads / tp] float32; one serves all layers."""
        count = num_heads // self.tp.size
        own = alibi_slopes(num_heads)[self.tp.rank * count :][:count]
        return torch.tensor(own, dtype=torch.float32, device=self.device)

    def rms_norm(self, name: str, size: int, eps: float) -> RMSNorm:
        """[..., size] -> the same, on every rank."""
        return RMSNorm(self.at(name), size, eps)

    def layer_norm(self, name: str, size: int, eps: float, *, affine: bool = True) -> LayerNorm:
        """[..., size] -> the same, on every rank."""
        return LayerNorm(self.at(name), size, eps, affine=affine)

    def embedding(self, name: str, size: int, dim: int) -> Embedding:
        """ids [T] below `size` -> [T, dim]."""
        return Embedding(self.at(name), size, dim)

    def lm_head(self, name: str, vocab_size: int, dim: int, *, tied: Embedding | None) -> LMHead:
        """[N, dim] -> logits [N, the rank's tokens]; tied: the embedding that shares its weight."""
        return LMHead(self.at(name), vocab_size, dim, tied=tied)

    def activation(self, name: str) -> Activation:
        """Elementwise; for a gated one there is `gated_linear`."""
        return activation(name, self.deterministic)
