"""The text model of Mistral Small 3.1 and later, and of Ministral 3, whose checkpoints see images."""

from __future__ import annotations

from typing import Any

from rayllm.config.architectures import llama, ministral
from rayllm.config.json_fields import JsonFields


def parse(config: JsonFields, _architecture: str) -> dict[str, Any]:
    is_mistral = config.text("model_type", "mistral") == "mistral"
    fields = (
        llama.parse(config, "MistralForCausalLM") if is_mistral else ministral.parse(config, "Ministral3ForCausalLM")
    )
    return fields | {"tie_word_embeddings": config.flag("tie_word_embeddings", True)}
