"""Which class serves which architecture."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rayllm.config.model_spec import SUPPORTED_ARCHITECTURES, ModelSpec
from rayllm.errors import ModelError
from rayllm.models.base import CausalLM
from rayllm.models.bloom import BloomForCausalLM
from rayllm.models.llama import LlamaForCausalLM
from rayllm.models.opt import OPTForCausalLM
from rayllm.parallel.tp_group import TPGroup

# (spec, tp, device, dtype, deterministic)
ModelClass = Callable[[ModelSpec, TPGroup, torch.device, torch.dtype, bool], CausalLM]

MODEL_CLASSES: dict[str, ModelClass] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": LlamaForCausalLM,
    "OPTForCausalLM": OPTForCausalLM,
    "BloomForCausalLM": BloomForCausalLM,
}


def model_class(architecture: str) -> ModelClass:
    """Raises ModelError, naming those that are supported, for an unknown architecture."""
    if architecture not in MODEL_CLASSES:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise ModelError(f"architecture {architecture} is not supported; supported are {supported}")
    return MODEL_CLASSES[architecture]
