"""What one decode step needs of each of its sequences, gathered from the persistent batch in one launch.

    input_ids[i]       = token_table[rows[i], positions[i]]
    seq_lens[i]        = positions[i] + 1
    slots[g, i]        = tables[g, rows[i], positions[i] // block_size] * block_size + positions[i] % block_size
    block_tables[g, i] = tables[g, rows[i]]

with g over the groups of layers that have block tables of their own. positions[i] = -1 marks a padding row: id 0, slot
-1, length 0, its block tables left as they were.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import check_slots, check_table, check_tables, check_vectors, fail
from ..dispatch import TritonModule, on_triton

_kernel = TritonModule("rayllm_kernels.cache.decode_inputs_kernel")


class DecodeInputs(NamedTuple):
    """The inputs of a decode step of B rows, with block tables of G groups."""

    input_ids: Tensor  # [B] int64
    slots: Tensor  # [G, B] int64, of any first stride
    seq_lens: Tensor  # [B] int32
    block_tables: Tensor  # [G, B, max_blocks] int32; entries past a sequence's blocks are left as they were


def decode_inputs(
    rows: Tensor, positions: Tensor, token_table: Tensor, tables: Tensor, block_size: int, out: DecodeInputs
) -> None:
    """Gather a decode step's inputs from the persistent batch, into `out`.

    rows: [B] int64, rows of the tables. positions: [B] int64; -1 marks padding, which gets id 0, slot -1 and length 0.
    token_table: [R, max_len] int32. tables: [G, R, max_blocks] int32.
    """
    count, device = rows.shape[0], rows.device
    vectors = {"rows": rows, "positions": positions, "input_ids": out.input_ids}
    check_vectors(count, torch.int64, device, **vectors)
    check_vectors(count, torch.int32, device, seq_lens=out.seq_lens)
    check_table(token_table, "token_table", device)
    check_tables(tables, "tables", device)
    check_tables(out.block_tables, "block_tables", device)
    groups, _, max_blocks = tables.shape
    check_slots(out.slots, groups, count, device)
    if out.block_tables.shape != (groups, count, max_blocks):
        fail("block_tables", f"must have shape ({groups}, {count}, {max_blocks})", out.block_tables.shape)
    if on_triton(rows):
        _kernel.decode_inputs(rows, positions, token_table, tables, block_size, out)
        return
    real = positions >= 0
    position = positions.clamp_min(0)
    out.input_ids.copy_(torch.where(real, token_table[rows, position].to(torch.int64), 0))
    blocks = tables[:, rows, position // block_size].to(torch.int64)
    out.slots.copy_(torch.where(real, blocks * block_size + position % block_size, -1))
    out.seq_lens.copy_(torch.where(real, position + 1, 0).to(torch.int32))
    used = torch.arange(max_blocks, device=device)[None, :] * block_size <= positions[:, None]
    out.block_tables.copy_(torch.where(used, tables[:, rows], out.block_tables))
