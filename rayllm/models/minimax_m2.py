"""MiniMax-M2: experts in every layer, and norms over all query heads and over all key heads."""

from __future__ import annotations

from rayllm.config.model_spec import ModelSpec
from rayllm.layers.layer import BuildContext
from rayllm.models.base import CausalLM
from rayllm.models.llama import LlamaForCausalLM
from rayllm.models.mixtral import NAMES
from rayllm.models.sparse_mlp import sparse_mlps


def minimax_m2(build: BuildContext, spec: ModelSpec) -> CausalLM:
    return LlamaForCausalLM(build, spec, sparse_mlps(NAMES._replace(correction="e_score_correction_bias")))
