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
    """Sum of weight * down_e(act(gate_e(x)) * up_e(x)) over a token's experts e.

    Each rank has a part of each expert's width, or, if the context says so, all of some experts, of which it computes
    the tokens that go through them. gate_up: [E, 2 * I, hidden_size], an expert's rows of gate before those of up.
    down: [E, hidden_size, I]. Of E and I, the one that ranks share is the rank's part, the other is num_experts or
    inner_size.

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
        self.num_experts, self.inner_size = num_experts, inner_size
        self.act, self.deterministic = act, context.deterministic
        self.owned: ops.ExpertRange | None = None
        self.first, count = 0, num_experts
        if context.expert_parallel and self.tp.size > 1:
            self.first, end = (num_experts * rank // self.tp.size for rank in (self.tp.rank, self.tp.rank + 1))
            count, self.shard = end - self.first, inner_size
            self.owned = ops.ExpertRange(self.first, num_experts)
        else:
            self.shard = context.shard(inner_size, "an expert's intermediate size")
        shapes = ExpertShapes(hidden_size, num_experts, inner_size, names, projections, transposed)
        self.quantised = QuantisedExperts.make(context, shapes) if self.owned is None else None
        if self.quantised is None:
            self.gate_up = context.parameter(count, 2 * self.shard, hidden_size)
            self.down = context.parameter(count, hidden_size, self.shard)
            self.product: Callable[..., torch.Tensor] = partial(
                ops.experts, gate_up=self.gate_up, down=self.down, owned=self.owned
            )
        else:
            self.product = partial(ops.experts_quantised, gate_up=self.quantised.gate_up, down=self.quantised.down)
            for name, parameter in self.quantised.parameters.items():
                self.register_parameter(name, parameter)
        self.gate_up_bias = context.parameter(count, 2 * self.shard) if bias else None
        self.down_bias = context.parameter(count, hidden_size) if bias else None
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
            down_bias=self.down_bias if self.tp.rank == 0 or self.owned is not None else None,  # which is added once
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

    def _part(
        self, source: WeightSource, name: str, shape: tuple[int, ...], dim: int, start: int, end: int
    ) -> torch.Tensor:
        """The rank's part of all experts' tensor [num_experts, *shape]: its experts, or start to end along `dim`."""
        whole = (self.num_experts, *shape)
        if self.owned is not None:
            dim, start, end = 0, self.first, self.first + self.down.shape[0]
        return source.slice(name, whole, dim, start, end)

    def _load_fused(self, source: WeightSource, prefix: str) -> None:
        shard, inner, hidden = self.shard, self.inner_size, self.down.shape[1]
        start, end, name = self.tp.rank * shard, (self.tp.rank + 1) * shard, prefix + "gate_up_proj"
        if self.owned is not None:
            source.write(self.gate_up, self._part(source, name, (2 * inner, hidden), 0, 0, 0))
        else:
            for half in range(2):
                rows = half * inner
                stored = self._part(source, name, (2 * inner, hidden), 1, rows + start, rows + end)
                source.write(self.gate_up[:, half * shard : (half + 1) * shard], stored)
        source.write(self.down, self._part(source, prefix + "down_proj", (hidden, inner), 2, start, end))

    def _load_transposed(self, source: WeightSource, prefix: str) -> None:
        shard, inner, hidden = self.shard, self.inner_size, self.down.shape[1]
        start, end = self.tp.rank * shard, (self.tp.rank + 1) * shard
        pairs = self._part(source, prefix + "gate_up_proj", (hidden, 2 * inner), 2, 2 * start, 2 * end)
        down = self._part(source, prefix + "down_proj", (inner, hidden), 1, start, end)
        source.write(self.down, down.transpose(1, 2))
        for half in range(2):
            rows = slice(half * shard, (half + 1) * shard)
            source.write(self.gate_up[:, rows], pairs[:, :, half::2].transpose(1, 2))
        self._load_biases(source, prefix)

    def _load_biases(self, source: WeightSource, prefix: str) -> None:
        """If there are any: rows of gate and up take turns."""
        if self.gate_up_bias is None or self.down_bias is None:
            return
        hidden, start, end = self.down_bias.shape[1], 2 * self.tp.rank * self.shard, 2 * (self.tp.rank + 1) * self.shard
        biases = self._part(source, prefix + "gate_up_proj_bias", (2 * self.inner_size,), 1, start, end)
        source.write(self.down_bias, self._part(source, prefix + "down_proj_bias", (hidden,), 1, 0, hidden))
        for half in range(2):
            source.write(self.gate_up_bias[:, half * self.shard : (half + 1) * self.shard], biases[:, half::2])

    def _load_each(self, source: WeightSource, prefix: str) -> None:
        shard, inner, (count, hidden, _) = self.shard, self.inner_size, self.down.shape
        start = 0 if self.owned is not None else self.tp.rank * shard
        *gate_and_up, down = self.projections
        for own in range(count):
            of_expert = f"{prefix}{self.first + own}."
            for half, name in enumerate(gate_and_up):
                stored = source.slice(f"{of_expert}{name}.weight", (inner, hidden), 0, start, start + shard)
                source.write(self.gate_up[own, half * shard : (half + 1) * shard], stored)
            stored = source.slice(f"{of_expert}{down}.weight", (hidden, inner), 1, start, start + shard)
            source.write(self.down[own], stored)
        for other in range(self.num_experts):
            if not self.first <= other < self.first + count:
                source.leave(f"{prefix}{other}")
