"""The Triton kernels of `all_reduce`, `all_reduce_add_rms_norm` and `all_gather_small`.

    total = round(sum over ranks of x + residual),   y = RMSNorm(total) * weight   (the norm as in `rms_norm`)

x, residual [M, H] of fp16 or bf16, 8 | H -> y, total [M, H], the same bits on every rank: fp32 sums, in one order.

Every rank has an equal buffer that its peers write into. Nobody waits for a flag: a receiver looks at the data itself,
until no word of a slot holds EMPTY any more, which no data does (the idea of NCCL's LL protocol). It costs one trip
over the wire, no fence and no barrier. EMPTY is a pair of NaNs; data that equals it is sent as another pair of NaNs.

One shot: every rank sends its rows to all, and all add. Two shots: every row has an owner, who adds what the others
send it and sends them the total: fewer bytes, one trip more. Both add alike, so the choice never changes a result.

Reuse of slots. A program owns its slots in two buffers and takes turns between them, counting its uses on the device,
so replayed graphs and plain launches mix. Each use empties what it received. A program that finishes its use k + 1 has
heard, maybe through an owner, from the same program of every rank, which therefore began its use k + 1 and so ended
use k: the slots of use k are empty everywhere before anyone begins use k + 2. Ranks must make the same calls in the
same order on one stream, and all programs must be resident at once: there are at most as many as multiprocessors.
A rank that never comes leaves the others waiting; ending that is the business of whoever watches the ranks.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compile_ahead import launch
from ..dependent_launch import wait_for_predecessor
from ..device import hardware
from . import all_reduce as op
from .all_reduce import PeerBuffers

BUFFERS = tl.constexpr(op.BUFFERS)
MAX_WARPS = 16
EMPTY = tl.constexpr(-1)  # 0xFFFFFFFF: two NaNs that no arithmetic makes
OTHER_NANS = tl.constexpr(0x7FFF7FFF)
Norm = tuple[Tensor | None, Tensor | None, float, Tensor | None]  # residual, weight, eps, y


class Form(NamedTuple):
    """A compile-time argument of the kernels: how the ranks' buffers are laid out, and how they are used."""

    ranks: int
    words: int  # of a row
    programs: int
    row_slots: int
    max_rows: int
    two_shot: bool
    overlap: bool  # launches overlap (`dependent_launch.py`)


def _form_of(buffers: PeerBuffers, two_shot: bool) -> Form:
    overlap = hardware(buffers.uses.device).can_overlap
    return Form(
        buffers.size, buffers.row_words, buffers.programs, buffers.row_slots, buffers.max_rows, two_shot, overlap
    )


