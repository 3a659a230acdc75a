"""Ministral, of 2024 and 3."""

from __future__ import annotations

from support.kinds.common import LLAMA

ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 32,  # so that the queries of a test's prompts are scaled
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
CONFIGS = {
    "ministral": ("Ministral", {**LLAMA, "sliding_window": 8}),
    "ministral3": ("Ministral3", {**LLAMA, "rope_parameters": ROPE}),
}
