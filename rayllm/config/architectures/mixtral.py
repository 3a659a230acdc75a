"""Mixtral."""

from __future__ import annotations

from typing import Any

from rayllm.config.architectures.common import check_top_k, decoder_fields, whole_number
from rayllm.config.json_fields import JsonFields
from rayllm.config.model_spec import ExpertsSpec, RouterSpec


def parse(config: JsonFields, _architecture: str) -> dict[str, Any]:
    fields = decoder_fields(config, kv_heads=8, norm_eps=1e-5, theta=1e6)
    window = None if config.get("sliding_window") is None else config.size("sliding_window")
    intermediate_size, num_layers = config.size("intermediate_size", 14336), fields["num_layers"]
    num_experts = whole_number(config, "num_local_experts", "num_experts", default=8)
    return fields | {
        "intermediate_size": intermediate_size,
        "sliding_windows": (window,) * num_layers,
        "experts": ExpertsSpec(
            num_experts=num_experts,
            top_k=check_top_k(config, config.size("num_experts_per_tok", 2), num_experts),
            intermediate_size=intermediate_size,
            sparse_layers=(True,) * num_layers,
            router=RouterSpec("softmax", normalised=True),
        ),
    }