@triton.jit
def _halves(words, DTYPE: tl.constexpr):
    """The two elements of each int32 word, in fp32."""
    low = (words & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True)
    high = ((words >> 16) & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _words(low, high, DTYPE: tl.constexpr):
    """Two elements rounded to DTYPE in each int32 word; the inverse of `_halves`."""
    low = low.to(DTYPE).to(tl.uint16, bitcast=True).to(tl.int32)
    high = high.to(DTYPE).to(tl.uint16, bitcast=True).to(tl.int32)
    return low | (high << 16)


@triton.jit
def _sendable(words):
    return tl.where(words == EMPTY, OTHER_NANS, words)


@triton.jit
def _receive(slots, mask):
    """Wait until no word at `slots` (of this rank's buffer) is EMPTY, then empty them -> the words."""
    words = tl.load(slots, mask=mask, other=0, volatile=True)
    while tl.max((words == EMPTY).to(tl.int32)) != 0:
        words = tl.load(slots, mask=mask, other=0, volatile=True)
    tl.store(slots, tl.full(words.shape, EMPTY, tl.int32), mask=mask)
    return words


@triton.jit
def _received_sum(slots, mask, DTYPE: tl.constexpr):
    """Sum over dimension 0 of [RANKS, N] words, once they are there -> two [N] fp32 halves."""
    low, high = _halves(_receive(slots, mask), DTYPE)
    return tl.sum(low, 0), tl.sum(high, 0)


@triton.jit
def _total(low, high, residual, DTYPE: tl.constexpr):
    """The words of the rounded total of two fp32 halves and, unless it is None, the residual's words."""
    if residual is not None:
        residual_low, residual_high = _halves(residual, DTYPE)
        low += residual_low
        high += residual_high
    return _sendable(_words(low, high, DTYPE))


@triton.jit
def _store_row(
    total, weights, total_ptr, y_ptr, mask, eps, DTYPE: tl.constexpr, WORDS: tl.constexpr, WIDE: tl.constexpr
):
    """Store the total's words and, unless weights, of either half of them, are None, those of its norm.

    WIDE: the weight is fp32 and meets what is not rounded.
    """
    tl.store(total_ptr, total, mask=mask)
    if weights is not None:
        low, high = _halves(total, DTYPE)
        weight_low, weight_high = weights
        scale = tl.rsqrt(tl.sum(low * low + high * high) / (2 * WORDS) + eps)
        low, high = low * scale, high * scale
        if not WIDE:
            low, high = low.to(DTYPE).to(tl.float32), high.to(DTYPE).to(tl.float32)
        tl.store(y_ptr, _words(low * weight_low, high * weight_high, DTYPE), mask=mask)


@triton.jit
def _load_weights(weight_ptr, column, mask, DTYPE: tl.constexpr):
    """fp32: the weights of the first and of the second element of each word."""
    if weight_ptr.dtype.element_ty == tl.float32:
        low = tl.load(weight_ptr + 2 * column, mask=mask, other=0.0)
        high = tl.load(weight_ptr + 2 * column + 1, mask=mask, other=0.0)
    else:
        low, high = _halves(tl.load(weight_ptr.to(tl.pointer_type(tl.int32)) + column, mask=mask, other=0), DTYPE)
    return low, high


@triton.jit
def _peer(peers_ptr, rank):
    """The words of rank `rank`'s buffer; `rank` may be a vector."""
    return tl.multiple_of(tl.load(peers_ptr + rank).to(tl.pointer_type(tl.int32)), 16)


@triton.jit(do_not_specialize=["num_rows"])
def _all_reduce_kernel(operands, peers, num_rows, eps, strides, FORM: tl.constexpr, WORDS_PADDED: tl.constexpr):
    """operands: (x, residual or None, weight or None, y, total). peers: (buffers' addresses, uses, this rank).

    strides: of x and residual, in words.
    """
    x_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr = operands
    peers_ptr, uses_ptr, rank = peers
    stride_x, stride_residual = strides
    RANKS: tl.constexpr = FORM.ranks
    WORDS: tl.constexpr = FORM.words
    PROGRAMS: tl.constexpr = FORM.programs
    ROW_SLOTS: tl.constexpr = FORM.row_slots
    TWO_SHOT: tl.constexpr = FORM.two_shot
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    word = tl.pointer_type(tl.int32)
    x_ptr, y_ptr, total_ptr = x_ptr.to(word), y_ptr.to(word), total_ptr.to(word)
    if residual_ptr is not None:
        residual_ptr = residual_ptr.to(word)
    program = tl.program_id(0)
    column = tl.arange(0, WORDS_PADDED)
    mask = column < WORDS
    source = tl.arange(0, RANKS)[:, None]
    # Each rank begins with its next neighbour, so that they do not all write to the same one; the last is itself.
    others = (rank + 1 + tl.arange(0, RANKS)) % RANKS
    peers = _peer(peers_ptr, others)[:, None]
    own = _peer(peers_ptr, rank)
    WIDE: tl.constexpr = False if weight_ptr is None else weight_ptr.dtype.element_ty == tl.float32
    weights = _load_weights(weight_ptr, column, mask, DTYPE) if weight_ptr is not None else None
    # Of `count` rows, the i-th belongs to rank (program + i) % RANKS.
    count = (num_rows - program + PROGRAMS - 1) // PROGRAMS
    first_owned = (rank + RANKS - program % RANKS) % RANKS
    wait_for_predecessor(FORM.overlap)

    uses = tl.load(uses_ptr + program)
    buffer = uses % BUFFERS * PROGRAMS + program
    parts = buffer.to(tl.int64) * (ROW_SLOTS * RANKS * WORDS)
    totals = (BUFFERS * PROGRAMS * ROW_SLOTS * RANKS + buffer.to(tl.int64) * (FORM.max_rows // PROGRAMS)) * WORDS
    for i in range(0, count):
        row = (program + i * PROGRAMS).to(tl.int64)
        words = _sendable(tl.load(x_ptr + row * stride_x + column, mask=mask, other=0))
        if TWO_SHOT:
            slot = parts + (i // RANKS * RANKS + rank) * WORDS
            tl.store(_peer(peers_ptr, (program + i) % RANKS) + slot + column, words, mask=mask)
        else:
            slot = parts + (i * RANKS + rank) * WORDS
            everyone = tl.broadcast_to(words[None, :], [RANKS, WORDS_PADDED])
            tl.store(peers + slot + column[None, :], everyone, mask=mask[None, :])

    step: tl.constexpr = RANKS if TWO_SHOT else 1
    for i in range(first_owned if TWO_SHOT else 0, count, step):
        row = (program + i * PROGRAMS).to(tl.int64)
        slot = parts + (i // step * RANKS + source) * WORDS
        residual = None
        if residual_ptr is not None:  # on its way while the parts are
            residual = tl.load(residual_ptr + row * stride_residual + column, mask=mask, other=0)
        low, high = _received_sum(own + slot + column[None, :], mask[None, :], DTYPE)
        total = _total(low, high, residual, DTYPE)
        if TWO_SHOT:
            everyone = tl.broadcast_to(total[None, :], [RANKS, WORDS_PADDED])
            not_me = tl.arange(0, RANKS)[:, None] < RANKS - 1
            tl.store(peers + totals + i * WORDS + column[None, :], everyone, mask=mask[None, :] & not_me)
        at = row * WORDS + column
        _store_row(total, weights, total_ptr + at, y_ptr + at, mask, eps, DTYPE, WORDS, WIDE)

    if TWO_SHOT:
        for i in range(0, count):
            if i % RANKS != first_owned:
                at = (program + i * PROGRAMS).to(tl.int64) * WORDS + column
                total = _receive(own + totals + i * WORDS + column, mask)
                _store_row(total, weights, total_ptr + at, y_ptr + at, mask, eps, DTYPE, WORDS, WIDE)
    tl.store(uses_ptr + program, uses + 1)


@triton.jit(do_not_specialize=["elements"])
def _all_gather_kernel(x_ptr, out_ptr, peers, elements, FORM: tl.constexpr, BLOCK: tl.constexpr):
    peers_ptr, uses_ptr, rank = peers
    RANKS: tl.constexpr = FORM.ranks
    WORDS: tl.constexpr = FORM.words
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)[None, :]
    source = tl.arange(0, RANKS)[:, None]
    at = program * BLOCK + column
    peers = _peer(peers_ptr, tl.arange(0, RANKS))[:, None]
    own = _peer(peers_ptr, rank)
    wait_for_predecessor(FORM.overlap)
    uses = tl.load(uses_ptr + program)
    buffer = uses % BUFFERS * FORM.programs + program
    parts = buffer.to(tl.int64) * (FORM.row_slots * RANKS * WORDS)
    # A word carries 16 bits of any kind, so that none is EMPTY.
    words = tl.load(x_ptr + at, mask=at < elements, other=0).to(tl.int32) & 0xFFFF
    tl.store(peers + parts + rank * WORDS + column, tl.broadcast_to(words, [RANKS, BLOCK]), mask=at < elements)
    received = _receive(own + parts + source * WORDS + column, at < elements)
    tl.store(out_ptr + source * elements + at, received.to(tl.int16), mask=at < elements)
    tl.store(uses_ptr + program, uses + 1)


def all_reduce(
    x: Tensor, total: Tensor, buffers: PeerBuffers, two_shot: bool, norm: Norm = (None, None, 0.0, None)
) -> None:
    """Write the sum to `total` and, if there is a weight, its norm to y; the arguments are checked."""
    residual, weight, eps, y = norm
    words_padded = triton.next_power_of_2(buffers.row_words)
    operands = (x, residual, weight, total if y is None else y, total)
    strides = (x.stride(0) // 2, 0 if residual is None else residual.stride(0) // 2)
    peers, form = (buffers.peers, buffers.uses, buffers.rank), _form_of(buffers, two_shot)
    options = {"num_warps": min(MAX_WARPS, max(4, words_padded // 128)), "launch_pdl": form.overlap}
    launch(_all_reduce_kernel, (min(x.shape[0], buffers.programs),))(
        operands, peers, x.shape[0], eps, strides, FORM=form, WORDS_PADDED=words_padded, **options
    )


def all_gather(x: Tensor, out: Tensor, buffers: PeerBuffers) -> None:
    """Write the ranks' x to `out`; the arguments are checked."""
    elements, block = x.nbytes // 2, buffers.gather_elements
    x_words, out_words = x.view(torch.int16), out.view(torch.int16)
    peers, form = (buffers.peers, buffers.uses, buffers.rank), _form_of(buffers, two_shot=False)
    launch(_all_gather_kernel, (triton.cdiv(elements, block),))(
        x_words, out_words, peers, elements, FORM=form, BLOCK=block, num_warps=4, launch_pdl=form.overlap
    )
