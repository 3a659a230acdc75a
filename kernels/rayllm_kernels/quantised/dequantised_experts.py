"""The experts' products of many tokens with weights of 4 bits, by the kernel for weights in 16, of dequantised ones.

Some experts at a time are written to buffers of a bounded size, and multiplied with their pairs: 2 bytes a weight are
written and read, which takes the less of the time the more tokens there are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..experts.experts import ExpertRange, Projections
from ..experts.group_kernel import group
from ..experts.plans import HOPPER_ROWS
from ..experts.products_kernel import multiply_many
from . import plans
from .dequantise_kernel import dequantise
from .experts import ExpertWeight, QuantisedProjections
from .int4 import Int4Weight


def multiply_dequantised(
    x: Tensor, experts: Tensor, projections: QuantisedProjections, owned: ExpertRange | None
) -> Tensor:
    """z [P, H] of x [T, H] and experts [T, k]."""
    gate_up, down, gate_up_bias, down_bias, act, clamp = projections
    (count, hidden, _), first_here = down.codes.shape, 0 if owned is None else owned.first
    at_once = plans.experts_at_once(count, hidden, down.inputs)
    buffers = [
        torch.empty((at_once, each.codes.shape[1], each.inputs), dtype=x.dtype, device=x.device)
        for each in (gate_up, down)
    ]
    z = torch.empty((experts.numel(), hidden), dtype=x.dtype, device=x.device)
    for first in range(0, count, at_once):
        number = min(at_once, count - first)
        here = None if owned is None and number == count else (first_here + first, number)
        groups = group(experts, number, HOPPER_ROWS, None if here is None else here[0], places=True)
        part = slice(first, first + number)
        dequantised = Projections(
            gate_up=dequantise_experts(gate_up, first, buffers[0][:number]),
            down=dequantise_experts(down, first, buffers[1][:number]),
            gate_up_bias=None if gate_up_bias is None else gate_up_bias[part],
            down_bias=None if down_bias is None else down_bias[part],
            act=act,
            clamp=clamp,
        )
        multiply_many(x, experts, dequantised, groups, here, out=z)
    return z


def dequantise_experts(weight: ExpertWeight, first: int, out: Tensor) -> Tensor:
    """`out` [experts, N, K], the numbers of experts from `first` on, times their scales, written to it."""
    codes, scales = weight.codes.flatten(0, 1), weight.scales.flatten(0, 1).T
    zeros = None if weight.zeros is None else weight.zeros.flatten(0, 1).T
    rows = Int4Weight(codes, scales, zeros, weight.inputs, weight.group)
    dequantise(rows, first * out.shape[1], out.flatten(0, 1), e2m1=weight.kind == "mxfp4")
    return out
