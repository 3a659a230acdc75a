"""The Triton kernel of the experts' products for few tokens: each pair of a token and an expert is a vector product.

    h[p] = act(G_e x[t], U_e x[t]),   y[t] = onto[t] + sum over i of w[t, i] * round(D_e h[t * k + i]),   p = t * k + i

x [T, H] of the model's dtype, weights of that dtype, in e4m3 with scales a row or a block, or of 4 bits with scales a
group -> h [P, I], y [T, H]. Biases as in `experts.py`. Everything is fp32; h, each expert's output and y are rounded.
What meets weights in e4m3 is not rounded to e4m3, which would take tensor cores to be of use.

A program owns a few outputs and all of K: of the first product for one pair, of the second for all of a token's, whose
sum it is. So nothing is looped over, and the second product's weights are asked for before the first one ends.

A row of 4 bits is shorter than the token, which more outputs should share: a program goes along K in chunks, of which
it asks for one before it multiplies the one before. The layout is that of `quantised/int4.py`; numbers become floats
as in `quantised/int4_vector_kernel.py` (int4) and `decode_e2m1` (MXFP4), too small by a power of two, which the token
is multiplied by beforehand. A thread has 16 bytes of a row at a time, whose inputs of either half share a scale.
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
from ..e4m3 import widen
from .device_functions import activate_gated, is_owned
from .plans import CHUNK, choose_code_pairs, choose_pairs

NO_ACTIVATION = (None, 0.0, 0.0)
VECTOR = tl.constexpr(4)  # words of 4-bit weights that a thread loads at once


class PairWeight(NamedTuple):
    """One projection of all experts.

    values: [E, N, K], contiguous rows; uint8 are the bytes of e4m3. scales: [E, ceil(N / rows), groups] fp32, None
    without any. group: inputs that share a scale, None for all. rows: outputs that do.

    kind: of weights of 4 bits, whose values are int32 [E, N, half / 4], codes of `ExpertWeight` as words; else None.
    scales, zeros: as there. inputs: K, None if it is the values' last dimension.
    """

    values: Tensor
    scales: Tensor | None = None
    group: int | None = None
    rows: int = 1
    kind: str | None = None
    zeros: Tensor | None = None
    inputs: int | None = None


class Form(NamedTuple):
    """The compile-time argument of the kernel. act, alpha, limit, top_k: as in `products_kernel.Form`."""

    inputs: int
    padded: int  # to a power of two; of 4 bits: vectors of a chunk
    rows: int  # outputs of a program
    places: int  # experts of a program, to a power of two
    group: int  # inputs that share a scale; `padded` for all
    weight_rows: int  # outputs that share one
    act: str | None
    alpha: float
    limit: float
    top_k: int
    overlap: bool  # launches overlap (`dependent_launch.py`)
    kind: str | None = None  # of weights of 4 bits
    words: int = 0  # of a row of these


@triton.jit
def _load_scales(scales_ptr, expert, real, row, sizes, FORM: tl.constexpr):
    """[places, rows, groups] of a row, or 1 without scales; sizes: as scale_sizes below."""
    if scales_ptr is None:
        return 1.0
    else:
        scale_rows, num_groups = sizes
        group = tl.arange(0, FORM.padded // FORM.group)[None, None, :]
        scale_row = (expert * scale_rows)[:, None] + (row // FORM.weight_rows)[None, :]
        pointers = scales_ptr + (scale_row * num_groups)[:, :, None] + group
        inside = real[:, None, None] & (group * FORM.group < FORM.inputs)
        return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def _multiply(weights, x, scales, SCALED: tl.constexpr, FORM: tl.constexpr):
    """[places, rows]: the scaled sums of weights [places, rows, padded] and x [places, 1, padded]."""
    products = widen(weights) * x
    if SCALED:
        COUNT: tl.constexpr = FORM.padded // FORM.group
        products = tl.sum(tl.reshape(products, [FORM.places, FORM.rows, COUNT, FORM.group]), 3) * scales
    return tl.sum(products, 2)


@triton.jit
def _find_experts(item, place, experts_ptr, owned, FORM: tl.constexpr):
    """(pairs at places of a program, their experts, counted from the first that is here, whether these are here)."""
    COUNT: tl.constexpr = 1 if FORM.act is not None else FORM.top_k
    pair = item * COUNT + place
    real = place < COUNT
    expert = tl.load(experts_ptr + pair, mask=real, other=0)
    if owned is not None:
        real &= is_owned(expert, owned)
        expert = tl.where(real, expert - owned[0], 0)
    return pair, expert.to(tl.int64), real


# As in `quantised/int4_vector_kernel.py`, tensors are loaded as vectors or by rows, and get their shapes afterwards.


@triton.jit
def _quarters(x):
    """x [..., 4] as four tensors."""
    even, odd = tl.split(tl.reshape(x, x.shape[:-1] + [2, 2]))  # noqa: RUF005 - Triton has no stars
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _load_words(values_ptr, row, real, chunk, FORM: tl.constexpr):
    """Four of [rows, places, vectors]: words of a chunk's vectors, zeros past the end. row, real: [rows * places]."""
    WORDS: tl.constexpr = FORM.padded * VECTOR
    word = chunk * WORDS + tl.arange(0, WORDS)
    inside = real[:, None] & (word < FORM.words)[None, :]
    words = tl.load(values_ptr + row[:, None] * FORM.words + word[None, :], mask=inside, other=0)
    return _quarters(tl.reshape(words, [FORM.rows, FORM.places, FORM.padded, VECTOR]))


