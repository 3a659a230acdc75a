"""The text model of Mistral Small 3.1 and later, up to 4, and of Ministral 3, whose checkpoints see images."""

from __future__ import annotations

from typing import Any

from rayllm.config.architectures import deepseek, llama, ministral
from rayllm.config.json_fields import JsonFields


def parse(config: JsonFields, _architecture: str) -> dict[str, Any]:
    kind = config.text("model_type", "mistral")
    if kind == "mistral":
        fields = llama.parse(config, "MistralForCausalLM")
    elif kind == "ministral3":
        fields = ministral.parse(config, "Ministral3ForCausalLM")
    else:
        fields = deepseek.parse_mistral4(config, "Mistral4ForCausalLM")
    # transformers ties by default, but for checkpoints that have an output matrix of their own (Mistral Small 3.1).
    told = config.get("tie_word_embeddings")
    return fields | {"tie_word_embeddings": None if told is None else config.flag("tie_word_embeddings", True)}
