"""Sequences whose recurrent states lie in shuffled blocks, with NaN wherever nothing may be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rayllm_kernels.ops import Chunks, Contexts, StateCache

CHANNELS, WIDTH, HEADS, KEY, VALUE = 2 * 2 * 8 + 4 * 12, 4, 4, 8, 12


@dataclass
class StateCase:
    """A step over `chunks` of sequences that have come some way."""

    cache: StateCache
    chunks: Chunks
    num_rows: int

    def copy(self) -> StateCase:
        """The same, with a cache of its own."""
        conv, recurrent, block_size = self.cache
        return StateCase(StateCache(conv.clone(), recurrent.clone(), block_size), self.chunks, self.num_rows)


def make_state_case(
    randn: Callable[..., Tensor],
    before: list[int],
    counts: list[int] | None,
    block_size: int,
    dtype: torch.dtype = torch.float32,
) -> StateCase:
    """A step over sequences with so many tokens before it, and so many in it.

    counts: None for one token each, where a sequence that is at -1 is padding. The caches are parts of larger ones, as
    those of one layer are.
    """
    ones = counts is None
    counts = [int(length >= 0) for length in before] if counts is None else counts
    lengths = [max(0, first + count) for first, count in zip(before, counts, strict=True)]
    blocks = [-(-length // block_size) for length in lengths]
    num_blocks = sum(blocks) + 2
    conv = randn(num_blocks, 2, WIDTH - 1, CHANNELS, dtype=dtype).fill_(float("nan"))
    recurrent = randn(num_blocks, 2, HEADS, KEY, VALUE).fill_(float("nan"))
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(5)).tolist()
    tables = torch.full((len(before), max(blocks, default=0) + 1), 1 << 30, dtype=torch.int32)
    for row, (first, count) in enumerate(zip(before, blocks, strict=True)):
        own, order = order[:count], order[count:]
        tables[row, :count] = torch.tensor(own, dtype=torch.int32)
        if first > 0:
            source = own[(first - 1) // block_size]
            conv[source, 1] = randn(WIDTH - 1, CHANNELS, dtype=dtype)
            recurrent[source, 1] = randn(HEADS, KEY, VALUE)
            if first < WIDTH - 1:
                conv[source, 1, : WIDTH - 1 - first] = 0.0
    device = conv.device
    lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    starts = None if ones else torch.tensor([0, *counts]).cumsum(0).to(device, torch.int32)
    chunks = Chunks(Contexts(tables.to(device), lens), starts, max(counts, default=0))
    rows = len(before) if ones else sum(counts)
    return StateCase(StateCache(conv[:, 1], recurrent[:, 1], block_size), chunks, rows)


# (tokens before, tokens of the step or None for one each, block size)
STEPS = [
    ([0, 5, 8, -1, 7, 3], None, 4),
    ([0, 1, 2], None, 1),
    ([0], [1], 4),
    ([0, 3, 8, 9, 1], [40, 1, 5, 0, 7], 4),
    ([0, 2], [6, 5], 1),
    ([10, 0], [3, 70], 64),
]
