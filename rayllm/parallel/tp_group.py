"""`TPGroup`: a rank's place among those that share a model, and the two collectives that they need."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

# The newer of two names of one function; the other warns where both exist.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, slots=True)
class TPGroup:
    """One rank's view of a tensor-parallel group, passed to whatever communicates.

    rank: 0 <= rank < size. group: the process group of the ranks, in order; None only for a group of one.
    The collectives are called by all ranks in the same order, on tensors of the same shape and dtype. With NCCL they
    can be captured in a CUDA graph.
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank must be in [0, {self.size}), not {self.rank}")
        if self.group is None and self.size > 1:
            raise ValueError(f"a group of {self.size} ranks needs a process group")

    @classmethod
    def single(cls) -> TPGroup:
        """The group of one rank, for models and layers that are not split."""
        return cls(0, 1, None)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum the contiguous `x` over the ranks, in place; returns `x`."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The ranks' tensors concatenated along `dim`, in rank order, as a new tensor; `x` itself for one rank."""
        if self.size == 1:
            return x
        gathered = x.new_empty(self.size, *x.shape)
        # Gloo wants the stacked result flattened to one leading dimension.
        _all_gather(gathered.view(-1), x.contiguous().view(-1), group=self.group)
        return torch.cat(gathered.unbind(0), dim=dim)
