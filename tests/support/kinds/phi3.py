"""Phi-3 and Phi-4."""

from __future__ import annotations

from support.kinds.common import LLAMA

PHI3 = {key: value for key, value in LLAMA.items() if key != "head_dim"}  # a share of hidden_size, 12
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.0, 2.5, 7.0],
    "partial_rotary_factor": 0.5,
}
CONFIGS = {
    "phi3": ("Phi3", {**PHI3, "sliding_window": 24}),
    "phi4": (  # a prompt of the tests is as long as the context of the pretraining
        "Phi3",
        {**PHI3, "tie_word_embeddings": True, "original_max_position_embeddings": 64, "rope_parameters": LONGROPE},
    ),
}
