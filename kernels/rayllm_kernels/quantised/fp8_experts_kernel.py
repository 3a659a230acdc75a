"""The Triton kernel of `experts_quantised` for weights and tokens in e4m3: the two grouped products.

    h[p] = act(G_e x[t], U_e x[t]),   z[q] = round(D_e h[p])

Tiles, the list of pairs and the sum over a token's experts are those of `experts/products_kernel.py`. x and h are
rounded to e4m3, after they have been to the model's dtype, h with a scale for each `ExpertWeight.token_group` of
neighbours, and so x where the weights have scales of such groups. That is a tile's depth: the sum of a group is scaled
and added in fp32, in ascending order of K. Where x and the weights have a scale a row, tensor cores add up all of K.

x is rounded once, by a launch before, and h by the program that has made it, which has whole groups of outputs. Few
pairs, each of which would be a tile of its own, are vectors that are not rounded (`experts/pairs_kernel.py`).
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
from ..device import Hardware, hardware
from ..dispatch import TritonModule
from ..experts.device_functions import activate_gated, find_rows, find_tile
from ..experts.experts import ExpertRange
from ..experts.group_kernel import Groups, arrange, most_tiles
from ..experts.pair_sum import PairSum
from ..experts.pairs_kernel import NO_ACTIVATION
from ..experts.plans import HOPPER_OUTPUTS, hopper_takes
from ..experts.products_kernel import activation_of, first_and_number
from ..linear.device_functions import no_sums, sums
from ..linear.invariant_kernel import can_copy
from ..linear.plans import Tiles
from . import plans
from .experts import ExpertWeight, QuantisedProjections
from .experts_kernel import sum_few
from .fp8_operands import Fp8Rows
from .fp8_rows_kernel import codes_of, scales_of, to_fp8, to_fp8_places

_hopper = TritonModule("rayllm_kernels.experts.hopper_kernel")


class Form(NamedTuple):
    """The compile-time argument of the kernel. The fields up to `grouped` are as in `experts/products_kernel.py`."""

    tiles: Tiles
    even: bool
    act: str | None
    alpha: float
    limit: float
    top_k: int
    grouped: bool
    group: int  # inputs that share a scale of the weights; 0 for all
    rows: int  # outputs that do
    uniform: bool  # all outputs of a tile do
    chained: bool  # x and the weights have a scale a row, with which the sum over all of K is multiplied
    own_group: int  # outputs that share a scale of y; 0 if y is in the model's dtype
    dtype: str  # of the model
    native: bool  # the hardware rounds to e4m3
    overlap: bool  # launches overlap (`dependent_launch.py`)


@triton.jit
def _round_to_dtype(y, FORM: tl.constexpr):
    """fp32 numbers as the model's dtype has them."""
    if FORM.dtype == "bfloat16":
        return y.to(tl.bfloat16).to(tl.float32)
    elif FORM.dtype == "float16":
        return y.to(tl.float16).to(tl.float32)
    else:
        return y


@triton.jit
def _load_tokens(x_ptr, stride, row, real, start, inputs, FORM: tl.constexpr):
    """x [tokens, depth] in e4m3 of the group that begins at `start`."""
    at = start + tl.arange(0, FORM.tiles.depth)
    inside = real[:, None]
    if not FORM.even:
        inside = inside & (at < inputs)[None, :]
    return tl.load(x_ptr + row.to(tl.int64)[:, None] * stride + at[None, :], mask=inside, other=0.0)


@triton.jit
def _load_weights(codes, expert_row, output, first_output, outputs, start, inputs, FORM: tl.constexpr):
    """[outputs, depth] of an expert whose rows begin at `expert_row`; codes: a pointer, or what copies tiles."""
    TILES: tl.constexpr = FORM.tiles
    if TILES.copied:  # what is past the expert's last row is another's, and is not stored
        return codes.load([expert_row + first_output, start])
    else:
        # Rows past the end repeat the last one and are not stored.
        row = (expert_row + tl.minimum(output, outputs - 1)).to(tl.int64)
        at = start + tl.arange(0, TILES.depth)
        pointers = codes + row[:, None] * inputs + at[None, :]
        if FORM.even:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=(at < inputs)[None, :], other=0.0)


@triton.jit
def _find_scales(scales_ptr, first_row, first_output, outputs, num_groups, FORM: tl.constexpr):
    """The first scales of a tile's rows of the weights, or of them all; first_row: of the expert's gate, up or down."""
    TILES: tl.constexpr = FORM.tiles
    if FORM.uniform:
        return scales_ptr + (first_row + first_output) // FORM.rows * num_groups
    else:
        output = tl.minimum(first_output + tl.arange(0, TILES.outputs), outputs - 1)
        return scales_ptr + (first_row + output) // FORM.rows * num_groups


