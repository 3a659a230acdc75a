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
    # By a matrix of counts, [P, V]: about 20 bytes a logit of the P rows beside the input.
    rows, table_rows, num_prompt_tokens, num_tokens, repetition, presence, frequency = penalties
    vocab_size = logits.shape[1]
    history = token_table[table_rows, : int(num_tokens.max())].long()
    place = torch.arange(history.shape[1], device=logits.device)
    known = (place < num_tokens[:, None]) & (history >= 0) & (history < vocab_size)
    output = known & (place >= num_prompt_tokens[:, None])
    # Whatever does not count is counted in one column too many, which is cut off.
    ids, output_ids = torch.where(known, history, vocab_size), torch.where(output, history, vocab_size)
    seen = torch.zeros(rows.shape[0], vocab_size + 1, dtype=torch.bool, device=logits.device)
    seen = seen.scatter_(1, ids, True)[:, :vocab_size]
    counts = torch.zeros(rows.shape[0], vocab_size + 1, dtype=torch.int32, device=logits.device)
    counts = counts.scatter_add_(1, output_ids, torch.ones_like(output_ids, dtype=torch.int32))[:, :vocab_size]
    own = logits.index_select(0, rows)
    factor = torch.where(seen, repetition[:, None], 1.0)
    result = torch.where(own > 0, own / factor, own * factor)
    result -= frequency[:, None] * counts
    result -= presence[:, None] * (counts > 0)
    logits.index_copy_(0, rows, result.clamp_(max=torch.finfo(torch.float32).max))
