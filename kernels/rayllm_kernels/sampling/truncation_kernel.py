"""The Triton kernel of `truncate_draws`, which neither sorts a row nor changes its logits.

logits [N, V] of any row stride, token_ids [N] int64, changed in place; the rest as in `DrawRows` and `CutRows`.

What top_k, top_p and min_p keep is all tokens with a logit of at least some cutoff (`truncation.py` defines it).
Noise does not depend on the cutoff, so a draw from the whole row that happens to be kept is the draw from the kept
tokens too. And for top_p that needs no cutoff: a token is kept if the tokens above it have less than p of the
probability, one pass
over the row. One that is not kept tells that the cutoff is above it; the next draw is from the tokens above it, and so
on. Each draw that is not kept leaves on average half of what is to be dropped, so with p = 0.9 one pass is enough nine
times out of ten. (Drawing from above a pivot until a draw is kept: the sampling kernels of FlashInfer, 2025.)

With top_k, the k-th largest logit is found first (`row_selection`); what is left is a list of little more than k
tokens on chip, drawn from in the same way. Probabilities are summed as the integers of the reference, so
what is kept does not depend on any order of summation. One program a row.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..compile_ahead import launch
from . import truncation as definition
from .draw import DrawRows
from .noise_kernel import LOG2E, NO_TOKEN, gumbel_of_tokens, scan
from .row_selection import WIDTH, collect, group_maxima, kth_largest, kth_largest_of_row, lists, load_tile
from .truncation import CutRows

# A quarter of the groups: about 1.15 k entries are then listed if large ones are anywhere.
MAX_LISTED_K = tl.constexpr(1024)
CAPACITY = tl.constexpr(2048)
SCAN_RUNS = tl.constexpr(8)
WARPS = 16
C1, C2, C3, C4 = (tl.constexpr(c) for c in definition.EXP2_COEFFICIENTS)


@triton.jit
def _weight(x, rule):
    """`truncation.weights`: the same float operations, one rounding each."""
    highest, scale, _, _ = rule
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
def _in_nucleus(row, value, floor, rule):
    """1 if a token of this logit is kept by top_p among the tokens from floor on, else 0."""
    lane = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.int64)
    above = tl.zeros([WIDTH], tl.int64)
    for start in range(0, row[1], WIDTH):
        x = load_tile(row, start + lane)
        weight = tl.where(x >= floor, _weight(x, rule), 0)
        total += weight
        above += tl.where(x > value, weight, 0)
    return (tl.sum(above, 0) < _target(tl.sum(total, 0), rule[3])).to(tl.int32)


@triton.jit
def _draw_from_row(row, token, floor, rule, position, seed):
    """The draw from the kept tokens of a row, given the draw from all of them."""
    row_ptr, vocab_size = row
    _, _, inverse, top_p = rule
    value = tl.load(row_ptr + token).to(tl.float32)
    kept = (value >= floor).to(tl.int32)
    if (kept != 0) & (top_p < 1.0):
        kept = _in_nucleus(row, value, floor, rule)
    while kept == 0:
        source = (row_ptr, 0, vocab_size)
        _, token = scan(source, 0, vocab_size, inverse, 1.0, position, seed, (floor, value), SCAN_RUNS, False)
        value = tl.load(row_ptr + token).to(tl.float32)
        kept = tl.full([], 1, tl.int32)
        if top_p < 1.0:
            kept = _in_nucleus(row, value, floor, rule)
    return token


@triton.jit
def _list_row(row, bound, listed):
    """List the tokens whose logit is at least bound; returns their number, of which CAPACITY are listed at most."""
    tl.store(listed[2], 0)
    tl.debug_barrier()
    lane = tl.arange(0, WIDTH)
    count = tl.zeros([WIDTH], tl.int32)
    for start in range(0, row[1], WIDTH):
        token = start + lane
        x = load_tile(row, token)
        wanted = (x >= bound) & (token < row[1])
        count += wanted.to(tl.int32)
        collect(x, token, wanted, listed, CAPACITY)
    tl.debug_barrier()
    return tl.sum(count, 0)


@triton.jit
def _draw_from_list(values_ptr, tokens_ptr, number, top_k, floor, rule, position, seed):
    """The draw from the kept tokens among those listed, which have the top_k largest logits among them."""
    _, _, inverse, top_p = rule
    lane = tl.arange(0, CAPACITY)
    values = tl.load(values_ptr + lane, mask=lane < number, other=float("-inf"))
    tokens = tl.load(tokens_ptr + lane, mask=lane < number, other=NO_TOKEN)
    floor = tl.maximum(floor, kth_largest(values, top_k))
    weight = tl.where(values >= floor, _weight(values, rule), 0)
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


@triton.jit(do_not_specialize=[*DrawRows._fields, *CutRows._fields])
def _truncate_kernel(
    token_ids, logits, seeds, positions, temperature, rows, top_k, top_p, log_min_p, scratch, stride_row, vocab_size
):
    """scratch: (values [C, CAPACITY] fp32, tokens [C, CAPACITY] int32, counters [C] int32)."""
    place = tl.program_id(0).to(tl.int64)
    row_index = tl.load(rows + place)
    row = (logits + row_index * stride_row, vocab_size)
    values_ptr, tokens_ptr = scratch[0] + place * CAPACITY, scratch[1] + place * CAPACITY
    k, p = tl.load(top_k + place), tl.load(top_p + place)
    row_temperature = tl.load(temperature + row_index)
    inverse, scale = tl.div_rn(1.0, row_temperature), tl.div_rn(LOG2E, row_temperature)
    seed, position = tl.load(seeds + row_index), tl.load(positions + row_index)
    maxima = group_maxima(row)
    highest = tl.max(maxima, 0)
    rule = (highest, scale, inverse, p)
    if highest > float("-inf"):  # else nothing can be drawn, and nothing is kept from it
        floor = highest + row_temperature * tl.load(log_min_p + place)
        token = tl.load(token_ids + row_index).to(tl.int32)
        listed = tl.full([], 0, tl.int32)
        if k > 0:
            if k <= MAX_LISTED_K:
                bound = kth_largest(maxima, k)
                listed = _list_row(row, bound, (values_ptr, tokens_ptr, scratch[2] + place))
            if (listed == 0) | (listed > CAPACITY):
                floor = tl.maximum(floor, kth_largest_of_row(row, k))
        if (listed == 0) | (listed > CAPACITY):
            token = _draw_from_row(row, token, floor, rule, position, seed)
        else:
            token = _draw_from_list(values_ptr, tokens_ptr, listed, k, floor, rule, position, seed)
        tl.store(token_ids + row_index, token.to(tl.int64))


def truncate_draws(token_ids: Tensor, logits: Tensor, draw: DrawRows, cut: CutRows) -> None:
    """Draw anew, in place, where a token is not kept; the arguments are checked, and C is at least 1."""
    count = cut.rows.shape[0]
    scratch = lists(count, CAPACITY.value, logits.device)
    stride, vocab_size = logits.stride(0), logits.shape[1]
    # Products and sums are rounded separately, as in the reference.
    options = {"num_warps": WARPS, "enable_fp_fusion": False}
    launch(_truncate_kernel, (count,))(token_ids, logits, *draw[:3], *cut, scratch, stride, vocab_size, **options)
