"""min_p, top_k and top_p as one number a row: the smallest logit that is kept.

All three keep the most likely tokens, so together they are a cutoff, and tokens of equal logit are kept or dropped
together: the result cannot depend on how a sort orders ties.

    min_p   keeps tokens with probability >= min_p * the highest probability
    top_k   keeps the k highest logits, and what ties with the last of them (as transformers and vLLM do)
    top_p   of what those two keep, renormalised, keeps the fewest tokens whose probabilities sum to at least p
            (Holtzman et al. 2020, "The curious case of neural text degeneration"), and what ties with the last

Probabilities are summed as integers, in units of 2^-40 of the row's highest. Integer sums are exact in any order, so a
row's cutoff is the same in every batch, by either way below, whatever order a device reduces in.
"""

from __future__ import annotations

import torch

_FIXED_POINT = 2.0**40  # 2^18 tokens of weight 2^40 still leave 5 bits of an int64 free


def cutoff(
    scaled: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    log_min_p: torch.Tensor,
    num_candidates: int,
    any_top_p: bool,
) -> torch.Tensor:
    """The smallest entry of each row of `scaled` that is kept: [C] float32. It never exceeds the row's maximum.

    scaled: [C, V] float32, logits over temperature, less the row's maximum (so that the maximum is 0); -inf allowed.
    top_k: [C] int64, 1 to V, or 0 for all. top_p: [C] float32, 1 for all. log_min_p: [C] float32, -inf for all.
    num_candidates: how many of the highest logits have to be looked at: 0 if no row has top_k or top_p, the largest
    top_k if every row with a top_p has a top_k as well, else V (a full sort). any_top_p: False if all top_p are 1.
    """
    if num_candidates == 0:
        return log_min_p
    candidates = _highest(scaled, num_candidates)
    kth = candidates.gather(1, (top_k - 1).clamp_(min=0, max=candidates.shape[1] - 1)[:, None])[:, 0]
    floor = torch.where(top_k > 0, torch.maximum(kth, log_min_p), log_min_p)
    if not any_top_p:
        return floor

    # The total is taken over the whole row: ties with the k-th may go on beyond the candidates.
    total = _weights(scaled, floor).sum(dim=1)
    target = (top_p.double() * total.double()).ceil_().long()
    reached = _weights(candidates, floor).cumsum(dim=1)
    # Entries before the one that reaches p. If only ties beyond the candidates reach it, the last candidate is one too.
    before = (reached < target[:, None]).sum(dim=1).clamp_(max=candidates.shape[1] - 1)
    nucleus = candidates.gather(1, before[:, None])[:, 0]
    return torch.where(top_p < 1.0, nucleus, floor)


def _highest(scaled: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` highest entries of each row in descending order, or all of them: [C, count or V]."""
    # A quarter of the row is about where selecting stops being faster than sorting.
    if count * 4 <= scaled.shape[1]:
        return scaled.topk(count, dim=1).values
    return scaled.sort(dim=1, descending=True).values


def _weights(scaled: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    """exp(scaled) in fixed point, 0 below the row's floor. scaled: [C, X]. Returns [C, X] int64."""
    kept = torch.where(scaled >= floor[:, None], scaled, float("-inf"))
    return kept.exp_().mul_(_FIXED_POINT).long()
