"""The Triton kernels of `experts`: two grouped products, and the sum over a token's experts.

    h[p] = act(G_e x[t], U_e x[t]),   z[q] = round(D_e h[p]),   y[t] = onto[t] + sum over i of w[t, i] * z[t * k + i]

Pair q = t * k + i of token t and expert e lies at place p of a list that has all pairs of an expert side by side
(`group_kernel.py`), or p = q where there are so few pairs that each is a tile of its own. The first product gathers its
rows of x [T, H] as it loads them, and leaves h [P, I] in the order of the list; the second puts z [P, H] back in the
order of the pairs. Sums are fp32: h is rounded once, z once, y once.

Programs beyond the last tile end at once: a launch has as many as shapes allow, and no host knows how many it needs.

Where the weights are of some of the experts alone (`ExpertRange`), pairs of the others have no tile, and nothing is
added for them. So few pairs that each would be a tile of its own are vector products (`pairs_kernel.py`), but for the
deterministic mode, where a token's bits must not depend on how many there are.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..compile_ahead import launch
from ..dependent_launch import wait_for_predecessor
from ..device import hardware
from ..dispatch import TritonModule
from ..linear.device_functions import add_products, no_sums, sums
from ..linear.invariant_kernel import can_copy
from ..linear.plans import Tiles
from .device_functions import activate_gated, find_rows, find_tile
from .experts import ExpertRange, Projections
from .group_kernel import Groups, arrange, most_tiles, spread
from .pair_sum import PairSum
from .pairs_kernel import NO_ACTIVATION, PairWeight, sum_pairs
from .plans import choose_tiles, hopper_takes

_hopper = TritonModule("rayllm_kernels.experts.hopper_kernel")

ACTS = {"silu": "silu", "swish": "silu", "gelu": "gelu"}  # the others are gelu's approximation by tanh


class Form(NamedTuple):
    """The compile-time argument of the products."""

    tiles: Tiles
    even: bool  # the tiles' depth divides K
    act: str | None  # of the first product; None makes it the second
    alpha: float  # these of the activation "clamped"
    limit: float
    top_k: int
    grouped: bool  # there is a list of pairs
    overlap: bool  # launches overlap (`dependent_launch.py`)


@triton.jit
def _load_tokens(x, stride_x, source, real, first, start, inputs, FORM: tl.constexpr):
    """[tokens, depth] from `start` on; x: a pointer, or what copies tiles of rows that lie side by side."""
    TILES: tl.constexpr = FORM.tiles
    if TILES.copied and FORM.act is None:  # what is past the group's last row is another's, and is not stored
        return x.load([first, start])
    else:
        at = (start + tl.arange(0, TILES.depth))[None, :]
        pointers = x + source.to(tl.int64)[:, None] * stride_x + at
        if FORM.even:
            return tl.load(pointers, mask=real[:, None], other=0.0)
        else:
            return tl.load(pointers, mask=real[:, None] & (at < inputs), other=0.0)


@triton.jit
def _load_weights(weight, strides, expert, part, first_output, outputs, start, inputs, FORM: tl.constexpr):
    """[outputs, depth] of an expert from `start` on; part: 1 for up. weight: a pointer, or what copies tiles."""
    TILES: tl.constexpr = FORM.tiles
    if TILES.copied:  # what is past the part's last row is another's, and is not stored
        parts = 2 if FORM.act is not None else 1
        return weight.load([(expert * parts + part) * outputs + first_output, start])
    else:
        stride_expert, stride_row = strides
        # Rows past the end repeat the last one and are not stored.
        row = part * outputs + tl.minimum(first_output + tl.arange(0, TILES.outputs), outputs - 1)
        at = (start + tl.arange(0, TILES.depth))[None, :]
        pointers = weight + expert.to(tl.int64) * stride_expert + row.to(tl.int64)[:, None] * stride_row + at
        if FORM.even:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=at < inputs, other=0.0)


@triton.jit(do_not_specialize=["most"])
def _experts_kernel(
    x, weight, bias_ptr, y_ptr, experts_ptr, owned, groups, strides, inputs, outputs, most, FORM: tl.constexpr
):
    """x, weight: pointers, or what copies tiles (`Tiles.copied`): weights as one matrix of all experts' rows, and x of
    the second product. owned: the first of the experts that the weights are of, and their number, or None if these are
    all. groups: of `Groups`, or None. strides: of a row of x, of an expert and of a row of the weights.

    most: tiles that there is room for.
    """
    stride_x, stride_expert, stride_weight = strides
    TILES: tl.constexpr = FORM.tiles
    OUTPUTS: tl.constexpr = TILES.outputs
    wait_for_predecessor(FORM.overlap)
    column_tiles = tl.cdiv(outputs, OUTPUTS)
    tile, column_tile = tl.program_id(0) // column_tiles, tl.program_id(0) % column_tiles
    expert, first, end = find_tile(groups, experts_ptr, owned, tile, most, FORM)
    if first >= end:
        return
    real, source, target = find_rows(groups, first, end, FORM)
    first_output, of_weight = column_tile * OUTPUTS, (stride_expert, stride_weight)
    output = first_output + tl.arange(0, OUTPUTS)
    acc = no_sums(TILES)
    up_acc = acc
    for start in range(0, inputs, TILES.depth):
        # The weights first, which need not wait for the list of pairs.
        weights = _load_weights(weight, of_weight, expert, 0, first_output, outputs, start, inputs, FORM)
        up_weights = weights
        if FORM.act is not None:
            up_weights = _load_weights(weight, of_weight, expert, 1, first_output, outputs, start, inputs, FORM)
        tokens = _load_tokens(x, stride_x, source, real, first, start, inputs, FORM)
        acc = add_products(acc, weights, tokens, TILES)
        if FORM.act is not None:
            up_acc = add_products(up_acc, up_weights, tokens, TILES)

    column = output[None, :]
    if bias_ptr is not None:
        bias_ptr += expert.to(tl.int64) * outputs * (2 if FORM.act is not None else 1)
    y = sums(acc, bias_ptr, column, outputs, TILES)
    if FORM.act is not None:
        if bias_ptr is not None:
            bias_ptr += outputs
        y = activate_gated(y, sums(up_acc, bias_ptr, column, outputs, TILES), FORM)
    target_ptr = y_ptr + target.to(tl.int64)[:, None] * outputs + column
    tl.store(target_ptr, y.to(y_ptr.dtype.element_ty), mask=real[:, None] & (column < outputs))


def activation_of(act: str, clamp: tuple[float, float] | None, *, gated: bool) -> tuple[str | None, float, float]:
    """The fields act, alpha and limit of a `Form`; gated: of the first product."""
    if not gated:
        return None, 0.0, 0.0
    return (ACTS.get(act, "gelu_tanh"), 0.0, 0.0) if clamp is None else ("clamped", *clamp)


def multiply(
    x: Tensor,
    projections: Projections,
    experts: Tensor,
    groups: Groups | None,
    tiles: Tiles,
    *,
    gated: bool,
    owned: ExpertRange | None = None,
) -> Tensor:
    """h of x [T, H] if `gated`, z of h [P, I] otherwise; experts [T, k] and their groups, if any.

    tiles: its tokens are the rows of a tile of the groups.
    """
    weight, bias = (projections[0], projections[2]) if gated else (projections[1], projections[3])
    pairs, inputs = experts.numel(), x.shape[1]
    outputs = weight.shape[1] // 2 if gated else weight.shape[1]
    y = torch.empty((pairs, outputs), dtype=x.dtype, device=x.device)
    most = pairs if groups is None else most_tiles(pairs, weight.shape[0], tiles.tokens)
    gpu = hardware(x.device)
    if tiles.copied and (groups is None or not (weight.is_contiguous() and can_copy(weight[0]) and can_copy(x))):
        tiles = tiles._replace(copied=False)
    form = Form(
        tiles,
        inputs % tiles.depth == 0,
        *activation_of(projections.act, projections.clamp, gated=gated),
        experts.shape[1],
        groups is not None,
        gpu.can_overlap,
    )
    stage_bytes = (tiles.tokens + (2 if gated else 1) * tiles.outputs) * tiles.depth * x.element_size()
    stages = gpu.stages(tiles.num_stages, stage_bytes)
    strides = (x.stride(0), weight.stride(0), weight.stride(1))
    operands: list[Any] = [x, weight]
    if tiles.copied:
        rows = weight.view(-1, inputs)
        operands[1] = TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [tiles.outputs, tiles.depth])
        if not gated:
            operands[0] = TensorDescriptor(x, list(x.shape), list(x.stride()), [tiles.tokens, tiles.depth])
    here = first_and_number(owned, weight.shape[0])
    options = {"num_warps": tiles.num_warps, "num_stages": stages, "launch_pdl": gpu.can_overlap}
    launch(_experts_kernel, (most * triton.cdiv(outputs, tiles.outputs),))(
        *operands, bias, y, experts, here, groups, strides, inputs, outputs, most, FORM=form, **options
    )
    return y


def first_and_number(owned: ExpertRange | None, count: int) -> tuple[int, int] | None:
    """As kernels take `owned`: the first of the `count` experts that are here, and their number; None if all are."""
    return None if owned is None else (owned.first, count)


def multiply_many(
    x: Tensor,
    experts: Tensor,
    projections: Projections,
    groups: Groups,
    here: tuple[int, int] | None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """z [P, H] of x [T, H] and experts [T, k], by `hopper_kernel`.

    groups: in tiles of HOPPER_ROWS, with places. out: for z, instead of a new tensor; rows of pairs of experts that are
    not here stay as they are.
    """
    assert groups.places is not None
    gate_up, down, gate_up_bias, down_bias, act, clamp = projections
    top_k, activation = experts.shape[1], activation_of(act, clamp, gated=True)
    spread_x = spread(x, groups.places, experts, here)
    h, _ = _hopper.multiply(spread_x, gate_up, gate_up_bias, groups, top_k, activation, dtype=x.dtype)
    del spread_x  # z is as large
    z: Tensor = _hopper.multiply(h, down, down_bias, groups, top_k, NO_ACTIVATION, dtype=x.dtype, out=out)[0]
    return z


def experts(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    projections: Projections,
    owned: ExpertRange | None,
    onto: Tensor | None,
    *,
    deterministic: bool,
) -> Tensor | PairSum:
    """y of checked arguments."""
    if not x.numel():
        return torch.empty_like(x)
    num_here = projections.down.shape[0]
    hopper = not deterministic and hopper_takes(projections.gate_up, projections.down, hardware(x.device))
    here = first_and_number(owned, num_here)
    rows, groups = arrange(experts, num_here, owned, x.dtype, hopper=hopper)
    if groups is None and not deterministic:
        operands = PairWeight(projections.gate_up), PairWeight(projections.down)
        biases = projections.gate_up_bias, projections.down_bias
        activation = activation_of(projections.act, projections.clamp, gated=True)
        return sum_pairs(x, weights, experts, operands, biases, activation, owned=here, onto=onto)
    if groups is not None and groups.places is not None:
        z = multiply_many(x, experts, projections, groups, here)
        return PairSum(z, weights, onto, experts, here)
    gate_up_tiles, down_tiles = (choose_tiles(rows, x.dtype, gated=gated) for gated in (True, False))
    h = multiply(x, projections, experts, groups, gate_up_tiles, gated=True, owned=owned)
    z = multiply(h, projections, experts, groups, down_tiles, gated=False, owned=owned)
    return PairSum(z, weights, onto, experts, here)
