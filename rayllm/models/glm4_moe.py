"""GLM-4-MoE: the first layers are a Llama's, the others have experts and a shared one."""

from __future__ import annotations

from rayllm.config.model_spec import ModelSpec
from rayllm.layers.layer import BuildContext
from rayllm.models.base import CausalLM
from rayllm.models.llama import LlamaForCausalLM
from rayllm.models.sparse_mlp import SparseNames, sparse_mlps


def glm4_moe(build: BuildContext, spec: ModelSpec) -> CausalLM:
    return LlamaForCausalLM(build, spec, sparse_mlps(SparseNames()))
