"""The Triton kernels of `experts`: two grouped products, and the sum over a token's experts.

    h[p] = act(G_e x[t], U_e x[t]),   z[q] = round(D_e h[p]),   y[t] = onto[t] + sum over i of w[t, i] * z[t * k + i]

Pair q = t * k + i of token t and expert e lies at place p of a list that has all pairs of an expert side by side
(`group_kernel.py`), or p = q where there are so few pairs that each is a tile of its own. The first product gathers its
rows of x [T, H] as it loads them, and leaves h [P, I] in the order of the list; the second puts z [P, H] back in the
order of the pairs. Sums are fp32: h is rounded once, z once, y once.

Programs beyond the last tile end at once: a launch has as many as shapes allow, and no host knows how many it needs.

Where the weights are of some of the experts alone (`ExpertRange`), pairs of the others have no tile, and nothing is
added for them.
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
from ..linear.device_functions import add_products, no_sums, sums
from ..linear.plans import Tiles
from .device_functions import activate_gated, find_rows, find_tile, is_owned
from .experts import ExpertRange, Projections
from .group_kernel import Groups, arrange, most_tiles
from .plans import choose_tiles

COLUMNS = 1024  # of a token's output that a program of the last kernel adds up
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


@triton.jit(do_not_specialize=["most"])
def _experts_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, experts_ptr, owned, groups, strides, inputs, outputs, most, FORM: tl.constexpr
):
    """owned: the first of the experts that the weights are of, and their number, or None if these are all.
    groups: of `Groups`, or None. strides: of a row of x, of an expert and of a row of the weights.

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
    output = column_tile * OUTPUTS + tl.arange(0, OUTPUTS)
    depth = tl.arange(0, TILES.depth)[None, :]
    # Rows past the end repeat the last one and are not stored.
    row = tl.minimum(output, outputs - 1).to(tl.int64)[:, None] * stride_weight
    weights_ptr = weight_ptr + expert.to(tl.int64) * stride_expert + row + depth
    up_shift = tl.cast(outputs, tl.int64) * stride_weight
    inputs_ptr = x_ptr + source.to(tl.int64)[:, None] * stride_x + depth
    acc = no_sums(TILES)
    up_acc = acc
    for start in range(0, inputs, TILES.depth):
        if FORM.even:
            x = tl.load(inputs_ptr, mask=real[:, None], other=0.0)
            weights = tl.load(weights_ptr)
        else:
            inside = start + depth < inputs
            x = tl.load(inputs_ptr, mask=real[:, None] & inside, other=0.0)
            weights = tl.load(weights_ptr, mask=inside, other=0.0)
        acc = add_products(acc, weights, x, TILES)
        if FORM.act is not None:
            if FORM.even:
                up_weights = tl.load(weights_ptr + up_shift)
            else:
                up_weights = tl.load(weights_ptr + up_shift, mask=start + depth < inputs, other=0.0)
            up_acc = add_products(up_acc, up_weights, x, TILES)
        weights_ptr += TILES.depth
        inputs_ptr += TILES.depth

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


@triton.jit
def _weighted(z_ptr, weights_ptr, pair, columns, column, mask):
    z = tl.load(z_ptr + pair * columns + column, mask=mask, other=0.0).to(tl.float32)
    return tl.load(weights_ptr + pair) * z


@triton.jit
def _combine_kernel(
    z_ptr,
    weights_ptr,
    experts_ptr,
    owned,
    onto_ptr,
    y_ptr,
    columns,
    stride_onto,
    TOP_K: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_predecessor(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < columns
    total = tl.zeros([TILE], tl.float32)
    if onto_ptr is not None:
        total += tl.load(onto_ptr + token * stride_onto + column, mask=mask, other=0.0).to(tl.float32)
    for i in range(TOP_K):
        pair = token * TOP_K + i
        if owned is not None:
            if is_owned(tl.load(experts_ptr + pair), owned):
                total += _weighted(z_ptr, weights_ptr, pair, columns, column, mask)
        else:
            total += _weighted(z_ptr, weights_ptr, pair, columns, column, mask)
    tl.store(y_ptr + token * columns + column, total.to(y_ptr.dtype.element_ty), mask=mask)


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
    here = first_and_number(owned, weight.shape[0])
    options = {"num_warps": tiles.num_warps, "num_stages": stages, "launch_pdl": gpu.can_overlap}
    launch(_experts_kernel, (most * triton.cdiv(outputs, tiles.outputs),))(
        x, weight, bias, y, experts, here, groups, strides, inputs, outputs, most, FORM=form, **options
    )
    return y


def first_and_number(owned: ExpertRange | None, count: int) -> tuple[int, int] | None:
    """As kernels take `owned`: the first of the `count` experts that are here, and their number; None if all are."""
    return None if owned is None else (owned.first, count)


def combine(
    z: Tensor, weights: Tensor, onto: Tensor | None, experts: Tensor | None = None, owned: tuple[int, int] | None = None
) -> Tensor:
    """y of z [P, H] and weights [T, k]. owned: of `first_and_number`, if z is of some of the experts [T, k] alone."""
    experts = None if owned is None else experts
    (tokens, top_k), columns = weights.shape, z.shape[1]
    y = torch.empty((tokens, columns), dtype=z.dtype, device=z.device)
    tile, overlap = min(COLUMNS, triton.next_power_of_2(columns)), hardware(z.device).can_overlap
    stride_onto, options = 0 if onto is None else onto.stride(0), {"num_warps": 4, "launch_pdl": overlap}
    launch(_combine_kernel, (tokens, triton.cdiv(columns, tile)))(
        z, weights, experts, owned, onto, y, columns, stride_onto, TOP_K=top_k, TILE=tile, OVERLAP=overlap, **options
    )
    return y


def experts(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    projections: Projections,
    owned: ExpertRange | None,
    onto: Tensor | None,
) -> Tensor:
    """y of checked arguments."""
    if not x.numel():
        return torch.empty_like(x)
    num_here = projections.down.shape[0]
    rows, groups = arrange(experts, num_here, owned, x.dtype)
    gate_up_tiles, down_tiles = (choose_tiles(rows, x.dtype, gated=gated) for gated in (True, False))
    h = multiply(x, projections, experts, groups, gate_up_tiles, gated=True, owned=owned)
    z = multiply(h, projections, experts, groups, down_tiles, gated=False, owned=owned)
    return combine(z, weights, onto, experts, first_and_number(owned, num_here))
