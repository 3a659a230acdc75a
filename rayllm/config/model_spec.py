"""`ModelSpec`: what config.json of a Hugging Face folder says of a model, checked, in one frozen struct."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

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
class Gemma4Spec:
    """What only Gemma 4 has. key_is_value: layers without a window have one projection for keys and values.

    layer_embedding: entries of a token's embedding for each layer, which is fed to it beside the residual; 0 for none.
    layer_vocab: tokens that have these. wide_readers: layers that attend to the keys of others have an MLP of twice the
    size.
    """

    key_is_value: bool
    layer_embedding: int
    layer_vocab: int
    wide_readers: bool


class NormNames(NamedTuple):
    """What checkpoints call the norms of a layer but the first; those after attention and MLP only with post_norms."""

    after_attention: str = "post_self_attn_layernorm"
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = "post_mlp_layernorm"


LLAMA_NORMS = NormNames()


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention: keys and values of all heads are made of one row a token.

    q_rank: entries of the row that queries are made of; None if they are projected at once. kv_rank: of the latent.
    nope_dim, rope_dim: of a head's queries and keys, those that no position turns before those that are rotated, which
    for keys are the same in all heads. value_dim: of a head's values.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    @property
    def query_dim(self) -> int:
        """Entries of a head's query."""
        return self.nope_dim + self.rope_dim

    @property
    def row_dim(self) -> int:
        """Numbers that the cache holds of a token: its latent and its rotated key."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """How a token's experts are chosen and weighed, by one logit an expert.

    scores: "softmax" over all experts, "sigmoid" of each, or "top_k_softmax", over the chosen ones only.
    normalised: the weights of the chosen ones are divided by their sum.
    correction: a number an expert is added to its score where experts are chosen, and not where they are weighed.
    num_groups, top_k_groups: experts lie in so many groups, and only those of the best few groups are chosen from.
    best_of_group: a group counts as much as so many of its best experts, 1 or 2.
    scale: of the weights. bias: of the logits.
    factors: a number an expert multiplies its weight at last.
    wide_logits: logits are float32 and not of the model's dtype. wide_weights: the same for the weights.
    """

    scores: str
    normalised: bool = False
    correction: bool = False
    num_groups: int = 1
    top_k_groups: int = 1
    best_of_group: int = 2
    scale: float = 1.0
    bias: bool = False
    factors: bool = False
    wide_logits: bool = False
    wide_weights: bool = True


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts in place of the MLP: each token goes through top_k of num_experts small MLPs.

    sparse_layers: one entry a layer, whether it has experts; the others have an MLP of the model's intermediate_size.
    intermediate_size: of one expert.
    shared_size: intermediate size of the shared expert, which every token goes through; 0 for none.
    shared_gate: what it gives is multiplied by the sigmoid of a linear layer's one output.
    bias: of gate, up and down. clamp: (alpha, limit) of a clamped activation (`rayllm_kernels.ops.experts`), if any.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    sparse_layers: tuple[bool, ...]
    router: RouterSpec
    shared_size: int = 0
    shared_gate: bool = False
    bias: bool = False
    clamp: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class GatedDeltaSpec:
    """Layers that keep a state of fixed size in place of keys and values (gated DeltaNet, `layers.gated_delta`).

    layers: one entry a layer, whether it is such a one; the others attend.
    key_heads, value_heads: the latter a multiple of the former. key_dim, value_dim: numbers of a head.
    conv_width: tokens that the causal convolution before the recurrence sees, itself included.
    grouped: the input projections of a key head and of its value heads are stored together (Qwen3-Next).
    """

    layers: tuple[bool, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    grouped: bool = False

    def state_shape(self, tp: int) -> tuple[int, int, int]:
        """[value heads, key_dim, value_dim] of the float32 state that each of `tp` ranks keeps of a sequence."""
        return self.value_heads // tp, self.key_dim, self.value_dim

    def conv_shape(self, tp: int) -> tuple[int, int]:
        """[conv_width - 1, channels] of the last inputs of the convolution, in the model's dtype."""
        channels = 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
        return self.conv_width - 1, channels // tp

    def state_bytes(self, tp: int, itemsize: int) -> int:
        """Of both for one layer and sequence, a multiple of 16. itemsize: of the model's dtype."""
        return -(-(4 * prod(self.state_shape(tp)) + itemsize * prod(self.conv_shape(tp))) // 16) * 16


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model's shape. Sizes are of the whole model, not of a rank.

    dtype: of the checkpoint.
    tie_word_embeddings: None if it is tied where the checkpoint has no output matrix.
    sliding_windows: one entry a layer, tokens a query sees counting itself, None for all.
    post_norms: what attention and MLP give is normed before it is added to the residual.
    norm_offset: the weights of all norms are stored less 1, and multiply in fp32.
    attention_scale: factor of the products of queries and keys; None for head_dim**-0.5.
    attention_softcap, logit_softcap: cap of these products, and of logits: cap * tanh(x / cap); None for none.
    embedding_scale: what embeddings are multiplied by, rounded to the model's dtype; None for nothing.
    window_rope: of layers with a window; None if it is that of the others.
    fused_qkv, fused_gate_up: checkpoints have these projections as one.
    qk_norm_whole: all query heads are normed as one, and all key heads. attention_sinks: each head has one.
    attention_gate: q_proj has a gate beside each query, whose sigmoid multiplies what attention gives.
    draft_layers: layers after the last one that a checkpoint may hold, which guess further tokens and are left out.
    draft_prefix: what the names of other such weights begin with; None if there are none.
    text_only: the checkpoint holds towers for images or sound too, which are left out.
    rope_layers: one entry a layer, whether it has rotary positions; None if all have.
    logits_scale: of logits.
    layer_heads: one entry a layer, its KV heads and the size of a head, where they differ; None if all are alike.
    kv_layers: one entry a layer, the layer whose keys and values it attends to; None if each has its own.
    gated_delta: of the layers with a recurrent state; None for models without.
    own: what only an architecture of a user's package has.
    latent: of latent attention; num_kv_heads is 1 then, and head_dim that of a cached row. None for any other.
    quantization: how the checkpoint stores weights in fewer bits; None if it does not.
    experts is None for models without. rope is None for OPT and BLOOM; opt, bloom and gemma4 are None for the others.
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
    tie_word_embeddings: bool | None
    qkv_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    sliding_windows: tuple[int | None, ...]
    eos_token_ids: list[int]
    qk_norm: bool = False
    qk_norm_whole: bool = False
    attention_sinks: bool = False
    attention_gate: bool = False
    draft_layers: int = 0
    draft_prefix: str | None = None
    experts: ExpertsSpec | None = None
    post_norms: bool = False
    norm_names: NormNames = LLAMA_NORMS
    norm_offset: bool = False
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float | None = None
    window_rope: RopeSpec | None = None
    fused_qkv: bool = False
    fused_gate_up: bool = False
    text_only: bool = False
    rope_layers: tuple[bool, ...] | None = None
    logits_scale: float = 1.0
    layer_heads: tuple[tuple[int, int], ...] | None = None
    kv_layers: tuple[int, ...] | None = None
    gated_delta: GatedDeltaSpec | None = None
    own: Any = None
    latent: LatentSpec | None = None
    rope: RopeSpec | None = None
    opt: OPTSpec | None = None
    bloom: BloomSpec | None = None
    gemma4: Gemma4Spec | None = None
    quantization: QuantizationSpec | None = None

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output that the position embedding is good for."""
        return self.rope.max_model_len(self.max_position_embeddings) if self.rope else self.max_position_embeddings

    @property
    def default_model_len(self) -> int:
        """`max_model_len`, or the tokens up to which the position embedding is exactly the pretraining's, if fewer."""
        exact = self.rope.exact_len if self.rope else None
        return self.max_model_len if exact is None else min(exact, self.max_model_len)

    @property
    def kv_window(self) -> int | None:
        """Tokens that a query sees in the layer that sees most, counting itself; None if one sees them all."""
        windows = [window for window in self.sliding_windows if window is not None]
        return max(windows) if len(windows) == self.num_layers else None

    def layer_kind(self, layer: int) -> Hashable:
        """Equal for layers that run the same kernels on tensors of the same shapes."""
        return (
            self.sliding_windows[layer],
            self.rope_layers is None or self.rope_layers[layer],
            self.is_sparse(layer),
            self.is_recurrent(layer),
            self.kv_heads(layer),
            self.kv_layer(layer) == layer,
        )

    def kv_heads(self, layer: int) -> tuple[int, int]:
        """(KV heads, entries of a head) of a layer."""
        return (self.num_kv_heads, self.head_dim) if self.layer_heads is None else self.layer_heads[layer]

    def kv_layer(self, layer: int) -> int:
        """The layer whose keys and values a layer attends to: its own, or those of one before it."""
        return layer if self.kv_layers is None else self.kv_layers[layer]

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer has experts in place of the MLP."""
        return self.experts is not None and self.experts.sparse_layers[layer]

    def is_recurrent(self, layer: int) -> bool:
        """Whether the layer keeps a state in place of keys and values."""
        return self.gated_delta is not None and self.gated_delta.layers[layer]

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

    def kv_shape(self, layer: int, tp: int) -> tuple[int, int]:
        """(heads, numbers of a head) of the keys of one token that each of `tp` ranks keeps, and of its values.

        With latent attention there are no values, see `LatentSpec.row_dim`.
        """
        num_heads, head_dim = self.kv_heads(layer)
        return max(1, num_heads // tp), head_dim


def check_parallel(spec: ModelSpec, tp: int, *, expert_parallel: bool = False) -> None:
    """Raises ModelError if `tp` ranks cannot share this model's heads or its MLP evenly.

    expert_parallel: they share experts, of which each has as many as another or one more, and not their width.
    """
    if spec.num_heads % tp:
        raise ModelError(f"tensor_parallel_size {tp} does not divide the model's {spec.num_heads} attention heads")
    for kv_heads in sorted({spec.kv_heads(layer)[0] for layer in range(spec.num_layers)}):
        if kv_heads % tp and tp % kv_heads:
            raise ModelError(
                f"tensor_parallel_size {tp} neither divides nor is a multiple of the model's {kv_heads} KV heads"
            )
    experts = spec.experts
    if expert_parallel and experts is None:
        raise ModelError(f"enable_expert_parallel is for mixtures of experts, and {spec.architecture} is none")
    if expert_parallel and experts is not None and experts.num_experts < tp:
        raise ModelError(f"enable_expert_parallel: {experts.num_experts} experts are too few for {tp} ranks")
    widths = {"intermediate_size": spec.intermediate_size}
    if experts is not None:
        widths = widths if not all(experts.sparse_layers) else {}
        widths |= {"shared expert's size": experts.shared_size}
        widths |= {} if expert_parallel else {"experts' intermediate size": experts.intermediate_size}
    for what, width in widths.items():
        if width % tp:
            raise ModelError(f"tensor_parallel_size {tp} does not divide the model's {what} {width}")
    delta = spec.gated_delta
    if delta is not None and delta.key_heads % tp:
        raise ModelError(f"tensor_parallel_size {tp} does not divide the model's {delta.key_heads} linear key heads")
