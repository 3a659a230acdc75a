"""Qwen3-MoE."""

from __future__ import annotations

from support.kinds.common import LLAMA

CONFIGS = {
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **LLAMA,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    )
}
