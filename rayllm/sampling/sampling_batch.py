"""`SamplingBatch`: what one sampling call has to do for each row, as device tensors and host flags.

A feature that no row uses is None and costs nothing; one that a few rows use lists just these rows. All tensors are
views of one buffer, so that a batch is one host-to-device copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from rayllm_kernels.ops import CutRows, DrawRows, PenaltyRows


class BiasEntries(NamedTuple):
    """E user biases, no token of a row twice."""

    rows: torch.Tensor  # [E] int64, indices into the batch
    token_ids: torch.Tensor  # [E] int64
    values: torch.Tensor  # [E] float32

    def apply(self, logits: torch.Tensor) -> None:
        """Add the values to their logits [N, V] float32, in place."""
        logits[self.rows, self.token_ids] += self.values


class BanEntries(NamedTuple):
    """E tokens that must not be drawn."""

    rows: torch.Tensor  # [E] int64, indices into the batch
    token_ids: torch.Tensor  # [E] int64

    def apply(self, logits: torch.Tensor) -> None:
        """Make their logits [N, V] -inf, in place."""
        logits.index_put_((self.rows, self.token_ids), logits.new_full((), float("-inf")))


class LogprobRows(NamedTuple):
    """The M rows that report log-probabilities."""

    host_rows: list[int]  # [M] indices into the batch, ascending
    num_top: list[int]  # [M] how many top tokens each asked for
    rows: torch.Tensor  # [M] int64, host_rows on the device


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """One sampling call over num_rows rows of logits. Made by `SamplingTable.batch`.

    draw: None if all rows are greedy. The others: None if no row uses the feature in this step.
    """

    num_rows: int
    draw: DrawRows | None = None
    cut: CutRows | None = None
    penalties: PenaltyRows | None = None
    bias: BiasEntries | None = None
    bans: BanEntries | None = None
    logprobs: LogprobRows | None = None

    @property
    def changes_logits(self) -> bool:
        """True if greedy rows too need more than the raw logits."""
        return self.bias is not None or self.bans is not None or self.penalties is not None
