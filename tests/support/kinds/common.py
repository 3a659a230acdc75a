"""What all tiny configs share, and the fields of a small Llama."""

from __future__ import annotations

from typing import Any

VOCAB_SIZE = 259  # 256 bytes and three specials; not divisible by 2, 4 or 8
BOS, EOS, PAD = 256, 257, 258
MAX_POSITION = 512
SPECIALS = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": MAX_POSITION,
    "tie_word_embeddings": False,
    **SPECIALS,
}
