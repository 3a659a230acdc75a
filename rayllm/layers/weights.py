"""`WeightSource`: where layers read their weights from, and the books of what they have filled."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn


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

    def choose(self, *names: str) -> str:
        """The first of several names of one tensor that is there; the first of all if none is."""
        return names[0]

    def optional(self, name: str) -> torch.Tensor | None:  # noqa: ARG002
        """The whole tensor `name`, of whatever shape; None if there is none, or if weights are made up."""
        return None

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
