"""Qwen3.5, dense and of experts, alone and beside a tower, and Qwen3-Next: every second layer keeps a state."""

from __future__ import annotations

from typing import Any

from support.kinds.common import LLAMA

LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "rms_norm_eps": 1e-3,  # a smaller one amplifies what a state gives for the first tokens, which is next to nothing
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 32,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "patch_size": 14,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 96,
    "num_position_embeddings": 16,
}
CONFIGS = {
    "qwen3_5": ("Qwen3_5", {**LLAMA, **LINEAR}),
    "qwen3_5_vl": ("Qwen3_5", {"text_config": {**LLAMA, **LINEAR}, "vision_config": TOWER}),
    "qwen3_5_moe": ("Qwen3_5Moe", {**LLAMA, **LINEAR, **EXPERTS}),
    "qwen3_5_moe_vl": ("Qwen3_5Moe", {"text_config": {**LLAMA, **LINEAR, **EXPERTS}, "vision_config": TOWER}),
    "qwen3_next": ("Qwen3Next", {**LLAMA, **LINEAR, **EXPERTS, "mlp_only_layers": [1]}),
}
