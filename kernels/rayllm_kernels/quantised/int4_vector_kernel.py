"""Single tokens times weights of 4 bits, with the norm before them and the activation behind them.

    y = f((n W^T) + bias),   n = x,   or   n = RMS norm of total,   total = round(x + residual);
    f, where W = [gate; up]: act(gate) * up

x, residual [1, K], W [N, K] (gated: [2 N, K]; `int4.py` has the layout), bias [N] -> y [1, N], total [1, K]. All is
fp32 and rounded once; what a norm multiplies all of a token by is multiplied into the sums.

At the rate of memory a multiprocessor has to take in some 26 weights a clock, for which it has 128 instructions, so a
number becomes a float by one AND and nothing else: bits p to p + 3 of a word, all others cleared and taken for a float,
are exactly number * 2^(p - 149). That is a denormal, or a normal number if bit 23 is set, with which the denormals go
on in equal steps. The token is multiplied by powers of two beforehand, so that all products are number * x *
2^(SHIFT - 149). NVIDIA's fused multiply-add takes denormals at full speed, and Triton does not have it flush them to
zero. Zero points are not taken off the numbers, but, times the sum of the token's, off sums within a group.

A program has all of K of some rows, the token in its registers, and goes on to other rows. It asks for a tile of
weights before it multiplies the one before, and for the first before the previous kernel ends.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..activation import activate
from ..compile_ahead import launch
from ..dependent_launch import wait_for_predecessor
from ..device import hardware
from . import plans
from .int4 import MIDDLE, Int4Weight

Norm = tuple[Tensor | None, Tensor | None, float]  # (residual, weight, eps), none of them without a weight

VECTOR = tl.constexpr(plans.INT4_VECTOR_BYTES)  # bytes of a row that a thread loads at once: four words
SYMMETRIC_ZERO = tl.constexpr(MIDDLE)
# Products are x * number * 2^-69: normal numbers from |x| = 2^-57 on, below which they get less exact, and finite, as
# the token's multiples are, up to |x| = 2^47.
SHIFT = tl.constexpr(80)
UNSHIFT = tl.constexpr(2.0 ** (149 - 80))


class Form(NamedTuple):
    """The compile-time argument of the kernel."""

    inputs: int
    half: int  # bytes of a row, whole vectors
    padded: int  # vectors of a row, to a power of two
    rows: int  # of W in a tile: its outputs, or twice as many if gated
    group: int  # inputs that share a scale; 0 for all
    act: str | None
    overlap: bool  # launches overlap (`dependent_launch.py`)


@triton.jit
def _rows_of(tile, place, outputs, FORM: tl.constexpr):
    """Rows of W at places of a tile. Gate and up of an output are neighbours; past the end the last ones repeat."""
    PARTS: tl.constexpr = 1 if FORM.act is None else 2
    output = tile * (FORM.rows // PARTS) + place // PARTS
    return tl.minimum(output, outputs - 1) + place % PARTS * outputs


# Tensors are loaded as vectors or by rows, and get their shapes afterwards: so, whichever dimension Triton spreads
# threads along where none is contiguous, a thread has the words, the scales and the inputs of the same vectors.


@triton.jit
def _load_tile(weight, tile, tiles, outputs, FORM: tl.constexpr):
    """(words [rows, padded, 4], then, all [rows, padded], the scales of their lower numbers, of the upper ones, and the
    zero points of both).

    Where all zero points are the same they are anything. Of a tile past the last one nothing is read.
    """
    codes_ptr, scales_ptr, zeros_ptr = weight
    WORDS: tl.constexpr = VECTOR // 4
    SHAPE: tl.constexpr = [FORM.rows, FORM.padded]
    row = _rows_of(tile, tl.arange(0, FORM.rows), outputs, FORM).to(tl.int64)
    word = tl.arange(0, FORM.padded * WORDS)
    inside = word < tl.where(tile < tiles, FORM.half // 4, 0)
    codes = tl.load(codes_ptr + row[:, None] * (FORM.half // 4) + word[None, :], mask=inside[None, :], other=0)
    place = tl.arange(0, FORM.rows * FORM.padded)
    vector = place % FORM.padded
    mask = vector < tl.where(tile < tiles, FORM.half // VECTOR, 0)
    first = _rows_of(tile, place // FORM.padded, outputs, FORM)
    if FORM.group != 0:
        GROUPS: tl.constexpr = (FORM.inputs + FORM.group - 1) // FORM.group
        FIRST_GROUPS: tl.constexpr = FORM.half // FORM.group
        all_rows = outputs if FORM.act is None else 2 * outputs
        first += vector * VECTOR // FORM.group * all_rows
        second = first + FIRST_GROUPS * all_rows
        # The second half may have a group that there is not, of zeros.
        other_vectors = (GROUPS - FIRST_GROUPS) * FORM.group // VECTOR
        other_mask = vector < tl.where(tile < tiles, other_vectors, 0)
    scales = tl.load(scales_ptr + first, mask=mask, other=0.0)
    other_scales = scales
    if FORM.group != 0:
        other_scales = tl.load(scales_ptr + second, mask=other_mask, other=0.0)
    zeros, other_zeros = scales, other_scales
    if zeros_ptr is not None:
        zeros = tl.load(zeros_ptr + first, mask=mask, other=0)
        other_zeros = zeros
        if FORM.group != 0:
            other_zeros = tl.load(zeros_ptr + second, mask=other_mask, other=0)
    return (
        tl.reshape(codes, [FORM.rows, FORM.padded, WORDS]),
        tl.reshape(scales, SHAPE),
        tl.reshape(other_scales, SHAPE),
        tl.reshape(zeros, SHAPE),
        tl.reshape(other_zeros, SHAPE),
    )


@triton.jit
def _inputs_of_vectors(FORM: tl.constexpr):
    """[4 * padded * 8] of the inputs whose numbers each vector has, and which of them there are.

    Of each eight of the first half and the next eight, then of the second half: so a thread loads, 16 bytes at a time,
    the inputs of its own vectors, and none has to move to another thread.
    """
    PART: tl.constexpr = VECTOR // 2
    place = tl.arange(0, 4 * FORM.padded * PART)
    part, vector = place // (FORM.padded * PART), place // PART % FORM.padded
    at = part // 2 * FORM.half + vector * VECTOR + part % 2 * PART + place % PART
    return at, (vector < FORM.half // VECTOR) & (at < FORM.inputs)


@triton.jit
def _token(x_ptr, norm, norm_weight, total_ptr, at, inside, FORM: tl.constexpr):
    """(what the weights are multiplied by, in fp32, 0 where there is no input; what the sums are); all as `at`."""
    residual_ptr, norm_ptr, eps = norm
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    factor = 1.0
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + at, mask=inside, other=0.0)
        total = (wide + residual.to(tl.float32)).to(x.dtype)
        stored = tl.where(tl.program_id(0) == 0, FORM.inputs, 0)  # one program stores it for all
        tl.store(total_ptr + at, total, mask=inside & (at < stored))
        wide = total.to(tl.float32)
    if norm_ptr is not None:
        factor = tl.rsqrt(tl.sum(wide * wide, 0) / FORM.inputs + eps)
        wide *= norm_weight.to(tl.float32)
    return wide, factor


@triton.jit
def _quarters(x):
    """x [..., 4] as four tensors."""
    even, odd = tl.split(tl.reshape(x, x.shape[:-1] + [2, 2]))  # noqa: RUF005 - Triton has no stars
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _scaled_halves(x, BYTE: tl.constexpr):
    """x [padded, 2], of a byte's two numbers, times 2^SHIFT, divided by what their bits stand for."""
    low, high = tl.split(x)
    return low * (2.0 ** (SHIFT - 8 * min(BYTE, 2))), high * (2.0 ** (SHIFT - 8 * min(BYTE, 2) - 4))


