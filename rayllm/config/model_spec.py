"""`ModelSpec`: what config.json of a Hugging Face folder says of a model, checked, in one frozen struct.

Reads the files of transformers 4 (rope_theta, rope_scaling, torch_dtype) and 5 (rope_parameters, dtype) without
importing either it or torch. A key that is absent takes the default of transformers' class of that architecture.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rayllm.config.json_fields import JsonFields, read_json_object
from rayllm.config.rope import RopeSpec, parse_rope
from rayllm.errors import ModelError

MAX_HEAD_DIM = 256  # of the attention kernels
BLOOM_POSITIONS = 2048  # what BLOOM was trained with; ALiBi itself has no limit, and not all files say it (seq_length)
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

    max_model_len: tokens of prompt and output that the position embedding is good for. dtype: of the checkpoint.
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
    max_model_len: int
    norm_eps: float
    hidden_act: str
    dtype: str
    tie_word_embeddings: bool
    qkv_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    eos_token_ids: list[int]
    bos_token_id: int | None
    rope: RopeSpec | None = None
    opt: OPTSpec | None = None
    bloom: BloomSpec | None = None

    @property
    def sliding_window(self) -> int | None:
        """The window of the layers that have one; None if no layer has."""
        return next((window for window in self.sliding_windows if window is not None), None)

    @property
    def kv_window(self) -> int | None:
        """Tokens that a query sees in the layer that sees most, counting itself; None if one sees them all."""
        widest = 0
        for window in self.sliding_windows:
            if window is None:
                return None
            widest = max(widest, window)
        return widest

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
    eos, bos = config.data.get("eos_token_id", _DEFAULT_EOS[architecture]), config.integer_or_none("bos_token_id")
    generation = folder / "generation_config.json"
    if generation.is_file():
        # Chat models end a turn with a token that only this file knows.
        told = read_json_object(generation).get("eos_token_id")
        eos = eos if told is None else told
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(isinstance(i, int) for i in ids):
        raise ModelError(f"{path}: eos_token_id must be an integer or a list of integers, not {eos!r}")
    parsers = {"OPTForCausalLM": _parse_opt, "BloomForCausalLM": _parse_bloom}
    return parsers.get(architecture, _parse_llama)(architecture, config, ids, bos)


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


# Tokens that end a sequence where config.json says nothing of it.
_DEFAULT_EOS: dict[str, int | None] = {
    "LlamaForCausalLM": 2,
    "MistralForCausalLM": 2,
    "Qwen2ForCausalLM": None,
    "Qwen3ForCausalLM": None,
    "OPTForCausalLM": 2,
    "BloomForCausalLM": 2,
}
SUPPORTED_ARCHITECTURES = tuple(_DEFAULT_EOS)


def _architecture(config: JsonFields) -> str:
    names = config.data.get("architectures")
    if not names:
        raise ModelError(f'{config.file} has no "architectures"')
    name = names[0] if isinstance(names, list) else names
    if name not in SUPPORTED_ARCHITECTURES:
        raise ModelError(f"architecture {name} is not supported; supported are {', '.join(SUPPORTED_ARCHITECTURES)}")
    return str(name)


def _check_quantization(config: JsonFields) -> None:
    """Raises ModelError if weights are quantised. Scales for a KV cache in fp8 alone are none of that."""
    quantization = config.data.get("quantization_config")
    if not quantization:
        return
    told = quantization if isinstance(quantization, dict) else {}
    method = told.get("quant_method")
    if method == "compressed-tensors" and told.get("kv_cache_scheme") and not told.get("config_groups"):
        return
    raise ModelError(f"{config.file}: quantised checkpoints ({method or 'quantization_config'}) are not supported")


def _dtype(config: JsonFields) -> str:
    name = config.text("dtype", config.text("torch_dtype", "float32")).removeprefix("torch.")
    if name not in DTYPES:
        raise ModelError(f"{config.file}: dtype {name} is not supported; supported are {', '.join(DTYPES)}")
    return name


def _activation(config: JsonFields, field: str, default: str, supported: tuple[str, ...]) -> str:
    name = config.text(field, default)
    if name not in supported:
        raise ModelError(f"{config.file}: {field} {name} is not supported; supported are {', '.join(supported)}")
    return name


def _check_heads(config: JsonFields, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    if num_heads % num_kv_heads:
        raise ModelError(f"{config.file}: {num_kv_heads} KV heads do not divide {num_heads} attention heads")
    if head_dim > MAX_HEAD_DIM:
        raise ModelError(f"{config.file}: head_dim {head_dim} is more than the {MAX_HEAD_DIM} that attention supports")


def _split_hidden(config: JsonFields, hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads:
        raise ModelError(f"{config.file}: {num_heads} attention heads do not divide hidden_size {hidden_size}")
    return hidden_size // num_heads


def _parse_llama(architecture: str, config: JsonFields, eos: list[int], bos: int | None) -> ModelSpec:
    hidden_size, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    num_kv_heads, num_layers = config.size("num_key_value_heads", num_heads), config.size("num_hidden_layers")
    is_qwen3 = architecture == "Qwen3ForCausalLM"
    if config.data.get("head_dim") is not None:
        head_dim = config.size("head_dim")
    elif is_qwen3 and "head_dim" not in config.data:
        head_dim = 128
    else:
        head_dim = _split_hidden(config, hidden_size, num_heads)
    _check_heads(config, num_heads, num_kv_heads, head_dim)
    # Llama's attention_bias covers all four projections; Qwen2 has a bias on q, k, v whatever its config says.
    has_flag = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
    attention_bias = has_flag and config.flag("attention_bias", False)
    max_position = config.size("max_position_embeddings")
    rope = parse_rope(config, head_dim, max_position)
    return ModelSpec(
        architecture=architecture,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=config.size("intermediate_size"),
        vocab_size=config.size("vocab_size"),
        max_position_embeddings=max_position,
        max_model_len=rope.max_model_len(max_position),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        hidden_act=_activation(config, "hidden_act", "silu", GATED_ACTIVATIONS),
        dtype=_dtype(config),
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        attention_out_bias=attention_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and config.flag("mlp_bias", False),
        qk_norm=is_qwen3,
        sliding_windows=_sliding_windows(architecture, config, num_layers),
        eos_token_ids=eos,
        bos_token_id=bos,
        rope=rope,
    )


def _sliding_windows(architecture: str, config: JsonFields, num_layers: int) -> tuple[int | None, ...]:
    everywhere_full = (None,) * num_layers
    if architecture == "MistralForCausalLM":
        # null means no window; an absent key means the class's default.
        if config.is_null("sliding_window"):
            return everywhere_full
        return (config.size("sliding_window", 4096),) * num_layers
    if architecture not in ("Qwen2ForCausalLM", "Qwen3ForCausalLM") or not config.flag("use_sliding_window", False):
        return everywhere_full
    if config.is_null("sliding_window"):
        return everywhere_full
    window, first = config.size("sliding_window", 4096), config.integer_or_none("max_window_layers")
    kinds = config.data.get("layer_types")
    if kinds is None:
        first = 28 if first is None else first
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ModelError(f"{config.file}: layer_types must be a list of one entry for each of {num_layers} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelError(f"{config.file}: layer type {kind!r} is not supported")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _parse_opt(architecture: str, config: JsonFields, eos: list[int], bos: int | None) -> ModelSpec:
    hidden_size, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    num_layers, max_position = config.size("num_hidden_layers"), config.size("max_position_embeddings")
    head_dim = _split_hidden(config, hidden_size, num_heads)
    _check_heads(config, num_heads, num_heads, head_dim)
    bias, pre_norm = config.flag("enable_bias", True), config.flag("do_layer_norm_before", True)
    return ModelSpec(
        architecture=architecture,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        intermediate_size=config.size("ffn_dim"),
        vocab_size=config.size("vocab_size"),
        max_position_embeddings=max_position,
        max_model_len=max_position,
        norm_eps=1e-5,  # torch's LayerNorm default, which OPT never overrides
        hidden_act=_activation(config, "activation_function", "relu", PLAIN_ACTIVATIONS),
        dtype=_dtype(config),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        attention_out_bias=bias,
        mlp_bias=bias,
        qk_norm=False,
        sliding_windows=(None,) * num_layers,
        eos_token_ids=eos,
        bos_token_id=bos,
        opt=OPTSpec(
            embed_dim=config.size("word_embed_proj_dim", hidden_size),
            pre_norm=pre_norm,
            # Checkpoints fine-tuned before transformers 4.20.1 lack it and say so in this flag.
            final_norm=pre_norm and not config.flag("_remove_final_layer_norm", False),
            norm_affine=config.flag("layer_norm_elementwise_affine", True),
        ),
    )


def _parse_bloom(architecture: str, config: JsonFields, eos: list[int], bos: int | None) -> ModelSpec:
    """Sizes go by several names, of which transformers prefers those of older files."""

    def size(name: str, other: str, default: int) -> int:
        return config.size(name, config.size(other, default))

    hidden_size, num_heads = size("n_embed", "hidden_size", 64), size("n_head", "num_attention_heads", 8)
    num_layers, max_position = size("n_layer", "num_hidden_layers", 2), config.size("seq_length", BLOOM_POSITIONS)
    head_dim = _split_hidden(config, hidden_size, num_heads)
    _check_heads(config, num_heads, num_heads, head_dim)
    return ModelSpec(
        architecture=architecture,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        intermediate_size=4 * hidden_size,
        vocab_size=config.size("vocab_size", 250880),
        max_position_embeddings=max_position,
        max_model_len=max_position,
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        hidden_act="gelu_pytorch_tanh",
        dtype=_dtype(config),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        qkv_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        qk_norm=False,
        sliding_windows=(None,) * num_layers,
        eos_token_ids=eos,
        bos_token_id=bos,
        bloom=BloomSpec(residual_after_norm=config.flag("apply_residual_connection_post_layernorm", False)),
    )
