"""BLOOM."""

from __future__ import annotations

from support.kinds.common import SPECIALS, VOCAB_SIZE

CONFIGS = {
    "bloom": (
        "Bloom",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 12,  # no power of two
            **SPECIALS,
        },
    )
}
