"""Which class serves which architecture. docs/models.md says how one is added."""

from __future__ import annotations

from collections.abc import Callable

from rayllm.config.model_spec import ModelSpec
from rayllm.layers.layer import BuildContext
from rayllm.models.base import CausalLM
from rayllm.models.bloom import BloomForCausalLM
from rayllm.models.llama import LlamaForCausalLM
from rayllm.models.mixtral import mixtral
from rayllm.models.opt import OPTForCausalLM
from rayllm.models.qwen3_moe import qwen3_moe

# As many as `config.architectures.ARCHITECTURES`.
MODEL_CLASSES: dict[str, Callable[[BuildContext, ModelSpec], CausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": LlamaForCausalLM,
    "OPTForCausalLM": OPTForCausalLM,
    "BloomForCausalLM": BloomForCausalLM,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "MixtralForCausalLM": mixtral,
}
