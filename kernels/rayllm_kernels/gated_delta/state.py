"""Where the recurrent layers of a model keep what they know of a sequence, and which tokens of a step go on from where.

A sequence has a block for each block_size tokens, as for keys and values. Block i holds the state after the last token
of [i * block_size, (i + 1) * block_size) that has been computed: it is written in place by the tokens of its range, and
left alone once the last of them is computed. A step whose first token of a sequence is at position p reads the block of
position p - 1, which is another one than it writes if p is at a border. At p = 0 the state is zero, whatever is there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..attention.context import Contexts
from ..checks import check_last_dim, check_table, check_vectors, fail


class StateCache(NamedTuple):
    """The blocks of one recurrent layer.

    conv: [num_blocks, width - 1, C], the last inputs of the causal convolution, oldest first, in the model's dtype.
    recurrent: [num_blocks, Hv, K, V] fp32. Both contiguous within a block.
    """

    conv: Tensor
    recurrent: Tensor
    block_size: int


class Chunks(NamedTuple):
    """Tokens of B sequences, and where their states lie.

    contexts: the block tables of the layer's group, and the tokens of each sequence after this step; 0 marks padding.
    starts: [B + 1] int32, sequence b has rows starts[b] to starts[b + 1]; None for one row each.
    longest: rows of a sequence, at least.
    """

    contexts: Contexts
    starts: Tensor | None = None
    longest: int = 1


def check_chunks(chunks: Chunks, num_rows: int, device: torch.device) -> None:
    """Raise ValueError unless the chunks are as above."""
    (tables, seq_lens), starts, longest = chunks
    batch = seq_lens.numel()
    check_vectors(batch, torch.int32, device, seq_lens=seq_lens)
    check_table(tables, "block_tables", device)
    if tables.shape[0] != batch:
        fail("block_tables", f"must be [{batch}, max_blocks]", tables.shape)
    if starts is not None:
        check_vectors(batch + 1, torch.int32, device, starts=starts)
    elif num_rows != batch:
        fail("starts", f"must be given for {num_rows} rows of {batch} sequences", None)
    if longest < 0:
        fail("longest", "must not be negative", longest)


def check_state(part: Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError unless a part of the cache is [num_blocks, *shape], contiguous within a block."""
    if part.shape[1:] != shape or part.dtype != dtype or part.device != device:
        got = (*part.shape, part.dtype, part.device)
        fail(name, f"must be [num_blocks, {', '.join(map(str, shape))}] of {dtype} on {device}", got)
    check_last_dim(part, name)
    if part.shape[0] and not part[0].is_contiguous():
        fail(name, "must be contiguous within a block", part.stride())


class Span(NamedTuple):
    """One sequence's tokens of a step, on the host."""

    rows: slice
    # The block that holds the state before them; None for zeros.
    source: int | None
    # (block, how many of the tokens are computed when its state is that which it is to hold), in order.
    targets: list[tuple[int, int]]


def spans(chunks: Chunks, block_size: int) -> list[Span]:
    """Of all sequences that have tokens. For the references: this reads tensors."""
    (tables, seq_lens), starts, _ = chunks
    edges = list(range(seq_lens.numel() + 1)) if starts is None else starts.tolist()
    found = []
    for row, length in enumerate(seq_lens.tolist()):
        count = edges[row + 1] - edges[row]
        if not count or not length:
            continue
        first = length - count
        table = tables[row].tolist()
        touched = range(first // block_size, (length - 1) // block_size + 1)
        targets = [(table[block], min((block + 1) * block_size, length) - first) for block in touched]
        source = table[(first - 1) // block_size] if first else None
        found.append(Span(slice(edges[row], edges[row + 1]), source, targets))
    return found
