"""`TPGroup`: a rank's place among those that share a model, and the collectives that they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from rayllm.parallel.symmetric import SymmetricReducer
from rayllm_kernels import ops

# The newer of two names of one function; the other warns where both exist.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, slots=True)
class TPGroup:
    """One rank's view of a tensor-parallel group, passed to whatever communicates.

    rank: 0 <= rank < size. group: the process group of the ranks, in order; None only for a group of one. symmetric:
    what takes small tensors instead, see `with_symmetric_memory`. fixed_order: sums are added in an order that does not
    depend on their size, so that a row's total is the same to the bit in every step.
    The collectives are called by all ranks in the same order, on tensors of the same shape and dtype. With NCCL they
    can be captured in a CUDA graph.
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None
    symmetric: SymmetricReducer | None = None
    fixed_order: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank must be in [0, {self.size}), not {self.rank}")
        if self.group is None and self.size > 1:
            raise ValueError(f"a group of {self.size} ranks needs a process group")

    @classmethod
    def single(cls) -> TPGroup:
        """The group of one rank, for models and layers that are not split."""
        return cls(0, 1, None)

    def with_symmetric_memory(self, hidden_size: int, dtype: torch.dtype) -> TPGroup:
        """This group, with small sums of rows of hidden_size over symmetric memory; the log says why if there is none.

        Collective; allocates on the current CUDA device, once per group.
        """
        if self.group is None:
            return self
        return replace(self, symmetric=SymmetricReducer.connect(self.group, hidden_size, dtype))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum the contiguous `x` over the ranks, in place; returns `x`."""
        if self.symmetric is not None and (parts := self._parts(x)):
            for part in parts:
                self.symmetric.all_reduce(part)
        elif self.size > 1 and self.fixed_order:
            first, *others = self._gather(x).unbind(0)
            total = first.float()
            for other in others:
                total += other
            x.copy_(total)
        elif self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(RMSNorm(total) * weight, total), total = sum of x over the ranks + residual: two new tensors.

        x, residual: [T, hidden], weight: [hidden]; residual and weight the same on all ranks, whose results are equal
        bit by bit. x may be overwritten.
        """
        if self.symmetric is not None and (parts := self._parts(x)):
            pairs = zip(parts, residual.split([len(part) for part in parts]), strict=True)
            sums = [self.symmetric.all_reduce_add_rms_norm(*pair, weight, eps) for pair in pairs]
            return sums[0] if len(sums) == 1 else (torch.cat([y for y, _ in sums]), torch.cat([t for _, t in sums]))
        return ops.fused_add_rms_norm(self.all_reduce(x), residual, weight, eps)

    def gather_small(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' x, of a few KB, in order of rank: a new tensor [size, *x.shape]."""
        if self.symmetric is not None and self.symmetric.takes_gather(x):
            return self.symmetric.gather_small(x)
        if self.size == 1:
            return x.clone()[None]
        return self._gather(x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors side by side in the last dimension, by rank, as a new tensor; `x` itself for one rank."""
        if self.size == 1:
            return x
        return torch.cat(self._gather(x).unbind(0), dim=-1)

    def _parts(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """What `symmetric` is to sum x in: one piece, or several if nothing else may sum a large x; empty for none.

        Its kernels add in the order of the ranks, whatever the number of rows.
        """
        assert self.symmetric is not None
        parts = x.split(self.symmetric.buffers.max_rows) if self.fixed_order else (x,)
        return parts if all(self.symmetric.takes(part) for part in parts) else ()

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        gathered = x.new_empty(self.size, *x.shape)
        # Gloo wants the stacked result flattened to one leading dimension.
        _all_gather(gathered.view(-1), x.contiguous().view(-1), group=self.group)
        return gathered