@triton.jit
def _scaled(x, BYTE: tl.constexpr, HALF: tl.constexpr, FORM: tl.constexpr):
    """x [places, vectors, 2], of a byte of two words, times what makes up for numbers that are too small, as two."""
    SHIFT: tl.constexpr = 64 if FORM.kind == "mxfp4" else 80 - 8 * min(BYTE, 2) - 4 * HALF
    return tl.split(x * 2.0**SHIFT)


@triton.jit
def _load_eights(x_row, real, chunk, PART: tl.constexpr, HALF: tl.constexpr, FORM: tl.constexpr):
    """Of each vector's first or second eight inputs of a half, those of two words: (for each byte both of `_scaled`,
    2^80 times the sum of all). Each of these [places, vectors]. x_row, real: [places].
    """
    place = tl.arange(0, FORM.padded * 8)
    vector = chunk * FORM.padded + place // 8
    at = HALF * 4 * FORM.words + vector * 16 + PART * 8 + place % 8
    inside = (vector < FORM.words // VECTOR) & (at < FORM.inputs)
    x = tl.load(x_row[:, None] + at[None, :], mask=real[:, None] & inside[None, :], other=0.0).to(tl.float32)
    total = tl.sum(tl.reshape(x, [FORM.places, FORM.padded, 8]), 2) * 2.0**80
    first, second, third, fourth = _quarters(tl.reshape(x, [FORM.places, FORM.padded, 2, 4]))
    scaled = (
        _scaled(first, 0, HALF, FORM),
        _scaled(second, 1, HALF, FORM),
        _scaled(third, 2, HALF, FORM),
        _scaled(fourth, 3, HALF, FORM),
    )
    return scaled, total


@triton.jit
def _numbers(words, BYTE: tl.constexpr, HALF: tl.constexpr, FORM: tl.constexpr):
    """The numbers of each word's byte BYTE, 0 or 1, and of the second one after it as floats that are too small: of
    MXFP4 by 2^126, of int4 by 2^149 over that of their bits.
    """
    if FORM.kind == "mxfp4":  # both in one word, as bf16
        PLACE: tl.constexpr = 8 * BYTE + 4 * HALF
        magnitudes = words << (6 - PLACE) if PLACE < 6 else words >> (PLACE - 6)
        bits = (magnitudes & 0x01C001C0) | ((words << (12 - PLACE)) & -0x7FFF8000)
        low, high = bits << 16, bits & -0x10000
    else:  # the last byte's bits would be an exponent, and more, so they move down
        low = words & (15 << (8 * BYTE + 4 * HALF))
        high = (words if BYTE == 0 else words >> 8) & (15 << (16 + 4 * HALF))
    return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)


