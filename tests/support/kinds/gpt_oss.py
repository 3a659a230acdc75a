"""gpt-oss."""

from __future__ import annotations

from support.kinds.common import LLAMA

CONFIGS = {
    "gpt_oss": (
        "GptOss",
        {
            **LLAMA,
            "intermediate_size": 48,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "sliding_window": 24,
            "num_hidden_layers": 2,  # one of each kind: sharp attention makes much of rounding errors
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 128,
            },
        },
    )
}
