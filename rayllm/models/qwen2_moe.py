"""Qwen2-MoE: a Qwen2 with a mixture of experts in most layers, and beside it a shared expert behind a gate."""

from __future__ import annotations

from rayllm.config.model_spec import ModelSpec
from rayllm.layers.layer import BuildContext
from rayllm.models.base import CausalLM
from rayllm.models.llama import LlamaForCausalLM
from rayllm.models.sparse_mlp import SparseNames, sparse_mlps


def qwen2_moe(build: BuildContext, spec: ModelSpec) -> CausalLM:
    return LlamaForCausalLM(build, spec, sparse_mlps(SparseNames(shared="shared_expert")))
