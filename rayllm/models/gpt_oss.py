"""gpt-oss: attention sinks, windows in every other layer, and experts with biases and a clamped activation."""

from __future__ import annotations

from rayllm.config.model_spec import ModelSpec
from rayllm.layers.layer import BuildContext
from rayllm.models.base import CausalLM
from rayllm.models.llama import LlamaForCausalLM
from rayllm.models.sparse_mlp import SparseNames, sparse_mlps


def gpt_oss(build: BuildContext, spec: ModelSpec) -> CausalLM:
    return LlamaForCausalLM(build, spec, sparse_mlps(SparseNames(router="router", transposed=True)))
