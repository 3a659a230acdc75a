"""top_k, top_p and min_p for tokens that were drawn from whole rows, without sorting a row or changing its logits.

What the three keep is all tokens with a logit of at least some cutoff (`reference_truncation` defines it). Noise does
not depend on the cutoff, so a draw from the whole row that happens to be kept is the draw from the kept tokens too. And
for top_p that needs no cutoff: a token is kept if the tokens above it have less than p of the probability, one pass
over the row. One that is not kept tells that the cutoff is above it; the next draw is from the tokens above it, and so
on. Each draw that is not kept leaves on average half of what is to be dropped, so with p = 0.9 one pass is enough nine
times out of ten. (Drawing from above a pivot until a draw is kept: the sampling kernels of FlashInfer, 2025.)

With top_k, the k-th largest logit is found first (`row_selection`); what is left is a list of little more than k
tokens on chip, drawn from in the same way. Probabilities are summed as the integers of the reference, so
what is kept does not depend on any order of summation. One program a row.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import reference_truncation as definition
from .checks_sampling import check_truncate_draws
from .gumbel_device import LOG2E, NO_TOKEN, gumbel_of_tokens, scan
from .row_selection import collect, group_maxima, kth_largest, kth_largest_of_row, load_tile

WIDTH = 4096
MAX_LISTED_K = 1024  # a quarter of the groups: about 1.15 k entries are then listed if large ones are anywhere
CAPACITY = 2048
SCAN_RUNS = 8
WARPS = 16
C1, C2, C3, C4 = (tl.constexpr(c) for c in definition.EXP2_COEFFICIENTS)


@triton.jit
def _weight(x, highest, scale):
    """`reference_truncation.weights`: the same float operations, one rounding each."""
    y = tl.maximum((x - highest) * scale, -63.0) + 127.0
    bits = y.to(tl.int32, bitcast=True)
    r = (((bits & 0x1FFFF) << 6) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    mantissa = (((C4 * r + C3) * r + C2) * r + C1) * r + 1.0
    integer = (mantissa.to(tl.int32, bitcast=True) & 0x7FFFFF) | 0x800000
    return (integer.to(tl.int64) << 17) >> (63 - ((bits >> 17) & 63)).to(tl.int64)


@triton.jit
def _target(total, top_p):
    """The mass that the tokens above a kept one must not have reached. The most likely token is always kept."""
    return tl.maximum(tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _in_nucleus(row_ptr, vocab_size, value, floor, highest, scale, top_p, WIDTH: tl.constexpr):
    """1 if a token of this logit is kept by top_p among the tokens from floor on, else 0."""
    lane = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.int64)
    above = tl.zeros([WIDTH], tl.int64)
    for start in range(0, vocab_size, WIDTH):
        x = load_tile(row_ptr, start + lane, vocab_size)
        weight = tl.where(x >= floor, _weight(x, highest, scale), 0)
        total += weight
        above += tl.where(x > value, weight, 0)
    return (tl.sum(above, 0) < _target(tl.sum(total, 0), top_p)).to(tl.int32)


@triton.jit
def _draw_from_row(
    row_ptr,
    vocab_size,
    token,
    floor,
    highest,
    scale,
    inverse,
    top_p,
    position,
    seed,
    WIDTH: tl.constexpr,
    RUNS: tl.constexpr,
):
    """The draw from the kept tokens of a row, given the draw from all of them."""
    value = tl.load(row_ptr + token).to(tl.float32)
    kept = (value >= floor).to(tl.int32)
    if (kept != 0) & (top_p < 1.0):
        kept = _in_nucleus(row_ptr, vocab_size, value, floor, highest, scale, top_p, WIDTH)
    while kept == 0:
        _, token = scan(
            row_ptr,
            0,
            vocab_size,
            0,
            vocab_size,
            inverse,
            1.0,
            position,
            seed,
            floor,
            value,
            RUNS,
            RESTRICTED=True,
            SHARDED=False,
        )
        value = tl.load(row_ptr + token).to(tl.float32)
        kept = tl.full([], 1, tl.int32)
        if top_p < 1.0:
            kept = _in_nucleus(row_ptr, vocab_size, value, floor, highest, scale, top_p, WIDTH)
    return token


@triton.jit
def _list_row(
    row_ptr, vocab_size, bound, values_ptr, tokens_ptr, counter_ptr, WIDTH: tl.constexpr, CAPACITY: tl.constexpr
):
    """List the tokens whose logit is at least bound; returns their number, of which CAPACITY are listed at most."""
    tl.store(counter_ptr, 0)
    tl.debug_barrier()
    lane = tl.arange(0, WIDTH)
    count = tl.zeros([WIDTH], tl.int32)
    for start in range(0, vocab_size, WIDTH):
        token = start + lane
        x = load_tile(row_ptr, token, vocab_size)
        wanted = (x >= bound) & (token < vocab_size)
        count += wanted.to(tl.int32)
        collect(x, token, wanted, values_ptr, tokens_ptr, counter_ptr, CAPACITY)
    tl.debug_barrier()
    return tl.sum(count, 0)


@triton.jit
def _draw_from_list(
    values_ptr, tokens_ptr, listed, top_k, floor, highest, scale, inverse, top_p, position, seed, CAPACITY: tl.constexpr
):
    """The draw from the kept tokens among those listed, which have the top_k largest logits among them."""
    lane = tl.arange(0, CAPACITY)
    values = tl.load(values_ptr + lane, mask=lane < listed, other=float("-inf"))
    tokens = tl.load(tokens_ptr + lane, mask=lane < listed, other=NO_TOKEN)
    floor = tl.maximum(floor, kth_largest(values, top_k))
    weight = tl.where(values >= floor, _weight(values, highest, scale), 0)
    target = _target(tl.sum(weight, 0), top_p)
    score = tl.where(values >= floor, values * inverse + gumbel_of_tokens(tokens, position, seed), float("-inf"))
    token = tl.full([], 0, tl.int32)
    kept = tl.full([], 0, tl.int32)
    while kept == 0:
        best = tl.max(score, 0)
        token = tl.min(tl.where(score == best, tokens, NO_TOKEN), 0)
        value = tl.max(tl.where(tokens == token, values, float("-inf")), 0)
        above = tl.sum(tl.where(values > value, weight, 0), 0)
        kept = ((top_p >= 1.0) | (above < target)).to(tl.int32)
        score = tl.where(values > value, score, float("-inf"))
    return token


@triton.jit(
    do_not_specialize=[
        "rows_ptr",
        "top_k_ptr",
        "top_p_ptr",
        "log_min_p_ptr",
        "seeds_ptr",
        "positions_ptr",
        "temperature_ptr",
    ]
)
def _truncate_kernel(
    token_ids_ptr,
    logits_ptr,
    rows_ptr,
    top_k_ptr,
    top_p_ptr,
    log_min_p_ptr,
    seeds_ptr,
    positions_ptr,
    temperature_ptr,
    values_ptr,
    tokens_ptr,
    counters_ptr,
    stride_row,
    vocab_size,
    WIDTH: tl.constexpr,
    MAX_LISTED_K: tl.constexpr,
    CAPACITY: tl.constexpr,
    RUNS: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + place)
    row_ptr = logits_ptr + row * stride_row
    values_ptr += place * CAPACITY
    tokens_ptr += place * CAPACITY
    top_k = tl.load(top_k_ptr + place)
    top_p = tl.load(top_p_ptr + place)
    temperature = tl.load(temperature_ptr + row)
    inverse, scale = tl.div_rn(1.0, temperature), tl.div_rn(LOG2E, temperature)
    seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
    maxima = group_maxima(row_ptr, vocab_size, WIDTH)
    highest = tl.max(maxima, 0)
    if highest > float("-inf"):  # else nothing can be drawn, and nothing is kept from it
        floor = highest + temperature * tl.load(log_min_p_ptr + place)
        token = tl.load(token_ids_ptr + row).to(tl.int32)
        listed = tl.full([], 0, tl.int32)
        if top_k > 0:
            if top_k <= MAX_LISTED_K:
                bound = kth_largest(maxima, top_k)
                listed = _list_row(
                    row_ptr, vocab_size, bound, values_ptr, tokens_ptr, counters_ptr + place, WIDTH, CAPACITY
                )
            if (listed == 0) | (listed > CAPACITY):
                floor = tl.maximum(floor, kth_largest_of_row(row_ptr, vocab_size, top_k, WIDTH))
        if (listed == 0) | (listed > CAPACITY):
            token = _draw_from_row(
                row_ptr, vocab_size, token, floor, highest, scale, inverse, top_p, position, seed, WIDTH, RUNS
            )
        else:
            token = _draw_from_list(
                values_ptr, tokens_ptr, listed, top_k, floor, highest, scale, inverse, top_p, position, seed, CAPACITY
            )
        tl.store(token_ids_ptr + row, token.to(tl.int64))


def truncate_draws(
    token_ids: Tensor,
    logits: Tensor,
    rows: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    log_min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
) -> None:
    """Draw anew, in place, where a token is not kept; see `ops.truncate_draws` for the contract."""
    check_truncate_draws(token_ids, logits, rows, top_k, top_p, log_min_p, seeds, positions, temperature)
    count = rows.shape[0]
    if not count:
        return
    values = torch.empty((count, CAPACITY), dtype=torch.float32, device=logits.device)
    tokens = torch.empty((count, CAPACITY), dtype=torch.int32, device=logits.device)
    counters = torch.empty(count, dtype=torch.int32, device=logits.device)
    # Products and sums are rounded separately, as in the reference.
    _truncate_kernel[(count,)](
        token_ids,
        logits,
        rows,
        top_k,
        top_p,
        log_min_p,
        seeds,
        positions,
        temperature,
        values,
        tokens,
        counters,
        logits.stride(0),
        logits.shape[1],
        WIDTH=WIDTH,
        MAX_LISTED_K=MAX_LISTED_K,
        CAPACITY=CAPACITY,
        RUNS=SCAN_RUNS,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
