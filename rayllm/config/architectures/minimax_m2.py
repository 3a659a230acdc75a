"""MiniMax-M2."""

from __future__ import annotations

from typing import Any

from rayllm.config.architectures.common import check_top_k, decoder_fields, whole_number
from rayllm.config.json_fields import JsonFields
from rayllm.config.model_spec import ExpertsSpec, RouterSpec


def parse(config: JsonFields, _architecture: str) -> dict[str, Any]:
    rotary_dim, head_dim = config.get("rotary_dim"), config.size("head_dim", 128)
    partial = 1.0 if rotary_dim is None else config.size("rotary_dim") / head_dim
    fields = decoder_fields(config, kv_heads=8, head_dim=128, theta=5e6, partial=partial)
    inner, num_layers = config.size("intermediate_size", 1536), fields["num_layers"]
    num_experts = whole_number(config, "num_local_experts", "num_experts", default=256)
    return fields | {
        "intermediate_size": inner,
        "qk_norm_whole": True,
        "experts": ExpertsSpec(
            num_experts=num_experts,
            top_k=check_top_k(config, config.size("num_experts_per_tok", 8), num_experts),
            intermediate_size=inner,
            sparse_layers=(True,) * num_layers,
            router=RouterSpec("sigmoid", normalised=True, correction=True),
        ),
    }
