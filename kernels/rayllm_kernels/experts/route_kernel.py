"""The Triton kernel of `route`: one program chooses the experts of one token.

logits [T, E] of any float dtype -> weights [T, top_k] fp32, experts [T, top_k] int32; `route.py` has the formulas. A
score and its expert are one 64-bit number, so that the largest is found with its place in one reduction, and of equal
scores the first expert's. Whatever the logits are, NaN too, experts are below E.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compile_ahead import launch
from ..dependent_launch import wait_for_predecessor
from ..device import hardware
from .route import TINY, Routing

SMALLEST = tl.constexpr(-(2**63))
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
def _ranked(scores, expert, NUM_EXPERTS: tl.constexpr):
    """int64 that are ordered as the scores, and among equal ones the other way round as the experts."""
    bits = scores.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    ranked = ordered * 4294967296 + (NUM_EXPERTS - 1 - expert).to(tl.int64)
    return tl.where(expert < NUM_EXPERTS, ranked, SMALLEST)


@triton.jit
def _expert_of(ranked, NUM_EXPERTS: tl.constexpr):
    return NUM_EXPERTS - 1 - (ranked & 0xFFFFFFFF).to(tl.int32)


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
    ranked = _ranked(group_score, expert, EXPERTS)
    for _ in range(FORM.top_k_groups):
        chosen = _expert_of(tl.max(ranked, 0), EXPERTS) // SIZE
        allowed |= group == chosen
        ranked = tl.where(group == chosen, SMALLEST, ranked)
    return allowed


@triton.jit
def _route_kernel(logits_ptr, correction_ptr, factors_ptr, weights_ptr, experts_ptr, stride, FORM: tl.constexpr):
    EXPERTS: tl.constexpr = FORM.experts
    wait_for_predecessor(FORM.overlap)
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
    ranked = _ranked(choice, expert, EXPERTS)
    if FORM.num_groups > 1:
        allowed = _in_best_groups(choice, expert, FORM)
        ranked = tl.where(allowed, ranked, SMALLEST)

    PLACES: tl.constexpr = FORM.top_k_padded
    place = tl.arange(0, PLACES)
    weights = tl.full([PLACES], float("-inf") if FORM.scores == "top_k_softmax" else 0.0, tl.float32)
    experts = tl.zeros([PLACES], tl.int32)
    for i in range(FORM.top_k):
        best = _expert_of(tl.max(ranked, 0), EXPERTS)
        weight = tl.sum(tl.where(expert == best, scores, 0.0), 0)
        weights = tl.where(place == i, weight, weights)
        experts = tl.where(place == i, best, experts)
        ranked = tl.where(expert == best, SMALLEST, ranked)
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
