"""SmolLM3: one layer of three has no rotary positions."""

from __future__ import annotations

from support.kinds.common import LLAMA

SMOLLM3 = {key: value for key, value in LLAMA.items() if key != "head_dim"}
CONFIGS = {"smollm3": ("SmolLM3", {**SMOLLM3, "no_rope_layers": [1, 0, 1]})}
