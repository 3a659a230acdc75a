"""Phi-3, Phi-3.5 and Phi-4."""

from __future__ import annotations

from typing import Any

from rayllm.config.architectures.common import decoder_fields
from rayllm.config.json_fields import JsonFields
from rayllm.errors import ModelError

ROPE_KINDS = {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}  # by older names too


def parse(config: JsonFields, _architecture: str) -> dict[str, Any]:
    fields = decoder_fields(config, norm_eps=1e-5, partial=1.0, original=4096, kinds=ROPE_KINDS)
    for key in ("full_attn_mod", "interpolate_factor"):  # of Phi-4-mini's own code, which does nothing for 1
        if config.integer(key, 1) != 1:
            raise ModelError(f"{config.file}: {key} {config.get(key)} is not supported; supported is 1")
    window = None if config.get("sliding_window") is None else config.size("sliding_window")
    if window is not None and window >= fields["max_position_embeddings"]:
        window = None  # which sees all that there can be
    return fields | {
        "intermediate_size": config.size("intermediate_size"),
        "fused_qkv": True,
        "fused_gate_up": True,
        "sliding_windows": (window,) * fields["num_layers"],
    }
