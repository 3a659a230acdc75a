"""The Triton kernels that round activations to e4m3, alone or in one pass with what makes them.

    scale = max(|y|) / 448 over a group of a row, or one found beforehand;   code = e4m3(y * (1 / scale))
    y = x,   y = round(act(gate)) * up where x = [gate, up],   or   y = RMS norm of total, total = round(x + residual)

x, residual [T, K] of fp32, fp16 or bf16, any row stride -> codes [T, K] e4m3, scales [T, ceil(K / group)] fp32, token
by token or group by group, total [T, K]. y is rounded to x's dtype before the scale is found, as if it were stored
between two kernels; both divisions are rounded to nearest, so the references in torch have the same codes.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..activation import activate
from ..cache.fp8 import encode_fp8
from ..compile_ahead import launch
from ..dependent_launch import announce_and_wait
from ..device import hardware
from ..experts.device_functions import add_pairs, store_at_places
from ..experts.pair_sum import PairSum, of_kernels, row_warps
from . import formats, fp8
from .fp8_operands import Fp8Rows, Rounding

E4M3_MAX = tl.constexpr(formats.E4M3_MAX)
LEAST_PEAK = tl.constexpr(fp8.LEAST_PEAK)
MAX_TILE = 16384  # entries of a row that a program holds at once


class Form(NamedTuple):
    """The compile-time argument of the kernels."""

    dim: int
    tile: int  # entries that are held at once, a power of two
    group: int  # entries that share a scale, a power of two that divides the tile, or the tile for a whole row
    act: str | None  # of a gate; None where there is none
    top_k: int  # pairs of a token that x is the sum of; 0 if x is there
    native: bool  # the hardware rounds to e4m3
    overlap: bool  # launches overlap (`dependent_launch.py`)


@triton.jit
def _peaks(y, FORM: tl.constexpr):
    """The largest |y| of each group of a tile, [tile / group, 1]."""
    return tl.max(tl.abs(tl.reshape(y, [FORM.tile // FORM.group, FORM.group])), 1, keep_dims=True)


@triton.jit
def scales_of(peaks, static_ptr):
    """What the numbers of groups are divided by whose largest ones these peaks are."""
    if static_ptr is not None:
        return tl.zeros_like(peaks) + tl.load(static_ptr).to(tl.float32)
    else:
        return tl.div_rn(tl.maximum(peaks, LEAST_PEAK), tl.zeros_like(peaks) + E4M3_MAX)


@triton.jit
def codes_of(y, scales, NATIVE: tl.constexpr):
    """y / scales as the bytes of e4m3 numbers. NATIVE: the hardware rounds to them, and saturates."""
    y *= tl.div_rn(tl.zeros_like(scales) + 1.0, scales)
    if NATIVE:
        return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return encode_fp8(y, 1.0, False)


@triton.jit
def _store_codes(y, scales, codes_ptr, element, FORM: tl.constexpr):
    """A tile of one row, whose groups have these scales."""
    groups = tl.reshape(y, [FORM.tile // FORM.group, FORM.group])
    codes = tl.reshape(codes_of(groups, scales, FORM.native), [FORM.tile])
    tl.store(codes_ptr + element, codes, mask=element < FORM.dim)


@triton.jit
def _load_activated(x_ptr, element, FORM: tl.constexpr):
    """fp32 numbers of a row that have been rounded to its dtype; 0 past its end."""
    mask = element < FORM.dim
    x = tl.load(x_ptr + element, mask=mask, other=0.0)
    ACT: tl.constexpr = FORM.act
    if ACT is not None:
        up = tl.load(x_ptr + FORM.dim + element, mask=mask, other=0.0)
        activated = activate(x.to(tl.float32), ACT).to(x.dtype)
        return (activated.to(tl.float32) * up.to(tl.float32)).to(x.dtype).to(tl.float32)
    else:
        return x.to(tl.float32)


@triton.jit(do_not_specialize=["token_stride", "group_stride"])
def _to_fp8_groups_kernel(
    x_ptr, codes_ptr, scales_ptr, static_ptr, x_stride, token_stride, group_stride, FORM: tl.constexpr
):
    """A program has a tile of a row. token_stride, group_stride: of scales."""
    announce_and_wait(FORM.overlap)
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    element = tile * FORM.tile + tl.arange(0, FORM.tile)
    y = _load_activated(x_ptr + row * x_stride, element, FORM)
    scales = scales_of(_peaks(y, FORM), static_ptr)
    _store_codes(y, scales, codes_ptr + row * FORM.dim, element, FORM)
    COUNT: tl.constexpr = FORM.tile // FORM.group
    group = tile * COUNT + tl.arange(0, COUNT)[:, None]
    target = scales_ptr + row * token_stride + group * group_stride
    tl.store(target, scales, mask=group * FORM.group < FORM.dim)


@triton.jit
def _to_fp8_rows_kernel(x_ptr, codes_ptr, scales_ptr, static_ptr, x_stride, FORM: tl.constexpr):
    """A program has a row, one scale for all of it; rows longer than a tile are read twice."""
    announce_and_wait(FORM.overlap)
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    codes_ptr += row * FORM.dim
    element = tl.arange(0, FORM.tile)
    y = _load_activated(x_ptr, element, FORM)
    peak = _peaks(y, FORM)
    if FORM.dim > FORM.tile:
        for start in range(FORM.tile, FORM.dim, FORM.tile):
            peak = tl.maximum(peak, _peaks(_load_activated(x_ptr, start + element, FORM), FORM))
    scales = scales_of(peak, static_ptr)
    _store_codes(y, scales, codes_ptr, element, FORM)
    if FORM.dim > FORM.tile:
        for start in range(FORM.tile, FORM.dim, FORM.tile):
            later = start + element
            _store_codes(_load_activated(x_ptr, later, FORM), scales, codes_ptr, later, FORM)
    tl.store(scales_ptr + row + tl.arange(0, 1)[:, None], scales)


@triton.jit
def _to_fp8_places_kernel(x_ptr, codes_ptr, scales_ptr, routed, x_stride, TOP_K: tl.constexpr, FORM: tl.constexpr):
    """A program has a row, whose codes go to the places of its pairs. routed: as for `store_at_places`."""
    announce_and_wait(FORM.overlap)
    row = tl.program_id(0)
    element = tl.arange(0, FORM.tile)
    y = _load_activated(x_ptr + row.to(tl.int64) * x_stride, element, FORM)
    scales = scales_of(_peaks(y, FORM), None)
    codes = tl.reshape(codes_of(tl.reshape(y, [1, FORM.tile]), scales, FORM.native), [FORM.tile])
    store_at_places(codes, codes_ptr, routed, row, FORM.dim, element, TOP_K)
    tl.store(scales_ptr + row + tl.arange(0, 1)[:, None], scales)


@triton.jit(do_not_specialize=["token_stride", "group_stride"])
def _rms_norm_fp8_kernel(
    x_ptr, pairs, residual_ptr, norm, outputs, static_ptr, strides, token_stride, group_stride, FORM: tl.constexpr
):
    """A program has a row. norm: (weight, eps). outputs: (codes, scales, total).

    pairs: what x is the sum of, as for `add_pairs`; None if x is there.

    strides: of x and residual. token_stride, group_stride: of scales.
    """
    weight_ptr, eps = norm
    codes_ptr, scales_ptr, total_ptr = outputs
    x_stride, residual_stride = strides
    row = tl.program_id(0).to(tl.int64)
    element = tl.arange(0, FORM.tile)
    mask = element < FORM.dim
    weight = tl.load(weight_ptr + element, mask=mask, other=0.0).to(tl.float32)  # no kernel writes it
    announce_and_wait(FORM.overlap)
    if FORM.top_k > 0:
        dtype = total_ptr.dtype.element_ty
        x = add_pairs(pairs, row, FORM.dim, element, FORM.top_k).to(dtype)
    else:
        dtype = x_ptr.dtype.element_ty
        x = tl.load(x_ptr + row * x_stride + element, mask=mask, other=0.0)
    wide = x.to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * residual_stride + element, mask=mask, other=0.0)
        total = (wide + residual.to(tl.float32)).to(dtype)
        tl.store(total_ptr + row * FORM.dim + element, total, mask=mask)
        wide = total.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 0) / FORM.dim + eps)
    normed = wide * factor
    if weight_ptr.dtype.element_ty == dtype:
        normed = normed.to(dtype).to(tl.float32)
    y = (normed * weight).to(dtype).to(tl.float32)
    scales = scales_of(_peaks(y, FORM), static_ptr)
    _store_codes(y, scales, codes_ptr + row * FORM.dim, element, FORM)
    COUNT: tl.constexpr = FORM.tile // FORM.group
    group = tl.arange(0, COUNT)[:, None]
    target = scales_ptr + row * token_stride + group * group_stride
    tl.store(target, scales, mask=group * FORM.group < FORM.dim)


def _allocate(tokens: int, dim: int, how: Rounding, device: torch.device, by_group: bool) -> tuple[Tensor, Tensor]:
    """(codes as bytes, scales) of new rows. by_group: as `Fp8Rows` says, with room for whole fours of tokens."""
    groups = 1 if how.group is None else triton.cdiv(dim, how.group)
    room = triton.cdiv(tokens, 4) * 4 if by_group else tokens
    codes = torch.empty((room, dim), dtype=torch.uint8, device=device)[:tokens]
    if by_group:
        return codes, torch.empty((groups, room), dtype=torch.float32, device=device).t()[:tokens]
    return codes, torch.empty((tokens, groups), dtype=torch.float32, device=device)


def to_fp8(x: Tensor, how: Rounding, act: str | None, *, by_group: bool = False) -> Fp8Rows:
    """x [T, K], or, with an act, [T, 2 K], activated, as fp8; the arguments are checked. by_group: see `Fp8Rows`."""
    tokens, dim = x.shape[0], x.shape[1] // 2 if act else x.shape[1]
    codes, scales = _allocate(tokens, dim, how, x.device, by_group)
    gpu, padded = hardware(x.device), triton.next_power_of_2(max(dim, 1))
    in_hardware = gpu.rounds_to_e4m3, gpu.can_overlap
    if tokens and how.group is not None:
        tile = max(how.group, min(1024, padded))
        form = Form(dim, tile, how.group, act, 0, *in_hardware)
        launch(_to_fp8_groups_kernel, (tokens, triton.cdiv(dim, tile)))(
            x, codes, scales, how.scale, x.stride(0), *scales.stride(), FORM=form, num_warps=4, launch_pdl=form.overlap
        )
    elif tokens:
        tile = min(MAX_TILE, padded)
        form = Form(dim, tile, tile, act, 0, *in_hardware)
        warps = row_warps(x, tile)
        launch(_to_fp8_rows_kernel, (tokens,))(
            x, codes, scales, how.scale, x.stride(0), FORM=form, num_warps=warps, launch_pdl=form.overlap
        )
    return Fp8Rows(codes.view(torch.float8_e4m3fn), scales, how.group)


def to_fp8_places(x: Tensor, places: Tensor, experts: Tensor, owned: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
    """(codes [P, K], scales [T, 1]) of x [T, K], each row at the places of its pairs, as by `spread`.

    K is at most MAX_TILE.
    """
    (tokens, dim), top_k = x.shape, experts.shape[1]
    codes = torch.empty((tokens * top_k, dim), dtype=torch.uint8, device=x.device)
    scales = torch.empty((tokens, 1), dtype=torch.float32, device=x.device)
    tile, gpu = triton.next_power_of_2(dim), hardware(x.device)
    form = Form(dim, tile, tile, None, 0, gpu.rounds_to_e4m3, gpu.can_overlap)
    launch(_to_fp8_places_kernel, (tokens,))(
        x,
        codes,
        scales,
        (places, experts, owned),
        x.stride(0),
        TOP_K=top_k,
        FORM=form,
        num_warps=row_warps(x, tile),
        launch_pdl=form.overlap,
    )
    return codes.view(torch.float8_e4m3fn), scales


def rms_norm_fp8(
    x: Tensor | PairSum, residual: Tensor | None, weight: Tensor, eps: float, how: Rounding, *, by_group: bool = False
) -> tuple[Fp8Rows, Tensor]:
    """(fp8 rows, total) of checked arguments; a `PairSum` has a residual. by_group: see `Fp8Rows`."""
    tokens, dim = x.shape
    codes, scales = _allocate(tokens, dim, how, x.device, by_group)
    if residual is None:
        assert isinstance(x, Tensor)
        total = x
    else:
        total = torch.empty((tokens, dim), dtype=x.dtype, device=x.device)
    tile = triton.next_power_of_2(dim)
    group, gpu = tile if how.group is None else how.group, hardware(x.device)
    top_k = x.weights.shape[1] if isinstance(x, PairSum) else 0
    form = Form(dim, max(tile, group), group, None, top_k, gpu.rounds_to_e4m3, gpu.can_overlap)
    strides = (0 if isinstance(x, PairSum) else x.stride(0), 0 if residual is None else residual.stride(0))
    options = {"num_warps": row_warps(x, tile), "launch_pdl": form.overlap}
    if tokens:
        outputs = (codes, scales, total)
        launch(_rms_norm_fp8_kernel, (tokens,))(
            None if isinstance(x, PairSum) else x,
            of_kernels(x),
            residual,
            (weight, eps),
            outputs,
            how.scale,
            strides,
            *scales.stride(),
            FORM=form,
            **options,
        )
    return Fp8Rows(codes.view(torch.float8_e4m3fn), scales, how.group), total
