"""SmolLM3."""

from __future__ import annotations

from typing import Any

from rayllm.config.architectures.common import decoder_fields, windows_of
from rayllm.config.json_fields import JsonFields
from rayllm.errors import ModelError


def parse(config: JsonFields, _architecture: str) -> dict[str, Any]:
    fields = decoder_fields(config, kv_heads=4, theta=2000000.0)
    bias, num_layers = config.flag("attention_bias", False), fields["num_layers"]
    rope_layers = _rope_layers(config, num_layers)
    return fields | {
        "intermediate_size": config.size("intermediate_size"),
        "tie_word_embeddings": config.flag("tie_word_embeddings", True),
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": config.flag("mlp_bias", False),
        "rope_layers": rope_layers,
        "sliding_windows": _windows(config, rope_layers),
    }


def _rope_layers(config: JsonFields, num_layers: int) -> tuple[bool, ...]:
    """By no_rope_layers, in which 1 stands for a layer that has rope, or all but every so-manieth."""
    interval = config.size("no_rope_layer_interval", 4)
    told = config.get("no_rope_layers")
    if told is None:
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if not isinstance(told, list) or len(told) < num_layers or any(each not in (0, 1) for each in told):
        raise ModelError(f"{config.file}: no_rope_layers must be a list of num_hidden_layers, {num_layers}, 0s and 1s")
    return tuple(bool(each) for each in told[:num_layers])


def _windows(config: JsonFields, rope_layers: tuple[bool, ...]) -> tuple[int | None, ...]:
    """By layer_types, or for all layers without rope."""
    window = None if config.get("sliding_window") is None else config.size("sliding_window")
    window = window if config.flag("use_sliding_window", False) else None
    config.get("max_window_layers")  # of Qwen2's configs; here layers without rope have windows
    return windows_of(config, len(rope_layers), window, [not has_rope for has_rope in rope_layers])
