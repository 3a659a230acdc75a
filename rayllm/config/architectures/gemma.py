"""Gemma 2, and the text model of Gemma 3."""

from __future__ import annotations

from typing import Any

from rayllm.config.architectures.common import FULL, GATED_ACTIVATIONS, SLIDING, layer_kinds
from rayllm.config.json_fields import JsonFields
from rayllm.config.known_keys import refuse_unknown
from rayllm.config.model_spec import NormNames
from rayllm.config.rope import RopeSpec, parse_rope
from rayllm.errors import ModelError

NORM_NAMES = NormNames("post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


def parse_gemma2(config: JsonFields, _architecture: str) -> dict[str, Any]:
    fields = _shared(config, max_position=8192, vocab_size=256000)
    cap = None if config.is_null("attn_logit_softcapping") else config.number("attn_logit_softcapping", 50.0)
    logit_cap = None if config.is_null("final_logit_softcapping") else config.number("final_logit_softcapping", 30.0)
    return fields | {
        "attention_softcap": cap,
        "logit_softcap": logit_cap,
        "sliding_windows": _windows(config, fields["num_layers"], pattern=2),
        "rope": parse_rope(config, fields["head_dim"], fields["max_position_embeddings"]),
    }


def parse_gemma3(config: JsonFields, _architecture: str) -> dict[str, Any]:
    """Of a text model. transformers has a key for a cap of attention too, which its model does not use: refused."""
    fields = _shared(config, max_position=131072, vocab_size=262208)
    config.get("_sliding_window_pattern")  # transformers writes it and never reads it
    pattern = config.size("sliding_window_pattern", 6)
    rope, window_rope = _ropes(config, fields["head_dim"], fields["max_position_embeddings"])
    cap = None if config.get("final_logit_softcapping") is None else config.number("final_logit_softcapping")
    return fields | {
        "qk_norm": True,
        "logit_softcap": cap,
        "sliding_windows": _windows(config, fields["num_layers"], pattern),
        "rope": rope,
        "window_rope": window_rope,
    }


def _shared(config: JsonFields, max_position: int, vocab_size: int) -> dict[str, Any]:
    """What both read alike. All keys may be absent: a Gemma 3 that sees images leaves out those with the default."""
    hidden_size, bias = config.size("hidden_size", 2304), config.flag("attention_bias", False)
    act = config.text("hidden_activation", "gelu_pytorch_tanh")
    if (other := config.text("hidden_act", act)) != act:  # transformers goes by hidden_activation
        raise ModelError(f"{config.file}: hidden_act {other} is not hidden_activation, {act}")
    return {
        "hidden_size": hidden_size,
        "num_layers": config.size("num_hidden_layers", 26),
        "num_heads": config.size("num_attention_heads", 8),
        "num_kv_heads": config.size("num_key_value_heads", 4),
        "head_dim": config.size("head_dim", 256),
        "intermediate_size": config.size("intermediate_size", 9216),
        "vocab_size": vocab_size,
        "max_position_embeddings": config.size("max_position_embeddings", max_position),
        "norm_eps": config.number("rms_norm_eps", 1e-6),
        "hidden_act": config.one_of("hidden_activation", act, GATED_ACTIVATIONS),
        "tie_word_embeddings": config.flag("tie_word_embeddings", True),
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "post_norms": True,
        "norm_names": NORM_NAMES,
        "norm_offset": True,
        "attention_scale": config.number("query_pre_attn_scalar", 256) ** -0.5,
        "embedding_scale": hidden_size**0.5,
    }


def _windows(config: JsonFields, num_layers: int, pattern: int) -> tuple[int | None, ...]:
    """By layer_types, or for all layers but every pattern-th."""
    default = [SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers)]
    kinds = layer_kinds(config, num_layers, (FULL, SLIDING), default)
    if SLIDING in kinds and config.is_null("sliding_window"):
        raise ModelError(f"{config.file}: sliding_window must be a positive integer where layers slide, not null")
    window = config.size("sliding_window", 4096)
    if (other := config.size("sliding_window_size", window)) != window:  # an older name, which stands beside the other
        raise ModelError(f"{config.file}: sliding_window_size {other} is not sliding_window, {window}")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _ropes(config: JsonFields, head_dim: int, max_position: int) -> tuple[RopeSpec, RopeSpec]:
    """The rotary embeddings of full layers, and of those with a window.

    transformers 5 has an object for each in rope_parameters. Before, rope_theta and rope_scaling were of the full
    layers, rope_local_base_freq was the base of the others; it still prefers rope_scaling.
    """
    told = config.get("rope_parameters") or {}
    if not isinstance(told, dict) or any(key not in (FULL, SLIDING) for key in told):
        raise ModelError(f"{config.file}: rope_parameters must have an object for {FULL} and for {SLIDING} layers")
    if head_dim % 2:
        raise ModelError(f"{config.file}: head_dim {head_dim} is odd, which rotary positions do not support")
    scaling = config.get("rope_scaling") or {}
    thetas = {FULL: config.number("rope_theta", 1e6), SLIDING: config.number("rope_local_base_freq", 1e4)}
    specs = []
    for kind, extra in ((FULL, scaling), (SLIDING, {})):
        own = told.get(kind) or {}
        name = "rope_scaling" if extra else f"rope_parameters.{kind}"
        if not isinstance(own, dict) or not isinstance(extra, dict):
            raise ModelError(f"{config.file}: {name} must be an object, not {own if extra == {} else extra!r}")
        rope = JsonFields(own | extra, config.file, name + ".")
        rope_type = rope.text("rope_type", "default")
        if (other := rope.text("type", rope_type)) != rope_type:  # an older name, which transformers overlooks here
            raise ModelError(f"{config.file}: {name}.type {other} is not rope_type, {rope_type}")
        rope.one_of(f"{name}.rope_type", rope_type, ("default", "linear"))
        factor = rope.number("factor") if rope_type == "linear" else 1.0
        theta = rope.number("rope_theta", thetas[kind])
        refuse_unknown(rope)
        specs.append(RopeSpec(rope_type, theta, head_dim, max_position, factor=factor, stretched=True))
    return specs[0], specs[1]
