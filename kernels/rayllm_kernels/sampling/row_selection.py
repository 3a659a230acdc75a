"""Triton device functions that find the largest entries of a row of logits without sorting it.

One program (all of its warps) works on a whole row, which it reads in tiles of WIDTH entries; the second and later
passes over a row come from the GPU's L2 cache. For k up to a fraction of WIDTH, the k-th largest of the maxima of WIDTH
groups is a lower bound of the k-th largest entry, and few entries reach it: those are collected, and the exact k-th
largest is found among them on chip. Otherwise it is found bit by bit, one counting pass over the row for each.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDTH = tl.constexpr(4096)


@triton.jit
def order_key(x):
    """uint32 in the order of the floats; 0.0 and -0.0 are the same."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, ~bits, bits | 0x80000000)


@triton.jit
def _value_of_key(key):
    return tl.where(key >= 0x80000000, key ^ 0x80000000, ~key).to(tl.float32, bitcast=True)


@triton.jit
def load_tile(row, token):
    """Logits of `row`, (its pointer, vocab_size), as float32; -inf past the vocabulary."""
    row_ptr, vocab_size = row
    return tl.load(row_ptr + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit
def group_maxima(row):
    """[WIDTH] float32: entry i is the maximum of the tokens i, i + WIDTH, i + 2 * WIDTH and so on."""
    lane = tl.arange(0, WIDTH)
    best = tl.full([WIDTH], float("-inf"), tl.float32)
    for start in range(0, row[1], WIDTH):
        best = tl.maximum(best, load_tile(row, start + lane))
    return best


@triton.jit
def kth_largest(values, k):
    """The k-th largest of a tensor of at least k floats, by bisection over the bits of its key."""
    keys = order_key(values)
    found = tl.full([], 0, tl.uint32)
    step = tl.full([], 0x80000000, tl.uint32)
    for _ in range(32):
        trial = found | step
        found = tl.where(tl.sum((keys >= trial).to(tl.int32), 0) >= k, trial, found)
        step = step >> 1
    return _value_of_key(found)


@triton.jit
def kth_largest_of_row(row, k):
    """As `kth_largest`, of a whole row, in 32 passes over it."""
    lane = tl.arange(0, WIDTH)
    found = tl.full([], 0, tl.uint32)
    step = tl.full([], 0x80000000, tl.uint32)
    for _ in range(32):
        trial = found | step
        count = tl.zeros([WIDTH], tl.int32)
        for start in range(0, row[1], WIDTH):
            token = start + lane
            keys = order_key(load_tile(row, token))
            count += ((keys >= trial) & (token < row[1])).to(tl.int32)
        found = tl.where(tl.sum(count, 0) >= k, trial, found)
        step = step >> 1
    return _value_of_key(found)


@triton.jit
def collect(values, token, wanted, listed, CAPACITY: tl.constexpr):
    """Append the wanted entries of a tile to a list, in any order; what is beyond its capacity is only counted.

    listed: pointers to (values, tokens, the number of entries).
    """
    values_ptr, tokens_ptr, counter_ptr = listed
    slot = tl.atomic_add(counter_ptr + 0 * token, 1, mask=wanted, sem="relaxed")
    stored = wanted & (slot < CAPACITY)
    tl.store(values_ptr + slot, values, mask=stored)
    tl.store(tokens_ptr + slot, token, mask=stored)


def lists(rows: int, capacity: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for `collect` of so many rows: (values [rows, capacity], tokens [rows, capacity], counters [rows])."""
    values = torch.empty((rows, capacity), dtype=torch.float32, device=device)
    tokens = torch.empty((rows, capacity), dtype=torch.int32, device=device)
    return values, tokens, torch.empty(rows, dtype=torch.int32, device=device)
