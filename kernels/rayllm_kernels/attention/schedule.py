"""How a decode step's attention is cut into equal ranges, on the device.

Sequence b has tiles(b) = ceil(seq_len / keys) - first visible key // keys key tiles a KV head. Laid end to end, the
T tiles of all sequences are cut every ceil(T / num_ranges); range r holds tiles r * quota to (r + 1) * quota, which may
begin and end inside a sequence ("stream-K": Osama, Merrill, Cecka, Garland, Owens, 2023). So every program of the
attention kernel gets the same work however ragged the batch is, and nothing here or there depends on host values:
a captured graph stays right as sequences grow.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..cache.kv_cache import KVCache
from ..checks import fail
from ..device import hardware
from ..dispatch import TritonModule, on_triton
from .context import Contexts, Scoring, Tiles, check_decodes

RANGE_FIELDS = 7
CUT_FIELDS = 3
# Of `latent_hopper.py`: keys of a tile, and heads of a program, at most.
LATENT_KEYS = 64
LATENT_HEADS = 32

_kernel = TritonModule("rayllm_kernels.attention.schedule_kernel")


class DecodeSchedule(NamedTuple):
    """The work of one decode step, cut into ranges of equal size. It serves all layers."""

    contexts: Tensor  # [B, 2] int32: (sequence, its length), in order, padding rows last
    # [num_ranges, 7] int32: row of `contexts` in which the range begins, that sequence, its length, the position of its
    # first tile, the range's first tile, its end, whether the range has padding rows to zero.
    ranges: Tensor
    # [min(B, num_ranges - 1), 3] int32: (sequence, first of its ranges, number of its ranges) of sequences that borders
    # cut, then zeros.
    cuts: Tensor
    partials: Tensor  # [2 * num_ranges, Hq, D] fp32, scratch for sequences that borders cut
    lse: Tensor  # [2 * num_ranges, Hq] fp32, scratch too
    keys: int  # of a tile

    def check(self, q: Tensor, cache: KVCache, scoring: Scoring) -> None:
        """Raise ValueError unless it was made for queries like q [B, Hq, D] over a cache like this one, and such
        scoring.
        """
        made_for = (self.contexts.shape[0], *self.partials.shape[1:])
        wanted = (*q.shape[:2], cache.v.shape[3])
        if made_for != wanted:
            fail("schedule", f"must be made for queries of shape {wanted}", made_for)
        if self.ranges.device != q.device:
            fail("schedule", f"must be on {q.device}", self.ranges.device)
        keys = choose_tiles(q, cache, scoring).keys
        if self.keys != keys:
            fail("schedule", f"must be made for such a cache and such scoring, whose tiles have {keys} keys", self.keys)


def choose_tiles(q: Tensor, cache: KVCache, scoring: Scoring) -> Tiles:
    """The fastest tiles on H200, less what does not fit a smaller GPU."""
    head_dim, itemsizes = cache.v.shape[3], (q.element_size(), cache.k.element_size())
    rows = max(16, 1 << (head_tile(q, cache, scoring) - 1).bit_length())
    rest = q.shape[2] - head_dim
    if hopper_takes(q, cache, scoring):
        return Tiles(rows, LATENT_KEYS, 4, 2, 1)
    tiles = _latent_tiles(rows, itemsizes[0]) if rest else _fastest_tiles(rows, head_dim, *itemsizes)
    queries_move = cache.scales is None
    return tiles.fitted(head_dim, *itemsizes, hardware(q.device), queries_move=queries_move, rest=rest)


def hopper_takes(q: Tensor, cache: KVCache, scoring: Scoring) -> bool:
    """Whether `latent_hopper.py` can run these checked tensors with this scoring.

    A copy moves a power of two of slots, at least the 8 after which the layout of shared memory repeats; blocks must
    lie whole slots apart, at addresses that are multiples of 16 bytes.
    """
    num_blocks, _, block_size, width = cache.k.shape
    latent, (stride_block, _, stride_slot, _) = cache.v.shape[3], cache.k.stride()
    return (
        cache.is_latent
        and hardware(q.device).is_hopper
        and scoring.is_plain
        and q.dtype in (torch.bfloat16, torch.float16)
        and latent in (128, 256, 512)
        and width - latent == 64
        and block_size % 8 == 0
        and stride_slot % 8 == 0
        and stride_block % stride_slot == 0
        and 0 < num_blocks * (stride_block // stride_slot) < 1 << 31
        and cache.k.data_ptr() % 16 == 0
    )


def _fastest_tiles(rows: int, head_dim: int, itemsize: int, cache_itemsize: int) -> Tiles:
    """As measured on H200: 16 KB of keys a tile and two tiles ahead; two programs of that fit a multiprocessor.

    Converting fp8 keeps a program from loading, so that more of them, of two warps each, are faster; measured for
    heads of 128.
    """
    if head_dim > 256:  # not measured
        return Tiles(rows, 32 if cache_itemsize == 1 else 16, 4, 2 if itemsize == 4 else 3)
    if itemsize == 4:  # no tensor cores in exact fp32: larger tiles spill registers
        return Tiles(rows, 32 if head_dim <= 128 else 16, 4, 2)
    if cache_itemsize == 1:
        if 64 < head_dim <= 128:
            return Tiles(rows, 64, 2, 3, 4)
        return Tiles(rows, 64 if head_dim > 128 else 128, 4, 3 if head_dim > 64 else 5)
    if head_dim > 128:
        return Tiles(rows, 32, 4, 3)
    return Tiles(rows, 64 if head_dim > 64 else 128, 4, 3)


def _latent_tiles(rows: int, itemsize: int) -> Tiles:
    """For a cache of latents; not measured. A tile's keys are its values too, and fill a multiprocessor once."""
    return Tiles(rows, 32 if itemsize == 2 else 16, 4, 3 if itemsize == 2 else 2, 1)


