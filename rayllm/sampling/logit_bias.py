"""Changes to single logits, given as (row, token id) entries: user biases and banned tokens."""

from __future__ import annotations

import torch


def add_bias(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, values: torch.Tensor) -> None:
    """logits[rows[e], token_ids[e]] += values[e], in place.

    logits: [N, V] float32. rows, token_ids: [E] int64, no pair twice. values: [E] float32.
    """
    logits[rows, token_ids] = logits[rows, token_ids] + values


def ban(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
    """logits[rows[e], token_ids[e]] = -inf, in place. logits: [N, V]. rows, token_ids: [E] int64."""
    logits.index_put_((rows, token_ids), logits.new_full((), float("-inf")))
