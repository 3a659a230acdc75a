"""`ModelSpec`: what config.json of a Hugging Face folder says of a model, checked, in one frozen struct."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from rayllm.config.quantization import QuantizationSpec
from rayllm.config.rope import RopeSpec
from rayllm.errors import ModelError


@dataclass(frozen=True, slots=True)
class OPTSpec:
    """What only OPT has. embed_dim: width of the token embeddings, projected to hidden_size if it differs.

    pre_norm: norms before attention and MLP, not after. final_norm: one more after the last layer.
    norm_affine: norms have a weight and a bias.
    """

    embed_dim: int
    pre_norm: bool
    final_norm: bool
    norm_affine: bool


@dataclass(frozen=True, slots=True)
class BloomSpec:
    """What only BLOOM has. residual_after_norm: residuals are taken after the norms of attention and MLP."""

    residual_after_norm: bool


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model's shape. Sizes are of the whole model, not of a rank.

    dtype: of the checkpoint.
    sliding_windows: one entry a layer, tokens a query sees counting itself, None for all.
    quantization: how the checkpoint stores weights in fewer bits; None if it does not.
    rope is None for OPT and BLOOM, opt and bloom are None for the others.
    """

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    norm_eps: float
    hidden_act: str
    dtype: str
    tie_word_embeddings: bool
    qkv_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    sliding_windows: tuple[int | None, ...]
    eos_token_ids: list[int]
    qk_norm: bool = False
    rope: RopeSpec | None = None
    opt: OPTSpec | None = None
    bloom: BloomSpec | None = None
    quantization: QuantizationSpec | None = None

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output that the position embedding is good for."""
        return self.rope.max_model_len(self.max_position_embeddings) if self.rope else self.max_position_embeddings

    @property
    def kv_window(self) -> int | None:
        """Tokens that a query sees in the layer that sees most, counting itself; None if one sees them all."""
        windows = [window for window in self.sliding_windows if window is not None]
        return max(windows) if len(windows) == self.num_layers else None

    def layer_kind(self, layer: int) -> Hashable:
        """Equal for layers that run the same kernels on tensors of the same shapes."""
        return self.sliding_windows[layer]

    @property
    def num_distinct_layers(self) -> int:
        """How many of the first layers run every kernel of the model, and need as much memory as all of them.

        All kinds of layers occur, and one layer at least is neither the first, which adds to nothing, nor the last,
        which goes on with fewer tokens after attention.
        """
        kinds = [self.layer_kind(layer) for layer in range(self.num_layers)]
        last_new = max(kinds.index(kind) for kind in set(kinds))
        return min(self.num_layers, max(3, last_new + 1))

    def kv_heads_per_rank(self, tp: int) -> int:
        """KV heads that each of `tp` ranks holds: replicated where there are more ranks than heads."""
        return max(1, self.num_kv_heads // tp)


def check_parallel(spec: ModelSpec, tp: int) -> None:
    """Raises ModelError if `tp` ranks cannot share this model's heads or its MLP evenly."""
    if spec.num_heads % tp:
        raise ModelError(f"tensor_parallel_size {tp} does not divide the model's {spec.num_heads} attention heads")
    if spec.num_kv_heads % tp and tp % spec.num_kv_heads:
        raise ModelError(
            f"tensor_parallel_size {tp} neither divides nor is a multiple of the model's {spec.num_kv_heads} KV heads"
        )
    if spec.intermediate_size % tp:
        raise ModelError(
            f"tensor_parallel_size {tp} does not divide the model's intermediate_size {spec.intermediate_size}"
        )
