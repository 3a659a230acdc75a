"""Ministral 3."""

from __future__ import annotations

from typing import Any

from rayllm.config.architectures.common import decoder_fields
from rayllm.config.json_fields import JsonFields

# What transformers' class has where config.json says nothing.
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def parse(config: JsonFields, _architecture: str) -> dict[str, Any]:
    rope = {"kinds": {"yarn": "yarn"}, "scales_queries": True, "absent": ROPE}
    fields = decoder_fields(config, kv_heads=8, head_dim=128, norm_eps=1e-5, **rope)
    window = None if config.get("sliding_window") is None else config.size("sliding_window")
    return fields | {
        "intermediate_size": config.size("intermediate_size"),
        "sliding_windows": (window,) * fields["num_layers"],
    }
