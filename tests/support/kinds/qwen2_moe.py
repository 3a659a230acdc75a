"""Qwen2-MoE."""

from __future__ import annotations

from support.kinds.common import LLAMA

CONFIGS = {
    "qwen2_moe": (
        "Qwen2Moe",
        {
            **{key: value for key, value in LLAMA.items() if key != "head_dim"},
            "num_hidden_layers": 2,  # one of each kind: sharp attention makes much of rounding errors
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 80,
            "mlp_only_layers": [1],
        },
    )
}
