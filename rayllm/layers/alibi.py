"""Attention with linear biases (Press, Smith, Lewis, 2022): not positions, but scores that fall with distance."""

from __future__ import annotations

import torch

from rayllm.layers.layer import BuildContext


def alibi_slopes(num_heads: int) -> list[float]:
    """The slope of each of num_heads heads.

    For a power of two the geometric sequence from 2^(-8 / n) to 2^-8. Else that of the largest power of two below,
    followed by every other member, from the first on, of the sequence of twice as many heads, as in the paper's code.
    """
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    return slopes + [2.0 ** (-4.0 * i / power) for i in range(1, 2 * (num_heads - power), 2)]


def rank_slopes(context: BuildContext, num_heads: int) -> torch.Tensor:
    """Those of the rank's heads, for the `Scoring` of all layers: [num_heads / tp] float32."""
    count = num_heads // context.tp.size
    own = alibi_slopes(num_heads)[context.tp.rank * count :][:count]
    return torch.tensor(own, dtype=torch.float32, device=context.device)
