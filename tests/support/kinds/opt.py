"""OPT."""

from __future__ import annotations

from typing import Any

from support.kinds.common import MAX_POSITION, SPECIALS, VOCAB_SIZE

OPT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "ffn_dim": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "max_position_embeddings": MAX_POSITION,
    **SPECIALS,
}
CONFIGS = {"opt": ("OPT", OPT), "opt_post": ("OPT", {**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 64})}
