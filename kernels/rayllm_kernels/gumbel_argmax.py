"""Sampling from softmax(logits / temperature) by the Gumbel-max trick, without materialising noise or probabilities.

    token = argmax_v  logits[v] / temperature + noise_scale * gumbel(seed, position, v)

The noise is that of `reference_noise`, whose docstring defines the hash: bit for bit the same integers, so a request
draws the same tokens on any device. One pass over the logits: programs of one row scan slices of the vocabulary and
leave their best (score, token); a second kernel takes the best of those. Among equal scores the lowest token wins.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .checks import check_gumbel_argmax

TILE = 1024
TARGET_PROGRAMS = 1024  # about eight a multiprocessor on the largest GPUs, so that a single row fills one too
MAX_SLICES = 128
UNIFORM_STEP = tl.constexpr(((1 << 24) - 1) * 2.0**-55)
SERIES_BOUND = tl.constexpr(1.0 / 16)


@triton.jit
def _mix(x):
    """lowbias32 of uint32 words."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def _row_keys(seed, position):
    """The two uint32 keys of a (seed, position)."""
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    place = position.to(tl.uint32)
    key_0 = _mix(_mix(_mix(low ^ 0x2545F491) + high) + _mix(place ^ 0x3C6EF372))
    key_1 = _mix(_mix(_mix(high ^ 0x2545F491) + low) + _mix(place ^ 0x1B873593))
    return key_0, key_1


@triton.jit
def _gumbel(token, key_0, key_1):
    """Standard Gumbel noise of vocabulary entries, float32."""
    bits = _mix(_mix(token.to(tl.uint32) ^ key_0) + key_1) & 0x7FFFFFFF
    u = (bits.to(tl.int32).to(tl.float32) + 0.5) * UNIFORM_STEP
    # -log(1 - u): a series where 1 - u would round the small u that matter most away.
    series = u * (1.0 + u * (1.0 / 2 + u * (1.0 / 3 + u * (1.0 / 4 + u * (1.0 / 5 + u * (1.0 / 6))))))
    exponential = tl.where(u < SERIES_BOUND, series, -tl.log(1.0 - u))
    return -tl.log(exponential)


@triton.jit
def _scan_kernel(
    logits_ptr, seeds_ptr, positions_ptr, temperature_ptr, noise_scale_ptr, best_ptr, best_token_ptr,
    stride_row, vocab_size, num_slices, slice_size, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    begin = tl.program_id(0) * slice_size
    end = tl.minimum(begin + slice_size, vocab_size)
    inverse = 1.0 / tl.load(temperature_ptr + row)
    noise_scale = tl.load(noise_scale_ptr + row)
    key_0, key_1 = _row_keys(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
    best = tl.full([TILE], float("-inf"), tl.float32)
    best_token = tl.zeros([TILE], tl.int32) + begin
    for start in range(begin, end, TILE):
        token = start + tl.arange(0, TILE)
        inside = token < end
        score = tl.load(logits_ptr + row * stride_row + token, mask=inside, other=float("-inf")).to(tl.float32)
        score *= inverse
        if noise_scale != 0.0:
            score += noise_scale * _gumbel(token, key_0, key_1)
        score = tl.where(inside, score, float("-inf"))
        better = score > best
        best = tl.where(better, score, best)
        best_token = tl.where(better, token, best_token)
    top = tl.max(best, 0)
    token = tl.min(tl.where(best == top, best_token, 0x7FFFFFFF), 0)
    tl.store(best_ptr + row * num_slices + tl.program_id(0), top)
    tl.store(best_token_ptr + row * num_slices + tl.program_id(0), token)


@triton.jit
def _reduce_kernel(best_ptr, best_token_ptr, out_ptr, num_slices, SLICES_PADDED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, SLICES_PADDED)
    mask = lane < num_slices
    best = tl.load(best_ptr + row * num_slices + lane, mask=mask, other=float("-inf"))
    token = tl.load(best_token_ptr + row * num_slices + lane, mask=mask, other=0x7FFFFFFF)
    top = tl.max(best, 0)
    tl.store(out_ptr + row, tl.min(tl.where(best == top, token, 0x7FFFFFFF), 0).to(tl.int64))


def gumbel_argmax(logits: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor, noise_scale: Tensor) -> Tensor:
    """One token a row; see `ops.gumbel_argmax` for the contract."""
    check_gumbel_argmax(logits, seeds, positions, temperature, noise_scale)
    rows, vocab_size = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return out
    slices = max(1, min(MAX_SLICES, TARGET_PROGRAMS // rows, triton.cdiv(vocab_size, TILE)))
    slice_size = triton.cdiv(triton.cdiv(vocab_size, slices), TILE) * TILE
    slices = triton.cdiv(vocab_size, slice_size)
    best = torch.empty((rows, slices), dtype=torch.float32, device=logits.device)
    best_token = torch.empty((rows, slices), dtype=torch.int32, device=logits.device)
    _scan_kernel[(slices, rows)](
        logits, seeds, positions, temperature, noise_scale, best, best_token, logits.stride(0), vocab_size, slices,
        slice_size, TILE=TILE, num_warps=4,
    )  # fmt: skip
    _reduce_kernel[(rows,)](best, best_token, out, slices, SLICES_PADDED=triton.next_power_of_2(slices), num_warps=1)
    return out