@triton.jit
def _add_products(acc, weights, x, TILES: tl.constexpr):
    """acc plus the products of weights [outputs, depth] and x [tokens, depth].

    As tensor cores add, which on Hopper have a few bits less than fp32. With `max_num_imprecise_acc` the compiler would
    add what they give to a sum of its own, also where acc is zero.
    """
    if TILES.weights_first:
        return tl.dot(weights, tl.trans(x), acc)
    else:
        return tl.dot(x, tl.trans(weights), acc)


@triton.jit
def _add_scaled(acc, weights, x, x_scales_ptr, real, weight_scales_ptr, start, FORM: tl.constexpr):
    """acc plus the scaled products of the group that begins at `start`.

    x_scales_ptr: [tokens], the first of each row. weight_scales_ptr: of `_find_scales`.
    """
    TILES: tl.constexpr = FORM.tiles
    if FORM.chained:
        return _add_products(acc, weights, x, TILES)
    else:
        x_scales = tl.load(x_scales_ptr + start // TILES.depth, mask=real, other=0.0)
        products = _add_products(no_sums(TILES), weights, x, TILES)
        if FORM.group == 0:
            scales = x_scales[None, :] if TILES.weights_first else x_scales[:, None]
        else:
            of_weights = tl.load(weight_scales_ptr + start // FORM.group)
            if FORM.uniform:
                scales = (x_scales * of_weights)[None, :] if TILES.weights_first else (x_scales * of_weights)[:, None]
            elif TILES.weights_first:
                scales = of_weights[:, None] * x_scales[None, :]
            else:
                scales = x_scales[:, None] * of_weights[None, :]
        return acc + products * scales


@triton.jit
def _finish(acc, x_scales_ptr, real, scales_ptr, bias_ptr, first_row, column, outputs, FORM: tl.constexpr):
    """fp32 [tokens, outputs] of a tile of sums: with the scales of rows, if these are not in it, and with the bias."""
    TILES: tl.constexpr = FORM.tiles
    y = sums(acc, None, column, outputs, TILES)
    if FORM.chained:
        y *= tl.load(x_scales_ptr, mask=real, other=0.0)[:, None]
    if FORM.group == 0:
        y *= tl.load(scales_ptr + (first_row + column) // FORM.rows, mask=column < outputs, other=0.0)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + first_row + column, mask=column < outputs, other=0.0).to(tl.float32)
    return y


@triton.jit
def _store_rounded(y, codes_ptr, scales_ptr, target, real, column_tile, outputs, FORM: tl.constexpr):
    """A tile of h [tokens, outputs] in e4m3, with the scales of its groups."""
    TOKENS: tl.constexpr = FORM.tiles.tokens
    OUTPUTS: tl.constexpr = FORM.tiles.outputs
    GROUP: tl.constexpr = FORM.own_group
    COUNT: tl.constexpr = OUTPUTS // GROUP
    column = (column_tile * OUTPUTS + tl.arange(0, OUTPUTS))[None, :]
    y = tl.where(column < outputs, _round_to_dtype(y, FORM), 0.0)
    parts = tl.reshape(y, [TOKENS, COUNT, GROUP])
    scales = scales_of(tl.max(tl.abs(parts), 2, keep_dims=True), None)
    codes = tl.reshape(codes_of(parts, scales, FORM.native), [TOKENS, OUTPUTS])
    row = target.to(tl.int64)[:, None]
    tl.store(codes_ptr + row * outputs + column, codes, mask=real[:, None] & (column < outputs))
    part = (column_tile * COUNT + tl.arange(0, COUNT))[None, :]
    scales_ptr += row * tl.cdiv(outputs, GROUP) + part
    tl.store(scales_ptr, tl.reshape(scales, [TOKENS, COUNT]), mask=real[:, None] & (part * GROUP < outputs))


@triton.jit(do_not_specialize=["most"])
def _fp8_experts_kernel(x, codes, scales_ptr, bias_ptr, y, groups, x_strides, sizes, most, FORM: tl.constexpr):
    """x: (codes, scales). codes: of the weights, as one matrix of all experts' rows. y: (codes, scales), or (numbers,
    None). groups, most: as for `find_tile`.

    x_strides: of a row of x and of one of its scales. sizes: (K, outputs, an expert's rows of scales, groups of a row).
    """
    x_ptr, x_scales_ptr = x
    y_ptr, y_scales_ptr = y
    inputs, outputs, scale_rows, num_groups = sizes
    TILES: tl.constexpr = FORM.tiles
    OUTPUTS: tl.constexpr = TILES.outputs
    wait_for_predecessor(FORM.overlap)
    column_tiles = tl.cdiv(outputs, OUTPUTS)
    tile, column_tile = tl.program_id(0) // column_tiles, tl.program_id(0) % column_tiles
    expert, first, end = find_tile(groups, None, None, tile, most, FORM)
    if first >= end:
        return
    real, source, target = find_rows(groups, first, end, FORM)
    expert_row = expert * outputs * (2 if FORM.act is not None else 1)
    first_output = column_tile * OUTPUTS
    output = first_output + tl.arange(0, OUTPUTS)
    scales_ptr += expert.to(tl.int64) * scale_rows * num_groups
    own_scales_ptr = _find_scales(scales_ptr, 0, first_output, outputs, num_groups, FORM)
    up_scales_ptr = _find_scales(scales_ptr, outputs, first_output, outputs, num_groups, FORM)
    x_stride, x_scale_stride = x_strides
    x_scales_ptr += source.to(tl.int64) * x_scale_stride
    acc = no_sums(TILES)
    up_acc = acc
    for start in range(0, inputs, TILES.depth):
        # The weights first, which need not wait for the list of pairs.
        weights = _load_weights(codes, expert_row, output, first_output, outputs, start, inputs, FORM)
        up_weights = weights
        if FORM.act is not None:
            row = expert_row + outputs
            up_weights = _load_weights(codes, row, output, first_output, outputs, start, inputs, FORM)
        tokens = _load_tokens(x_ptr, x_stride, source, real, start, inputs, FORM)
        acc = _add_scaled(acc, weights, tokens, x_scales_ptr, real, own_scales_ptr, start, FORM)
        if FORM.act is not None:
            up_acc = _add_scaled(up_acc, up_weights, tokens, x_scales_ptr, real, up_scales_ptr, start, FORM)

    column = output[None, :]
    if bias_ptr is not None:
        bias_ptr += expert_row
    result = _finish(acc, x_scales_ptr, real, scales_ptr, bias_ptr, 0, column, outputs, FORM)
    if FORM.act is not None:
        up = _finish(up_acc, x_scales_ptr, real, scales_ptr, bias_ptr, outputs, column, outputs, FORM)
        result = activate_gated(result, up, FORM)
    if FORM.own_group > 0:
        _store_rounded(result, y_ptr, y_scales_ptr, target, real, column_tile, outputs, FORM)
    else:
        target_ptr = y_ptr + target.to(tl.int64)[:, None] * outputs + column
        tl.store(target_ptr, result.to(y_ptr.dtype.element_ty), mask=real[:, None] & (column < outputs))


def _share_scales(weight: ExpertWeight, outputs: int, *, gated: bool) -> bool:
    """Whether all of so many outputs of a tile have one scale of a group; gated: of gate, and of up."""
    own = weight.codes.shape[1] // 2
    return weight.rows % outputs == 0 and (not gated or own % outputs == 0)


def most_rows(projections: QuantisedProjections, gpu: Hardware) -> int:
    """Of a tile, for both products."""
    gate_up, down, *_ = projections
    outputs = plans.fp8_expert_outputs(down.token_group)
    shared = [_share_scales(gate_up, outputs, gated=True), _share_scales(down, plans.FP8_DOWN_OUTPUTS, gated=False)]
    in_loop = [each for each, weight in zip(shared, (gate_up, down), strict=True) if weight.group is not None]
    return plans.most_fp8_expert_rows(gpu, shared_scales=all(in_loop))


def multiply(
    x: Fp8Rows,
    projections: QuantisedProjections,
    experts: Tensor,
    groups: Groups,
    tiles: Tiles,
    dtype: torch.dtype,
    *,
    gated: bool,
) -> Tensor | Fp8Rows:
    """h, in fp8, of x [T, H] if `gated`, z, in dtype, of h [P, I] otherwise; experts [T, k] and their groups.

    tiles: its tokens are the rows of a tile of the groups, its outputs a multiple of the group in which h is rounded.
    x: with a scale a row only if the weights have those too.
    """
    weight, bias = (projections[0], projections[2]) if gated else (projections[1], projections[3])
    (count, rows, inputs), pairs = weight.codes.shape, experts.numel()
    outputs = rows // 2 if gated else rows
    values, x_scales, _ = x
    device, gpu, codes = values.device, hardware(values.device), weight.codes.view(torch.float8_e4m3fn).flatten(0, 1)
    own_group = projections.down.token_group if gated else None
    y_scales = None
    if own_group is None:
        y = torch.empty((pairs, outputs), dtype=dtype, device=device)
    else:
        y = torch.empty((pairs, outputs), dtype=torch.uint8, device=device)
        y_scales = torch.empty((pairs, triton.cdiv(outputs, own_group)), dtype=torch.float32, device=device)
    if tiles.copied and not can_copy(codes):
        tiles = tiles._replace(copied=False)
    form = Form(
        tiles,
        inputs % tiles.depth == 0,
        *activation_of(projections.act, projections.clamp, gated=gated),
        experts.shape[1],
        True,
        weight.group or 0,
        weight.rows,
        _share_scales(weight, tiles.outputs, gated=gated),
        x.group is None,
        own_group or 0,
        str(dtype).removeprefix("torch."),
        gpu.rounds_to_e4m3,
        gpu.can_overlap,
    )
    stage_bytes = (tiles.tokens + (2 if gated else 1) * tiles.outputs) * tiles.depth
    options = {
        "num_warps": tiles.num_warps,
        "num_stages": gpu.stages(tiles.num_stages, stage_bytes),
        "launch_pdl": gpu.can_overlap,
    }
    operand: Any = codes
    if tiles.copied:
        operand = TensorDescriptor(codes, list(codes.shape), list(codes.stride()), [tiles.outputs, tiles.depth])
    most = most_tiles(pairs, count, tiles.tokens)
    launch(_fp8_experts_kernel, (most * triton.cdiv(outputs, tiles.outputs),))(
        (values, x_scales),
        operand,
        weight.scales,
        bias,
        (y, y_scales),
        groups,
        (values.stride(0), x_scales.stride(0)),
        (inputs, outputs, *weight.scales.shape[1:]),
        most,
        FORM=form,
        **options,
    )
    return y if y_scales is None else Fp8Rows(y.view(torch.float8_e4m3fn), y_scales, own_group)


def _hopper_takes(projections: QuantisedProjections, dtype: torch.dtype, gpu: Hardware) -> bool:
    """Whether `experts/hopper_kernel.py` can compute the products of many pairs: rows have a scale each."""
    gate_up, down, *_ = projections
    scaled = gate_up.group is None and down.group is None and gate_up.rows == down.rows == 1
    first, last = (each.codes.view(torch.float8_e4m3fn) for each in (gate_up, down))
    return scaled and dtype != torch.float32 and down.token_group == HOPPER_OUTPUTS and hopper_takes(first, last, gpu)


def _multiply_many(
    x: Tensor, experts: Tensor, projections: QuantisedProjections, groups: Groups, here: tuple[int, int] | None
) -> Tensor:
    """z of x [T, H] and experts [T, k], whose groups have places."""
    assert groups.places is not None
    gate_up, down, gate_up_bias, down_bias, act, clamp = projections
    first, last = (each.codes.view(torch.float8_e4m3fn) for each in (gate_up, down))
    top_k, activation = experts.shape[1], activation_of(act, clamp, gated=True)
    rows, of_x = to_fp8_places(x, groups.places, experts, here)
    scales = of_x, gate_up.scales
    h, of_h = _hopper.multiply(
        rows, first, gate_up_bias, groups, top_k, activation, scales=scales, dtype=x.dtype, rounded=True
    )
    scales = of_h, down.scales
    z: Tensor = _hopper.multiply(h, last, down_bias, groups, top_k, NO_ACTIVATION, scales=scales, dtype=x.dtype)[0]
    return z


def experts(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    projections: QuantisedProjections,
    owned: ExpertRange | None,
    onto: Tensor | None,
    *,
    deterministic: bool,
) -> Tensor | PairSum:
    """y of checked arguments."""
    if not x.numel():
        return torch.empty_like(x)
    num_here, gate_up, down = projections.down.codes.shape[0], *projections[:2]
    gpu, fixed = hardware(x.device), plans.FIXED_FP8_EXPERT_ROWS if deterministic else None
    most = most_rows(projections, gpu)
    hopper = not deterministic and _hopper_takes(projections, x.dtype, gpu)
    rows, groups = arrange(experts, num_here, owned, x.dtype, most_rows=most, fixed_rows=fixed, hopper=hopper)
    here = first_and_number(owned, num_here)
    if groups is None:
        return sum_few(x, weights, experts, projections, here, onto)
    if groups.places is not None:
        return PairSum(_multiply_many(x, experts, projections, groups, here), weights, onto, experts, here)
    first, last = (
        plans.choose_fp8_expert_tiles(
            rows, weight.token_group, down.token_group, gpu, gated=gated, scaled=weight.group is not None
        )
        for weight, gated in ((gate_up, True), (down, False))
    )
    h = multiply(to_fp8(x, gate_up.rounding, None), projections, experts, groups, first, x.dtype, gated=True)
    assert isinstance(h, Fp8Rows)
    z = multiply(h, projections, experts, groups, last, x.dtype, gated=False)
    assert isinstance(z, Tensor)
    return PairSum(z, weights, onto, experts, here)
