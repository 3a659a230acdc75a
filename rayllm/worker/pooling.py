"""`Pooler`: from the hidden states of prompts to their embeddings, over as many steps as a prompt takes."""

from __future__ import annotations

import torch

from rayllm.api.types import SequenceData
from rayllm.worker.inputs import PersistentBatch, StepInputs


def pooling_bytes(max_num_seqs: int, hidden_size: int) -> int:
    """What a `Pooler` holds on the device."""
    return 4 * max_num_seqs * hidden_size


class Pooler:
    """Pools the rows that ask for it: their last hidden state, or the mean of all, as a vector of length 1 (L2).

    Sums are float32, whatever the model's dtype. They outlast steps, so they are not of the steps' memory.
    """

    def __init__(self, max_num_seqs: int, hidden_size: int, device: torch.device):
        self._kinds: dict[int, str] = {}  # row -> "last" or "mean"
        self._sums = torch.zeros(max_num_seqs, hidden_size, device=device)  # of each row's tokens so far

    def add(self, data: SequenceData) -> None:
        """Take note of a new row. Raises RuntimeError for a mean that would lack the first tokens."""
        if data.pooling is None:
            return
        if data.pooling == "mean" and data.num_computed_tokens:
            raise RuntimeError(f"a mean needs every token, and row {data.row} begins at {data.num_computed_tokens}")
        self._kinds[data.row] = data.pooling
        self._sums[data.row] = 0.0

    def free(self, row: int) -> None:
        """Forget a row, if it is known."""
        self._kinds.pop(row, None)

    def wants(self, rows: list[int]) -> bool:
        """Whether any of a step's rows is pooled."""
        return bool(self._kinds) and any(row in self._kinds for row in rows)

    def pool(self, inputs: StepInputs, hidden: torch.Tensor, state: PersistentBatch) -> torch.Tensor | None:
        """Embeddings [P, hidden_size] float32 of the P pooled prompts that end in this step, in the step's order.

        hidden: [T, hidden_size] of all of the step's tokens. state: before it counts the step. None if P is 0.
        """
        done = []
        ends = inputs.counts.cumsum()
        for row, count, start, end in zip(
            inputs.rows.tolist(), inputs.counts.tolist(), inputs.starts.tolist(), ends.tolist(), strict=True
        ):
            kind = self._kinds.get(row)
            if kind is None:
                continue
            if kind == "mean":
                self._sums[row] += hidden[end - count : end].sum(0, dtype=torch.float32)
            if start + count == int(state.num_prompt[row]):
                done.append(self._sums[row] if kind == "mean" else hidden[end - 1].float())
        # The mean's direction is the sum's.
        return torch.nn.functional.normalize(torch.stack(done), dim=1) if done else None
