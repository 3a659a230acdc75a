"""The Triton kernel of `gather_logprobs`, without a float copy or a sort of a row.

    logprob = logit - log(sum over the row of exp(logit)),   rank = 1 + the number of higher logits

logits [N, V] of any row stride, rows, token_ids [M] int64 -> logprobs [M] fp32, ranks [M] int64, top_ids [M, K] int64,
top_logprobs [M, K] fp32.

One program a row. A first pass finds the maximum and, with it, a bound that the most likely tokens reach
(`row_selection`); a second sums exponentials, counts what is above the chosen token and lists what reaches the
bound. The top tokens are then taken from that list one by one. Where ties make it too long, each top token takes a pass
over the row instead.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compile_ahead import launch
from .noise_kernel import NO_TOKEN
from .row_selection import WIDTH, collect, group_maxima, kth_largest, lists, load_tile, order_key

CAPACITY = 1024
WARPS = 16


@triton.jit
def _next_of_row(row, key, token):
    """(key, token) of the row that come next after those given: by descending logit, then by ascending token."""
    lane = tl.arange(0, WIDTH)
    best = tl.zeros([WIDTH], tl.uint32)
    best_token = tl.full([WIDTH], NO_TOKEN, tl.int32)
    for start in range(0, row[1], WIDTH):
        other = start + lane
        keys = order_key(load_tile(row, other))
        left = (other < row[1]) & ((keys < key) | ((keys == key) & (other > token)))
        better = left & (keys > best)
        best = tl.where(better, keys, best)
        best_token = tl.where(better, other, best_token)
    top = tl.max(best, 0)
    return top, tl.min(tl.where(best == top, best_token, NO_TOKEN), 0)


@triton.jit(do_not_specialize=["rows_ptr", "token_ids_ptr", "num_top", "group_k"])
def _gather_kernel(
    logits_ptr, rows_ptr, token_ids_ptr, out, scratch, stride_row, vocab_size, num_top, group_k, CAPACITY: tl.constexpr
):
    """out: (logprobs, ranks, top_ids, top_logprobs). scratch: (values and tokens [M, CAPACITY], counters [M])."""
    logprobs_ptr, ranks_ptr, top_ids_ptr, top_logprobs_ptr = out
    place = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + tl.load(rows_ptr + place) * stride_row
    row = (row_ptr, vocab_size)
    values_ptr, tokens_ptr = scratch[0] + place * CAPACITY, scratch[1] + place * CAPACITY
    chosen = tl.load(row_ptr + tl.load(token_ids_ptr + place)).to(tl.float32)
    maxima = group_maxima(row)
    highest = tl.max(maxima, 0)
    bound = tl.full([], float("inf"), tl.float32)
    if num_top > 0:
        bound = kth_largest(maxima, group_k)

    counter_ptr = scratch[2] + place
    tl.store(counter_ptr, 0)
    tl.debug_barrier()
    lane = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.float32)
    higher = tl.zeros([WIDTH], tl.int32)
    listed = tl.zeros([WIDTH], tl.int32)
    for start in range(0, vocab_size, WIDTH):
        token = start + lane
        x = load_tile(row, token)
        total += tl.exp(x - highest)
        higher += (x > chosen).to(tl.int32)
        wanted = (x >= bound) & (token < vocab_size)
        listed += wanted.to(tl.int32)
        collect(x, token, wanted, (values_ptr, tokens_ptr, counter_ptr), CAPACITY)
    tl.debug_barrier()
    log_total = tl.log(tl.sum(total, 0))
    tl.store(logprobs_ptr + place, chosen - highest - log_total)
    tl.store(ranks_ptr + place, tl.sum(higher, 0).to(tl.int64) + 1)

    number = tl.sum(listed, 0)
    complete = (number >= num_top) & (number <= CAPACITY)
    entry = tl.arange(0, CAPACITY)
    tokens = tl.load(tokens_ptr + entry, mask=entry < number, other=NO_TOKEN)
    values = tl.load(values_ptr + entry, mask=entry < number, other=float("-inf"))
    keys = tl.where(entry < number, order_key(values), 0)
    key = tl.full([], 0xFFFFFFFF, tl.uint32)
    top_token = tl.full([], -1, tl.int32)
    for i in range(num_top):
        if complete:
            key = tl.max(keys, 0)
            top_token = tl.min(tl.where(keys == key, tokens, NO_TOKEN), 0)
            keys = tl.where(tokens == top_token, 0, keys)
        else:
            key, top_token = _next_of_row(row, key, top_token)
        tl.store(top_ids_ptr + place * num_top + i, top_token.to(tl.int64))
        logprob = tl.load(row_ptr + top_token).to(tl.float32) - highest - log_total
        tl.store(top_logprobs_ptr + place * num_top + i, logprob)


def gather_logprobs(
    logits: Tensor, rows: Tensor, token_ids: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logprobs, ranks, top_ids, top_logprobs); the arguments are checked."""
    count, device = rows.shape[0], logits.device
    out = (
        torch.empty(count, dtype=torch.float32, device=device),
        torch.empty(count, dtype=torch.int64, device=device),
        torch.empty((count, num_top), dtype=torch.int64, device=device),
        torch.empty((count, num_top), dtype=torch.float32, device=device),
    )
    if not count:
        return out
    scratch = lists(count, CAPACITY, device)
    stride, vocab_size, group_k = logits.stride(0), logits.shape[1], min(num_top, WIDTH.value)
    options = {"CAPACITY": CAPACITY, "num_warps": WARPS, "enable_fp_fusion": False}
    launch(_gather_kernel, (count,))(
        logits, rows, token_ids, out, scratch, stride, vocab_size, num_top, group_k, **options
    )
    return out
