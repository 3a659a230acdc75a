"""`PlainMatrix`: a weight in the model's dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rayllm.layers.layer import BuildContext
from rayllm.layers.matrices.matrix import Activations, Matrix, Piece
from rayllm.layers.weights import WeightSource
from rayllm_kernels import ops


class PlainMatrix(Matrix):
    """Whatever the checkpoint has is turned into the model's dtype as it is read."""

    def __init__(self, context: BuildContext, rows: int, columns: int):
        self.weight = context.parameter(rows, columns)
        self.parameters = {"weight": self.weight}
        self.fuses = self.adds = self.adapts = not context.deterministic

    def load(self, source: WeightSource, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            stored = source.rectangle(piece.module + ".weight", piece.rows, piece.columns)
            source.write(self.weight[piece.own_rows], stored)

    def multiply(self, x: Activations, bias: torch.Tensor | None) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        if not self.adapts:
            return ops.linear_invariant(x, self.weight, bias)
        return ops.linear(x, self.weight, bias, adapters=self._adapters_of(x))

    def multiply_gated(self, x: Activations, act: str, wanted: ops.Rounding | None) -> Activations:  # noqa: ARG002
        assert isinstance(x, torch.Tensor)
        return ops.linear_act_mul(x, self.weight, act, adapters=self._adapters_of(x))

    def multiply_normed(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm: tuple[torch.Tensor, float],
        bias: torch.Tensor | None,
        *,
        act: str | None,
        wanted: ops.Rounding | None,  # noqa: ARG002
    ) -> tuple[Activations, torch.Tensor]:
        return ops.add_rms_norm_linear(x, residual, *norm, self.weight, bias, act=act, adapters=self._adapters_of(x))

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return total.addmm_(x, self.weight.t())

    def _adapters_of(self, x: torch.Tensor) -> ops.TokenAdapters | None:
        return None if self.adapters is None else self.adapters.of(x)
