"""Granite 3: a Llama with multipliers.

Each layer adds its output times residual_multiplier, m, to the residual stream. Norms do not see the scale of what they
norm, so a stream divided by m needs no multiplier in any layer: embeddings are divided by m instead, and eps by m^2.
"""

from __future__ import annotations

from typing import Any

from rayllm.config.architectures.common import decoder_fields
from rayllm.config.json_fields import JsonFields


def parse(config: JsonFields, _architecture: str) -> dict[str, Any]:
    fields = decoder_fields(config)
    bias, multiplier = config.flag("attention_bias", False), config.number("residual_multiplier", 1.0)
    return fields | {
        "intermediate_size": config.size("intermediate_size"),
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": config.flag("mlp_bias", False),
        "norm_eps": fields["norm_eps"] / multiplier**2,
        "attention_scale": config.number("attention_multiplier", 1.0),
        "embedding_scale": config.number("embedding_multiplier", 1.0) / multiplier,
        "logits_scale": 1 / config.number("logits_scaling", 1.0),
    }
