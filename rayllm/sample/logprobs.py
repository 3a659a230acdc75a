"""Log-probabilities of chosen tokens and of the most likely ones, always of the raw logits.

`gather` works on the device and does not synchronise; `to_entries` turns its result, once on the host, into structs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rayllm.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Log-probabilities (natural log) at M positions, K of the most likely tokens each.

    token_ids: [M] int64, the chosen tokens. logprobs: [M] float32. ranks: [M] int64, 1 + the number of more likely
    tokens. top_ids: [M, K] int64, most likely first, lower ids first among equals. top_logprobs: [M, K] float32.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    def to_host(self, non_blocking: bool = True) -> LogprobTensors:
        """The same on the CPU. If non_blocking, copies from CUDA only start: wait for an event recorded after them."""
        return LogprobTensors(
            self.token_ids.to("cpu", non_blocking=non_blocking),
            self.logprobs.to("cpu", non_blocking=non_blocking),
            self.ranks.to("cpu", non_blocking=non_blocking),
            self.top_ids.to("cpu", non_blocking=non_blocking),
            self.top_logprobs.to("cpu", non_blocking=non_blocking),
        )


def gather(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> LogprobTensors:
    """Log-probabilities under softmax(logits).

    logits: [M, V] float32, raw; -inf allowed, but not for a whole row. token_ids: [M] int64. num_top: K, 0 to V.
    Memory beside logits: 4 bytes a logit, 16 if num_top > 0.
    """
    highest = logits.amax(dim=1, keepdim=True)
    log_total = (logits - highest).exp_().sum(dim=1, keepdim=True).log_()
    chosen = logits.gather(1, token_ids[:, None])
    ranks = (logits > chosen).sum(dim=1) + 1
    if num_top > 0:
        top_ids = _ordered_keys(logits).topk(num_top, dim=1).indices
    else:
        top_ids = token_ids.new_empty(token_ids.shape[0], 0)
    return LogprobTensors(
        token_ids=token_ids,
        logprobs=(chosen - highest - log_total)[:, 0],
        ranks=ranks,
        top_ids=top_ids,
        top_logprobs=logits.gather(1, top_ids) - highest - log_total,
    )


def to_entries(tensors: LogprobTensors, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """One struct a position. tensors: on the host, M positions. num_top: [M], how many top tokens each asked for."""
    columns = zip(
        tensors.token_ids.tolist(),
        tensors.logprobs.tolist(),
        tensors.ranks.tolist(),
        tensors.top_ids.tolist(),
        tensors.top_logprobs.tolist(),
        num_top,
        strict=True,
    )
    return [TokenLogprobs(token, lp, rank, ids[:k], lps[:k]) for token, lp, rank, ids, lps, k in columns]


def prompt_logprobs(logits: torch.Tensor, target_ids: torch.Tensor, num_top: int) -> list[TokenLogprobs]:
    """Log-probabilities of prompt tokens, each under the logits of the position before it. Synchronises.

    logits: [M, V]. target_ids: [M] int64, the tokens that follow. num_top: top tokens a position. The caller bounds
    memory (see `gather`) by calling this with pieces of the prompt.
    """
    tensors = gather(logits.float(), target_ids, num_top).to_host(non_blocking=False)
    return to_entries(tensors, [num_top] * target_ids.shape[0])


def _ordered_keys(logits: torch.Tensor) -> torch.Tensor:
    """int64 keys in the order of (logit, then lower id first): topk of them has no ties, so it is the same anywhere.

    The bits of a float32, with all but the sign flipped if it is negative, are an integer in the float's order.
    """
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 makes -0.0 and 0.0 equal
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(logits.shape[1], device=logits.device)
    return (ordered.long() << 32) - ids
