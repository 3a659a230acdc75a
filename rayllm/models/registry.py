"""Which class serves which architecture. docs/models.md says how one is added."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module

from rayllm.config.architectures.architecture import packaged
from rayllm.config.model_spec import ModelSpec
from rayllm.errors import ModelError
from rayllm.layers.layer import BuildContext
from rayllm.models.base import CausalLM
from rayllm.models.bloom import BloomForCausalLM
from rayllm.models.deepseek import deepseek
from rayllm.models.gemma4 import Gemma4ForCausalLM
from rayllm.models.glm4_moe import glm4_moe
from rayllm.models.gpt_oss import gpt_oss
from rayllm.models.llama import LlamaForCausalLM
from rayllm.models.minimax_m2 import minimax_m2
from rayllm.models.mistral3 import mistral3
from rayllm.models.mixtral import mixtral
from rayllm.models.opt import OPTForCausalLM
from rayllm.models.qwen2_moe import qwen2_moe
from rayllm.models.qwen3_5 import qwen3_5
from rayllm.models.qwen3_moe import qwen3_moe

logger = logging.getLogger(__name__)

# What makes one rank's model of a spec.
ModelClass = Callable[[BuildContext, ModelSpec], CausalLM]

# As many as `config.architectures.ARCHITECTURES`.
MODEL_CLASSES: dict[str, ModelClass] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": LlamaForCausalLM,
    "OPTForCausalLM": OPTForCausalLM,
    "BloomForCausalLM": BloomForCausalLM,
    "Phi3ForCausalLM": LlamaForCausalLM,
    "GlmForCausalLM": LlamaForCausalLM,
    "Glm4ForCausalLM": LlamaForCausalLM,
    "MinistralForCausalLM": LlamaForCausalLM,
    "Ministral3ForCausalLM": LlamaForCausalLM,
    "GraniteForCausalLM": LlamaForCausalLM,
    "SmolLM3ForCausalLM": LlamaForCausalLM,
    "Gemma2ForCausalLM": LlamaForCausalLM,
    "Gemma3ForCausalLM": LlamaForCausalLM,
    "Gemma3ForConditionalGeneration": LlamaForCausalLM,
    "Gemma4ForCausalLM": Gemma4ForCausalLM,
    "Gemma4ForConditionalGeneration": Gemma4ForCausalLM,
    "Gemma4UnifiedForCausalLM": Gemma4ForCausalLM,
    "Gemma4UnifiedForConditionalGeneration": Gemma4ForCausalLM,
    "Mistral3ForConditionalGeneration": mistral3,
    "Qwen2_5_VLForConditionalGeneration": LlamaForCausalLM,
    "Qwen3VLForConditionalGeneration": LlamaForCausalLM,
    "Qwen2MoeForCausalLM": qwen2_moe,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "Qwen3_5ForCausalLM": qwen3_5,
    "Qwen3_5ForConditionalGeneration": qwen3_5,
    "Qwen3_5MoeForCausalLM": qwen3_5,
    "Qwen3_5MoeForConditionalGeneration": qwen3_5,
    "Qwen3NextForCausalLM": qwen3_5,
    "MixtralForCausalLM": mixtral,
    "Glm4MoeForCausalLM": glm4_moe,
    "MiniMaxM2ForCausalLM": minimax_m2,
    "DeepseekV3ForCausalLM": deepseek,
    "DeepseekV2ForCausalLM": deepseek,
    "Glm4MoeLiteForCausalLM": deepseek,
    "Mistral4ForCausalLM": deepseek,
    "GptOssForCausalLM": gpt_oss,
}


def model_class(architecture: str) -> ModelClass:
    """One of MODEL_CLASSES, or that of a user's package. Raises ModelError if the package's cannot be imported."""
    if architecture in MODEL_CLASSES:
        return MODEL_CLASSES[architecture]
    own = packaged(architecture)
    assert own is not None  # whose parser was found
    assert own.model is not None
    module, _, name = own.model.partition(":")
    try:
        found: ModelClass = getattr(import_module(module), name)
    except Exception as error:  # whatever the package's code raises
        raise ModelError(f"architecture {architecture}: {own.model} cannot be imported: {error!r}") from error
    logger.info("architecture %s is %s", architecture, own.model)
    return found
