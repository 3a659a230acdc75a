"""Gathering a decode step's inputs from the persistent batch."""

from __future__ import annotations

import pytest
import torch

from rayllm_kernels.ops import DecodeInputs


@pytest.mark.parametrize("block_size", [1, 7, 16])
@pytest.mark.parametrize(("groups", "max_blocks"), [(1, 3), (1, 40), (3, 40), (1, 1100)])
def test_decode_inputs_are_gathered_and_padding_is_inert(kernels, reference, device, block_size, groups, max_blocks):
    generator = torch.Generator().manual_seed(0)
    table_rows, count, max_len = 9, 6, max_blocks * block_size
    token_table = torch.randint(0, 1000, (table_rows, max_len), dtype=torch.int32, generator=generator).to(device)
    tables = torch.randint(0, 500, (groups, table_rows, max_blocks), dtype=torch.int32, generator=generator).to(device)
    rows = torch.tensor([4, 0, 8, 2, 0, 0], device=device)
    positions = torch.tensor([0, max_len - 1, max_len // 2, block_size - 1, -1, -1], device=device)

    def run(module) -> DecodeInputs:
        out = DecodeInputs(
            input_ids=torch.full((count,), -9, dtype=torch.int64, device=device),
            slots=torch.full((groups, count + 2), -9, dtype=torch.int64, device=device)[:, :count],
            seq_lens=torch.full((count,), -9, dtype=torch.int32, device=device),
            block_tables=torch.full((groups, count + 1, max_blocks), -9, dtype=torch.int32, device=device)[:, :count],
        )
        module.decode_inputs(rows, positions, token_table, tables, block_size, out)
        return out

    expected, actual = run(reference), run(kernels)
    assert expected.seq_lens.tolist() == [1, max_len, max_len // 2 + 1, block_size, 0, 0]
    assert expected.slots[:, 4:].tolist() == [[-1, -1]] * groups
    assert (expected.block_tables[:, 4:] == -9).all()
    used = max_len // 2 // block_size + 1
    assert torch.equal(expected.block_tables[:, 2, :used], tables[:, 8, :used])
    for name, ours, theirs in zip(DecodeInputs._fields, actual, expected, strict=True):
        assert torch.equal(ours, theirs), name
