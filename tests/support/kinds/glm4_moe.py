"""GLM-4-MoE."""

from __future__ import annotations

from support.kinds.common import LLAMA

CONFIGS = {
    "glm4_moe": (
        "Glm4Moe",
        {
            **LLAMA,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    )
}
