"""Sampling from softmax(logits / temperature) by the Gumbel-max trick, without materialising noise or probabilities.

    token = argmax_v  logits[v] * (1 / temperature) + noise_scale * gumbel(seed, position, v)

The noise is that of `noise.py`, whose docstring defines the hash: bit for bit the same integers, so a request draws the
same tokens on any device. Among equal scores the lowest token wins.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import check_float, check_last_dim, check_vectors, fail
from ..dispatch import TritonModule, on_triton
from .noise import gumbel_noise

NO_TOKEN = 0x7FFFFFFF  # more than any token

_kernel = TritonModule("rayllm_kernels.sampling.draw_kernel")


class DrawRows(NamedTuple):
    """How each of N rows of logits is drawn."""

    seeds: Tensor  # [N] int64, at least 0
    positions: Tensor  # [N] int64: the index that the token to draw has in its sequence
    temperature: Tensor  # [N] fp32, above 0; 1 in greedy rows
    noise_scale: Tensor  # [N] fp32: 1 to draw, 0 for the argmax of greedy rows

    def check(self, logits: Tensor) -> None:
        """Raise ValueError unless these and `logits` [N, V] are as a draw wants them."""
        check_logits(logits)
        rows, device = logits.shape[0], logits.device
        check_vectors(rows, torch.int64, device, seeds=self.seeds, positions=self.positions)
        check_vectors(rows, torch.float32, device, temperature=self.temperature, noise_scale=self.noise_scale)


def check_logits(logits: Tensor) -> None:
    """Raise ValueError unless `logits` are [rows, vocab_size] of a float dtype, each row contiguous."""
    if logits.dim() != 2 or not logits.shape[1]:
        fail("logits", "must be [rows, vocab_size] of at least one column", logits.shape)
    check_float(logits, "logits")
    check_last_dim(logits, "logits")


def gumbel_argmax(logits: Tensor, draw: DrawRows) -> Tensor:
    """Draw one token a row: argmax of logits / temperature + noise_scale * noise(seed, position) -> [N] int64.

    logits: [N, V] fp32, fp16 or bf16, rows of any stride; -inf is never drawn unless a row has nothing else. The noise
    depends on seed, position and token alone.
    """
    draw.check(logits)
    if on_triton(logits):
        return _kernel.draw_best(logits, draw, first_token=0, keys=False)
    return _scores(logits, draw, 0).argmax(dim=1)


def gumbel_keys(logits: Tensor, draw: DrawRows, *, first_token: int) -> Tensor:
    """`gumbel_argmax` over slices of a vocabulary: the best of one slice as a key [N] int64.

    logits: [N, C] of tokens first_token to first_token + C - 1; the rest as for `gumbel_argmax`. The largest key of all
    slices is that of the token that `gumbel_argmax` draws from the whole; `tokens_of_keys` names it. A key is the best
    score in the order of integers, times 2^32, plus NO_TOKEN less the lowest token that has it.
    """
    draw.check(logits)
    if not 0 <= first_token < 1 << 31:
        fail("first_token", "must be at least 0 and below 2^31", first_token)
    if on_triton(logits):
        return _kernel.draw_best(logits, draw, first_token=first_token, keys=True)
    scores = _scores(logits, draw, first_token)
    top = scores.amax(dim=1, keepdim=True)
    ids = torch.arange(first_token, first_token + logits.shape[1], device=logits.device)
    token = torch.where(scores == top, ids, NO_TOKEN).amin(dim=1)
    bits = top[:, 0].view(torch.int32)
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    return order * 2**32 + (NO_TOKEN - token)


def tokens_of_keys(keys: Tensor) -> Tensor:
    """The tokens of `gumbel_keys`, int64."""
    return NO_TOKEN - (keys & NO_TOKEN)


def _scores(logits: Tensor, draw: DrawRows, first_token: int) -> Tensor:
    scores = logits.float() * (1.0 / draw.temperature)[:, None]
    noise = gumbel_noise(draw.seeds, draw.positions, logits.shape[1], first_token)
    return scores.add_(noise.mul_(draw.noise_scale[:, None]))
