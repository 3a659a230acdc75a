"""Rows of logits that are made to mislead a kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

INF = float("inf")


@pytest.fixture(scope="session")
def rows_of() -> Callable[[str, int], torch.Tensor]:
    """(kind, vocabulary) -> a few rows [N, V] float32 of one kind."""
    return _rows_of


def _rows_of(kind: str, vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(kind))
    rows = torch.randn(6, vocab, generator=generator)
    if kind == "flat":
        return rows
    if kind == "peaked":
        return 8 * rows
    if kind == "ties":
        return (2 * rows).round()
    if kind == "equal":
        return torch.zeros_like(rows)
    if kind == "ascending":
        return torch.linspace(-20, 20, vocab).repeat(6, 1)
    if kind == "mostly banned":
        return rows.masked_fill_(torch.rand(rows.shape, generator=generator) < 0.98, -INF)
    if kind == "one token":
        only = torch.full_like(rows, -INF)
        only[torch.arange(6), torch.randint(0, vocab, (6,), generator=generator)] = -50.0
        return only
    if kind == "one group":  # the largest all in one residue class, so that maxima of strided groups say little
        rows[:, :: 4096 if vocab > 50_000 else 512] += 20
        return rows
    assert kind == "huge"
    return rows * 1e4
