"""`ModelSpec`: what config.json of a Hugging Face folder says of a model, checked, in one frozen struct.

Reads the files of transformers 4 (rope_theta, rope_scaling, torch_dtype) and 5 (rope_parameters, dtype) without
importing either it or torch. A key that is absent takes the default of transformers' class of that architecture. One
that nothing here reads refuses the model, unless `known_keys` has it as harmless.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayllm.api.sampling_params import SamplingParams
from rayllm.config.json_fields import JsonFields, read_json_object
from rayllm.config.known_keys import refuse_unknown
from rayllm.config.rope import RopeSpec, parse_rope
from rayllm.errors import InvalidRequestError, ModelError

QWEN = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", *QWEN, "OPTForCausalLM", "BloomForCausalLM")
DEFAULT_KV_HEADS = {"MistralForCausalLM": 8} | dict.fromkeys(QWEN, 32)  # of the others, as many as attention heads
DEFAULT_EOS = 2  # of all but Qwen, which has none where config.json says nothing of it
MAX_HEAD_DIM = 256  # of the attention kernels
BLOOM_POSITIONS = 2048  # what BLOOM was trained with; ALiBi itself has no limit, and not all files say it (seq_length)
GENERATION_CONFIG = "generation_config.json"
# Fields of that file -> those of `SamplingParams`.
SAMPLING_FIELDS = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}
DTYPES = ("float32", "bfloat16", "float16")
GATED_ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")
PLAIN_ACTIVATIONS = (*GATED_ACTIVATIONS, "relu")


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

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output that the position embedding is good for."""
        return self.rope.max_model_len(self.max_position_embeddings) if self.rope else self.max_position_embeddings

    @property
    def kv_window(self) -> int | None:
        """Tokens that a query sees in the layer that sees most, counting itself; None if one sees them all."""
        windows = [window for window in self.sliding_windows if window is not None]
        return max(windows) if len(windows) == self.num_layers else None

    @property
    def num_distinct_layers(self) -> int:
        """How many of the first layers run every kernel of the model, and need as much memory as all of them.

        All windows occur, and one layer at least is neither the first, which adds to nothing, nor the last, which goes
        on with fewer tokens after attention.
        """
        last_new = max(self.sliding_windows.index(window) for window in set(self.sliding_windows))
        return min(self.num_layers, max(3, last_new + 1))

    def kv_heads_per_rank(self, tp: int) -> int:
        """KV heads that each of `tp` ranks holds: replicated where there are more ranks than heads."""
        return max(1, self.num_kv_heads // tp)


def load_model_spec(path: str) -> ModelSpec:
    """Read the folder `path`. Raises ModelError in one sentence for anything that cannot be served."""
    folder = Path(path)
    if not folder.exists():
        raise ModelError(f"model folder {path} does not exist")
    if not folder.is_dir():
        raise ModelError(f"model {path} is not a folder")
    if not (folder / "config.json").is_file():
        state = "has no config.json" if any(folder.iterdir()) else "is empty"
        raise ModelError(f"model folder {path} {state}")
    config = JsonFields(read_json_object(folder / "config.json"), str(folder / "config.json"))
    architecture = _architecture(config)
    _check_quantization(config)
    eos = config.get("eos_token_id", None if architecture in QWEN else DEFAULT_EOS)
    generation = folder / GENERATION_CONFIG
    if generation.is_file():
        # Chat models end a turn with a token that only this file knows.
        told = read_json_object(generation).get("eos_token_id")
        eos = eos if told is None else told
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(isinstance(i, int) for i in ids):
        raise ModelError(f"{path}: eos_token_id must be an integer or a list of integers, not {eos!r}")
    parsers = {"OPTForCausalLM": _parse_opt, "BloomForCausalLM": _parse_bloom}
    parse = parsers.get(architecture, _parse_llama)
    spec = _make_spec(config, architecture=architecture, eos_token_ids=ids, **parse(config, architecture))
    refuse_unknown(config)
    return spec


def load_sampling_defaults(path: str) -> dict[str, Any]:
    """How the folder `path` says to sample, as fields of `SamplingParams`; null says nothing. Raises ModelError."""
    file = Path(path) / GENERATION_CONFIG
    told = read_json_object(file) if file.is_file() else {}
    defaults = {field: told[name] for name, field in SAMPLING_FIELDS.items() if told.get(name) is not None}
    try:
        SamplingParams(**defaults)
    except InvalidRequestError as error:
        raise ModelError(f"{file}: {error} (generation_config none would ignore it)") from None
    return defaults


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


def _architecture(config: JsonFields) -> str:
    names = config.get("architectures")
    if not names:
        raise ModelError(f'{config.file} has no "architectures"')
    name = names[0] if isinstance(names, list) else names
    if name not in SUPPORTED_ARCHITECTURES:
        raise ModelError(f"architectures: {name} is not supported; supported are {', '.join(SUPPORTED_ARCHITECTURES)}")
    model_type = name.removesuffix("ForCausalLM").lower()
    if (told := config.text("model_type", model_type)) != model_type:  # transformers would make a model of that class
        raise ModelError(f"{config.file}: model_type {told} is not that of the architectures, {name}")
    return str(name)


def _check_quantization(config: JsonFields) -> None:
    """Raises ModelError if weights are quantised. Scales for a KV cache in fp8 alone are none of that."""
    quantization = config.get("quantization_config")
    if not quantization:
        return
    told = quantization if isinstance(quantization, dict) else {}
    method = told.get("quant_method")
    if method == "compressed-tensors" and told.get("kv_cache_scheme") and not told.get("config_groups"):
        return
    raise ModelError(f"{config.file}: quantization_config: quantised checkpoints ({method}) are not supported")


def _split_hidden(config: JsonFields, hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads:
        raise ModelError(f"{config.file}: num_attention_heads {num_heads} does not divide hidden_size {hidden_size}")
    return hidden_size // num_heads


def _make_spec(
    config: JsonFields,
    *,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    vocab_size: int | None = None,
    bias: bool = False,
    **rest: Any,
) -> ModelSpec:
    """A spec of these fields, its heads checked. By default each head has its own KV, and a share of hidden_size.

    vocab_size: where config.json does not say it. bias: of all projections for which rest does not say it.
    rest: further fields of ModelSpec; by default no layer has a sliding window.
    """
    num_kv_heads = num_kv_heads or num_heads
    head_dim = head_dim or _split_hidden(config, hidden_size, num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{config.file}: num_key_value_heads {num_kv_heads} does not divide num_attention_heads {num_heads}"
        )
    if head_dim > MAX_HEAD_DIM:
        raise ModelError(f"{config.file}: head_dim {head_dim} is more than the {MAX_HEAD_DIM} that attention supports")
    dtype = config.text("dtype", config.text("torch_dtype", "float32")).removeprefix("torch.")
    defaults = dict.fromkeys(("qkv_bias", "attention_out_bias", "mlp_bias"), bias)
    return ModelSpec(
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=config.size("vocab_size", vocab_size),
        dtype=config.one_of("dtype", dtype, DTYPES),
        **{"sliding_windows": (None,) * num_layers} | defaults | rest,
    )


def _parse_llama(config: JsonFields, architecture: str) -> dict[str, Any]:
    hidden_size, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    num_layers, max_position = config.size("num_hidden_layers"), config.size("max_position_embeddings")
    is_qwen3 = architecture == "Qwen3ForCausalLM"
    told = config.get("head_dim", 128 if is_qwen3 else None)
    head_dim = _split_hidden(config, hidden_size, num_heads) if told is None else config.size("head_dim", told)
    null = config.is_null("num_key_value_heads")
    kv_heads = num_heads if null else DEFAULT_KV_HEADS.get(architecture, num_heads)
    # Llama's attention_bias covers all four projections; Qwen2 has a bias on q, k, v whatever its config says.
    has_flag = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
    attention_bias = has_flag and config.flag("attention_bias", False)
    return {
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": config.size("num_key_value_heads", kv_heads),
        "head_dim": head_dim,
        "intermediate_size": config.size("intermediate_size"),
        "max_position_embeddings": max_position,
        "norm_eps": config.number("rms_norm_eps", 1e-6),
        "hidden_act": config.one_of("hidden_act", config.text("hidden_act", "silu"), GATED_ACTIVATIONS),
        "tie_word_embeddings": config.flag("tie_word_embeddings", False),
        "qkv_bias": attention_bias or architecture == "Qwen2ForCausalLM",
        "attention_out_bias": attention_bias,
        "mlp_bias": architecture == "LlamaForCausalLM" and config.flag("mlp_bias", False),
        "qk_norm": is_qwen3,
        "sliding_windows": _sliding_windows(architecture, config, num_layers),
        "rope": parse_rope(config, head_dim, max_position),
    }


def _sliding_windows(architecture: str, config: JsonFields, num_layers: int) -> tuple[int | None, ...]:
    if architecture == "LlamaForCausalLM":  # which has none; a key that says otherwise is unknown
        return (None,) * num_layers
    # null means no window; an absent key means the class's default.
    window = None if config.is_null("sliding_window") else config.size("sliding_window", 4096)
    if architecture == "MistralForCausalLM":
        return (window,) * num_layers
    if not config.flag("use_sliding_window", False):
        window = None
    first, kinds = config.integer("max_window_layers", 28), config.get("layer_types")
    if kinds is None:
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ModelError(f"{config.file}: layer_types must be a list of as many as num_hidden_layers, {num_layers}")
    supported = ("full_attention", "sliding_attention") if window else ("full_attention",)
    return tuple(
        window if config.one_of("layer_types", kind, supported) == "sliding_attention" else None for kind in kinds
    )


def _parse_opt(config: JsonFields, _architecture: str) -> dict[str, Any]:
    hidden_size, pre_norm = config.size("hidden_size"), config.flag("do_layer_norm_before", True)
    activation = config.text("activation_function", "relu")
    return {
        "hidden_size": hidden_size,
        "num_layers": config.size("num_hidden_layers"),
        "num_heads": config.size("num_attention_heads"),
        "intermediate_size": config.size("ffn_dim"),
        "max_position_embeddings": config.size("max_position_embeddings"),
        "norm_eps": 1e-5,  # torch's LayerNorm default, which OPT never overrides
        "hidden_act": config.one_of("activation_function", activation, PLAIN_ACTIVATIONS),
        "tie_word_embeddings": config.flag("tie_word_embeddings", True),
        "bias": config.flag("enable_bias", True),
        "opt": OPTSpec(
            embed_dim=config.size("word_embed_proj_dim", hidden_size),
            pre_norm=pre_norm,
            # Checkpoints fine-tuned before transformers 4.20.1 lack it and say so in this flag.
            final_norm=pre_norm and not config.flag("_remove_final_layer_norm", False),
            norm_affine=config.flag("layer_norm_elementwise_affine", True),
        ),
    }


def _parse_bloom(config: JsonFields, _architecture: str) -> dict[str, Any]:
    """Sizes go by two names. Where a file has both, transformers takes the one that is first here."""

    def size(name: str, other: str, default: int) -> int:
        return config.size(name, config.size(other, default))

    hidden_size = size("n_embed", "hidden_size", 64)
    return {
        "hidden_size": hidden_size,
        "num_layers": size("num_hidden_layers", "n_layer", 2),
        "num_heads": size("num_attention_heads", "n_head", 8),
        "intermediate_size": 4 * hidden_size,
        "vocab_size": 250880,
        "max_position_embeddings": config.size("seq_length", BLOOM_POSITIONS),
        "norm_eps": config.number("layer_norm_epsilon", 1e-5),
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": config.flag("tie_word_embeddings", True),
        "bias": True,
        "bloom": BloomSpec(residual_after_norm=config.flag("apply_residual_connection_post_layernorm", False)),
    }
