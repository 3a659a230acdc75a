"""Which chunks of a step latent attention computes with keys and values expanded, and in which pieces.

`docs/decisions/latent_attention.md` has the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch

from rayllm.config.model_spec import LatentSpec
from rayllm.layers.attention import AttentionPlan, LayerCache
from rayllm.layers.batch import ChunkLengths
from rayllm_kernels import ops
from rayllm_kernels.ops import PIECE_KEYS, Contexts, KeyPiece

# Fewer queries leave a part of the tiles of expanded attention empty, which are of one head each.
MIN_QUERIES = 128
ROOM_BYTES = 256 << 20  # of a piece's keys and values: enough for products to run at their full speed


@dataclass(frozen=True, slots=True)
class LatentRun:
    """Neighbouring rows of a step that are computed in one form.

    rows: None for all. absorbed: the plan of these rows alone; None if they are expanded, by `pieces`, whose rows count
    from the first of these.
    """

    rows: slice | None
    absorbed: AttentionPlan | None
    pieces: tuple[KeyPiece, ...] = ()


def spared(sizes: LatentSpec, chunks: ChunkLengths) -> np.ndarray:
    """Multiplications a head that each chunk is spared if it is expanded: [chunks] int64, negative where it costs more.

    A chunk's own latents are expanded at the price of bringing its queries to their space and the results back.
    """
    contexts, tokens = chunks
    pairs = contexts * tokens + tokens * (tokens + 1) // 2
    made = sizes.nope_dim + sizes.value_dim
    return (2 * sizes.kv_rank - made) * pairs - sizes.kv_rank * made * contexts


def are_expanded(sizes: LatentSpec, chunks: ChunkLengths) -> np.ndarray:
    """Which chunks: [chunks] bool."""
    return (spared(sizes, chunks) > 0) & (chunks.tokens >= MIN_QUERIES)


def piece_room(sizes: LatentSpec, heads: int, itemsize: int) -> int:
    """Keys of a piece at most, a multiple of PIECE_KEYS."""
    row = heads * (sizes.nope_dim + sizes.value_dim) * itemsize
    return max(1, ROOM_BYTES // (row * PIECE_KEYS)) * PIECE_KEYS


def cut(lengths: list[int], room: int) -> Iterator[list[tuple[int, int, int]]]:
    """Pieces of at most `room` keys of contexts of these lengths: (context, first key, end) of each part of one."""
    piece: list[tuple[int, int, int]] = []
    left = room
    for context, length in enumerate(lengths):
        first = 0
        while first < length:
            end = length if length - first <= left else first + left // PIECE_KEYS * PIECE_KEYS
            if end > first:
                piece.append((context, first, end))
                left -= end - first
            if end < length:
                yield piece
                piece, left = [], room
            first = end
    if piece:
        yield piece


def latent_runs(plan: AttentionPlan, sizes: LatentSpec, cache: LayerCache, room: int) -> tuple[LatentRun, ...]:
    """The rows of a step, in order. plan: not deterministic; cache: of any layer of its group, which lie alike."""
    chunks = plan.batch.chunks
    expanded = np.zeros(0, bool) if chunks is None else are_expanded(sizes, chunks)
    if chunks is None or not expanded.any():
        return (LatentRun(None, plan),)
    starts = plan.prefill_row + np.concatenate([[0], np.cumsum(chunks.tokens)])
    runs = []
    if plan.num_decodes and expanded[0]:
        runs.append(LatentRun(slice(0, plan.prefill_row), _part(plan, 0, 0, 0)))
    for is_expanded, group in groupby(range(len(expanded)), key=lambda chunk: bool(expanded[chunk])):
        first, *others = group
        end = [first, *others][-1] + 1
        begin = 0 if first == 0 and not is_expanded else int(starts[first])  # the decodes are absorbed too
        rows = slice(begin, int(starts[end]))
        if is_expanded:
            pieces = _pieces(plan, cache, chunks, first, end, room)
            runs.append(LatentRun(rows, None, tuple(pieces)))
        else:
            longest = int(chunks.tokens[first:end].max())
            runs.append(LatentRun(rows, replace(_part(plan, first, end, begin), max_query_len=longest)))
    return tuple(runs)


def _part(plan: AttentionPlan, first: int, end: int, begin: int) -> AttentionPlan:
    """The plan of chunks first..end alone, whose rows count from row `begin`: 0 takes in the decodes."""
    prefills = tuple(Contexts(tables[first:end], lens[first:end]) for tables, lens in plan.prefills)
    if begin == 0:
        return replace(plan, prefills=prefills, prefill_starts=plan.prefill_starts[: end + 1])
    starts = plan.prefill_starts[first : end + 1] + (plan.prefill_row - begin)
    none = tuple(Contexts(tables[:0], lens[:0]) for tables, lens in plan.decodes)
    return replace(plan, num_decodes=0, decodes=none, prefills=prefills, prefill_row=0, prefill_starts=starts)


def _pieces(
    plan: AttentionPlan, cache: LayerCache, chunks: ChunkLengths, first: int, end: int, room: int
) -> Iterator[KeyPiece]:
    """Of the chunks first..end, whose rows count from the first one's."""
    tables, lens = plan.prefills[cache.group]
    starts = plan.prefill_starts[first : end + 1]
    if first or plan.prefill_row:
        starts = starts - starts[0]
    lengths = (chunks.contexts + chunks.tokens)[first:end]
    parts = list(cut(lengths.tolist(), room))
    bounds = _to_device(np.array(list(_bounds(parts)), np.int32), lens.device).split([len(piece) for piece in parts])
    for piece, places in zip(parts, bounds, strict=True):
        sequences = slice(first + piece[0][0], first + piece[-1][0] + 1)
        count = sum(stop - begin for _, begin, stop in piece)
        wide = places.to(torch.int64)
        row = torch.repeat_interleave(wide[:, 1] - wide[:, 0], output_size=count)  # the sequence of each key
        positions = torch.arange(count, device=lens.device) + (wide[:, 0] - wide[:, 2])[row]
        yield KeyPiece(
            rows=ops.latent_rows(cache.kv, tables[sequences], row, positions),
            bounds=places,
            seq_lens=lens[sequences],
            query_starts=starts[piece[0][0] : piece[-1][0] + 2],
            max_query_len=int(chunks.tokens[sequences].max()),
        )


def _bounds(pieces: list[list[tuple[int, int, int]]]) -> Iterator[tuple[int, int, int]]:
    """`KeyPiece.bounds` of all pieces."""
    for piece in pieces:
        row = 0
        for _, first, end in piece:
            yield first, end, row
            row += end - first


def _to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Without waiting for what the device has to do until then."""
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
