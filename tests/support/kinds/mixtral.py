"""Mixtral."""

from __future__ import annotations

from support.kinds.common import LLAMA

CONFIGS = {"mixtral": ("Mixtral", {**LLAMA, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 24})}
