"""Llama, Mistral, Qwen2 and Qwen3."""

from __future__ import annotations

from typing import Any

from support.kinds.common import LLAMA


def _rope(rope_type: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "Llama", {**LLAMA, "rope_parameters": {"rope_type": rope_type, **fields, "rope_theta": 10000.0}}


CONFIGS = {
    "llama": ("Llama", LLAMA),
    "llama3_rope": _rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    ),
    "llama_linear": _rope("linear", factor=2.0),
    "llama_yarn": _rope("yarn", factor=4.0, original_max_position_embeddings=128),
    "mistral": ("Mistral", {**LLAMA, "num_key_value_heads": 2, "sliding_window": 24}),
    "qwen2": ("Qwen2", LLAMA),
    "qwen3": ("Qwen3", LLAMA),
    "qwen3_tied": ("Qwen3", {**LLAMA, "tie_word_embeddings": True}),
}
