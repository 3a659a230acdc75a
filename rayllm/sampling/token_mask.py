"""Token masks: a grammar's say in sampling. Runs on any device without waiting for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens M rows may take. rows: [M] int64, indices into the batch. bits: [M, B] uint8, token i in bit i % 8
    of byte i // 8; 8 B is at least the vocabulary.
    """

    rows: torch.Tensor
    bits: torch.Tensor

    @classmethod
    def of(cls, masks: list[tuple[int, bytes]], device: torch.device) -> TokenMasks:
        """`StepPlan.masks` (at least one), in one copy to the device."""
        rows = np.array([row for row, _bits in masks], np.int64)
        host = torch.frombuffer(bytearray(rows.tobytes() + b"".join(bits for _row, bits in masks)), dtype=torch.uint8)
        if device.type == "cuda":
            host = host.pin_memory()
        packed = host.to(device, non_blocking=True)
        return cls(packed[: rows.nbytes].view(torch.int64), packed[rows.nbytes :].view(len(masks), -1))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """A copy of the logits [N, V] with -inf for the tokens that a masked row may not take."""
        shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
        allowed = (self.bits[:, :, None] >> shifts).bitwise_and_(1).view(len(self.rows), -1)[:, : logits.shape[1]]
        masked = logits[self.rows].masked_fill_(allowed == 0, float("-inf"))
        return logits.index_copy(0, self.rows, masked)
