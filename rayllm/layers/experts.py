"""`Experts`: the small MLPs of a mixture, of which each token goes through a few."""

from __future__ import annotations

import torch

from rayllm.layers.layer import BuildContext, Layer
from rayllm.layers.weights import WeightSource
from rayllm_kernels import ops


class Experts(Layer):
    """Sum of weight * down_e(act(gate_e(x)) * up_e(x)) over a token's experts e, each rank having a part of each width.

    gate_up: [num_experts, 2 * inner / tp, hidden_size], an expert's rows of gate before those of up. down:
    [num_experts, hidden_size, inner / tp].

    A checkpoint holds either each expert's three projections on their own, in [out, in] as `torch.nn.Linear`, or all
    experts' as two tensors "gate_up_proj" [num_experts, 2 * inner, hidden_size] and "down_proj"
    [num_experts, hidden_size, inner].

    names: of the whole, with the block's prefix before it, of which the checkpoint has one. projections: of an expert's
    gate, up and down.
    """

    def __init__(
        self,
        context: BuildContext,
        hidden_size: int,
        num_experts: int,
        inner_size: int,
        act: str,
        names: tuple[str, ...],
        projections: tuple[str, str, str],
    ):
        super().__init__(context)
        self.inner_size, self.act, self.deterministic = inner_size, act, context.deterministic
        self.shard = context.shard(inner_size, "an expert's intermediate size")
        self.gate_up = context.parameter(num_experts, 2 * self.shard, hidden_size)
        self.down = context.parameter(num_experts, hidden_size, self.shard)
        self.names, self.projections = names, projections

    def forward(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, onto: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The rank's summand of the output, plus `onto`: x, onto [T, hidden_size] -> [T, hidden_size].

        weights, experts: of `Router`.
        """
        return ops.experts(
            x, weights, experts, self.gate_up, self.down, self.act, onto=onto, deterministic=self.deterministic
        )

    def load(self, source: WeightSource) -> None:
        first = [f"{self.prefix}{name}.0.{self.projections[0]}.weight" for name in self.names]
        fused = [f"{self.prefix}{name}.gate_up_proj" for name in self.names]
        found = source.choose(*first, *fused)
        if found in fused:
            self._load_fused(source, found.removesuffix("gate_up_proj"))
        else:
            self._load_each(source, found.removesuffix(f"0.{self.projections[0]}.weight"))

    def _load_fused(self, source: WeightSource, prefix: str) -> None:
        shard, inner, (experts, hidden, _) = self.shard, self.inner_size, self.down.shape
        start = self.tp.rank * shard
        for half in range(2):
            rows = half * inner + start
            stored = source.slice(prefix + "gate_up_proj", (experts, 2 * inner, hidden), 1, rows, rows + shard)
            source.write(self.gate_up[:, half * shard : (half + 1) * shard], stored)
        source.write(self.down, source.slice(prefix + "down_proj", (experts, hidden, inner), 2, start, start + shard))

    def _load_each(self, source: WeightSource, prefix: str) -> None:
        shard, inner, hidden = self.shard, self.inner_size, self.down.shape[1]
        start = self.tp.rank * shard
        *gate_and_up, down = self.projections
        for expert in range(self.down.shape[0]):
            for half, name in enumerate(gate_and_up):
                stored = source.slice(f"{prefix}{expert}.{name}.weight", (inner, hidden), 0, start, start + shard)
                source.write(self.gate_up[expert, half * shard : (half + 1) * shard], stored)
            stored = source.slice(f"{prefix}{expert}.{down}.weight", (hidden, inner), 1, start, start + shard)
            source.write(self.down[expert], stored)
