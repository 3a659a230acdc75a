"""OPT."""

from __future__ import annotations

from typing import Any

from rayllm.config.architectures.common import PLAIN_ACTIVATIONS
from rayllm.config.json_fields import JsonFields
from rayllm.config.model_spec import OPTSpec


def parse(config: JsonFields, _architecture: str) -> dict[str, Any]:
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