@triton.jit
def _sums_of_half(words, parts, total, of_groups, first_group, chunk, groups, HALF: tl.constexpr, FORM: tl.constexpr):
    """[rows, places, vectors]: scaled sums of a half's numbers. words: of `_load_words`. parts: what `_load_eights` has
    of both eights; total: of all. of_groups: (scales, zero points or None). first_group: [rows * places * vectors],
    where rows have their scales, negative of those that are not there. groups: of a row.
    """
    scales_ptr, zeros_ptr = of_groups
    SHAPE: tl.constexpr = [FORM.rows, FORM.places, FORM.padded]
    UNSHIFT: tl.constexpr = 2.0**62 if FORM.kind == "mxfp4" else 2.0**69
    vector = chunk * FORM.padded + tl.arange(0, FORM.rows * FORM.places * FORM.padded) % FORM.padded
    group = vector * 0
    if FORM.group > 0:
        group = (HALF * 4 * FORM.words + vector * 16) // FORM.group
    # The second half may have a group that there is not, of zeros.
    inside = (first_group >= 0) & (vector < FORM.words // VECTOR) & (group < groups)
    scales = tl.reshape(tl.load(scales_ptr + first_group + group, mask=inside, other=0), SHAPE)
    sums = tl.full(SHAPE, 0.0, tl.float32)
    if FORM.kind == "mxfp4":
        exponents = scales.to(tl.int32)
        # The least exponent is that of a subnormal number of fp32.
        scales = tl.where(exponents == 0, 0x00400000, exponents << 23).to(tl.float32, bitcast=True)
    elif zeros_ptr is None:
        sums -= total[None] * (8 * 2.0**-149)
    else:
        zeros = tl.reshape(tl.load(zeros_ptr + first_group + group, mask=inside, other=0), SHAPE)
        sums -= zeros.to(tl.int32).to(tl.float32, bitcast=True) * total[None]
    for word in tl.static_range(4):
        for byte in tl.static_range(2):
            low, high = _numbers(words[word], byte, HALF, FORM)
            sums += low * parts[word // 2][byte][word % 2][None]
            sums += high * parts[word // 2][byte + 2][word % 2][None]
    return sums * UNSHIFT * scales


@triton.jit
def _load_last(bias_ptr, combined, item, pair, expert, real, output, outputs, FORM: tl.constexpr):
    """What the sums meet, none of it of the kernel before: (bias, that of up, pairs' weights, onto), 0 for what is not
    there. Asked for before the products, which else would end with memory's latency. Arguments as in `_pairs_kernel`.
    """
    bias, up_bias, weights, onto = 0.0, 0.0, 0.0, 0.0
    if bias_ptr is not None:
        row = tl.minimum(output, outputs - 1)
        own_rows = outputs * (2 if FORM.act is not None else 1)
        pointers = bias_ptr + (expert * own_rows)[:, None] + row[None, :]
        bias = tl.load(pointers, mask=real[:, None], other=0.0)
        if FORM.act is not None:
            up_bias = tl.load(pointers + outputs, mask=real[:, None], other=0.0)
    if FORM.act is None:
        weights_ptr, onto_ptr, stride_onto = combined
        weights = tl.load(weights_ptr + pair, mask=real, other=0.0)
        if onto_ptr is not None:
            onto = tl.load(onto_ptr + item.to(tl.int64) * stride_onto + output, mask=output < outputs, other=0.0)
    return bias, up_bias, weights, onto


@triton.jit
def _store(result, up, last, y_ptr, item, pair, real, output, outputs, FORM: tl.constexpr):
    """result, up: sums [places, rows]. last: of `_load_last`. The rest as in `_pairs_kernel`."""
    bias, up_bias, weights, onto = last
    result += bias
    if FORM.act is not None:
        result = activate_gated(result, up + up_bias, FORM)
        target = y_ptr + pair.to(tl.int64)[:, None] * outputs + output[None, :]
        tl.store(target, result.to(y_ptr.dtype.element_ty), mask=real[:, None] & (output < outputs)[None, :])
    else:
        result = result.to(y_ptr.dtype.element_ty).to(tl.float32)
        total = tl.sum(weights[:, None] * result, 0) + onto
        tl.store(y_ptr + item.to(tl.int64) * outputs + output, total.to(y_ptr.dtype.element_ty), mask=output < outputs)


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
    item, place = tl.program_id(1), tl.arange(0, FORM.places)
    pair, wide_expert, real = _find_experts(item, place, experts_ptr, owned, FORM)
    output = tl.program_id(0) * FORM.rows + tl.arange(0, FORM.rows)
    row = tl.minimum(output, outputs - 1)  # rows past the end repeat the last one and are not stored
    pointers = values_ptr + (wide_expert * stride_expert)[:, None, None]
    pointers += (row.to(tl.int64) * stride_weight)[None, :, None]
    depth = tl.arange(0, FORM.padded)[None, None, :]
    inside = real[:, None, None] & (depth < FORM.inputs)
    values = tl.load(pointers + depth, mask=inside, other=0.0)
    scales = _load_scales(scales_ptr, wide_expert, real, row, scale_sizes, FORM)
    if ACT is not None:
        up_pointers = pointers + tl.cast(outputs, tl.int64) * stride_weight
        up_values = tl.load(up_pointers + depth, mask=inside, other=0.0)
        up_scales = _load_scales(scales_ptr, wide_expert, real, outputs + row, scale_sizes, FORM)
        x_row = x_ptr + (pair // FORM.top_k).to(tl.int64)[:, None, None] * stride_x
    else:
        x_row = x_ptr + pair.to(tl.int64)[:, None, None] * stride_x
    last = _load_last(bias_ptr, combined, item, pair, wide_expert, real, output, outputs, FORM)
    if ACT is None:
        wait_for_predecessor(FORM.overlap)
    x = tl.load(x_row + depth, mask=inside, other=0.0).to(tl.float32)
    SCALED: tl.constexpr = scales_ptr is not None
    result = _multiply(values, x, scales, SCALED, FORM)
    up = result
    if ACT is not None:
        up = _multiply(up_values, x, up_scales, SCALED, FORM)
    _store(result, up, last, y_ptr, item, pair, real, output, outputs, FORM)


@triton.jit
def _code_pairs_kernel(
    x_ptr, weight, bias_ptr, y_ptr, experts_ptr, owned, combined, stride_x, outputs, groups, FORM: tl.constexpr
):
    """The same of weights of 4 bits. weight: (values, scales, zero points or None). groups: of a row."""
    values_ptr, scales_ptr, zeros_ptr = weight
    ACT: tl.constexpr = FORM.act
    PARTS: tl.constexpr = 1 if ACT is None else 2
    CHUNKS: tl.constexpr = (FORM.words // VECTOR + FORM.padded - 1) // FORM.padded
    if ACT is not None:  # the kernel before says which experts
        wait_for_predecessor(FORM.overlap)
    item, first_output = tl.program_id(1), tl.program_id(0) * FORM.rows
    own = tl.arange(0, FORM.rows * FORM.places)
    _, own_expert, own_real = _find_experts(item, own % FORM.places, experts_ptr, owned, FORM)
    # Rows past the end repeat the last one and are not stored.
    own_row = own_expert * (PARTS * outputs) + tl.minimum(first_output + own // FORM.places, outputs - 1)
    words = _load_words(values_ptr, own_row, own_real, 0, FORM)
    up_words = words
    if ACT is not None:
        up_words = _load_words(values_ptr, own_row + outputs, own_real, 0, FORM)
    else:
        wait_for_predecessor(FORM.overlap)
    pair, expert, real = _find_experts(item, tl.arange(0, FORM.places), experts_ptr, owned, FORM)
    if ACT is not None:
        x_row = x_ptr + (pair // FORM.top_k).to(tl.int64) * stride_x
    else:
        x_row = x_ptr + pair.to(tl.int64) * stride_x
    place = tl.arange(0, FORM.rows * FORM.places * FORM.padded) // FORM.padded
    _, scale_expert, scale_real = _find_experts(item, place % FORM.places, experts_ptr, owned, FORM)
    scale_row = scale_expert * (PARTS * outputs) + tl.minimum(first_output + place // FORM.places, outputs - 1)
    output = first_output + tl.arange(0, FORM.rows)
    last = _load_last(bias_ptr, combined, item, pair, expert, real, output, outputs, FORM)
    first_group = tl.where(scale_real, scale_row * groups, -1)
    up_group = tl.where(scale_real, (scale_row + outputs) * groups, -1)

    of_groups = scales_ptr, zeros_ptr
    acc = tl.full([FORM.rows, FORM.places, FORM.padded], 0.0, tl.float32)
    up_acc = acc
    for chunk in range(0, CHUNKS):
        following = _load_words(values_ptr, own_row, own_real, chunk + 1, FORM)
        up_following = following
        if ACT is not None:
            up_following = _load_words(values_ptr, own_row + outputs, own_real, chunk + 1, FORM)
        for half in tl.static_range(2):
            first, total = _load_eights(x_row, real, chunk, 0, half, FORM)
            second, other_total = _load_eights(x_row, real, chunk, 1, half, FORM)
            parts, total = (first, second), total + other_total
            acc += _sums_of_half(words, parts, total, of_groups, first_group, chunk, groups, half, FORM)
            if ACT is not None:
                up_acc += _sums_of_half(up_words, parts, total, of_groups, up_group, chunk, groups, half, FORM)
        words, up_words = following, up_following
    result = tl.trans(tl.sum(acc, 2))
    up = result
    if ACT is not None:
        up = tl.trans(tl.sum(up_acc, 2))
    _store(result, up, last, y_ptr, item, pair, real, output, outputs, FORM)


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

    experts: [T, k]; these and `combined` of the second product are from before the kernel that h is of. activation: of
    `activation_of`. owned: of `first_and_number`. choice: outputs and warps of a program; None for those of the plan.
    """
    (tokens, top_k), (_, rows, inputs) = experts.shape, weight.values.shape
    inputs = inputs if weight.inputs is None else weight.inputs
    gated = combined is None
    outputs = rows // 2 if gated else rows
    items, places = (tokens * top_k, 1) if gated else (tokens, triton.next_power_of_2(top_k))
    y = torch.empty((items, outputs), dtype=x.dtype, device=x.device)
    overlap = hardware(x.device).can_overlap
    onto = None if combined is None else combined[1]
    of_sum = None if combined is None else (*combined, 0 if onto is None else onto.stride(0))
    if weight.kind is not None:
        assert weight.scales is not None
        words = weight.values.shape[2]
        padded = min(CHUNK, triton.next_power_of_2(words // VECTOR.value))
        program_rows, num_warps = choice or choose_code_pairs(places, gated=gated)
        sizes = inputs, padded, program_rows, places, weight.group or 0, weight.rows
        form = Form(*sizes, *activation, top_k, overlap, weight.kind, words)
        launch(_code_pairs_kernel, (triton.cdiv(outputs, program_rows), items))(
            x,
            (weight.values, weight.scales, weight.zeros),
            bias,
            y,
            experts,
            owned,
            of_sum,
            x.stride(0),
            outputs,
            weight.scales.shape[2],
            FORM=form,
            num_warps=num_warps,
            launch_pdl=overlap,
        )
        return y
    padded = padded_inputs(inputs, weight.group)
    program_rows, num_warps = choice or choose_pairs(places * padded * weight.values.element_size(), gated=gated)
    sizes = inputs, padded, program_rows, places, weight.group or padded, weight.rows
    of_scales = (0, 0) if weight.scales is None else tuple(weight.scales.shape[1:])
    launch(_pairs_kernel, (triton.cdiv(outputs, program_rows), items))(
        x,
        (weight.values, weight.scales),
        bias,
        y,
        experts,
        owned,
        of_sum,
        (x.stride(0), weight.values.stride(0), weight.values.stride(1)),
        outputs,
        of_scales,
        FORM=Form(*sizes, *activation, top_k, overlap),
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
