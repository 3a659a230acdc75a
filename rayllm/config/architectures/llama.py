"""Llama, Mistral, Ministral (of 2024), Qwen2 and Qwen3."""

from __future__ import annotations

from typing import Any

from rayllm.config.architectures.common import decoder_fields, windows_of
from rayllm.config.json_fields import JsonFields
from rayllm.errors import ModelError

# Where config.json does not say it; a Llama has as many as query heads.
DEFAULT_KV_HEADS = {"MistralForCausalLM": 8, "MinistralForCausalLM": 8, "Qwen2ForCausalLM": 32, "Qwen3ForCausalLM": 32}
DEFAULT_HEAD_DIM = {"Qwen3ForCausalLM": 128}


def parse(config: JsonFields, architecture: str) -> dict[str, Any]:
    is_qwen3 = architecture == "Qwen3ForCausalLM"
    fields = decoder_fields(
        config, kv_heads=DEFAULT_KV_HEADS.get(architecture), head_dim=DEFAULT_HEAD_DIM.get(architecture)
    )
    # Llama's attention_bias covers all four projections; Qwen2 has a bias on q, k, v whatever its config says.
    has_flag = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
    attention_bias = has_flag and config.flag("attention_bias", False)
    return fields | {
        "intermediate_size": config.size("intermediate_size"),
        "qkv_bias": attention_bias or architecture == "Qwen2ForCausalLM",
        "attention_out_bias": attention_bias,
        "mlp_bias": architecture == "LlamaForCausalLM" and config.flag("mlp_bias", False),
        "qk_norm": is_qwen3,
        "sliding_windows": _sliding_windows(architecture, config, fields["num_layers"]),
    }


def _sliding_windows(architecture: str, config: JsonFields, num_layers: int) -> tuple[int | None, ...]:
    if architecture == "LlamaForCausalLM":  # which has none; a key that says otherwise is unknown
        return (None,) * num_layers
    # null means no window; an absent key means the class's default.
    window = None if config.is_null("sliding_window") else config.size("sliding_window", 4096)
    if architecture == "MistralForCausalLM":
        return (window,) * num_layers
    if architecture == "MinistralForCausalLM":
        if window is None:  # where transformers fails
            raise ModelError(f"{config.file}: sliding_window must be a positive integer, not null")
        return windows_of(config, num_layers, window, [True] * num_layers)
    return layer_windows(config, num_layers)


def layer_windows(config: JsonFields, num_layers: int, *, first: int = 28) -> tuple[int | None, ...]:
    """Windows as Qwen2 has them: those that layer_types says, or all layers' from max_window_layers on.

    first: the default of max_window_layers.
    """
    window = None if config.is_null("sliding_window") else config.size("sliding_window", 4096)
    first = config.integer("max_window_layers", first)
    window = window if config.flag("use_sliding_window", False) else None
    return windows_of(config, num_layers, window, [layer >= first for layer in range(num_layers)])
