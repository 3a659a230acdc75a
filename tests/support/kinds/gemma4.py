"""Gemma 4: with embeddings for layers, with experts, with layers that attend to the keys of others, with towers."""

from __future__ import annotations

from typing import Any

from support.kinds.common import LLAMA, VOCAB_SIZE

SIZES: dict[str, Any] = {key: value for key, value in LLAMA.items() if key != "tie_word_embeddings"}
UNIFIED = SIZES | {"sliding_window": 24, "global_head_dim": 32, "final_logit_softcapping": 20.0}
GEMMA4 = UNIFIED | {"hidden_size_per_layer_input": 24, "vocab_size_per_layer_input": VOCAB_SIZE}
EXPERTS = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 48}
ONE_PROJECTION = {"attention_k_eq_v": True, "num_global_key_value_heads": 2}
SHARED = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 4,
    "use_double_wide_mlp": True,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "position_embedding_size": 8,
}
CONFIGS = {
    "gemma4": ("Gemma4", GEMMA4),
    "gemma4_moe": ("Gemma4", GEMMA4 | EXPERTS | ONE_PROJECTION | {"hidden_size_per_layer_input": 0}),
    "gemma4_shared": ("Gemma4", GEMMA4 | SHARED),
    "gemma4_vision": ("Gemma4", {"text_config": GEMMA4, "vision_config": TOWER}),
    "gemma4_unified": ("Gemma4Unified", UNIFIED | ONE_PROJECTION),
    "gemma4_unified_vision": (
        "Gemma4Unified",
        {"text_config": UNIFIED, "vision_config": {"mm_embed_dim": 32, "mm_posemb_size": 8, "output_proj_dims": 96}},
    ),
}
