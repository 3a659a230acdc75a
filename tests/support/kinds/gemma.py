"""Gemma 2 and 3."""

from __future__ import annotations

from typing import Any

from support.kinds.common import LLAMA

SIZES: dict[str, Any] = {key: value for key, value in LLAMA.items() if key != "tie_word_embeddings"}
# Every other layer has a window here, and the caps are where the logits of the tiny models are.
GEMMA2 = SIZES | {"sliding_window": 24, "attn_logit_softcapping": 20.0, "query_pre_attn_scalar": 24}
GEMMA3 = SIZES | {
    "sliding_window": 24,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 24,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    },
}
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
CONFIGS = {
    "gemma2": ("Gemma2", GEMMA2),
    "gemma3": ("Gemma3", GEMMA3),
    "gemma3_vision": ("Gemma3", {"text_config": GEMMA3, "vision_config": SIGLIP, "mm_tokens_per_image": 1}),
}
