"""Weights of 4 bits."""

from __future__ import annotations

import torch

from rayllm_kernels.ops import Int4Weight
from rayllm_kernels.quantised.int4 import half_of


def random_weight(outputs, inputs, group, *, symmetric, device):
    """Scales differ by a factor of 16 from group to group."""
    groups = 1 if group is None else -(-inputs // group)
    codes = torch.randint(256, (outputs, half_of(inputs, group)), dtype=torch.uint8, device=device)
    scales = torch.exp2(4 * torch.rand(groups, outputs, device=device)) * inputs**-0.5 / 32
    zeros = None if symmetric else torch.randint(16, scales.shape, dtype=torch.uint8, device=device)
    return Int4Weight(codes, scales, zeros, inputs, group)
