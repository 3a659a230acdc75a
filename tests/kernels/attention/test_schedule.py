"""How a decode step's work is cut: the Triton schedule against a walk over tiles."""

from __future__ import annotations

import pytest
import torch

from rayllm_kernels.attention.schedule import choose_tiles
from rayllm_kernels.device import INTERPRETER, assumed

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
    schedule = case.schedule(kernels, sliding_window=window, num_ranges=num_ranges)
    assert schedule.ranges.shape == (num_ranges, 7)
    used = [(row, length) for row, length in enumerate(seq_lens) if length > 0]
    padding = [(row, 0) for row, length in enumerate(seq_lens) if length == 0]
    assert list(map(tuple, schedule.contexts.tolist())) == used + padding

    keys = choose_tiles(case.q, case.cache, case.scoring()).keys
    # (sequence, tiles of its own before it) of every tile, in order
    firsts = [0 if window is None else max(length - window, 0) // keys for length in seq_lens]
    counts = [-(-length // keys) - first for length, first in zip(seq_lens, firsts, strict=True)]
    tiles = [(row, firsts[row] + tile) for row, count in enumerate(counts) for tile in range(count)]
    quota = max(1, -(-len(tiles) // num_ranges))
    zeroed = []
    for index, record in enumerate(schedule.ranges.tolist()):
        context, sequence, length, origin, first, end, has_empty = record
        assert (first, end) == (index * quota, min((index + 1) * quota, len(tiles)))
        if first < end:
            assert used[context] == (sequence, length)
            assert tiles[first] == (sequence, firsts[sequence] + first - origin)
        mine = [row for row in range(index, len(seq_lens), num_ranges) if seq_lens[row] == 0]
        assert has_empty == bool(mine)
        zeroed += mine
    ranges_of = {row: sorted({at // quota for at, tile in enumerate(tiles) if tile[0] == row}) for row, _ in used}
    cuts = [(row, ranges[0], len(ranges)) for row, ranges in ranges_of.items() if len(ranges) > 1]
    assert schedule.cuts.shape == (min(len(seq_lens), num_ranges - 1), 3)
    assert list(map(tuple, schedule.cuts.tolist()))[: len(cuts)] == cuts
    assert not schedule.cuts[len(cuts) :, 2].any()
    assert sorted(zeroed) == [row for row, length in enumerate(seq_lens) if length == 0]


@pytest.mark.parametrize(
    ("heads", "cache_dtype", "num_ranges"),
    [
        ((32, 8), torch.bfloat16, 2 * 132 // 8),
        ((32, 8), torch.float8_e4m3fn, 4 * 132 // 8),
        ((1, 1), torch.bfloat16, 2 * 132),
        ((130, 1), torch.bfloat16, 2 * 132 // 3),
        ((300, 300), torch.bfloat16, 1),
    ],
)
def test_ranges_fill_the_device(paged_case, kernels, heads, cache_dtype, num_ranges):
    case = paged_case([1], heads=heads, head_dim=128, dtype=torch.bfloat16, cache_dtype=cache_dtype)
    with assumed(case.q.device, INTERPRETER._replace(multiprocessors=132)):
        assert case.schedule(kernels).ranges.shape[0] == num_ranges


def test_the_reference_needs_no_schedule(paged_case, reference):
    assert paged_case([3, 40]).schedule(reference) is None
