"""All-reduce over GPUs that can write each other's memory, alone or with the residual add and RMSNorm that follow.

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

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .checks import check_like, check_rows, check_vector, fail
from .dependent_launch import can_overlap, wait_for_predecessor

BUFFERS = tl.constexpr(2)
MAX_WARPS = 16
GATHER_ELEMENTS = 512  # 16-bit elements of one program of `all_gather_small`
EMPTY = tl.constexpr(-1)  # 0xFFFFFFFF: two NaNs that no arithmetic makes
OTHER_NANS = tl.constexpr(0x7FFF7FFF)


@dataclass(frozen=True, slots=True)
class PeerBuffers:
    """One rank's view of the ranks' buffers, for rows of `hidden_size` elements of `dtype` (2 bytes each).

    peers: [size] int64 on the device, addresses of the ranks' buffers as this rank sees them, each of `num_words` int32
    and filled with -1 before the first call of any rank. uses: [programs] int32 on the device, zero at first, the
    rank's own. programs: at most the number of multiprocessors. max_rows: of one call, a multiple of `programs`. The
    same on all ranks, but for `rank`, `peers` and `uses`.
    """

    rank: int
    size: int
    hidden_size: int
    dtype: torch.dtype
    programs: int
    max_rows: int
    peers: Tensor
    uses: Tensor

    def __post_init__(self) -> None:
        if self.size not in (2, 4, 8):
            raise ValueError(f"size must be 2, 4 or 8, got {self.size}")
        if self.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"dtype must be float16 or bfloat16, got {self.dtype}")
        if self.hidden_size % 8 != 0:
            raise ValueError(f"hidden_size must be a multiple of 8, got {self.hidden_size}")
        if self.max_rows % self.programs != 0:
            raise ValueError(f"max_rows must be a multiple of {self.programs} programs, got {self.max_rows}")

    @property
    def row_slots(self) -> int:
        """Rows whose parts from all ranks a program can hold: all that it owns in a call of max_rows rows."""
        return -(-(self.max_rows // self.programs) // self.size)

    @property
    def max_one_shot_rows(self) -> int:
        return self.programs * self.row_slots

    @property
    def num_words(self) -> int:
        """Size of a rank's buffer in int32 words: received parts of rows, then received totals."""
        parts = self.programs * self.row_slots * self.size
        return BUFFERS.value * (parts + self.max_rows) * (self.hidden_size // 2)


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
def _total(low, high, residual, DTYPE: tl.constexpr, HAS_RESIDUAL: tl.constexpr):
    """The words of the rounded total of two fp32 halves and the residual's words."""
    if HAS_RESIDUAL:
        residual_low, residual_high = _halves(residual, DTYPE)
        low += residual_low
        high += residual_high
    return _sendable(_words(low, high, DTYPE))


@triton.jit
def _store_row(
    total, weight, total_ptr, y_ptr, mask, eps, HIDDEN: tl.constexpr, DTYPE: tl.constexpr, NORM: tl.constexpr
):
    """Store the total's words and, if NORM, those of its norm."""
    tl.store(total_ptr, total, mask=mask)
    if NORM:
        low, high = _halves(total, DTYPE)
        weight_low, weight_high = _halves(weight, DTYPE)
        scale = tl.rsqrt(tl.sum(low * low + high * high) / HIDDEN + eps)
        low = (low * scale).to(DTYPE).to(tl.float32) * weight_low
        high = (high * scale).to(DTYPE).to(tl.float32) * weight_high
        tl.store(y_ptr, _words(low, high, DTYPE), mask=mask)


@triton.jit
def _peer(peers_ptr, rank):
    """The words of rank `rank`'s buffer; `rank` may be a vector."""
    return tl.multiple_of(tl.load(peers_ptr + rank).to(tl.pointer_type(tl.int32)), 16)


@triton.jit(do_not_specialize=["num_rows"])
def _all_reduce_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    total_ptr,
    peers_ptr,
    uses_ptr,
    rank,
    num_rows,
    eps,
    stride_x,
    stride_residual,
    TWO_SHOT: tl.constexpr,
    RANKS: tl.constexpr,
    WORDS: tl.constexpr,
    WORDS_PADDED: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ROW_SLOTS: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    DTYPE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    word = tl.pointer_type(tl.int32)
    x_ptr, residual_ptr, weight_ptr = x_ptr.to(word), residual_ptr.to(word), weight_ptr.to(word)
    y_ptr, total_ptr = y_ptr.to(word), total_ptr.to(word)
    program = tl.program_id(0)
    column = tl.arange(0, WORDS_PADDED)
    mask = column < WORDS
    source = tl.arange(0, RANKS)[:, None]
    # Each rank begins with its next neighbour, so that they do not all write to the same one; the last is itself.
    others = (rank + 1 + tl.arange(0, RANKS)) % RANKS
    peers = _peer(peers_ptr, others)[:, None]
    own = _peer(peers_ptr, rank)
    weight = tl.load(weight_ptr + column, mask=mask, other=0) if NORM else column
    # Of `count` rows, the i-th belongs to rank (program + i) % RANKS.
    count = (num_rows - program + PROGRAMS - 1) // PROGRAMS
    first_owned = (rank + RANKS - program % RANKS) % RANKS
    wait_for_predecessor(OVERLAP)

    uses = tl.load(uses_ptr + program)
    buffer = uses % BUFFERS * PROGRAMS + program
    parts = buffer.to(tl.int64) * (ROW_SLOTS * RANKS * WORDS)
    totals = (BUFFERS * PROGRAMS * ROW_SLOTS * RANKS + buffer.to(tl.int64) * (MAX_ROWS // PROGRAMS)) * WORDS
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
        residual = column
        if HAS_RESIDUAL:  # on its way while the parts are
            residual = tl.load(residual_ptr + row * stride_residual + column, mask=mask, other=0)
        low, high = _received_sum(own + slot + column[None, :], mask[None, :], DTYPE)
        total = _total(low, high, residual, DTYPE, HAS_RESIDUAL)
        if TWO_SHOT:
            everyone = tl.broadcast_to(total[None, :], [RANKS, WORDS_PADDED])
            not_me = tl.arange(0, RANKS)[:, None] < RANKS - 1
            tl.store(peers + totals + i * WORDS + column[None, :], everyone, mask=mask[None, :] & not_me)
        at = row * WORDS + column
        _store_row(total, weight, total_ptr + at, y_ptr + at, mask, eps, 2 * WORDS, DTYPE, NORM)

    if TWO_SHOT:
        for i in range(0, count):
            if i % RANKS != first_owned:
                at = (program + i * PROGRAMS).to(tl.int64) * WORDS + column
                total = _receive(own + totals + i * WORDS + column, mask)
                _store_row(total, weight, total_ptr + at, y_ptr + at, mask, eps, 2 * WORDS, DTYPE, NORM)
    tl.store(uses_ptr + program, uses + 1)


@triton.jit(do_not_specialize=["elements"])
def _all_gather_kernel(
    x_ptr,
    out_ptr,
    peers_ptr,
    uses_ptr,
    rank,
    elements,
    RANKS: tl.constexpr,
    WORDS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ROW_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)[None, :]
    source = tl.arange(0, RANKS)[:, None]
    at = program * BLOCK + column
    peers = _peer(peers_ptr, tl.arange(0, RANKS))[:, None]
    own = _peer(peers_ptr, rank)
    wait_for_predecessor(OVERLAP)
    uses = tl.load(uses_ptr + program)
    buffer = uses % BUFFERS * PROGRAMS + program
    parts = buffer.to(tl.int64) * (ROW_SLOTS * RANKS * WORDS)
    # A word carries 16 bits of any kind, so that none is EMPTY.
    words = tl.load(x_ptr + at, mask=at < elements, other=0).to(tl.int32) & 0xFFFF
    tl.store(peers + parts + rank * WORDS + column, tl.broadcast_to(words, [RANKS, BLOCK]), mask=at < elements)
    received = _receive(own + parts + source * WORDS + column, at < elements)
    tl.store(out_ptr + source * elements + at, received.to(tl.int16), mask=at < elements)
    tl.store(uses_ptr + program, uses + 1)


def _check(x: Tensor, argument: str, buffers: PeerBuffers, two_shot: bool) -> None:
    if x.dim() != 2 or x.shape[1] != buffers.hidden_size:
        fail(argument, f"must be [M, {buffers.hidden_size}]", x.shape)
    if x.dtype != buffers.dtype:
        fail(argument, f"must be {buffers.dtype}", x.dtype)
    check_rows(x, argument)
    if x.stride(0) % 2 != 0 or x.storage_offset() % 2 != 0:
        fail(argument, "must have rows that begin at a multiple of 4 bytes", (x.storage_offset(), *x.stride()))
    most = buffers.max_rows if two_shot else buffers.max_one_shot_rows
    if not 1 <= x.shape[0] <= most:
        fail(argument, f"must have 1 to {most} rows", x.shape)


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    y: Tensor,
    total: Tensor,
    buffers: PeerBuffers,
    two_shot: bool,
) -> None:
    words = buffers.hidden_size // 2
    words_padded = triton.next_power_of_2(words)
    overlap = can_overlap(x.device)
    _all_reduce_kernel[(min(x.shape[0], buffers.programs),)](
        x,
        x if residual is None else residual,
        x if weight is None else weight,
        y,
        total,
        buffers.peers,
        buffers.uses,
        buffers.rank,
        x.shape[0],
        eps,
        x.stride(0) // 2,
        0 if residual is None else residual.stride(0) // 2,
        TWO_SHOT=two_shot,
        RANKS=buffers.size,
        WORDS=words,
        WORDS_PADDED=words_padded,
        PROGRAMS=buffers.programs,
        ROW_SLOTS=buffers.row_slots,
        MAX_ROWS=buffers.max_rows,
        DTYPE=_TRITON_DTYPES[x.dtype],
        HAS_RESIDUAL=residual is not None,
        NORM=weight is not None,
        OVERLAP=overlap,
        num_warps=min(MAX_WARPS, max(4, words_padded // 128)),
        launch_pdl=overlap,
    )


_TRITON_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def all_reduce_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, buffers: PeerBuffers, *, two_shot: bool
) -> tuple[Tensor, Tensor]:
    """(RMSNorm(total) * weight, total) of total = sum of the ranks' x + residual: two new tensors [M, H].

    x, residual: [M, H], rows of any even stride, last dimension contiguous; residual and weight [H] the same on all
    ranks. M is 1 to buffers.max_rows, or max_one_shot_rows. All ranks must call it alike.
    """
    _check(x, "x", buffers, two_shot)
    _check(residual, "residual", buffers, two_shot)
    if residual.shape != x.shape:
        fail("residual", f"must have the shape of x, {tuple(x.shape)}", residual.shape)
    check_like(residual, "residual", x, "x")
    check_vector(weight, "weight", buffers.hidden_size, x.dtype, x.device)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, residual, weight, eps, y, total, buffers, two_shot)
    return y, total


def all_reduce(x: Tensor, buffers: PeerBuffers, *, two_shot: bool) -> Tensor:
    """x [M, H], contiguous, becomes the sum of the ranks' x; returns it. M as for `all_reduce_add_rms_norm`."""
    _check(x, "x", buffers, two_shot)
    if not x.is_contiguous():
        fail("x", "must be contiguous", x.stride())
    _launch(x, None, None, 0.0, x, x, buffers, two_shot)
    return x


def gather_limit(buffers: PeerBuffers) -> int:
    """Bytes of a rank that `all_gather_small` can take."""
    return 2 * buffers.programs * _gather_block(buffers)


def _gather_block(buffers: PeerBuffers) -> int:
    return min(GATHER_ELEMENTS, 1 << ((buffers.hidden_size // 2).bit_length() - 1))


def all_gather_small(x: Tensor, buffers: PeerBuffers) -> Tensor:
    """The ranks' x in order of rank -> [size, *x.shape], bit by bit. x: contiguous, of 2, 4 or 8 bytes an element."""
    if not x.is_contiguous() or x.dim() == 0 or x.element_size() % 2 != 0:
        fail("x", "must be contiguous, of one dimension or more and 2, 4 or 8 bytes an element", (x.dtype, *x.stride()))
    if not 0 < x.nbytes <= gather_limit(buffers):
        fail("x", f"must have 1 to {gather_limit(buffers)} bytes", x.nbytes)
    out = torch.empty((buffers.size, *x.shape), dtype=x.dtype, device=x.device)
    block, elements = _gather_block(buffers), x.nbytes // 2
    overlap = can_overlap(x.device)
    _all_gather_kernel[(triton.cdiv(elements, block),)](
        x.view(torch.int16),
        out.view(torch.int16),
        buffers.peers,
        buffers.uses,
        buffers.rank,
        elements,
        RANKS=buffers.size,
        WORDS=buffers.hidden_size // 2,
        PROGRAMS=buffers.programs,
        ROW_SLOTS=buffers.row_slots,
        BLOCK=block,
        OVERLAP=overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
    return out