def head_tile(q: Tensor, cache: KVCache, scoring: Scoring) -> int:
    """Query heads of one KV head that one program takes, whose outputs have to fit its registers."""
    group, head_dim = q.shape[1] // cache.k.shape[1], cache.v.shape[3]
    most = 64 if head_dim <= 256 else 16
    return min(group, LATENT_HEADS if hopper_takes(q, cache, scoring) else most)


def programs_a_range(q: Tensor, cache: KVCache, scoring: Scoring) -> int:
    """Programs that share one range: one a KV head, more if it has very many query heads."""
    heads, kv_heads = q.shape[1], cache.k.shape[1]
    return kv_heads * -(-heads // kv_heads // head_tile(q, cache, scoring))


def decode_schedule(
    q: Tensor, cache: KVCache, contexts: Contexts, scoring: Scoring, *, num_ranges: int | None = None
) -> DecodeSchedule | None:
    """Cut the work of `paged_decode_attention` on these arguments into equal ranges, once for all layers of one shape.

    The contexts may not change until attention is done: it reads them and the schedule before it waits for the kernel
    before it (`dependent_launch.py`).
    Any layer's queries, cache and scoring will do: of them, only shapes, the sliding window and, over latents, whether
    the scoring is plain are used. num_ranges: None fills the device once. Returns None where the reference attends,
    which needs no schedule.
    """
    check_decodes(q, cache, contexts, scoring, None)
    (batch, heads), head_dim = q.shape[:2], cache.v.shape[3]
    if num_ranges is not None and num_ranges < 1:
        fail("num_ranges", "must be at least 1 or None", num_ranges)
    if not on_triton(q):
        return None
    tiles = choose_tiles(q, cache, scoring)
    if num_ranges is None:
        programs = tiles.programs * hardware(q.device).multiprocessors
        num_ranges = max(1, programs // programs_a_range(q, cache, scoring))
    schedule = DecodeSchedule(
        contexts=torch.empty((batch, 2), dtype=torch.int32, device=q.device),
        ranges=torch.empty((num_ranges, RANGE_FIELDS), dtype=torch.int32, device=q.device),
        cuts=torch.empty((min(batch, num_ranges - 1), CUT_FIELDS), dtype=torch.int32, device=q.device),
        partials=torch.empty((2 * num_ranges, heads, head_dim), dtype=torch.float32, device=q.device),
        lse=torch.empty((2 * num_ranges, heads), dtype=torch.float32, device=q.device),
        keys=tiles.keys,
    )
    _kernel.fill(schedule, contexts.seq_lens, scoring.sliding_window, tiles.keys)
    return schedule
