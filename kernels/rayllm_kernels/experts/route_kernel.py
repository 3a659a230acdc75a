"""The Triton kernel of `route`: one program chooses the experts of one token.

logits [T, E] of any float dtype -> weights [T, top_k] fp32, experts [T, top_k] int32; `route.py` has the formulas.
Scores are compared as integers of 32 bits in the same order, of which a warp finds the largest by one instruction, and
by another the first expert that has it. Whatever the logits are, NaN too, experts are below E and all different.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compile_ahead import launch
from ..dependent_launch import announce_and_wait
from ..device import hardware
from .route import TINY, Routing

LEAST = tl.constexpr(-(2**31))  # below every score
_TINY = tl.constexpr(TINY)


class Form(NamedTuple):
    """The compile-time argument of the kernel."""

    experts: int
    experts_padded: int  # to a power of two
    top_k: int
    top_k_padded: int
    scores: str
    normalised: bool
    num_groups: int
    top_k_groups: int
    scale: float
    rounded: bool
    best_of_group: int
    overlap: bool  # launches overlap (`dependent_launch.py`)


@triton.jit
def _ordered(scores, candidate):
    """int32 that are ordered as the scores; those of no candidates are below all others."""
    bits = scores.to(tl.int32, bitcast=True)
    return tl.where(candidate, tl.maximum(tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), LEAST + 1), LEAST)


@triton.jit
def _first_best(ordered, number):
    """The least of the numbers that the largest of `ordered` have."""
    return tl.min(tl.where(ordered == tl.max(ordered, 0), number, 0x7FFFFFFF), 0)


@triton.jit
def _in_best_groups(choice, expert, FORM: tl.constexpr):
    """Whether an expert lies in one of the best groups, which count as much as their best expert or two."""
    EXPERTS: tl.constexpr = FORM.experts
    SIZE: tl.constexpr = EXPERTS // FORM.num_groups
    PADDED: tl.constexpr = FORM.experts_padded
    group = expert // SIZE
    group_score = tl.full([PADDED], float("-inf"), tl.float32)
    for i in range(FORM.num_groups):
        mine = tl.where(group == i, choice, float("-inf"))
        best = tl.max(mine, 0)
        if FORM.best_of_group == 2:
            first = tl.min(tl.where(mine == best, expert, EXPERTS), 0)
            best += tl.max(tl.where(expert == first, float("-inf"), mine), 0)
        group_score = tl.where(group == i, best, group_score)
    allowed = expert < 0
    ordered = _ordered(group_score, expert < EXPERTS)
    for _ in range(FORM.top_k_groups):
        chosen = _first_best(ordered, group)
        allowed |= group == chosen
        ordered = tl.where(group == chosen, LEAST, ordered)
    return allowed


@triton.jit
def _route_kernel(logits_ptr, correction_ptr, factors_ptr, weights_ptr, experts_ptr, stride, FORM: tl.constexpr):
    EXPERTS: tl.constexpr = FORM.experts
    announce_and_wait(FORM.overlap)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, FORM.experts_padded)
    real = expert < EXPERTS
    scores = tl.load(logits_ptr + token * stride + expert, mask=real, other=float("-inf")).to(tl.float32)
    if FORM.scores == "softmax":
        scores = tl.exp(scores - tl.max(scores, 0))
        scores = scores / tl.sum(scores, 0)
    elif FORM.scores == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-scores))
    choice = scores
    if correction_ptr is not None:
        choice += tl.load(correction_ptr + expert, mask=real, other=0.0)
    candidate = real
    if FORM.num_groups > 1:
        candidate &= _in_best_groups(choice, expert, FORM)
    ordered = _ordered(choice, candidate)

    PLACES: tl.constexpr = FORM.top_k_padded
    place = tl.arange(0, PLACES)
    experts = tl.zeros([PLACES], tl.int32)
    for i in range(FORM.top_k):
        best = _first_best(ordered, expert)
        experts = tl.where(place == i, best, experts)
        ordered = tl.where(expert == best, LEAST, ordered)
    weights = tl.gather(scores, experts, 0)
    weights = tl.where(place < FORM.top_k, weights, float("-inf") if FORM.scores == "top_k_softmax" else 0.0)
    if FORM.scores == "top_k_softmax":
        weights = tl.exp(weights - tl.max(weights, 0))
        weights = weights / tl.sum(weights, 0)
    if FORM.normalised:
        weights = weights / (tl.sum(weights, 0) + _TINY)
    weights *= FORM.scale
    if factors_ptr is not None:
        weights *= tl.load(factors_ptr + experts, mask=place < FORM.top_k, other=0.0)
    if FORM.rounded:
        weights = weights.to(logits_ptr.dtype.element_ty).to(tl.float32)
    target = token * FORM.top_k + place
    tl.store(weights_ptr + target, weights, mask=place < FORM.top_k)
    tl.store(experts_ptr + target, experts, mask=place < FORM.top_k)


def route(logits: Tensor, routing: Routing, correction: Tensor | None, factors: Tensor | None) -> tuple[Tensor, Tensor]:
    """(weights, experts) of checked arguments."""
    tokens, num_experts = logits.shape
    weights = torch.empty((tokens, routing.top_k), dtype=torch.float32, device=logits.device)
    experts = torch.empty((tokens, routing.top_k), dtype=torch.int32, device=logits.device)
    if not tokens:
        return weights, experts
    overlap = hardware(logits.device).can_overlap
    form = Form(
        num_experts,
        triton.next_power_of_2(num_experts),
        routing.top_k,
        triton.next_power_of_2(routing.top_k),
        routing.scores,
        routing.normalised,
        routing.num_groups,
        routing.top_k_groups,
        routing.scale,
        routing.rounded,
        routing.best_of_group,
        overlap,
    )
    launch(_route_kernel, (tokens,))(
        logits, correction, factors, weights, experts, logits.stride(0), FORM=form, num_warps=1, launch_pdl=overlap
    )
    return weights, experts
