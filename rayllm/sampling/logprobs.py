"""Log-probabilities of chosen tokens and of the most likely ones, always of the raw logits.

`gather` works on the device and does not synchronise; `to_entries` turns its result, once on the host, into structs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from rayllm.api.types import TokenLogprobs
from rayllm_kernels import ops


class LogprobTensors(NamedTuple):
    """Log-probabilities (natural log) at M positions, K of the most likely tokens each."""

    token_ids: torch.Tensor  # [M] int64, the chosen tokens
    logprobs: torch.Tensor  # [M] float32
    ranks: torch.Tensor  # [M] int64, 1 + the number of more likely tokens
    top_ids: torch.Tensor  # [M, K] int64, most likely first, lower ids first among equals
    top_logprobs: torch.Tensor  # [M, K] float32

    def to_host(self, non_blocking: bool = True) -> LogprobTensors:
        """The same on the CPU. If non_blocking, copies from CUDA only start: wait for an event recorded after them."""
        return LogprobTensors(*(tensor.to("cpu", non_blocking=non_blocking) for tensor in self))


def gather(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> LogprobTensors:
    """Log-probabilities under softmax(logits), see `ops.gather_logprobs`.

    logits: [N, V] float, raw; -inf allowed, but not for a whole row. rows: [M] int64, those to report on. token_ids:
    [M] int64, their chosen tokens. num_top: K, 0 to V.
    """
    return LogprobTensors(token_ids, *ops.gather_logprobs(logits, rows, token_ids, num_top))


def to_entries(tensors: LogprobTensors, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """One struct a position. tensors: on the host, M positions. num_top: [M], how many top tokens each asked for."""
    columns = zip(*(tensor.tolist() for tensor in tensors), num_top, strict=True)
    return [TokenLogprobs(token, lp, rank, ids[:k], lps[:k]) for token, lp, rank, ids, lps, k in columns]


def prompt_logprobs(logits: torch.Tensor, target_ids: torch.Tensor, num_top: int) -> list[TokenLogprobs]:
    """Log-probabilities of prompt tokens, each under the logits of the position before it. Synchronises.

    logits: [M, V]. target_ids: [M] int64, the tokens that follow. num_top: top tokens a position. The caller bounds
    memory by calling this with pieces of the prompt.
    """
    rows = torch.arange(logits.shape[0], device=logits.device)
    tensors = gather(logits, rows, target_ids, num_top).to_host(non_blocking=False)
    return to_entries(tensors, [num_top] * target_ids.shape[0])
