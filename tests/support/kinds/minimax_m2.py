"""MiniMax-M2."""

from __future__ import annotations

from support.kinds.common import LLAMA

CONFIGS = {
    "minimax_m2": (
        "MiniMaxM2",
        {**LLAMA, "intermediate_size": 48, "num_local_experts": 8, "num_experts_per_tok": 3, "rotary_dim": 8},
    )
}