@triton.jit
def _of_words(x, BYTE: tl.constexpr, FORM: tl.constexpr):
    """x [padded, 4, 2], of one byte of the words of each eight inputs, as `_scaled_halves` of each word."""
    words = _quarters(tl.reshape(x, [FORM.padded, 2, 4]))
    return (
        _scaled_halves(words[0], BYTE),
        _scaled_halves(words[1], BYTE),
        _scaled_halves(words[2], BYTE),
        _scaled_halves(words[3], BYTE),
    )


@triton.jit
def _by_bytes(wide, FORM: tl.constexpr):
    """(what numbers are multiplied by, [padded] for each byte, word and half; sums of each vector's inputs of the first
    half, and of the second, [padded]), all times 2^SHIFT. wide: of `_token`.
    """
    x = tl.permute(tl.reshape(wide, [4, FORM.padded, VECTOR // 2]), 1, 0, 2)
    low, high = tl.split(tl.sum(tl.reshape(tl.sum(x, 2), [FORM.padded, 2, 2]), 2) * (2.0**SHIFT))
    first, second, third, fourth = _quarters(tl.reshape(x, [FORM.padded, 4, 2, 4]))
    token = (
        _of_words(first, 0, FORM),
        _of_words(second, 1, FORM),
        _of_words(third, 2, FORM),
        _of_words(fourth, 3, FORM),
    )
    return token, low, high


@triton.jit
def _sums(words, scales, zeros, token, total, HALF: tl.constexpr):
    """[rows, padded]: scaled sums of a half's numbers, of one vector each.

    words: four of [rows, padded]. token, total: of `_by_bytes`.
    """
    sums = zeros.to(tl.float32, bitcast=True) * -total[None, :]
    for word in tl.static_range(4):
        for byte in tl.static_range(4):
            # The last byte's bits would be an exponent, and more, so they move down.
            bits = words[word] if byte < 3 else words[word] >> 8
            number = (bits & (15 << (8 * min(byte, 2) + 4 * HALF))).to(tl.float32, bitcast=True)
            sums += number * token[byte][word][HALF][None, :]
    return sums * scales


@triton.jit(do_not_specialize=["tiles"])
def _int4_vector_kernel(x_ptr, norm, weight, bias_ptr, y_ptr, total_ptr, outputs, tiles, FORM: tl.constexpr):
    """norm: (residual or None, weight of the norm or None, eps). weight: (codes as int32, scales, zeros or None)."""
    ACT: tl.constexpr = FORM.act
    OUTPUTS: tl.constexpr = FORM.rows if ACT is None else FORM.rows // 2
    first_tile = tl.program_id(0)
    codes, scales, other_scales, zeros, other_zeros = _load_tile(weight, first_tile, tiles, outputs, FORM)
    at, inside = _inputs_of_vectors(FORM)
    norm_weight = tl.load(norm[1] + at, mask=inside, other=0.0) if norm[1] is not None else 0.0
    wait_for_predecessor(FORM.overlap)
    wide, factor = _token(x_ptr, norm, norm_weight, total_ptr, at, inside, FORM)
    token, total, other_total = _by_bytes(wide, FORM)
    for tile in range(first_tile, tiles, tl.num_programs(0)):
        following = _load_tile(weight, tile + tl.num_programs(0), tiles, outputs, FORM)
        if weight[2] is None:
            low_zeros = tl.full([1, 1], SYMMETRIC_ZERO, tl.int32)
            high_zeros = low_zeros
        else:
            low_zeros, high_zeros = zeros.to(tl.int32), other_zeros.to(tl.int32)
        words = _quarters(codes)
        sums = _sums(words, scales, low_zeros, token, total, 0)
        sums += _sums(words, other_scales, high_zeros, token, other_total, 1)
        y = tl.sum(sums, 1) * (factor * UNSHIFT)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + _rows_of(tile, tl.arange(0, FORM.rows), outputs, FORM)).to(tl.float32)
        if ACT is not None:
            gate, up = tl.split(tl.reshape(y, [OUTPUTS, 2]))
            y = activate(gate, ACT) * up
        output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
        tl.store(y_ptr + output, y.to(y_ptr.dtype.element_ty), mask=output < outputs)
        codes, scales, other_scales, zeros, other_zeros = following


def linear_int4_vector(
    x: Tensor,
    norm: Norm,
    weight: Int4Weight,
    bias: Tensor | None,
    act: str | None,
    *,
    choice: tuple[int, int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """(y, total) of one token, of checked arguments; total is x where there is no residual.

    choice: outputs of a tile, warps of a program, and programs a multiprocessor; None for those of the plan.
    """
    inputs, (rows, half) = x.shape[1], weight.codes.shape
    outputs = rows // 2 if act else rows
    y = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    total = x if norm[0] is None else torch.empty_like(x)
    gpu, padded = hardware(x.device), triton.next_power_of_2(half // plans.INT4_VECTOR_BYTES)
    tile_outputs, num_warps, programs = choice or plans.choose_int4_vector(padded, gated=act is not None)
    tiles = triton.cdiv(outputs, tile_outputs)
    tile_rows = 2 * tile_outputs if act else tile_outputs
    form = Form(inputs, half, padded, tile_rows, weight.group or 0, act, gpu.can_overlap)
    launch(_int4_vector_kernel, (min(tiles, programs * gpu.multiprocessors),))(
        x,
        norm,
        (weight.codes.view(torch.int32), weight.scales, weight.zeros),
        bias,
        y,
        total,
        outputs,
        tiles,
        FORM=form,
        num_warps=num_warps,
        launch_pdl=gpu.can_overlap,
    )
    return y, total
