"""The ids of a step's tokens and where their KV goes, gathered from the persistent batch in one launch.

    input_ids[i] = token_table[rows[i], positions[i]]
    slots[g, i]  = tables[g, rows[i], positions[i] // block_size] * block_size + positions[i] % block_size

with g over the groups of layers that have block tables of their own. positions[i] = -1 marks padding: id 0, slot -1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import check_slots, check_table, check_tables, check_vectors
from ..dispatch import TritonModule, on_triton

_kernel = TritonModule("rayllm_kernels.cache.token_inputs_kernel")


def token_inputs(
    rows: Tensor,
    positions: Tensor,
    token_table: Tensor,
    tables: Tensor,
    block_size: int,
    input_ids: Tensor,
    slots: Tensor,
) -> None:
    """Gather T tokens from the persistent batch, into input_ids [T] and slots [G, T], both int64.

    rows: [T] int64, rows of the tables. positions: [T] int64; -1 marks padding, which gets id 0 and slot -1.
    token_table: [R, max_len] int32. tables: [G, R, max_blocks] int32.
    """
    count, device = rows.shape[0], rows.device
    vectors = {"rows": rows, "positions": positions, "input_ids": input_ids}
    check_vectors(count, torch.int64, device, **vectors)
    check_table(token_table, "token_table", device)
    check_tables(tables, "tables", device)
    check_slots(slots, tables.shape[0], count, device)
    if on_triton(rows):
        _kernel.token_inputs(rows, positions, token_table, tables, block_size, input_ids, slots)
        return
    real = positions >= 0
    position = positions.clamp_min(0)
    input_ids.copy_(torch.where(real, token_table[rows, position].to(torch.int64), 0))
    blocks = tables[:, rows, position // block_size].to(torch.int64)
    slots.copy_(torch.where(real, blocks * block_size + position % block_size, -1))
