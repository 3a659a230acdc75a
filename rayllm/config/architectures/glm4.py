"""GLM-4, of both classes: those of 2025 (Glm4) have norms after attention and MLP too."""

from __future__ import annotations

from typing import Any

from rayllm.config.architectures.common import decoder_fields
from rayllm.config.json_fields import JsonFields


def parse(config: JsonFields, architecture: str) -> dict[str, Any]:
    fields = decoder_fields(config, kv_heads=2, head_dim=128, norm_eps=1.5625e-7, partial=0.5, interleaved=True)
    return fields | {
        "intermediate_size": config.size("intermediate_size"),
        "qkv_bias": config.flag("attention_bias", True),
        "fused_gate_up": True,
        "post_norms": architecture == "Glm4ForCausalLM",
    }
