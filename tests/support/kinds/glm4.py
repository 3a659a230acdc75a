"""GLM-4, of both classes."""

from __future__ import annotations

from support.kinds.common import LLAMA

CONFIGS = {"glm": ("Glm", LLAMA), "glm4": ("Glm4", {**LLAMA, "attention_bias": False})}
