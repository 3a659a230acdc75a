"""Which chunks latent attention expands, and in which pieces."""

from __future__ import annotations

import numpy as np
import pytest

from rayllm.config.model_spec import LatentSpec
from rayllm.layers.batch import ChunkLengths
from rayllm.layers.latent_plan import PIECE_KEYS, are_expanded, cut, piece_room, spared

DEEPSEEK = LatentSpec(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)


def chunks(*lengths: tuple[int, int]) -> ChunkLengths:
    return ChunkLengths(*np.array(lengths, np.int64).T)


def multiplications(sizes: LatentSpec, context: int, tokens: int) -> tuple[int, int]:
    """Of a head, absorbed and expanded, counted query by query."""
    pairs = sum(context + number for number in range(1, tokens + 1))
    projections = sizes.kv_rank * (sizes.nope_dim + sizes.value_dim)  # of a query there and back, or of a key
    absorbed = pairs * (sizes.row_dim + sizes.kv_rank) + tokens * projections
    return absorbed, pairs * (sizes.query_dim + sizes.value_dim) + (context + tokens) * projections


@pytest.mark.parametrize("sizes", [DEEPSEEK, LatentSpec(768, 512, 192, 64, 256), LatentSpec(1024, 256, 64, 64, 128)])
def test_what_is_spared(sizes):
    lengths = [(0, 1), (0, 500), (1000, 3), (5000, 180), (100_000, 8192)]
    for found, (context, tokens) in zip(spared(sizes, chunks(*lengths)), lengths, strict=True):
        absorbed, expanded = multiplications(sizes, context, tokens)
        assert found == absorbed - expanded


def test_the_break_even_of_deepseek_v3():
    """171 queries, whatever the context, and less if they see one another more than a context."""
    found = are_expanded(DEEPSEEK, chunks((100_000, 170), (100_000, 171), (190, 128), (0, 127), (0, 128), (10**6, 1)))
    assert found.tolist() == [False, True, True, False, True, False]
    wide = LatentSpec(None, 64, 128, 64, 128)  # whose latents are smaller than keys and values
    assert not are_expanded(wide, chunks((0, 5000))).any()


def test_pieces_hold_every_key_once():
    lengths, room = [5, 3 * PIECE_KEYS, 1, PIECE_KEYS + 7, 70], 2 * PIECE_KEYS
    pieces = list(cut(lengths, room))
    assert all(0 < sum(end - first for _, first, end in piece) <= room for piece in pieces)
    assert all(end % PIECE_KEYS == 0 or end == lengths[context] for piece in pieces for context, _, end in piece)
    parts = [part for piece in pieces for part in piece]
    assert [context for context, _, _ in parts] == sorted(context for context, _, _ in parts)
    for context, length in enumerate(lengths):
        keys = [key for found, first, end in parts if found == context for key in range(first, end)]
        assert keys == list(range(length))
    assert len(list(cut(lengths, 10**6))) == 1
    assert list(cut([], room)) == []


def test_the_room_of_a_piece_is_bounded_in_bytes():
    assert piece_room(DEEPSEEK, heads=128, itemsize=2) == 4096
    assert piece_room(DEEPSEEK, heads=16, itemsize=2) == 32768
    assert piece_room(DEEPSEEK, heads=10**6, itemsize=2) == PIECE_KEYS
