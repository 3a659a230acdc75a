"""`WeightSource`: where layers read their weights from, and the books of what they have filled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple, Self

import torch
from torch import nn

from rayllm.config.quantization import WeightFormat
from rayllm_kernels.quantised.formats import Numbers


class Span(NamedTuple):
    """[start, stop) of a dimension of `size`."""

    start: int
    stop: int
    size: int

    def blocks(self, step: int | None) -> Self:
        """The blocks of `step` that hold it, counted in blocks; None is one block of all."""
        if step is None:
            return self._replace(start=0, stop=1, size=1)
        return self._replace(start=self.start // step, stop=-(-self.stop // step), size=-(-self.size // step))

    def aligned(self, step: int) -> Self:
        """Out to multiples of `step`, or to the end of the dimension."""
        return self._replace(start=self.start // step * step, stop=min(-(-self.stop // step) * step, self.size))

    def within(self, outer: Span) -> slice:
        """Where it is in a tensor that holds `outer`."""
        return slice(self.start - outer.start, self.stop - outer.start)


class WeightSource(ABC):
    """Named tensors of a whole model, of which each rank reads its own slices.

    `tensor` and `slice` raise ModelError if the stored shape is not `shape`. A name that is missing is only noted, and
    zeros are returned, so that `finish` can name all that are missing at once.
    """

    def __init__(self) -> None:
        self._written: dict[int, int] = {}

    @abstractmethod
    def slice(self, name: str, shape: tuple[int, ...], dim: int, start: int, stop: int) -> torch.Tensor:
        """Entries [start, stop) along `dim` of the tensor `name`, whose full shape is `shape`."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The whole tensor `name`."""
        return self.slice(name, shape, 0, 0, shape[0])

    def rectangle(self, name: str, rows: Span, columns: Span) -> torch.Tensor:
        """A part of the matrix `name`."""
        if columns == Span(0, columns.size, columns.size):
            return self.slice(name, (rows.size, columns.size), 0, rows.start, rows.stop)
        part = self.slice(name, (rows.size, columns.size), 1, columns.start, columns.stop)
        return part[rows.start : rows.stop]

    def format_of(self, module: str) -> WeightFormat | None:  # noqa: ARG002
        """How the weight of a module is quantised that a layer may keep so, by its `numbers`; None if it is not."""
        return None

    def numbers(self, module: str, rows: Span, columns: Span) -> Numbers:
        """A part of the weight [out, in] of a module that has a format."""
        raise NotImplementedError(f"{module} is not quantised")

    def expert_codes(self, name: str, experts: Span, outputs: Span, inputs: Span) -> tuple[torch.Tensor, torch.Tensor]:
        """A part of all experts' weight [E, N, K] in MXFP4: (codes [E, N, K], exponents [E, N, K / 32]), both uint8."""
        raise NotImplementedError(f"{name} is not quantised")

    def activation_scale(self, module: str) -> torch.Tensor:
        """float32 [1]: what the inputs of a module are divided by before they are rounded to fp8."""
        raise NotImplementedError(f"{module} is not quantised")

    def choose(self, *names: str) -> str:
        """The first of several names of one tensor that is there; the first of all if none is."""
        return names[0]

    def optional(self, name: str) -> torch.Tensor | None:  # noqa: ARG002
        """The whole tensor `name`, of whatever shape; None if there is none, or if weights are made up."""
        return None

    def check_found(self) -> None:  # noqa: B027
        """Raises ModelError naming weights that were asked for so far and are missing; of use before their contents are
        found wanting.
        """

    def leave(self, module: str) -> None:  # noqa: B027
        """All weights of `module` are other ranks' to read."""

    def finish(self) -> None:  # noqa: B027
        """Raises ModelError naming weights that were asked for and missing, or that nobody asked for."""

    def write(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy into a parameter, or a view of one, casting to its dtype; each element is written once."""
        destination.copy_(source)
        key = destination.untyped_storage().data_ptr()
        self._written[key] = self._written.get(key, 0) + destination.numel()

    def unwritten(self, module: nn.Module) -> list[str]:
        """Names of the parameters of `module` that `write` has not filled completely (a bug of a layer)."""
        return [
            name
            for name, parameter in module.named_parameters()
            if self._written.get(parameter.untyped_storage().data_ptr(), 0) != parameter.numel()
        ]
