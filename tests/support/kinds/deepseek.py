"""Models with latent attention: DeepSeek-V2 and V3, GLM-4-MoE-Lite, Mistral 4."""

from __future__ import annotations

from typing import Any

from support.kinds.common import LLAMA
from support.kinds.ministral import ROPE

LATENT: dict[str, Any] = {key: value for key, value in LLAMA.items() if key != "head_dim"} | {
    "num_key_value_heads": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
}
GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
CONFIGS = {
    "deepseek_v3": ("DeepseekV3", LATENT | GROUPS | {"first_k_dense_replace": 1, "rope_parameters": YARN}),
    "deepseek_v2": (
        "DeepseekV2",
        LATENT
        | GROUPS
        | {
            "n_shared_experts": 2,
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "first_k_dense_replace": 1,
        },
    ),
    "glm4_moe_lite": ("Glm4MoeLite", LATENT),
    "mistral4": ("Mistral4", LATENT | {"rope_parameters": ROPE}),
}
