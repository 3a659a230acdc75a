"""Mixtral: a Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from rayllm.config.model_spec import ModelSpec
from rayllm.layers.layer import BuildContext
from rayllm.models.base import CausalLM
from rayllm.models.llama import LlamaForCausalLM
from rayllm.models.sparse_mlp import SparseNames, sparse_mlps

# transformers 5 calls the block "mlp", and still writes checkpoints with the old name.
NAMES = SparseNames(blocks=("block_sparse_moe", "mlp"), projections=("w1", "w3", "w2"))


def mixtral(build: BuildContext, spec: ModelSpec) -> CausalLM:
    return LlamaForCausalLM(build, spec, sparse_mlps(NAMES))
