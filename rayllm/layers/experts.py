"""`Experts`: the small MLPs of a mixture, of which each token goes through a few."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from rayllm.layers.layer import BuildContext, Layer
from rayllm.layers.matrices.experts import ExpertPart, ExpertShapes, QuantisedExperts
from rayllm.layers.norm import Summand
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
        self.num_experts, self.hidden_size, self.inner_size = num_experts, hidden_size, inner_size
        self.act, self.deterministic = act, context.deterministic
        part = self.part = ExpertPart.of(context, num_experts, inner_size)
        self.owned, self.shard, count = part.owned, part.inner.stop - part.inner.start, part.num_here
        shapes = ExpertShapes(hidden_size, num_experts, inner_size, names, projections, transposed)
        self.quantised = QuantisedExperts.make(context, shapes, part)
        if self.quantised is None:
            self.gate_up = context.parameter(count, 2 * self.shard, hidden_size)
            self.down = context.parameter(count, hidden_size, self.shard)
            self.product: Callable[..., Summand] = partial(ops.experts, gate_up=self.gate_up, down=self.down)
        else:
            self.product = partial(
                ops.experts_quantised,
                gate_up=self.quantised.gate_up,
                down=self.quantised.down,
                fp8_tokens=self.quantised.fp8_tokens,
            )
            for name, parameter in self.quantised.parameters.items():
                self.register_parameter(name, parameter)
        self.gate_up_bias = context.parameter(count, 2 * self.shard) if bias else None
        self.down_bias = context.parameter(count, hidden_size) if bias else None
        self.names, self.projections, self.clamp, self.transposed = names, projections, clamp, transposed

    @property
    def num_parameters(self) -> int:
        """Weights and biases of the rank's part, whatever their bits are."""
        of_biases = 0 if self.gate_up_bias is None else 2 * self.shard + self.hidden_size
        return self.part.num_here * (3 * self.shard * self.hidden_size + of_biases)

    def forward(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        onto: torch.Tensor | None = None,
        *,
        summed: bool = True,
    ) -> Summand:
        """The rank's summand of the output, plus `onto`: x, onto [T, hidden_size] -> [T, hidden_size].

        weights, experts: of `Router`. summed: False if it need not be added up yet.
        """
        return self.product(
            x,
            weights,
            experts,
            act=self.act,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias if self.tp.rank == 0 or self.owned is not None else None,  # which is added once
            clamp=self.clamp,
            owned=self.owned,
            onto=onto,
            summed=summed,
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
            dim, (start, end, _) = 0, self.part.experts
        return source.slice(name, whole, dim, start, end)

    def _load_fused(self, source: WeightSource, prefix: str) -> None:
        shard, inner, hidden = self.shard, self.inner_size, self.hidden_size
        (start, end, _), name = self.part.inner, prefix + "gate_up_proj"
        if self.owned is not None:
            source.write(self.gate_up, self._part(source, name, (2 * inner, hidden), 0, 0, 0))
        else:
            for half in range(2):
                rows = half * inner
                stored = self._part(source, name, (2 * inner, hidden), 1, rows + start, rows + end)
                source.write(self.gate_up[:, half * shard : (half + 1) * shard], stored)
        source.write(self.down, self._part(source, prefix + "down_proj", (hidden, inner), 2, start, end))

    def _load_transposed(self, source: WeightSource, prefix: str) -> None:
        shard, inner, hidden = self.shard, self.inner_size, self.hidden_size
        start, end, _ = self.part.inner
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
        hidden, (start, end) = self.hidden_size, (2 * border for border in self.part.inner[:2])
        biases = self._part(source, prefix + "gate_up_proj_bias", (2 * self.inner_size,), 1, start, end)
        source.write(self.down_bias, self._part(source, prefix + "down_proj_bias", (hidden,), 1, 0, hidden))
        for half in range(2):
            source.write(self.gate_up_bias[:, half * self.shard : (half + 1) * self.shard], biases[:, half::2])

    def _load_each(self, source: WeightSource, prefix: str) -> None:
        shard, inner, hidden, start = self.shard, self.inner_size, self.hidden_size, self.part.inner.start
        *gate_and_up, down = self.projections
        for own, number in enumerate(range(self.part.experts.start, self.part.experts.stop)):
            of_expert = f"{prefix}{number}."
            for half, name in enumerate(gate_and_up):
                stored = source.slice(f"{of_expert}{name}.weight", (inner, hidden), 0, start, start + shard)
                source.write(self.gate_up[own, half * shard : (half + 1) * shard], stored)
            stored = source.slice(f"{of_expert}{down}.weight", (hidden, inner), 1, start, start + shard)
            source.write(self.down[own], stored)
        self.part.leave_others(source, prefix)
