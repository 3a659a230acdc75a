"""All-reduce over GPUs that can write each other's memory, alone or with the residual add and RMSNorm that follow.

    total = round(sum over ranks of x + residual),   y = RMSNorm(total) * weight   (the norm as in `rms_norm`)

There is no reference: on CPUs, and where GPUs cannot write each other's memory, ranks sum with torch.distributed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import check_like, check_norm_weight, check_rows, fail
from ..dispatch import TritonModule

BUFFERS = 2  # that a program takes turns between
GATHER_ELEMENTS = 512  # 16-bit elements of one program of `all_gather_small`

_kernel = TritonModule("rayllm_kernels.collectives.all_reduce_kernel")


@dataclass(frozen=True, slots=True)
class PeerBuffers:
    """One rank's view of the ranks' buffers, for rows of `hidden_size` elements of `dtype` (2 bytes each).

    All but `rank`, `peers` and `uses` are the same on all ranks. The numbers are not checked: who makes it chooses
    them as the comments say.
    """

    rank: int
    size: int  # number of ranks: 2, 4 or 8
    hidden_size: int  # a multiple of 8
    dtype: torch.dtype  # float16 or bfloat16
    programs: int  # of a launch, at most the number of multiprocessors
    max_rows: int  # of one call, a multiple of `programs`
    # [size] int64 on the device: addresses of the ranks' buffers as this rank sees them, each of `num_words` int32 and
    # filled with -1 before the first call of any rank.
    peers: Tensor
    uses: Tensor  # [programs] int32 on the device, zero at first, the rank's own

    @property
    def row_words(self) -> int:
        """int32 words of a row."""
        return self.hidden_size // 2

    @property
    def row_slots(self) -> int:
        """Rows whose parts from all ranks a program can hold: all that it owns in a call of max_rows rows."""
        return -(-(self.max_rows // self.programs) // self.size)

    @property
    def max_one_shot_rows(self) -> int:
        """The most rows of a call in one shot."""
        return self.programs * self.row_slots

    @property
    def num_words(self) -> int:
        """Size of a rank's buffer in int32 words: received parts of rows, then received totals."""
        parts = self.programs * self.row_slots * self.size
        return BUFFERS * (parts + self.max_rows) * self.row_words

    @property
    def gather_elements(self) -> int:
        """16-bit elements that a program of `all_gather_small` takes, a power of two."""
        return min(GATHER_ELEMENTS, 1 << (self.row_words.bit_length() - 1))

    @property
    def gather_limit(self) -> int:
        """The most bytes of a rank that `all_gather_small` can take."""
        return 2 * self.programs * self.gather_elements

    def check(self, x: Tensor, argument: str, two_shot: bool) -> None:
        """Raise ValueError unless `x` is rows that the kernels can sum through these buffers."""
        check_rows(x, argument)
        if x.shape[1:] != (self.hidden_size,) or x.dtype != self.dtype:
            fail(argument, f"must be [M, {self.hidden_size}] of {self.dtype}", (x.dtype, *x.shape))
        if x.stride(0) % 2 != 0 or x.storage_offset() % 2 != 0:
            fail(argument, "must have rows that begin at a multiple of 4 bytes", (x.storage_offset(), *x.stride()))
        most = self.max_rows if two_shot else self.max_one_shot_rows
        if not 1 <= x.shape[0] <= most:
            fail(argument, f"must have 1 to {most} rows", x.shape)


def all_reduce_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, buffers: PeerBuffers, *, two_shot: bool
) -> tuple[Tensor, Tensor]:
    """(RMSNorm(total) * weight, total) of total = sum of the ranks' x + residual: two new tensors [M, H].

    x, residual: [M, H], rows of any even stride, last dimension contiguous; residual and weight [H], in x's dtype or in
    fp32 as for `rms_norm`, the same on all ranks. M is 1 to buffers.max_rows, or max_one_shot_rows. All ranks must call
    it alike.
    """
    buffers.check(x, "x", two_shot)
    buffers.check(residual, "residual", two_shot)
    if residual.shape != x.shape:
        fail("residual", f"must have the shape of x, {tuple(x.shape)}", residual.shape)
    check_like(residual, "residual", x, "x")
    check_norm_weight(weight, "weight", buffers.hidden_size, x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _kernel.all_reduce(x, total, buffers, two_shot, (residual, weight, eps, y))
    return y, total


def all_reduce(x: Tensor, buffers: PeerBuffers, *, two_shot: bool) -> Tensor:
    """x [M, H], contiguous, becomes the sum of the ranks' x; returns it. M as for `all_reduce_add_rms_norm`."""
    buffers.check(x, "x", two_shot)
    if not x.is_contiguous():
        fail("x", "must be contiguous", x.stride())
    _kernel.all_reduce(x, x, buffers, two_shot)
    return x


def all_gather_small(x: Tensor, buffers: PeerBuffers) -> Tensor:
    """The ranks' x in order of rank -> [size, *x.shape], bit by bit. x: contiguous, of 2, 4 or 8 bytes an element."""
    if not x.is_contiguous() or x.dim() == 0 or x.element_size() % 2 != 0:
        fail("x", "must be contiguous, of one dimension or more and 2, 4 or 8 bytes an element", (x.dtype, *x.stride()))
    if not 0 < x.nbytes <= buffers.gather_limit:
        fail("x", f"must have 1 to {buffers.gather_limit} bytes", x.nbytes)
    out = torch.empty((buffers.size, *x.shape), dtype=x.dtype, device=x.device)
    _kernel.all_gather(x, out, buffers)
    return out
