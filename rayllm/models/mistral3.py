"""The text model of checkpoints of Mistral that see: a Llama, or, in Mistral Small 4, one with latent attention."""

from __future__ import annotations

from rayllm.config.model_spec import ModelSpec
from rayllm.layers.layer import BuildContext
from rayllm.models.base import CausalLM
from rayllm.models.deepseek import deepseek
from rayllm.models.llama import LlamaForCausalLM


def mistral3(build: BuildContext, spec: ModelSpec) -> CausalLM:
    return LlamaForCausalLM(build, spec) if spec.latent is None else deepseek(build, spec)
