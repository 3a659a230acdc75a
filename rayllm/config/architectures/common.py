"""What parsers of config.json have in common."""

from __future__ import annotations

from typing import Any

from rayllm.config.json_fields import JsonFields
from rayllm.config.model_spec import ModelSpec
from rayllm.config.rope import parse_rope
from rayllm.errors import ModelError

MAX_HEAD_DIM = 512  # of the attention kernels
DTYPES = ("float32", "bfloat16", "float16")
GATED_ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")
PLAIN_ACTIVATIONS = (*GATED_ACTIVATIONS, "relu")
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"  # kinds of layers in layer_types


def split_hidden(config: JsonFields, hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads:
        raise ModelError(f"{config.file}: num_attention_heads {num_heads} does not divide hidden_size {hidden_size}")
    return hidden_size // num_heads


def whole_number(config: JsonFields, *names: str, default: int) -> int:
    """A size that goes by several names. Raises ModelError if a file has two of them that differ."""
    told = {name: config.size(name) for name in names if config.get(name) is not None}
    if len(set(told.values())) > 1:
        raise ModelError(f"{config.file}: {' and '.join(f'{name} {value}' for name, value in told.items())} differ")
    return next(iter(told.values()), default)


def check_top_k(config: JsonFields, top_k: int, num_experts: int) -> int:
    """top_k. Raises ModelError if there are not so many experts."""
    if top_k > num_experts:
        raise ModelError(f"{config.file}: num_experts_per_tok {top_k} is more than the {num_experts} experts")
    return top_k


def layer_kinds(
    config: JsonFields, num_layers: int, supported: tuple[str, ...], default: list[str], name: str = "layer_types"
) -> list[str]:
    """The kind of each layer, by the list `name`. default: those of a file without it. Raises ModelError."""
    kinds = config.get(name)
    if kinds is None:
        return default
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ModelError(f"{config.file}: {name} must be a list of num_hidden_layers, {num_layers}")
    return [config.one_of(name, kind, supported) for kind in kinds]


def windows_of(config: JsonFields, num_layers: int, window: int | None, default: list[bool]) -> tuple[int | None, ...]:
    """`window` for the layers that layer_types calls sliding. default: which those are if it is absent."""
    supported = (FULL, SLIDING) if window else (FULL,)
    kinds = layer_kinds(config, num_layers, supported, [SLIDING if slides else FULL for slides in default])
    return tuple(window if kind == SLIDING else None for kind in kinds)


def decoder_fields(
    config: JsonFields, *, kv_heads: int | None = None, head_dim: int | None = None, norm_eps: float = 1e-6, **rope: Any
) -> dict[str, Any]:
    """The fields of `ModelSpec` that all relatives of Llama read alike, with the defaults of transformers' class.

    kv_heads: where config.json lacks num_key_value_heads; None for as many as query heads, as null always means.
    head_dim: where it lacks head_dim; None for a share of hidden_size. rope: options of `parse_rope`.
    """
    hidden_size, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    max_position = config.size("max_position_embeddings")
    told = config.get("head_dim", head_dim)
    head_dim = split_hidden(config, hidden_size, num_heads) if told is None else config.size("head_dim", told)
    kv_heads = num_heads if kv_heads is None or config.is_null("num_key_value_heads") else kv_heads
    return {
        "hidden_size": hidden_size,
        "num_layers": config.size("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": config.size("num_key_value_heads", kv_heads),
        "head_dim": head_dim,
        "max_position_embeddings": max_position,
        "norm_eps": config.number("rms_norm_eps", norm_eps),
        "hidden_act": config.one_of("hidden_act", config.text("hidden_act", "silu"), GATED_ACTIVATIONS),
        "tie_word_embeddings": config.flag("tie_word_embeddings", False),
        "rope": parse_rope(config, head_dim, max_position, **rope),
    }


def make_spec(
    config: JsonFields,
    *,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    vocab_size: int | None = None,
    eos_token_ids: list[int],
    bias: bool = False,
    **rest: Any,
) -> ModelSpec:
    """A spec of these fields, its heads checked. By default each head has its own KV, and a share of hidden_size.

    vocab_size: where config.json does not say it. eos_token_ids: those beyond the vocabulary are left out, as they can
    never come. bias: of all projections for which rest does not say it. rest: further fields of ModelSpec; by default
    no layer has a sliding window.
    """
    num_kv_heads = num_kv_heads or num_heads
    head_dim = head_dim or split_hidden(config, hidden_size, num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{config.file}: num_key_value_heads {num_kv_heads} does not divide num_attention_heads {num_heads}"
        )
    if head_dim > MAX_HEAD_DIM and rest.get("latent") is None:  # whose parsers know other limits
        raise ModelError(f"{config.file}: head_dim {head_dim} is more than the {MAX_HEAD_DIM} that attention supports")
    dtype = config.text("dtype", config.text("torch_dtype", "float32")).removeprefix("torch.")
    defaults = dict.fromkeys(("qkv_bias", "attention_out_bias", "mlp_bias"), bias)
    vocab_size = config.size("vocab_size", vocab_size)
    return ModelSpec(
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        eos_token_ids=[token for token in eos_token_ids if token < vocab_size],
        dtype=config.one_of("dtype", dtype, DTYPES),
        **{"sliding_windows": (None,) * num_layers} | defaults | rest,
    )
