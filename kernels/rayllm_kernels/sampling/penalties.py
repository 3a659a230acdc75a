"""Penalties of the tokens that a sequence already has, on its entries of the logits alone."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import check_last_dim, check_table, check_vectors, fail
from ..dispatch import TritonModule, on_triton

_kernel = TritonModule("rayllm_kernels.sampling.penalties_kernel")


class PenaltyRows(NamedTuple):
    """The P rows of a batch with a penalty."""

    rows: Tensor  # [P] int64, theirs in the logits, none twice
    table_rows: Tensor  # [P] int64, theirs in the token table
    num_prompt_tokens: Tensor  # [P] int64
    num_tokens: Tensor  # [P] int64, prompt and output; later entries of the token table do not count
    repetition: Tensor  # [P] fp32, 1 for none
    presence: Tensor  # [P] fp32, 0 for none
    frequency: Tensor  # [P] fp32, 0 for none

    def check(self, logits: Tensor, token_table: Tensor) -> None:
        """Raise ValueError unless these, `logits` and `token_table` are as `penalise` wants them."""
        if logits.dim() != 2:
            fail("logits", "must be [rows, vocab_size]", logits.shape)
        if logits.dtype != torch.float32:
            fail("logits", "must be torch.float32", logits.dtype)
        check_last_dim(logits, "logits")
        check_table(token_table, "token_table", logits.device)
        fields = self._asdict()
        floats = {name: fields.pop(name) for name in ("repetition", "presence", "frequency")}
        check_vectors(self.rows.numel(), torch.int64, logits.device, **fields)
        check_vectors(self.rows.numel(), torch.float32, logits.device, **floats)


def penalise(logits: Tensor, token_table: Tensor, penalties: PenaltyRows) -> None:
    """Change the logits of the tokens that P sequences already have, in place.

    A token of prompt or output has its logit divided by `repetition` if positive, else multiplied; then one of the
    output loses frequency * its count there + presence. What overflows becomes the largest number. logits: [N, V] fp32.
    token_table: [R, L] int32, each sequence's tokens; ids that are not 0 to V - 1 do not count.
    """
    penalties.check(logits, token_table)
    if not penalties.rows.shape[0]:
        return
    if on_triton(logits):
        _kernel.penalise(logits, token_table, penalties)
        return
    for row, table_row, prompt_end, end, repetition, presence, frequency in zip(*penalties, strict=True):
        own, history = logits[row], token_table[table_row, :end].long()
        known = (history >= 0) & (history < own.numel())
        seen = history[known].unique()
        counts = torch.bincount(history[prompt_end:][known[prompt_end:]], minlength=own.numel())[seen]
        result = own[seen]
        result = torch.where(result > 0, result / repetition, result * repetition)
        result -= frequency * counts
        result -= presence * (counts > 0)
        own[seen] = result.clamp_(max=torch.finfo(torch.float32).max)
