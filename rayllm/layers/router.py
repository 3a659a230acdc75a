"""`Router`: which experts each token goes through, and with which weights."""

from __future__ import annotations

import torch

from rayllm.config.model_spec import RouterSpec
from rayllm.layers.layer import BuildContext, Layer
from rayllm.layers.weights import WeightSource
from rayllm_kernels import ops


class Router(Layer):
    """A linear layer to one logit an expert, and the choice of `top_k` by `RouterSpec`. Every rank has it whole.

    names: of the projection, each with the block's prefix before it, of which the checkpoint has one. corrections,
    factors: the same for what `RouterSpec` calls so. forward: [T, hidden_size] -> (weights [T, top_k] float32, experts
    [T, top_k] int32), the best expert first.
    """

    def __init__(
        self,
        context: BuildContext,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        spec: RouterSpec,
        names: tuple[str, ...],
        corrections: tuple[str, ...] = (),
        factors: tuple[str, ...] = (),
    ):
        super().__init__(context)
        self.weight = context.parameter(num_experts, hidden_size)
        self.bias = context.parameter(num_experts) if spec.bias else None
        self.correction = context.parameter(num_experts, dtype=torch.float32) if spec.correction else None
        self.factors = context.parameter(num_experts, dtype=torch.float32) if spec.factors else None
        self.dtype, self.wide_logits, self.deterministic = context.dtype, spec.wide_logits, context.deterministic
        self.names, self.correction_names, self.factor_names = names, corrections, factors
        self.routing = ops.Routing(
            top_k=top_k,
            scores=spec.scores,
            normalised=spec.normalised,
            num_groups=spec.num_groups,
            top_k_groups=spec.top_k_groups,
            best_of_group=spec.best_of_group,
            scale=spec.scale,
            rounded=not spec.wide_weights,
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        deterministic = self.deterministic
        if self.wide_logits:
            logits = ops.linear_wide(x, self.weight, self.bias, deterministic=deterministic)
        else:
            logits = (ops.linear_invariant if deterministic else ops.linear)(x, self.weight, self.bias)
        return ops.route(logits, self.routing, self.correction, self.factors, deterministic=deterministic)

    def load(self, source: WeightSource) -> None:
        for field, parameter in (("weight", self.weight), ("bias", self.bias)):
            if parameter is not None:
                name = source.choose(*(f"{self.prefix}{name}.{field}" for name in self.names))
                source.write(parameter, source.tensor(name, tuple(parameter.shape)))
        if self.correction is not None:
            name = source.choose(*(self.prefix + name for name in self.correction_names))
            source.write(self.correction, source.tensor(name, tuple(self.correction.shape)))
        if self.factors is not None:
            name = source.choose(*(self.prefix + name for name in self.factor_names))
            source.write(self.factors, source.tensor(name, tuple(self.factors.shape)).to(self.dtype))
