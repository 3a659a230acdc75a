"""Gathering tokens and their slots from the persistent batch."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("count", [0, 1, 7, 128, 300])
@pytest.mark.parametrize(("block_size", "groups"), [(1, 1), (7, 3), (16, 1)])
def test_tokens_are_gathered_and_padding_is_inert(kernels, reference, device, block_size, groups, count):
    generator = torch.Generator().manual_seed(0)
    table_rows, max_blocks = 9, 40
    max_len = max_blocks * block_size
    token_table = torch.randint(0, 1000, (table_rows, max_len), dtype=torch.int32, generator=generator).to(device)
    tables = torch.randint(0, 500, (groups, table_rows, max_blocks), dtype=torch.int32, generator=generator).to(device)
    rows = torch.randint(0, table_rows, (count,), generator=generator).to(device)
    positions = torch.randint(-1, max_len, (count,), generator=generator).to(device)
    positions[-1:] = -1  # the last of them, so that each size has padding beside what it must not touch

    def run(module) -> torch.Tensor:
        out = torch.full((1 + groups, count + 1), -9, dtype=torch.int64, device=device)
        module.token_inputs(rows, positions, token_table, tables, block_size, out[0, :count], out[1:, :count])
        return out

    expected, actual = run(reference), run(kernels)
    assert torch.equal(actual, expected)
    assert actual[:, -1].tolist() == [-9] * (1 + groups)
    for index, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
        slots = [int(block) * block_size + position % block_size for block in tables[:, row, position // block_size]]
        ours = actual[:, index].tolist()
        assert ours == ([0] + [-1] * groups if position < 0 else [int(token_table[row, position]), *slots])
