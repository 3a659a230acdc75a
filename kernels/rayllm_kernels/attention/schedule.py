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

RANGE_FIELDS = 8

_kernel = TritonModule("rayllm_kernels.attention.schedule_kernel")


class DecodeSchedule(NamedTuple):
    """The work of one decode step, cut into ranges of equal size. It serves all layers."""

    contexts: Tensor  # [B, 2] int32: (sequence, its length), in order, padding rows last
    # [num_ranges, 8] int32: row of `contexts` in which the range begins, that sequence, its length, the position of its
    # first tile, the range's first tile, its end, tiles a range, whether the range has padding rows to zero.
    ranges: Tensor
    partials: Tensor  # [2 * num_ranges, Hq, D] fp32, scratch for sequences that borders cut
    lse: Tensor  # [2 * num_ranges, Hq] fp32, scratch too

    def check(self, q: Tensor, cache: KVCache) -> None:
        """Raise ValueError unless it was made for queries like q [B, Hq, D] over a cache like this one."""
        made_for = (self.contexts.shape[0], *self.partials.shape[1:])
        wanted = (*q.shape[:2], cache.v.shape[3])
        if made_for != wanted:
            fail("schedule", f"must be made for queries of shape {wanted}", made_for)
        if self.ranges.device != q.device:
            fail("schedule", f"must be on {q.device}", self.ranges.device)


def choose_tiles(q: Tensor, cache: KVCache) -> Tiles:
    """The fastest tiles on H200, less what does not fit a smaller GPU."""
    head_dim, itemsizes = cache.v.shape[3], (q.element_size(), cache.k.element_size())
    rows = max(16, 1 << (head_tile(q.shape[1], cache.k.shape[1], head_dim) - 1).bit_length())
    rest = q.shape[2] - head_dim
    tiles = _latent_tiles(rows, itemsizes[0]) if rest else _fastest_tiles(rows, head_dim, *itemsizes)
    queries_move = cache.scales is None
    return tiles.fitted(head_dim, *itemsizes, hardware(q.device), queries_move=queries_move, rest=rest)


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


def head_tile(heads: int, kv_heads: int, head_dim: int) -> int:
    """Query heads of one KV head that one program takes, whose outputs have to fit its registers."""
    return min(heads // kv_heads, 64 if head_dim <= 256 else 16)


def programs_a_range(heads: int, kv_heads: int, head_dim: int) -> int:
    """Programs that share one range: one a KV head, more if it has very many query heads."""
    return kv_heads * -(-heads // kv_heads // head_tile(heads, kv_heads, head_dim))


def decode_schedule(
    q: Tensor, cache: KVCache, contexts: Contexts, scoring: Scoring, *, num_ranges: int | None = None
) -> DecodeSchedule | None:
    """Cut the work of `paged_decode_attention` on these arguments into equal ranges, once for all layers of one shape.

    Any layer's queries, cache and scoring will do: of them, only shapes and the sliding window are used. num_ranges:
    None fills the device once. Returns None where the reference attends, which needs no schedule.
    """
    check_decodes(q, cache, contexts, scoring, None)
    (batch, heads), (_, kv_heads, _, head_dim) = q.shape[:2], cache.v.shape
    if num_ranges is not None and num_ranges < 1:
        fail("num_ranges", "must be at least 1 or None", num_ranges)
    if not on_triton(q):
        return None
    tiles = choose_tiles(q, cache)
    if num_ranges is None:
        programs = programs_a_range(heads, kv_heads, head_dim)
        num_ranges = max(1, tiles.programs * hardware(q.device).multiprocessors // programs)
    schedule = DecodeSchedule(
        contexts=torch.empty((batch, 2), dtype=torch.int32, device=q.device),
        ranges=torch.empty((num_ranges, RANGE_FIELDS), dtype=torch.int32, device=q.device),
        partials=torch.empty((2 * num_ranges, heads, head_dim), dtype=torch.float32, device=q.device),
        lse=torch.empty((2 * num_ranges, heads), dtype=torch.float32, device=q.device),
    )
    _kernel.fill(schedule, contexts.seq_lens, scoring.sliding_window, tiles.keys)
    return schedule
