"""`Matrix`: a rank's weight of a linear layer in one format, how it is read and multiplied with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from rayllm.layers.lora import ProjectionAdapters
from rayllm.layers.weights import Span, WeightSource
from rayllm_kernels import ops

# What a product is handed: tokens [T, in] in the model's dtype, or as its matrix `takes` them.
Activations = torch.Tensor | ops.Fp8Rows


class Piece(NamedTuple):
    """A rectangle of the weight [out, in] of one module of the checkpoint.

    module: its name. at: the row of the layer's matrix where it begins.
    """

    module: str
    rows: Span
    columns: Span
    at: int

    @property
    def own_rows(self) -> slice:
        """Where it is in the layer's matrix."""
        return slice(self.at, self.at + self.rows.stop - self.rows.start)


class Matrix(ABC):
    """[out, in] of one rank.

    parameters: the tensors that it consists of, by name, for the layer to register. takes: how products want tokens
    rounded; None for in the model's dtype. Whoever makes the tokens may round them in the same pass; products round
    what is not yet. fuses: products may have a norm before them and an activation behind them (`multiply_normed`,
    `multiply_gated`). adds: they may add to something (`add_to`). adapts: all products but that one add what
    `adapters`, if it is set, give each token.
    """

    parameters: dict[str, nn.Parameter]
    takes: ops.Rounding | None = None
    fuses = False
    adds = False
    adapts = False
    adapters: ProjectionAdapters | None = None

    @abstractmethod
    def load(self, source: WeightSource, pieces: Sequence[Piece]) -> None:
        """Fill the parameters, which the pieces cover."""

    @abstractmethod
    def multiply(self, x: Activations, bias: torch.Tensor | None) -> torch.Tensor:
        """x W^T + bias, [T, out] in the model's dtype."""

    def multiply_gated(self, x: Activations, act: str, wanted: ops.Rounding | None) -> Activations:
        """act(gate) * up, of which x W^T has one beside the other.

        wanted: how the result should be rounded, if it is made in a pass of its own; None for not at all.
        """
        raise NotImplementedError

    def multiply_normed(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm: tuple[torch.Tensor, float],
        bias: torch.Tensor | None,
        *,
        act: str | None,
        wanted: ops.Rounding | None,
    ) -> tuple[Activations, torch.Tensor]:
        """(the product of norm(total), total), total = x + residual; norm: (weight, eps). act: by `multiply_gated`."""
        raise NotImplementedError

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """total [T, out] + x W^T, in place."""
        raise NotImplementedError
