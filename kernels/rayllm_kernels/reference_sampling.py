"""The torch references of what surrounds the model in a decode step: its inputs, and the choice of a token."""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import check_decode_inputs, check_gumbel_argmax
from .reference_noise import gumbel_noise


def gumbel_argmax(logits: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor, noise_scale: Tensor) -> Tensor:
    """argmax of logits / temperature + noise_scale * noise, in fp32."""
    check_gumbel_argmax(logits, seeds, positions, temperature, noise_scale)
    scores = logits.float() / temperature[:, None]
    noise = gumbel_noise(seeds, positions, logits.shape[1])
    return scores.add_(noise.mul_(noise_scale[:, None])).argmax(dim=1)


def decode_inputs(
    rows: Tensor, positions: Tensor, token_table: Tensor, block_table: Tensor, block_size: int, *,
    input_ids: Tensor, slots: Tensor, seq_lens: Tensor, block_tables: Tensor,
) -> None:  # fmt: skip
    """Gather by plain indexing; padding rows are set apart first."""
    check_decode_inputs(rows, positions, token_table, block_table, input_ids, slots, seq_lens, block_tables)
    real = positions >= 0
    position = positions.clamp_min(0)
    input_ids.copy_(torch.where(real, token_table[rows, position].to(torch.int64), 0))
    blocks = block_table[rows, position // block_size].to(torch.int64)
    slots.copy_(torch.where(real, blocks * block_size + position % block_size, -1))
    seq_lens.copy_(torch.where(real, position + 1, 0).to(torch.int32))
    used = torch.arange(block_table.shape[1], device=rows.device)[None, :] * block_size <= positions[:, None]
    block_tables.copy_(torch.where(used, block_table[rows], block_tables))
