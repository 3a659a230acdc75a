"""Sampling from softmax(logits / temperature) by the Gumbel-max trick, without materialising noise or probabilities.

    token = argmax_v  logits[v] * (1 / temperature) + noise_scale * gumbel(seed, position, v)

The noise is that of `reference_noise`, whose docstring defines the hash: bit for bit the same integers, so a request
draws the same tokens on any device. One pass over the logits (`gumbel_device`): programs of one row scan slices of the
vocabulary and leave their best (score, token); a second kernel takes the best of those. Among equal scores the lowest
token wins.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .checks import check_gumbel_argmax
from .gumbel_device import scan, scan_without_noise
from .reference_noise import SPAN
from .reference_sampling import NO_TOKEN

# Spans a tile and warps a program. Many small programs hide each other's waits; one row is done sooner in wide tiles.
MANY_ROWS = (1, 2)
FEW_ROWS = (2, 4)
TARGET_PROGRAMS = 1056  # eight a multiprocessor on the largest GPUs: more slices of a row would find good scores later
MAX_SLICES = 128


@triton.jit(do_not_specialize=["seeds_ptr", "positions_ptr", "temperature_ptr", "noise_scale_ptr", "num_slices"])
def _scan_kernel(
    logits_ptr,
    seeds_ptr,
    positions_ptr,
    temperature_ptr,
    noise_scale_ptr,
    best_ptr,
    best_token_ptr,
    stride_row,
    first,
    vocab_size,
    num_slices,
    slice_size,
    RUNS: tl.constexpr,
    SPAN: tl.constexpr,
    SHARDED: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    begin = first // SPAN * SPAN + tl.program_id(0) * slice_size
    end = tl.minimum(begin + slice_size, vocab_size)
    inverse = tl.div_rn(1.0, tl.load(temperature_ptr + row))
    noise_scale = tl.load(noise_scale_ptr + row)
    row_ptr = logits_ptr + row * stride_row - first
    if noise_scale == 0.0:
        best, token = scan_without_noise(row_ptr, begin, end, first, vocab_size, inverse, RUNS * SPAN, SHARDED)
    else:
        seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
        best, token = scan(
            row_ptr,
            begin,
            end,
            first,
            vocab_size,
            inverse,
            noise_scale,
            position,
            seed,
            0.0,
            0.0,
            RUNS,
            RESTRICTED=False,
            SHARDED=SHARDED,
        )
    tl.store(best_ptr + row * num_slices + tl.program_id(0), best)
    tl.store(best_token_ptr + row * num_slices + tl.program_id(0), token)


@triton.jit(do_not_specialize=["num_slices"])
def _reduce_kernel(
    best_ptr,
    best_token_ptr,
    out_ptr,
    num_slices,
    SLICES_PADDED: tl.constexpr,
    KEYS: tl.constexpr,
    NO_TOKEN: tl.constexpr,
):
    """The best token of a row or, if KEYS, its key."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, SLICES_PADDED)
    mask = lane < num_slices
    best = tl.load(best_ptr + row * num_slices + lane, mask=mask, other=float("-inf"))
    token = tl.load(best_token_ptr + row * num_slices + lane, mask=mask, other=NO_TOKEN)
    top = tl.max(best, 0)
    result = tl.min(tl.where(best == top, token, NO_TOKEN), 0).to(tl.int64)
    if KEYS:
        bits = top.to(tl.int32, bitcast=True)
        order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # integers in the order of the floats
        result = (order.to(tl.int64) << 32) + (NO_TOKEN - result)
    tl.store(out_ptr + row, result)


def gumbel_argmax(logits: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor, noise_scale: Tensor) -> Tensor:
    """One token a row; see `ops.gumbel_argmax` for the contract."""
    return _best(logits, seeds, positions, temperature, noise_scale, first_token=0, keys=False)


def gumbel_keys(
    logits: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor, noise_scale: Tensor, *, first_token: int
) -> Tensor:
    """One key a row; see `ops.gumbel_keys` for the contract."""
    return _best(logits, seeds, positions, temperature, noise_scale, first_token=first_token, keys=True)


def _best(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
    noise_scale: Tensor,
    *,
    first_token: int,
    keys: bool,
) -> Tensor:
    check_gumbel_argmax(logits, seeds, positions, temperature, noise_scale, first_token)
    rows, vocab_size = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return out
    runs, warps = FEW_ROWS if rows <= 2 else MANY_ROWS
    tile = runs * SPAN
    span = first_token % SPAN + vocab_size  # slices begin at whole spans
    slices = max(1, min(MAX_SLICES, TARGET_PROGRAMS // rows, triton.cdiv(span, tile)))
    slice_size = triton.cdiv(triton.cdiv(span, slices), tile) * tile
    slices = triton.cdiv(span, slice_size)
    best = torch.empty((rows, slices), dtype=torch.float32, device=logits.device)
    best_token = torch.empty((rows, slices), dtype=torch.int32, device=logits.device)
    # Products and sums are rounded separately, as in the reference and in whatever else computes a score.
    _scan_kernel[(slices, rows)](
        logits,
        seeds,
        positions,
        temperature,
        noise_scale,
        best,
        best_token,
        logits.stride(0),
        first_token,
        first_token + vocab_size,
        slices,
        slice_size,
        RUNS=runs,
        SPAN=SPAN,
        SHARDED=first_token > 0,
        num_warps=warps,
        enable_fp_fusion=False,
    )
    _reduce_kernel[(rows,)](
        best,
        best_token,
        out,
        slices,
        SLICES_PADDED=triton.next_power_of_2(slices),
        KEYS=keys,
        NO_TOKEN=NO_TOKEN,
        num_warps=1,
    )
    return out
