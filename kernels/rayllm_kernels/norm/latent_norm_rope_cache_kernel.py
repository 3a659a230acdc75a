"""The Triton kernel of `latent_norm_rope_cache`: one program takes some query heads of a token, or its latent and key.

    latent = norm(kv[:R]), key = rotary(kv[R:]);  cache[slot // block_size, 0, slot % block_size] = latent, key
    out = rotary(q)

q, out [T, Hq, P] of any token and head stride; kv [T, R + P] of any token stride; norm_weight [R]; positions [T] int64;
cos_sin_cache [max_pos, P] fp32; cache.k [num_blocks, 1, block_size, R + P]; slot_mapping [T] int64, negative for
padding. The roundings are those of `rms_norm` and `rotate`.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..cache.kv_cache import KVCache
from ..compile_ahead import launch
from ..dependent_launch import wait_for_predecessor
from ..device import hardware

HEADS = 16  # of one program, at most


class Form(NamedTuple):
    """The compile-time argument of the kernel."""

    rank: int  # entries of a latent
    rank_padded: int  # here and below to a power of two
    half: int  # pairs that are rotated
    half_padded: int
    interleaved: bool  # entries 2i and 2i + 1 are a pair, not i and i + half
    heads: int  # of one program
    block_size: int
    overlap: bool  # launches overlap (`dependent_launch.py`)


@triton.jit
def _rotate(source, target, valid, cos_sin_ptr, FORM: tl.constexpr):
    """Rotate the pairs at pointers `source` [N, 1] to `target` [N, 1]. cos_sin_ptr: the angles of the position.

    They may be the same: whoever stores a pair has loaded it, and nobody else stores it.
    """
    pair = tl.arange(0, FORM.half_padded)[None, :]
    in_pair = pair < FORM.half
    if FORM.interleaved:
        one = 2 * pair
        other = 2 * pair + 1
    else:
        one = pair
        other = FORM.half + pair
    mask = valid & in_pair
    cos = tl.load(cos_sin_ptr + pair, mask=in_pair, other=0.0)
    sin = tl.load(cos_sin_ptr + FORM.half + pair, mask=in_pair, other=0.0)
    first = tl.load(source + one, mask=mask, other=0.0)
    second = tl.load(source + other, mask=mask, other=0.0)
    a, b = first.to(tl.float32), second.to(tl.float32)
    tl.store(target + one, (a * cos - b * sin).to(first.dtype), mask=mask)
    tl.store(target + other, (b * cos + a * sin).to(first.dtype), mask=mask)


@triton.jit(do_not_specialize=["positions_ptr", "slots_ptr"])
def _latent_norm_rope_cache_kernel(pointers, eps, positions_ptr, slots_ptr, strides, num_heads, FORM: tl.constexpr):
    """pointers: q, kv, the norm's weight, cos_sin, the cache's keys and out. strides: of q, kv, cos_sin, cache, out."""
    q_ptr, kv_ptr, weight_ptr, cos_sin_ptr, cache_ptr, out_ptr = pointers
    stride_qt, stride_qh, stride_kv, stride_cos_sin, stride_block, stride_slot, stride_ot, stride_oh = strides
    token = tl.program_id(0).to(tl.int64)
    wait_for_predecessor(FORM.overlap)
    position = tl.load(positions_ptr + token)
    angles = cos_sin_ptr + position * stride_cos_sin
    if tl.program_id(1) > 0:
        head = (tl.program_id(1) - 1) * FORM.heads + tl.arange(0, FORM.heads)[:, None]
        source = q_ptr + token * stride_qt + head * stride_qh
        _rotate(source, out_ptr + token * stride_ot + head * stride_oh, head < num_heads, angles, FORM)
    else:
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            row = kv_ptr + token * stride_kv
            target = cache_ptr + slot // FORM.block_size * stride_block + slot % FORM.block_size * stride_slot
            dims = tl.arange(0, FORM.rank_padded)
            mask = dims < FORM.rank
            x = tl.load(row + dims, mask=mask, other=0.0)
            wide = x.to(tl.float32)
            normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / FORM.rank + eps)
            weight = tl.load(weight_ptr + dims, mask=mask, other=0.0)
            if weight_ptr.dtype.element_ty == x.dtype:
                normed = normed.to(x.dtype).to(tl.float32)
            tl.store(target + dims, (normed * weight.to(tl.float32)).to(x.dtype), mask=mask)
            lane = tl.arange(0, 1)[:, None]
            _rotate(row + FORM.rank + lane, target + FORM.rank + lane, lane == 0, angles, FORM)


def latent_norm_rope_cache(
    q: Tensor,
    kv: Tensor,
    norm_weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin_cache: Tensor,
    cache: KVCache,
    slot_mapping: Tensor,
    out: Tensor,
    interleaved: bool,
) -> None:
    """Write `out` and the cache; the arguments are checked."""
    tokens, num_heads, turned = q.shape
    if tokens == 0:
        return
    rank, half, heads = cache.v.shape[3], turned // 2, min(triton.next_power_of_2(num_heads), HEADS)
    overlap = hardware(kv.device).can_overlap
    padded = triton.next_power_of_2(rank), triton.next_power_of_2(half)
    form = Form(rank, padded[0], half, padded[1], interleaved, heads, cache.k.shape[2], overlap)
    stride_block, _, stride_slot, _ = cache.k.stride()
    strides = (*q.stride()[:2], kv.stride(0), cos_sin_cache.stride(0), stride_block, stride_slot, *out.stride()[:2])
    pointers = (q, kv, norm_weight, cos_sin_cache, cache.k, out)
    launch(_latent_norm_rope_cache_kernel, (tokens, 1 + triton.cdiv(num_heads, heads)))(
        pointers, eps, positions, slot_mapping, strides, num_heads, FORM=form, num_warps=4, launch_pdl=overlap
    )
