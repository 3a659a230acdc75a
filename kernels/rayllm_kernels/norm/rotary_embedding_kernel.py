"""The Triton kernel of `rotary_embedding`: one program rotates some heads of one token.

    a' = a cos - b sin,  b' = b cos + a sin,   a = row[:r/2], b = row[r/2:r]   (half-split, as in GPT-NeoX and Llama)

positions [T] int64; q [T, Hq, D] and k [T, Hkv, D] of any token and head stride; cos_sin_cache [max_pos, r] fp32 holds
cos in its first half and sin in its second. Entries past r are left alone. fp32 arithmetic, rounded once.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..compile_ahead import launch

TILE_ELEMENTS = 1024  # pairs of one token, by one program


class Form(NamedTuple):
    """The compile-time argument of the kernel."""

    heads: int  # of one program
    half: int  # pairs of a head
    half_padded: int  # to a power of two


@triton.jit
def _rotate(ptr, stride_head, first_head, num_heads, cos, sin, FORM: tl.constexpr):
    head = first_head + tl.arange(0, FORM.heads)[:, None]
    pair = tl.arange(0, FORM.half_padded)[None, :]
    mask = (head < num_heads) & (pair < FORM.half)
    first_ptr = ptr + head * stride_head + pair
    first = tl.load(first_ptr, mask=mask, other=0.0)
    second = tl.load(first_ptr + FORM.half, mask=mask, other=0.0)
    a, b = first.to(tl.float32), second.to(tl.float32)
    tl.store(first_ptr, (a * cos - b * sin).to(first.dtype), mask=mask)
    tl.store(first_ptr + FORM.half, (b * cos + a * sin).to(first.dtype), mask=mask)


@triton.jit(do_not_specialize=["positions_ptr"])
def _rotary_kernel(positions_ptr, q_ptr, k_ptr, cos_sin_ptr, strides, q_heads, k_heads, q_programs, FORM: tl.constexpr):
    """strides: of q, k and cos_sin."""
    q_strides, k_strides, cos_sin_strides = strides
    stride_qt, stride_qh, _ = q_strides
    stride_kt, stride_kh, _ = k_strides
    stride_cos_sin, _ = cos_sin_strides
    token = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    angle = cos_sin_ptr + tl.load(positions_ptr + token) * stride_cos_sin + tl.arange(0, FORM.half_padded)[None, :]
    mask = tl.arange(0, FORM.half_padded)[None, :] < FORM.half
    cos = tl.load(angle, mask=mask, other=0.0)
    sin = tl.load(angle + FORM.half, mask=mask, other=0.0)
    if program < q_programs:
        _rotate(q_ptr + token * stride_qt, stride_qh, program * FORM.heads, q_heads, cos, sin, FORM)
    else:
        first_head = (program - q_programs) * FORM.heads
        _rotate(k_ptr + token * stride_kt, stride_kh, first_head, k_heads, cos, sin, FORM)


def rotary_embedding(positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor) -> None:
    """Rotate the heads of T tokens; the arguments are checked."""
    half = cos_sin_cache.shape[1] // 2
    half_padded = triton.next_power_of_2(half)
    heads = min(triton.next_power_of_2(max(q.shape[1], k.shape[1])), max(1, TILE_ELEMENTS // half_padded))
    q_programs, k_programs = triton.cdiv(q.shape[1], heads), triton.cdiv(k.shape[1], heads)
    strides = (q.stride(), k.stride(), cos_sin_cache.stride())
    form = Form(heads, half, half_padded)
    launch(_rotary_kernel, (q.shape[0], q_programs + k_programs))(
        positions, q, k, cos_sin_cache, strides, q.shape[1], k.shape[1], q_programs, FORM=form, num_warps=4
    )
