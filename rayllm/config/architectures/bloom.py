"""BLOOM."""

from __future__ import annotations

from typing import Any

from rayllm.config.json_fields import JsonFields
from rayllm.config.model_spec import BloomSpec

POSITIONS = 2048  # what BLOOM was trained with; ALiBi itself has no limit, and not all files say it (seq_length)


def parse(config: JsonFields, _architecture: str) -> dict[str, Any]:
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
        "max_position_embeddings": config.size("seq_length", POSITIONS),
        "norm_eps": config.number("layer_norm_epsilon", 1e-5),
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": config.flag("tie_word_embeddings", True),
        "bias": True,
        "bloom": BloomSpec(residual_after_norm=config.flag("apply_residual_connection_post_layernorm", False)),
    }
