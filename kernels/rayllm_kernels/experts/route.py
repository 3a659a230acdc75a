"""The choice of a token's experts from its logits, one an expert.

softmax:        s = softmax(logits)      the top_k largest s + correction are chosen
sigmoid:        s = sigmoid(logits)      the same
top_k_softmax:  the top_k largest logits are chosen, and s is the softmax of these

weight = s / (sum of the chosen s, if normalised) * scale * factor of the expert, if there are any

With groups (DeepSeek-V3, 2024), experts lie in num_groups groups of equal size; a group counts as much as its two
largest s + correction together (or as its largest, in DeepSeek-V2), and only experts of the top_k_groups best groups
are chosen from.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import check_float, check_last_dim, check_vectors, fail
from ..dispatch import TritonModule, on_triton

_kernel = TritonModule("rayllm_kernels.experts.route_kernel")

SCORES = ("softmax", "sigmoid", "top_k_softmax")
TINY = 1e-20  # keeps a sum of scores from being zero, and changes no other in fp32


class Routing(NamedTuple):
    """How experts are chosen and weighed: see above.

    best_of_group: how many experts of a group it counts as much as, 1 or 2. rounded: weights are rounded to the dtype
    of the logits.
    """

    top_k: int
    scores: str
    normalised: bool = False
    num_groups: int = 1
    top_k_groups: int = 1
    scale: float = 1.0
    rounded: bool = False
    best_of_group: int = 2


def route(
    logits: Tensor,
    routing: Routing,
    correction: Tensor | None = None,
    factors: Tensor | None = None,
    *,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """(weights [T, top_k] fp32, experts [T, top_k] int32) of logits [T, E], the best expert first.

    Of equal ones the first is better. correction, factors: [E] fp32. Everything is computed in fp32. deterministic: on
    the CPU, rows are computed one by one, so that none depends on the others to the bit; on GPUs none ever does.
    """
    _check(logits, routing, correction, factors)
    if on_triton(logits):
        return _kernel.route(logits, routing, correction, factors)
    if deterministic and logits.shape[0]:
        rows = [_route(row.clone(), routing, correction, factors) for row in logits.split(1)]
        return torch.cat([weights for weights, _ in rows]), torch.cat([experts for _, experts in rows])
    return _route(logits, routing, correction, factors)


def _route(
    logits: Tensor, routing: Routing, correction: Tensor | None, factors: Tensor | None
) -> tuple[Tensor, Tensor]:
    wide = logits.float()
    scores = {"softmax": lambda x: x.softmax(-1), "sigmoid": torch.sigmoid}.get(routing.scores, lambda x: x)(wide)
    choice = scores if correction is None else scores + correction
    if routing.num_groups > 1:
        choice = _only_best_groups(choice, routing)
    experts = choice.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
    weights = scores.gather(1, experts)
    if routing.scores == "top_k_softmax":
        weights = weights.softmax(-1)
    if routing.normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    weights = weights * routing.scale
    if factors is not None:
        weights = weights * factors[experts]
    if routing.rounded:
        weights = weights.to(logits.dtype).float()
    return weights, experts.to(torch.int32)


def _only_best_groups(choice: Tensor, routing: Routing) -> Tensor:
    groups = choice.unflatten(1, (routing.num_groups, -1))
    counts = groups.topk(routing.best_of_group, -1).values.sum(-1)
    best = counts.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k_groups]
    chosen = torch.zeros(groups.shape[:2], dtype=torch.bool, device=choice.device).scatter_(1, best, value=True)
    return groups.masked_fill(~chosen[..., None], -torch.inf).flatten(1)


def _check(logits: Tensor, routing: Routing, correction: Tensor | None, factors: Tensor | None) -> None:
    if logits.dim() != 2:
        fail("logits", "must be [T, E]", logits.shape)
    check_float(logits, "logits")
    check_last_dim(logits, "logits")
    experts = logits.shape[1]
    if routing.scores not in SCORES:
        fail("routing.scores", f"must be one of {', '.join(SCORES)}", routing.scores)
    size, rest = divmod(experts, routing.num_groups)
    if routing.best_of_group not in (1, 2):
        fail("routing.best_of_group", "must be 1 or 2", routing.best_of_group)
    if rest or (routing.num_groups > 1 and size < 2):
        fail("routing.num_groups", f"must share {experts} experts evenly, two or more each", routing.num_groups)
    if not 0 < routing.top_k_groups <= routing.num_groups:
        fail("routing.top_k_groups", f"must be from 1 to {routing.num_groups}", routing.top_k_groups)
    if not 0 < routing.top_k <= size * routing.top_k_groups:
        fail("routing.top_k", f"must be from 1 to {size * routing.top_k_groups}", routing.top_k)
    if correction is not None:
        check_vectors(experts, torch.float32, logits.device, correction=correction)
    if factors is not None:
        check_vectors(experts, torch.float32, logits.device, factors=factors)
