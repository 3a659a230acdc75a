"""`SamplingBatch`: what one sampling call has to do for each row, as device tensors and host flags.

A feature that no row uses is None and costs nothing; one that a few rows use lists just these rows. All tensors are
views of one buffer, so that a batch is one host-to-device copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rayllm_kernels.ops import CutRows, DrawRows, PenaltyRows


@dataclass(frozen=True, slots=True)
class BiasEntries:
    """E user biases. rows (indices into the batch), token_ids: [E] int64. values: [E] float32."""

    rows: torch.Tensor
    token_ids: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class BanEntries:
    """E tokens that must not be drawn. rows (indices into the batch), token_ids: [E] int64."""

    rows: torch.Tensor
    token_ids: torch.Tensor


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """The M rows that report log-probabilities.

    host_rows: indices into the batch, ascending. num_top: how many top tokens each asked for. rows: [M] int64,
    host_rows on the device.
    """

    host_rows: list[int]
    num_top: list[int]
    rows: torch.Tensor

    @property
    def max_num_top(self) -> int:
        """Top tokens to look for: the most that any row asked for."""
        return max(self.num_top)


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """One sampling call over num_rows rows of logits. Made by `SamplingTable.batch`.

    draw: None if all rows are greedy. The others: None if no row uses the feature in this step.
    """

    num_rows: int
    draw: DrawRows | None
    cut: CutRows | None
    penalties: PenaltyRows | None
    bias: BiasEntries | None
    bans: BanEntries | None
    logprobs: LogprobRows | None

    @property
    def changes_logits(self) -> bool:
        """True if greedy rows too need more than the raw logits."""
        return self.bias is not None or self.bans is not None or self.penalties is not None


class Packer:
    """Collects host arrays and brings them to a device in one copy."""

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []

    def add(self, *arrays: np.ndarray) -> slice:
        """Add C-contiguous arrays [fields, length]; the result says where `copy`'s list has their rows, in order."""
        first = len(self._arrays)
        self._arrays += arrays
        return slice(first, len(self._arrays))

    def copy(self, device: torch.device) -> list[tuple[torch.Tensor, ...]]:
        """For each array added, its rows ([length] each) on the device.

        To CUDA the copy starts from pinned memory and is not waited for: the allocator of pinned memory does not
        hand the source out again before the copy is done.
        """
        padded = [-(-array.nbytes // 8) * 8 for array in self._arrays]  # views need aligned starts
        host = torch.empty(sum(padded), dtype=torch.uint8, pin_memory=device.type == "cuda")
        target = host.numpy()
        start = 0
        for array, size in zip(self._arrays, padded, strict=True):
            target[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
            start += size
        packed = host.to(device, non_blocking=True)
        views = []
        start = 0
        for array, size in zip(self._arrays, padded, strict=True):
            dtype = torch.float32 if array.dtype == np.float32 else torch.int64
            views.append(packed[start : start + array.nbytes].view(dtype).view(array.shape).unbind(0))
            start += size
        return views
