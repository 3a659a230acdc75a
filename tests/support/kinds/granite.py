"""Granite."""

from __future__ import annotations

from support.kinds.common import LLAMA

MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
    "rms_norm_eps": 1e-2,  # of an effect that tests see
}
GRANITE = {key: value for key, value in LLAMA.items() if key != "head_dim"}
CONFIGS = {"granite": ("Granite", GRANITE | MULTIPLIERS)}
