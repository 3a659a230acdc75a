"""`SparseMLP`: a mixture of experts where a Llama has its MLP."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from rayllm.config.model_spec import ModelSpec
from rayllm.layers.experts import Experts
from rayllm.layers.layer import BuildContext
from rayllm.layers.norm import RMSNorm, Summand
from rayllm.layers.router import Router
from rayllm.layers.shared_expert_gate import SharedExpertGate
from rayllm.models.llama import LlamaMLP, MakeMLP, dense_mlp


class SparseNames(NamedTuple):
    """What a family calls the weights of a layer's experts.

    blocks: the names that the block goes by, of which a checkpoint has one.
    router, correction: within the block. shared, shared_gate: the shared expert and its gate.
    projections: gate, up and down of an expert. transposed: as for `Experts`.
    """

    blocks: tuple[str, ...] = ("mlp",)
    router: str = "gate"
    correction: str = "gate.e_score_correction_bias"
    shared: str = "shared_experts"
    shared_gate: str = "shared_expert_gate"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    transposed: bool = False


class SparseMLP(nn.Module):
    """Router, experts and the shared expert of a layer. build: of the layer."""

    def __init__(self, build: BuildContext, spec: ModelSpec, names: SparseNames):
        super().__init__()
        sizes, hidden, self.tp = spec.experts, spec.hidden_size, build.tp
        assert sizes is not None

        def within(name: str) -> tuple[str, ...]:
            return tuple(f"{block}.{name}" for block in names.blocks)

        self.router = Router(
            build, hidden, sizes.num_experts, sizes.top_k, sizes.router, within(names.router), within(names.correction)
        )
        self.experts = Experts(
            build,
            hidden,
            sizes.num_experts,
            sizes.intermediate_size,
            spec.hidden_act,
            within("experts"),
            names.projections,
            bias=sizes.bias,
            clamp=sizes.clamp,
            transposed=names.transposed,
        )
        self.shared, self.shared_expert_gate, block = None, None, build.at(names.blocks[0])
        if sizes.shared_size:
            self.shared = LlamaMLP(block.at(names.shared), spec, inner=sizes.shared_size)
        if sizes.shared_gate:
            self.shared_expert_gate = SharedExpertGate(block.at(names.shared_gate), hidden)

    def forward(self, x: Summand, residual: torch.Tensor | None, norm: RMSNorm) -> tuple[Summand, torch.Tensor | None]:
        """total + experts of norm(total), total = x + residual: in two parts, as x and residual themselves."""
        x, total = norm.add_partial(x, residual)
        weights, experts = self.router(x)
        shared = None if self.shared is None else self.shared.summand(x)
        if self.shared_expert_gate is not None:
            shared = self.shared_expert_gate(x, shared)
        return self.experts(x, weights, experts, onto=shared, summed=self.tp.size > 1), total


def sparse_mlps(names: SparseNames) -> MakeMLP:
    """Makes the layers' MLPs: a `SparseMLP` of these names where the model has experts, and the usual one elsewhere."""

    def make(build: BuildContext, spec: ModelSpec, layer: int) -> nn.Module:
        return SparseMLP(build, spec, names) if spec.is_sparse(layer) else dense_mlp(build, spec, layer)

    return make
