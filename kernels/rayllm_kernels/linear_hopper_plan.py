"""Which projections the Hopper kernel takes, and how it cuts them: from shapes alone, by sweeps on an H200.

The sweeps timed the layers of Llama-3.1-8B (whole and cut in four), Llama-3.2-1B, Qwen2.5-1.5B and Qwen3-0.6B in bf16
for 16 to 256 tokens. What decides: every multiprocessor should read weights; programs that share a tile's K hand over
their sums, which takes 2 to 3 us; a tile's inputs are read again for every tile of outputs, from L2, whose rate bounds
the products of 100 tokens and more.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MAX_TOKENS = 128
BLOCK_ROWS = 64  # of the weights, by one instruction
MAX_ROWS = 65536  # above are the heads of language models
FULL = 0.7  # of the multiprocessors: with so many tiles none is shared
WELL_FULL = 0.8  # below, fewer or smaller tiles leave too much idle


class Tile(NamedTuple):
    """A tile's tokens (a power of two), its consumers (1 or 2), blocks of 64 weight rows for each of them (1 or 2).

    stages: of the ring. registers: of a thread when a program starts; 128 leave room for two programs a multiprocessor.
    """

    tokens: int
    consumers: int
    blocks: int
    stages: int
    registers: int

    @property
    def rows(self) -> int:
        return self.consumers * self.blocks * BLOCK_ROWS


# Two programs a multiprocessor for few weights, where waiting counts; else large tiles, which read less from L2.
NARROW = {tokens: Tile(tokens, 1, 1, stages, 128) for tokens, stages in ((16, 9), (32, 8), (64, 6), (128, 4))}
WIDE = {tokens: Tile(tokens, 2, 1, stages, 168) for tokens, stages in ((16, 10), (32, 8), (64, 8), (128, 6))}
WIDEST = Tile(128, 2, 2, 4, 168)
TILES = (*NARROW.values(), *WIDE.values(), WIDEST)


def hopper_takes(x: Tensor, weight: Tensor, gated: bool) -> bool:
    """Whether the kernel can run these checked tensors: tensor copies want rows that start at multiples of 16 bytes.

    Gate and up are cut into groups of eight rows.
    """
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and min(x.shape[0], x.shape[1], weight.shape[0]) > 0
        and all(t.data_ptr() % 16 == 0 and t.stride(0) % 8 == 0 and t.stride(0) >= t.shape[1] for t in (x, weight))
        and not (gated and weight.shape[0] % 16)
    )


def _others_win(tokens: int, rows: int, inputs: int, gated: bool) -> bool:
    """Whether `linear_tiles` (up to 64 tokens) or cuBLAS was faster for weights [rows, inputs]."""
    if tokens > 64:
        return not gated and (rows * inputs > 4 << 20 or min(rows, inputs) > 1024)
    if tokens > 32:
        return not gated and rows >= 2048 and inputs <= 4096
    if tokens > 16:
        return not gated and (rows > MAX_ROWS or (rows >= 3072 and inputs <= 1024))
    return rows * inputs <= 6 << 20 or rows > MAX_ROWS


def _plan_wide(tokens: int, rows: int, multiprocessors: int) -> tuple[Tile, int] | None:
    tiles = -(-rows // 128)
    if tokens == MAX_TOKENS:
        for tile in (WIDE[tokens], WIDEST):
            if WELL_FULL * multiprocessors < -(-rows // tile.rows) <= multiprocessors:
                return tile, -(-rows // tile.rows)
        return None
    return WIDE[tokens], max(1, multiprocessors // tiles) * tiles if tiles <= multiprocessors else multiprocessors


def _plan_narrow(tokens: int, tile_tokens: int, rows: int, multiprocessors: int) -> tuple[Tile, int] | None:
    def count() -> int:
        return -(-rows // BLOCK_ROWS) * -(-tokens // tile_tokens)

    # Fewer tokens a tile rather than many programs on one tile's K.
    while tile_tokens > 16 and (
        count() * (5 if tile_tokens == 64 else 8) <= multiprocessors
        or (tile_tokens == 128 and 2 * count() <= multiprocessors)
    ):
        tile_tokens //= 2
    tile, tiles = NARROW[tile_tokens], count()
    if tiles >= FULL * multiprocessors:
        return tile, min(tiles, 2 * multiprocessors)
    programs = multiprocessors // tiles * tiles
    if programs < WELL_FULL * multiprocessors:
        if tokens > 64:
            return None
        programs = 2 * multiprocessors // tiles * tiles
    return tile, programs


def plan_hopper(tokens: int, rows: int, inputs: int, gated: bool, multiprocessors: int) -> tuple[Tile, int] | None:
    """Tile and number of programs for weights [rows, inputs]; None where another kernel was faster."""
    if tokens > MAX_TOKENS or _others_win(tokens, rows, inputs, gated):
        return None
    tile_tokens = max(16, 1 << (tokens - 1).bit_length())
    if rows > 2048 and rows * inputs > 8 << 20:
        return _plan_wide(tile_tokens, rows, multiprocessors)
    return _plan_narrow(tokens, tile_tokens, rows, multiprocessors)
