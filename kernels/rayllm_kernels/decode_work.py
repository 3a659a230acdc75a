"""How decode attention cuts its work: the parts that need no Triton."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MAX_HEAD_TILE = 64  # query heads of one KV head that one program takes
RANGE_FIELDS = 8


class DecodeSchedule(NamedTuple):
    """The work of one decode step, cut into ranges of equal size; `decode_schedule.py` says how. It serves all layers.

    contexts: [B, 2] int32: (sequence, its length), in order, padding rows last.
    ranges: [num_ranges, 8] int32: row of `contexts` in which the range begins, that sequence, its length, the position
        of its first tile, the range's first tile, its end, tiles a range, whether the range has padding rows to zero.
    partials: [2 * num_ranges, Hq, D] fp32 and lse: [2 * num_ranges, Hq] fp32, scratch for sequences that borders cut.
    """

    contexts: Tensor
    ranges: Tensor
    partials: Tensor
    lse: Tensor


class Tiles(NamedTuple):
    """Keys a tile, warps a program, pipeline stages, and programs that a multiprocessor runs at once."""

    keys: int
    num_warps: int
    num_stages: int
    programs: int = 2


def choose_tiles(head_dim: int, itemsize: int, cache_itemsize: int) -> Tiles:
    """As measured on H200: 16 KB of keys a tile and two tiles ahead; two programs of that fit a multiprocessor.

    itemsize: of queries. cache_itemsize: of keys. Converting fp8 keeps a program from loading, so that more of them, of
    two warps each, are faster; measured for heads of 128.
    """
    if itemsize == 4:  # no tensor cores in exact fp32: larger tiles spill registers
        return Tiles(32 if head_dim <= 128 else 16, 4, 2)
    if cache_itemsize == 1:
        if 64 < head_dim <= 128:
            return Tiles(64, 2, 3, 4)
        return Tiles(64 if head_dim > 128 else 128, 4, 3 if head_dim > 64 else 5)
    if head_dim > 128:
        return Tiles(32, 4, 3)
    return Tiles(64 if head_dim > 64 else 128, 4, 3)


def programs_a_range(heads: int, kv_heads: int) -> int:
    """Programs that share one range: one a KV head, more if it has very many query heads."""
    return kv_heads * -(-heads // kv_heads // MAX_HEAD_TILE)


def choose_num_ranges(programs: int, multiprocessors: int, tiles: Tiles) -> int:
    """Ranges that fill the device once, at so many programs a range."""
    return max(1, tiles.programs * multiprocessors // programs)


def empty_schedule(q: Tensor, num_ranges: int) -> DecodeSchedule:
    """A schedule for queries like q [B, Hq, D], not yet filled in."""
    heads, head_dim = q.shape[1:]
    return DecodeSchedule(
        contexts=torch.empty((q.shape[0], 2), dtype=torch.int32, device=q.device),
        ranges=torch.empty((num_ranges, RANGE_FIELDS), dtype=torch.int32, device=q.device),
        partials=torch.empty((2 * num_ranges, heads, head_dim), dtype=torch.float32, device=q.device),
        lse=torch.empty((2 * num_ranges, heads), dtype=torch.float32, device=q.device),
    )
