"""Log-probabilities of chosen tokens, their ranks and the most likely tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import check_vectors, fail
from ..dispatch import TritonModule, on_triton
from .draw import check_logits

_kernel = TritonModule("rayllm_kernels.sampling.logprobs_kernel")


def gather_logprobs(
    logits: Tensor, rows: Tensor, token_ids: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(log-probabilities [M] fp32, ranks [M] int64, top ids [M, K] int64, their log-probabilities [M, K] fp32).

    logits: [N, V] fp32, fp16 or bf16; -inf allowed, but not for a whole row. rows: [M] int64, the rows to report on.
    token_ids: [M] int64, the chosen token of each; a rank is 1 + the number of tokens of higher logit. num_top: K, 0 to
    V, made for a few; top ids have the most likely first, and lower ids first among equals.
    """
    check_logits(logits)
    check_vectors(rows.numel(), torch.int64, logits.device, rows=rows, token_ids=token_ids)
    if not 0 <= num_top <= logits.shape[1]:
        fail("num_top", f"must be 0 to {logits.shape[1]}", num_top)
    if on_triton(logits):
        return _kernel.gather_logprobs(logits, rows, token_ids, num_top)
    # log_softmax of the rows in fp32: 8 bytes a logit of these rows, 20 if num_top > 0.
    own = logits.index_select(0, rows).float()
    highest = own.amax(dim=1, keepdim=True)
    log_total = (own - highest).exp_().sum(dim=1, keepdim=True).log_()
    chosen = own.gather(1, token_ids[:, None])
    ranks = (own > chosen).sum(dim=1) + 1
    if num_top > 0:
        top_ids = _ordered_keys(own).topk(num_top, dim=1).indices
    else:
        top_ids = token_ids.new_empty(token_ids.shape[0], 0)
    top_logprobs = own.gather(1, top_ids) - highest - log_total
    return (chosen - highest - log_total)[:, 0], ranks, top_ids, top_logprobs


def _ordered_keys(logits: Tensor) -> Tensor:
    """int64 keys in the order of (logit, then lower id first): topk of them has no ties, so it is the same anywhere.

    The bits of a float32, with all but the sign flipped if it is negative, are an integer in the float's order.
    """
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 makes -0.0 and 0.0 equal
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(logits.shape[1], device=logits.device)
    return (ordered.long() << 32) - ids
