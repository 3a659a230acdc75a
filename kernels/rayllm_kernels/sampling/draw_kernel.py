"""The Triton kernels of `gumbel_argmax` and `gumbel_keys`: one pass over the logits.

    token = argmax_v  logits[v] * (1 / temperature) + noise_scale * gumbel(seed, position, v)

logits [N, V] of any row stride, seeds, positions [N] int64, temperature, noise_scale [N] fp32 -> tokens or keys [N]
int64. Programs of one row scan slices of the vocabulary (`noise_kernel.scan`) and leave their best (score, token); a
second kernel takes the best of those. Among equal scores the lowest token wins.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compile_ahead import launch
from .draw import DrawRows
from .noise_kernel import NO_TOKEN, SPAN, scan, scan_without_noise

# Spans a tile and warps a program. Many small programs hide each other's waits; one row is done sooner in wide tiles.
MANY_ROWS = (1, 2)
FEW_ROWS = (2, 4)
TARGET_PROGRAMS = 1056  # eight a multiprocessor on the largest GPUs: more slices of a row would find good scores later
MAX_SLICES = 128


@triton.jit(do_not_specialize=[*DrawRows._fields, "slices"])
def _scan_kernel(
    logits, seeds, positions, temperature, noise_scale, best, sizes, slices, RUNS: tl.constexpr, SHARDED: tl.constexpr
):
    """best: where the (score, token) of each slice go. slices: their number a row.

    sizes: (stride of the logits, first token, vocab_size, tokens of a slice).
    """
    stride_row, first, vocab_size, slice_size = sizes
    row = tl.program_id(1).to(tl.int64)
    begin = first // SPAN * SPAN + tl.program_id(0) * slice_size
    end = tl.minimum(begin + slice_size, vocab_size)
    inverse = tl.div_rn(1.0, tl.load(temperature + row))
    scale = tl.load(noise_scale + row)
    source = (logits + row * stride_row - first, first, vocab_size)
    if scale == 0.0:
        score, token = scan_without_noise(source, begin, end, inverse, RUNS * SPAN, SHARDED)
    else:
        seed, position = tl.load(seeds + row), tl.load(positions + row)
        score, token = scan(source, begin, end, inverse, scale, position, seed, None, RUNS, SHARDED)
    tl.store(best[0] + row * slices + tl.program_id(0), score)
    tl.store(best[1] + row * slices + tl.program_id(0), token)


@triton.jit(do_not_specialize=["num_slices"])
def _reduce_kernel(best, out_ptr, num_slices, SLICES_PADDED: tl.constexpr, KEYS: tl.constexpr):
    """The best token of a row or, if KEYS, its key."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, SLICES_PADDED)
    mask = lane < num_slices
    score = tl.load(best[0] + row * num_slices + lane, mask=mask, other=float("-inf"))
    token = tl.load(best[1] + row * num_slices + lane, mask=mask, other=NO_TOKEN)
    top = tl.max(score, 0)
    result = tl.min(tl.where(score == top, token, NO_TOKEN), 0).to(tl.int64)
    if KEYS:
        bits = top.to(tl.int32, bitcast=True)
        order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # integers in the order of the floats
        result = (order.to(tl.int64) << 32) + (NO_TOKEN - result)
    tl.store(out_ptr + row, result)


def draw_best(logits: Tensor, draw: DrawRows, *, first_token: int, keys: bool) -> Tensor:
    """One token a row or, if `keys`, its key; the arguments are checked."""
    rows, vocab_size = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return out
    runs, warps = FEW_ROWS if rows <= 2 else MANY_ROWS
    tile = runs * SPAN.value
    span = first_token % SPAN.value + vocab_size  # slices begin at whole spans
    slices = max(1, min(MAX_SLICES, TARGET_PROGRAMS // rows, triton.cdiv(span, tile)))
    slice_size = triton.cdiv(triton.cdiv(span, slices), tile) * tile
    slices = triton.cdiv(span, slice_size)
    best = (
        torch.empty((rows, slices), dtype=torch.float32, device=logits.device),
        torch.empty((rows, slices), dtype=torch.int32, device=logits.device),
    )
    # Products and sums are rounded separately, as in the reference and in whatever else computes a score.
    options = {"RUNS": runs, "SHARDED": first_token > 0, "num_warps": warps, "enable_fp_fusion": False}
    sizes = (logits.stride(0), first_token, first_token + vocab_size, slice_size)
    launch(_scan_kernel, (slices, rows))(logits, *draw, best, sizes, slices, **options)
    padded = triton.next_power_of_2(slices)
    launch(_reduce_kernel, (rows,))(best, out, slices, SLICES_PADDED=padded, KEYS=keys, num_warps=1)
    return out
