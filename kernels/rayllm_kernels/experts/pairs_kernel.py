"""The Triton kernel of the experts' products for few tokens: each pair of a token and an expert is a vector product.

    h[p] = act(G_e x[t], U_e x[t]),   y[t] = onto[t] + sum over i of w[t, i] * round(D_e h[t * k + i]),   p = t * k + i

x [T, H] of the model's dtype, weights of that dtype or in e4m3 with scales a row or a block -> h [P, I], y [T, H].
Biases as in `experts.py`. Everything is fp32; h, each expert's output and y are rounded. What meets weights in e4m3 is
not rounded to e4m3, which would take tensor cores to be of use.

A program owns a few outputs and all of K: of the first product for one pair, of the second for all of a token's, whose
sum it is. So nothing is looped over, and the second product's weights are asked for before the first one ends.
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
from .device_functions import activate_gated, is_owned
from .plans import choose_pairs

NO_ACTIVATION = (None, 0.0, 0.0)


class PairWeight(NamedTuple):
    """One projection of all experts. values: [E, N, K], contiguous rows. scales: [E, ceil(N / rows), groups] fp32, None
    without any. group: inputs that share a scale, None for all. rows: outputs that do.
    """

    values: Tensor
    scales: Tensor | None = None
    group: int | None = None
    rows: int = 1


class Form(NamedTuple):
    """The compile-time argument of the kernel. act, alpha, limit, top_k: as in `products_kernel.Form`."""

    inputs: int
    padded: int  # to a power of two
    rows: int  # outputs of a program
    places: int  # experts of a program, to a power of two
    group: int  # inputs that share a scale; `padded` for all
    weight_rows: int  # outputs that share one
    act: str | None
    alpha: float
    limit: float
    top_k: int
    overlap: bool  # launches overlap (`dependent_launch.py`)


@triton.jit
def _multiply(weights, x, scales_ptr, expert, real, row, sizes, FORM: tl.constexpr):
    """[places, rows]: the scaled sums of weights [places, rows, padded] and x [places, 1, padded]; sizes: as
    scale_sizes below.
    """
    products = weights.to(tl.float32) * x
    if scales_ptr is None:
        return tl.sum(products, 2)
    else:
        COUNT: tl.constexpr = FORM.padded // FORM.group
        scale_rows, num_groups = sizes
        products = tl.sum(tl.reshape(products, [FORM.places, FORM.rows, COUNT, FORM.group]), 3)
        group = tl.arange(0, COUNT)[None, None, :]
        scale_row = (expert * scale_rows)[:, None] + (row // FORM.weight_rows)[None, :]
        pointers = scales_ptr + (scale_row * num_groups)[:, :, None] + group
        inside = real[:, None, None] & (group * FORM.group < FORM.inputs)
        return tl.sum(products * tl.load(pointers, mask=inside, other=0.0), 2)


@triton.jit
def _add_bias(y, bias_ptr, expert, real, outputs, row, FORM: tl.constexpr):
    if bias_ptr is None:
        return y
    else:
        own_rows = outputs * (2 if FORM.act is not None else 1)
        pointers = bias_ptr + (expert * own_rows)[:, None] + row[None, :]
        return y + tl.load(pointers, mask=real[:, None], other=0.0).to(tl.float32)


@triton.jit
def _pairs_kernel(
    x_ptr, weight, bias_ptr, y_ptr, experts_ptr, owned, combined, strides, outputs, scale_sizes, FORM: tl.constexpr
):
    """A program of the first product has a pair, one of the second a token.

    weight: (values, scales or None). owned: as for `find_tile`. combined: of the second product (weights [T, k], onto
    or None, stride of onto). strides: of a row of x, of an expert and of a row of the weights.
    scale_sizes: rows of an expert's scales, groups of a row.
    """
    values_ptr, scales_ptr = weight
    stride_x, stride_expert, stride_weight = strides
    ACT: tl.constexpr = FORM.act
    if ACT is not None:  # the kernel before says which experts
        wait_for_predecessor(FORM.overlap)
    item = tl.program_id(1)
    place = tl.arange(0, FORM.places)
    COUNT: tl.constexpr = 1 if ACT is not None else FORM.top_k
    pair = item * COUNT + place
    real = place < COUNT
    expert = tl.load(experts_ptr + pair, mask=real, other=0)
    if owned is not None:
        real &= is_owned(expert, owned)
        expert = tl.where(real, expert - owned[0], 0)
    wide_expert = expert.to(tl.int64)
    output = tl.program_id(0) * FORM.rows + tl.arange(0, FORM.rows)
    row = tl.minimum(output, outputs - 1)  # rows past the end repeat the last one and are not stored
    depth = tl.arange(0, FORM.padded)[None, None, :]
    inside = real[:, None, None] & (depth < FORM.inputs)
    pointers = values_ptr + (wide_expert * stride_expert)[:, None, None]
    pointers += (row.to(tl.int64) * stride_weight)[None, :, None] + depth
    values = tl.load(pointers, mask=inside, other=0.0)
    if ACT is not None:
        up_values = tl.load(pointers + tl.cast(outputs, tl.int64) * stride_weight, mask=inside, other=0.0)
        x_row = x_ptr + (pair // FORM.top_k).to(tl.int64)[:, None, None] * stride_x
    else:
        wait_for_predecessor(FORM.overlap)
        x_row = x_ptr + pair.to(tl.int64)[:, None, None] * stride_x
    x = tl.load(x_row + depth, mask=inside, other=0.0).to(tl.float32)

    result = _multiply(values, x, scales_ptr, wide_expert, real, row, scale_sizes, FORM)
    result = _add_bias(result, bias_ptr, wide_expert, real, outputs, row, FORM)
    if ACT is not None:
        up = _multiply(up_values, x, scales_ptr, wide_expert, real, outputs + row, scale_sizes, FORM)
        up = _add_bias(up, bias_ptr, wide_expert, real, outputs, outputs + row, FORM)
        result = activate_gated(result, up, FORM)
        target = y_ptr + pair.to(tl.int64)[:, None] * outputs + output[None, :]
        tl.store(target, result.to(y_ptr.dtype.element_ty), mask=real[:, None] & (output < outputs)[None, :])
    else:
        weights_ptr, onto_ptr, stride_onto = combined
        weights = tl.load(weights_ptr + pair, mask=real, other=0.0)
        result = result.to(y_ptr.dtype.element_ty).to(tl.float32)
        total = tl.sum(weights[:, None] * result, 0)
        if onto_ptr is not None:
            onto = tl.load(onto_ptr + item.to(tl.int64) * stride_onto + output, mask=output < outputs, other=0.0)
            total += onto.to(tl.float32)
        tl.store(y_ptr + item.to(tl.int64) * outputs + output, total.to(y_ptr.dtype.element_ty), mask=output < outputs)


def multiply_pairs(
    x: Tensor,
    weight: PairWeight,
    bias: Tensor | None,
    experts: Tensor,
    activation: tuple[str | None, float, float],
    *,
    owned: tuple[int, int] | None = None,
    combined: tuple[Tensor, Tensor | None] | None = None,
    choice: tuple[int, int] | None = None,
) -> Tensor:
    """h [P, I] of x [T, H]; or y [T, H] of h, if there are `combined`, the experts' weights [T, k] and onto.

    experts: [T, k], those of the second product from before the kernel that h is of. activation: of `activation_of`.
    owned: of `first_and_number`. choice: outputs and warps of a program; None for those of the plan.
    """
    (tokens, top_k), (_, rows, inputs) = experts.shape, weight.values.shape
    gated = combined is None
    outputs = rows // 2 if gated else rows
    items, places = (tokens * top_k, 1) if gated else (tokens, triton.next_power_of_2(top_k))
    y = torch.empty((items, outputs), dtype=x.dtype, device=x.device)
    padded = padded_inputs(inputs, weight.group)
    program_rows, num_warps = choice or choose_pairs(places * padded * weight.values.element_size(), gated=gated)
    overlap = hardware(x.device).can_overlap
    form = Form(
        *(inputs, padded, program_rows, places, weight.group or padded, weight.rows),
        *activation,
        top_k=top_k,
        overlap=overlap,
    )
    of_scales = (0, 0) if weight.scales is None else tuple(weight.scales.shape[1:])
    onto = None if combined is None else combined[1]
    launch(_pairs_kernel, (triton.cdiv(outputs, program_rows), items))(
        x,
        (weight.values, weight.scales),
        bias,
        y,
        experts,
        owned,
        None if combined is None else (*combined, 0 if onto is None else onto.stride(0)),
        (x.stride(0), weight.values.stride(0), weight.values.stride(1)),
        outputs,
        of_scales,
        FORM=form,
        num_warps=num_warps,
        launch_pdl=overlap,
    )
    return y


def sum_pairs(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    operands: tuple[PairWeight, PairWeight],
    biases: tuple[Tensor | None, Tensor | None],
    activation: tuple[str | None, float, float],
    *,
    owned: tuple[int, int] | None,
    onto: Tensor | None,
) -> Tensor:
    """y of x [T, H], weights and experts [T, k]. operands, biases: of gate and up, and of down."""
    first, last = operands
    first_bias, last_bias = biases
    h = multiply_pairs(x, first, first_bias, experts, activation, owned=owned)
    return multiply_pairs(h, last, last_bias, experts, NO_ACTIVATION, owned=owned, combined=(weights, onto))


def padded_inputs(inputs: int, group: int | None) -> int:
    """To a power of two and at least one group."""
    padded: int = triton.next_power_of_2(max(inputs, group or 1))
    return padded
