"""Text models with a tower for images beside them."""

from __future__ import annotations

from typing import Any

from support.kinds.common import LLAMA
from support.kinds.deepseek import CONFIGS as LATENTS
from support.kinds.ministral import CONFIGS as MINISTRALS

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "patch_size": 14}
PIXTRAL = SIZES | {"num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16, "image_size": 28}
QWEN = SIZES | {"depth": 1, "num_heads": 2, "out_hidden_size": 96}
MROPE = {"rope_type": "default", "rope_theta": 10000.0}
QWEN_TEXT = {key: value for key, value in LLAMA.items() if key != "head_dim"}


def _mistral3(text: dict[str, Any], **rest: Any) -> tuple[str, dict[str, Any]]:
    return "Mistral3", {"text_config": text, "vision_config": PIXTRAL | {"model_type": "pixtral"}, **rest}


CONFIGS = {
    "mistral3": _mistral3({**LLAMA, "model_type": "mistral", "sliding_window": None}, tie_word_embeddings=False),
    "mistral3_ministral": _mistral3({**MINISTRALS["ministral3"][1], "model_type": "ministral3"}),
    "mistral3_mistral4": _mistral3({**LATENTS["mistral4"][1], "model_type": "mistral4"}),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {
            "text_config": QWEN_TEXT | {"rope_parameters": MROPE | {"mrope_section": [2, 2, 2]}},
            "vision_config": QWEN | {"fullatt_block_indexes": [0]},
        },
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {
            "text_config": LLAMA | {"rope_parameters": MROPE | {"mrope_section": [2, 3, 3]}},
            "vision_config": QWEN | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
            "tie_word_embeddings": True,
        },
    ),
}
