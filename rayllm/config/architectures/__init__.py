"""Which architectures there are, by the names of transformers' classes, and how their config.json is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from rayllm.config.architectures import bloom, llama, mixtral, opt, qwen3_moe
from rayllm.config.json_fields import JsonFields


class Architecture(NamedTuple):
    """parse: config.json and the name of the architecture -> fields of `ModelSpec` as for `make_spec`.

    model_type: what config.json calls it. eos_token_id: the default of transformers' class; None for none.
    """

    parse: Callable[[JsonFields, str], dict[str, Any]]
    model_type: str
    eos_token_id: int | None = None


ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(llama.parse, "llama", eos_token_id=2),
    "MistralForCausalLM": Architecture(llama.parse, "mistral", eos_token_id=2),
    "Qwen2ForCausalLM": Architecture(llama.parse, "qwen2"),
    "Qwen3ForCausalLM": Architecture(llama.parse, "qwen3"),
    "OPTForCausalLM": Architecture(opt.parse, "opt", eos_token_id=2),
    "BloomForCausalLM": Architecture(bloom.parse, "bloom", eos_token_id=2),
    "Qwen3MoeForCausalLM": Architecture(qwen3_moe.parse, "qwen3_moe"),
    "MixtralForCausalLM": Architecture(mixtral.parse, "mixtral", eos_token_id=2),
}
