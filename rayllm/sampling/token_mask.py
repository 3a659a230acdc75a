"""Token masks: a grammar's say in sampling. Runs on any device without waiting for it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from rayllm.sampling.transfer import to_device


class TokenMasks(NamedTuple):
    """Which tokens M rows may take."""

    rows: torch.Tensor  # [M] int64, indices into the batch
    bits: torch.Tensor  # [M, B] uint8, token i in bit i % 8 of byte i // 8; 8 B is at least the vocabulary

    @classmethod
    def of(cls, masks: list[tuple[int, bytes]], device: torch.device) -> TokenMasks:
        """`StepPlan.masks` (at least one), in one copy to the device."""
        bits = np.frombuffer(b"".join(bits for _row, bits in masks), np.uint8).reshape(len(masks), -1)
        return cls(*to_device([np.array([row for row, _bits in masks], np.int64), bits], device))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """A copy of the logits [N, V] with -inf for the tokens that a masked row may not take."""
        shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
        allowed = (self.bits[:, :, None] >> shifts).bitwise_and_(1).view(len(self.rows), -1)[:, : logits.shape[1]]
        masked = logits[self.rows].masked_fill_(allowed == 0, float("-inf"))
        return logits.index_copy(0, self.rows, masked)
