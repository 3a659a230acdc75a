"""How a decode step's work is cut: the Triton schedule against its reference, and both against a walk over tiles."""

from __future__ import annotations

import pytest
import torch

from rayllm_kernels import reference
from rayllm_kernels.decode_work import choose_num_ranges, choose_tiles

CASES = [
    ([], 3),
    ([0, 0, 0, 0, 0], 2),
    ([1], 1),
    ([700], 7),
    ([700], 64),
    ([5, 0, 130], 20),
    ([32, 64, 96], 3),
    ([0, 0, 40, 0, 0, 0, 70, 0], 3),
    ([31 * i % 400 for i in range(33)], 16),
]


@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize(("seq_lens", "num_ranges"), CASES)
def test_every_tile_falls_to_one_range(paged_case, kernels, seq_lens, num_ranges, window):
    case = paged_case(seq_lens, heads=(6, 3), head_dim=16)
    options = {"sliding_window": window, "num_ranges": num_ranges}
    schedule = case.schedule(kernels, **options)
    expected = case.schedule(reference, **options)
    assert torch.equal(schedule.ranges, expected.ranges)
    used = [(row, length) for row, length in enumerate(seq_lens) if length > 0]
    padding = [(row, 0) for row, length in enumerate(seq_lens) if length == 0]
    for contexts in (schedule.contexts, expected.contexts):
        assert list(map(tuple, contexts.tolist())) == used + padding

    keys = choose_tiles(16, 4, 4).keys
    # (sequence, tiles of its own before it) of every tile, in order
    firsts = [0 if window is None else max(length - window, 0) // keys for length in seq_lens]
    counts = [-(-length // keys) - first for length, first in zip(seq_lens, firsts, strict=True)]
    tiles = [(row, firsts[row] + tile) for row, count in enumerate(counts) for tile in range(count)]
    quota = max(1, -(-len(tiles) // num_ranges))
    zeroed = []
    for index, record in enumerate(schedule.ranges.tolist()):
        context, sequence, length, origin, first, end, size, has_empty = record
        assert (first, end, size) == (index * quota, min((index + 1) * quota, len(tiles)), quota)
        if first < end:
            assert used[context] == (sequence, length)
            assert tiles[first] == (sequence, firsts[sequence] + first - origin)
        mine = [row for row in range(index, len(seq_lens), num_ranges) if seq_lens[row] == 0]
        assert has_empty == bool(mine)
        zeroed += mine
    assert sorted(zeroed) == [row for row, length in enumerate(seq_lens) if length == 0]


def test_ranges_fill_the_device():
    two, four = choose_tiles(128, 2, 2), choose_tiles(128, 2, 1)
    assert (two.programs, four.programs) == (2, 4)
    assert choose_num_ranges(8, 132, two) == 2 * 132 // 8
    assert choose_num_ranges(8, 132, four) == 4 * 132 // 8
    assert choose_num_ranges(1, 1, two) == 2
    assert choose_num_ranges(5000, 132, four) == 1
