"""`Experts`: the small MLPs of a mixture, of which each token goes through a few."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from rayllm.layers.layer import BuildContext, Layer
from rayllm.layers.matrices.experts import ExpertShapes, QuantisedExperts
from rayllm.layers.weights import WeightSource
from rayllm_kernels import ops


class Experts(Layer):
    """Sum of weight * down_e(act(gate_e(x)) * up_e(x)) over a token's experts e, each rank having a part of each width.

    gate_up: [num_experts, 2 * inner / tp, hidden_size], an expert's rows of gate before those of up. down:
    [num_experts, hidden_size, inner / tp].

    A checkpoint holds either each expert's three projections on their own, in [out, in] as `torch.nn.Linear`, or all
    experts' as two tensors "gate_up_proj" [num_experts, 2 * inner, hidden_size] and "down_proj"
    [num_experts, hidden_size, inner].

    bias: "gate_up_proj_bias" and "down_proj_bias" beside the fused tensors. clamp: as for `ops.experts`.
    transposed: the fused tensors are [num_experts, in, out], and rows of gate and up take turns.
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
        *,
        bias: bool = False,
        clamp: tuple[float, float] | None = None,
        transposed: bool = False,
    ):
        super().__init__(context)
        self.inner_size, self.act, self.deterministic = inner_size, act, context.deterministic
        self.shard = context.shard(inner_size, "an expert's intermediate size")
        shapes = ExpertShapes(hidden_size, num_experts, inner_size, names, projections, transposed)
        self.quantised = QuantisedExperts.make(context, shapes)
        if self.quantised is None:
            self.gate_up = context.parameter(num_experts, 2 * self.shard, hidden_size)
            self.down = context.parameter(num_experts, hidden_size, self.shard)
            self.product: Callable[..., torch.Tensor] = partial(ops.experts, gate_up=self.gate_up, down=self.down)
        else:
            self.product = partial(ops.experts_quantised, gate_up=self.quantised.gate_up, down=self.quantised.down)
            for name, parameter in self.quantised.parameters.items():
                self.register_parameter(name, parameter)
        self.gate_up_bias = context.parameter(num_experts, 2 * self.shard) if bias else None
        self.down_bias = context.parameter(num_experts, hidden_size) if bias else None
        self.names, self.projections, self.clamp, self.transposed = names, projections, clamp, transposed

    def forward(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, onto: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The rank's summand of the output, plus `onto`: x, onto [T, hidden_size] -> [T, hidden_size].

        weights, experts: of `Router`.
        """
        return self.product(
            x,
            weights,
            experts,
            act=self.act,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias if self.tp.rank == 0 else None,  # which is added once
            clamp=self.clamp,
            onto=onto,
            deterministic=self.deterministic,
        )

    def load(self, source: WeightSource) -> None:
        if self.quantised is not None:
            self.quantised.load(source)
            self._load_biases(source, self.quantised.prefix)
            return
        first = [f"{self.prefix}{name}.0.{self.projections[0]}.weight" for name in self.names]
        fused = [f"{self.prefix}{name}.gate_up_proj" for name in self.names]
        found = source.choose(*first, *fused)
        if self.transposed:
            self._load_transposed(source, fused[0].removesuffix("gate_up_proj"))
        elif found in fused:
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

    def _load_transposed(self, source: WeightSource, prefix: str) -> None:
        shard, inner, (experts, hidden, _) = self.shard, self.inner_size, self.down.shape
        start, end = self.tp.rank * shard, (self.tp.rank + 1) * shard
        pairs = source.slice(prefix + "gate_up_proj", (experts, hidden, 2 * inner), 2, 2 * start, 2 * end)
        down = source.slice(prefix + "down_proj", (experts, inner, hidden), 1, start, end)
        source.write(self.down, down.transpose(1, 2))
        for half in range(2):
            rows = slice(half * shard, (half + 1) * shard)
            source.write(self.gate_up[:, rows], pairs[:, :, half::2].transpose(1, 2))
        self._load_biases(source, prefix)

    def _load_biases(self, source: WeightSource, prefix: str) -> None:
        """If there are any: rows of gate and up take turns."""
        if self.gate_up_bias is None or self.down_bias is None:
            return
        (experts, hidden), inner, start = self.down_bias.shape, self.inner_size, 2 * self.tp.rank * self.shard
        biases = source.slice(prefix + "gate_up_proj_bias", (experts, 2 * inner), 1, start, start + 2 * self.shard)
        source.write(self.down_bias, source.tensor(prefix + "down_proj_bias", (experts, hidden)))
        for half in range(2):
            source.write(self.gate_up_bias[:, half * self.shard : (half + 1) * self.shard], biases[:, half::2])

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
