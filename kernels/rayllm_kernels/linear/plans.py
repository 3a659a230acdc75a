"""Which kernel computes a projection, with which tiles: from shapes, layout and dtype alone, by sweeps on an H200.

So a captured graph and an eager call agree. Weights are [rows, inputs]; a gated projection's hold gate and up, two rows
an output. docs/performance.md and benchmarks/RESULTS.md have the figures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..lora.lora import TokenAdapters

# ---- one or two tokens: `rows_kernel` ----

LONG = 4096  # inputs from which the tensor cores win for two tokens, and many small programs for one
MAX_NORM_INPUTS = 2048  # for two tokens: every program repeats the norm, and its reads must stay few beside the weights
ADAPTER_PARTS = 2  # of the inputs, in which they are multiplied with adapters' first matrices
MAX_RANKS = 256  # of adapters
MAX_SHRUNK, MAX_ADDED = 1 << 16, 1 << 18  # words of what adapters shrink, and of what they add, in one launch


def rows_take(x: Tensor, weight: Tensor, *, norm: bool, adapters: TokenAdapters | None = None) -> bool:
    """Whether `rows_kernel` is the fastest for x [T, in], with the norm of x in it if `norm`, and adapters if any."""
    tokens, inputs = x.shape
    fits = 0 < tokens <= (2 if inputs < LONG else 1) and inputs > 0 and weight.shape[0] > 0
    fits = fits and (not norm or tokens == 1 or inputs <= MAX_NORM_INPUTS)
    if adapters is None:
        return fits
    _slots, projections, ranks, _inputs = adapters.weights.a.shape
    shrunk, added = ADAPTER_PARTS * tokens * projections * ranks, tokens * weight.shape[0]
    return fits and 0 < ranks <= MAX_RANKS and shrunk <= MAX_SHRUNK and added <= MAX_ADDED


def choose_rows(tokens: int, inputs: int, *, gated: bool, norm: bool) -> tuple[int, int]:
    """Outputs and warps of a program; not measured as a set.

    Where a few tiles span K, they should be large, because the first ones are read before the previous kernel ends. The
    more is computed besides the products (tokens, two halves, the norm), the fewer rows a thread's registers hold.
    """
    if gated and tokens > 1:
        return 4, 4
    if norm or inputs < 2048:
        return 8, 4
    return (2, 4) if inputs >= LONG and tokens == 1 else (4, 8)


# ---- up to 64 tokens, on any GPU: `tiles_kernel` ----

MAX_TILES_TOKENS = 64
MIN_SHARED_MEMORY = 200 << 10  # bytes a program must be able to take, for the deepest pipelines below


class Tiles(NamedTuple):
    """What one program of `tiles_kernel` or `invariant_kernel` works with."""

    tokens: int
    outputs: int
    depth: int  # of K
    num_warps: int
    num_stages: int
    weights_first: bool  # weights are the first operand
    slices: int = 1  # of the depth, each a product of its own
    copied: bool = False  # by tensor copies


def choose_tiles(tokens: int, outputs: int, gated: bool, multiprocessors: int) -> Tiles:
    """As wide as leaves no multiprocessor idle, deep where narrow."""
    padded = max(16, 1 << (tokens - 1).bit_length())  # the least that tensor cores take, and powers of two
    if tokens <= 32 and outputs <= 16 * multiprocessors:
        return Tiles(padded, 8, 512, 4, 4 if tokens <= 16 else 3, False, slices=4)
    if tokens <= 16 and not gated:
        return Tiles(padded, 32, 256, 4, 4, False)
    if 16 < tokens <= 32:
        return Tiles(padded, 64, 128, 4, 4 if gated else 6, True)
    wide = outputs > 40 * multiprocessors
    return Tiles(padded, 64, 128, 4, 4, True) if wide else Tiles(padded, 32, 128, 4, 5, False)


# ---- up to 128 tokens, on Hopper: `hopper_kernel` ----

# The sweeps timed the layers of Llama-3.1-8B (whole and cut in four), Llama-3.2-1B, Qwen2.5-1.5B and Qwen3-0.6B in bf16
# for 16 to 256 tokens. What decides: every multiprocessor should read weights; programs that share a tile's K hand over
# their sums, which takes 2 to 3 us; a tile's inputs are read again for every tile of outputs, from L2, whose rate
# bounds the products of 100 tokens and more.
MAX_HOPPER_TOKENS = 128
BLOCK_ROWS = 64  # of the weights, by one instruction
MAX_ROWS = 65536  # above are the heads of language models
SMALL = 1 << 18  # weights that are read sooner than sums are handed over: those of routers
FULL = 0.7  # of the multiprocessors: with so many tiles none is shared
MORE_TOKENS = 256  # of e4m3 products of few outputs
LONG_STEPS = 32  # of 128 inputs, from which two programs or more share a tile of those
WELL_FULL = 0.8  # below, fewer or smaller tiles leave too much idle


class HopperTile(NamedTuple):
    """What one program of `hopper_kernel` works with."""

    tokens: int  # a power of two, or for 4 bits the sum of two
    consumers: int  # 1 or 2
    blocks: int  # of 64 weight rows for each consumer, 1 or 2
    stages: int  # of the ring
    registers: int  # of a thread when a program starts; 128 leave room for two programs a multiprocessor
    act: str | None = None  # of a gate, whose rows and those of up take turns, eight by eight
    depth: int = 64  # of K, 128 bytes
    scale_rows: int = 0  # of e4m3 weights that share a scale, 1 for all of K, more for `depth` of K; 0 for no e4m3
    own_sums: bool = False  # e4m3 products with a scale a row are added up by the tensor cores, with the bits they have

    @property
    def rows(self) -> int:
        return self.consumers * self.blocks * BLOCK_ROWS


HopperPlan = tuple[HopperTile, int]  # and the number of programs

# Two programs a multiprocessor for few weights, where waiting counts; else large tiles, which read less from L2.
NARROW = {tokens: HopperTile(tokens, 1, 1, stages, 128) for tokens, stages in ((16, 9), (32, 8), (64, 6), (128, 4))}
WIDE = {tokens: HopperTile(tokens, 2, 1, stages, 168) for tokens, stages in ((16, 10), (32, 8), (64, 8), (128, 6))}
WIDEST = HopperTile(128, 2, 2, 4, 168)
WIDE_OWN_SUMS = WIDE[128]._replace(own_sums=True)
HOPPER_TILES = (*NARROW.values(), *WIDE.values(), WIDEST)


MAX_PROJECTIONS = 4  # with adapters, of one product
MAX_COLUMNS = 31 * 64  # of adapters' second matrices, in groups of 64 of which each is a bit of a word
MAX_GROUPS = 4096  # of rows of adapters' first matrices and of tokens


def hopper_takes_adapters(tokens: int, adapters: TokenAdapters, gated: bool) -> bool:
    """Whether the Hopper kernel, which takes the rest, can add what adapters give. Gate and up are one each, or one."""
    slots, projections, ranks, _inputs = adapters.weights.a.shape
    rows, columns = adapters.weights.rows, slots * ranks
    return (
        0 < tokens <= MAX_HOPPER_TOKENS
        and 0 < projections <= (2 if gated else MAX_PROJECTIONS)
        and (not gated or len(set(rows)) == 1)
        and 0 < columns <= MAX_COLUMNS
        and columns % 8 == 0
        and slots * projections * -(-ranks // 16) * -(-tokens // 16) <= MAX_GROUPS
        and all(t.data_ptr() % 16 == 0 for t in adapters.weights[:2])
    )


def hopper_takes(x: Tensor, weight: Tensor, gated: bool) -> bool:
    """Whether the Hopper kernels can run these checked tensors: tensor copies want rows at multiples of 16 bytes.

    Gate and up are cut into groups of eight rows.
    """
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and min(x.shape[0], x.shape[1], weight.shape[0]) > 0
        and all(t.data_ptr() % 16 == 0 and t.stride(0) % 8 == 0 and t.stride(0) >= t.shape[1] for t in (x, weight))
        and not (gated and weight.shape[0] % 16)
    )


def _others_win(tokens: int, rows: int, inputs: int, gated: bool) -> bool:
    """Whether `tiles_kernel` (up to 64 tokens) or cuBLAS was faster for weights [rows, inputs]."""
    if tokens > 64:
        return not gated and (rows * inputs > 4 << 20 or min(rows, inputs) > 1024)
    if tokens > 32:
        return not gated and rows >= 2048 and inputs <= 4096
    if tokens > 16:
        return not gated and (rows > MAX_ROWS or (rows >= 3072 and inputs <= 1024) or rows * inputs <= SMALL)
    return rows * inputs <= 6 << 20 or rows > MAX_ROWS


def _plan_wide(tokens: int, rows: int, multiprocessors: int) -> HopperPlan | None:
    tiles = -(-rows // 128)
    if tokens == MAX_HOPPER_TOKENS:
        for tile in (WIDE[tokens], WIDEST):
            if WELL_FULL * multiprocessors < -(-rows // tile.rows) <= multiprocessors:
                return tile, -(-rows // tile.rows)
        return None
    return WIDE[tokens], max(1, multiprocessors // tiles) * tiles if tiles <= multiprocessors else multiprocessors


def _plan_narrow(tokens: int, tile_tokens: int, rows: int, multiprocessors: int) -> HopperPlan | None:
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


def plan_hopper(
    tokens: int, rows: int, inputs: int, gated: bool, multiprocessors: int, *, adapted: bool = False
) -> HopperPlan | None:
    """Tile and number of programs for weights [rows, inputs]; None where another kernel was faster.

    adapted: there are adapters, which other kernels have launches of their own for.
    """
    if tokens > MAX_HOPPER_TOKENS or (not adapted and _others_win(tokens, rows, inputs, gated)):
        return None
    tile_tokens = max(16, 1 << (tokens - 1).bit_length())
    if rows > 2048 and rows * inputs > 8 << 20:
        return _plan_wide(tile_tokens, rows, multiprocessors)
    return _plan_narrow(tokens, tile_tokens, rows, multiprocessors)


def plan_hopper_fp8(
    tokens: int, rows: int, inputs: int, multiprocessors: int, *, row_scales: bool
) -> HopperPlan | None:
    """The same for e4m3, whose stages are as many bytes and whose consumers hold a second tile of sums.

    row_scales: a row of weights has one scale, so that the second tile can be spared.
    """
    if tokens > MAX_HOPPER_TOKENS:
        return _plan_more(tokens, rows, inputs, multiprocessors, row_scales)
    tile_tokens = max(16, 1 << (tokens - 1).bit_length())
    if tokens > 64:
        # Sums of so many tokens take long to hand over, so that programs have 16 units at least.
        tiles, steps = -(-rows // BLOCK_ROWS), -(-inputs // 128)
        if tiles > multiprocessors:
            return None
        return NARROW[tile_tokens], tiles * max(
            multiprocessors // tiles, min(2 * multiprocessors // tiles, steps // 16)
        )
    if rows > 2048 and rows * inputs >= 16 << 20:
        return _plan_wide(tile_tokens, rows, multiprocessors)
    return _plan_narrow(tokens, tile_tokens, rows, multiprocessors)


def _plan_more(tokens: int, rows: int, inputs: int, multiprocessors: int, row_scales: bool) -> HopperPlan | None:
    """Of 129 to 256 tokens and so few outputs that PyTorch's product leaves many multiprocessors idle."""
    if tokens > MORE_TOKENS:
        return None

    def count(tile: HopperTile) -> int:
        return -(-rows // tile.rows) * -(-tokens // tile.tokens)

    # A tile, and how many programs it must have at least.
    tile, least = (NARROW[64], 1) if -(-inputs // 128) < LONG_STEPS else (NARROW[128], 2)
    if row_scales and count(tile) * least > multiprocessors:
        tile, least = WIDE_OWN_SUMS, 2
    tiles = count(tile)
    return None if tiles * least > multiprocessors else (tile, multiprocessors // tiles * tiles)


# ---- 512 tokens and more, gated, on Hopper: `gated_hopper_kernel` ----

# The sweeps timed the same models for 512 to 16,384 tokens. What decides is how full the programs' last round of tiles
# is: from about nine tenths on, all rounds together, the kernel was faster than cuBLAS and the activation on its own;
# below, cuBLAS has smaller tiles to choose.
GATED_BLOCK_TOKENS = 64  # of a consumer, by one instruction
GATED_TILE_OUTPUTS = 128
MIN_GATED_TOKENS = 512
MIN_GATED_INPUTS = 1024
GATED_FULL = 0.9  # of the multiprocessors' rounds of tiles, below which others are faster
GATED_LEAD = 0.98  # of two consumers' share that three must reach: large tiles read less from L2


def filled(tokens: int, rows: int, consumers: int, multiprocessors: int) -> float:
    """The useful share of what so many programs, one a multiprocessor, multiply in whole rounds of tiles."""
    tile_tokens, tile_rows = consumers * GATED_BLOCK_TOKENS, 2 * GATED_TILE_OUTPUTS
    tiles = -(-tokens // tile_tokens) * -(-rows // tile_rows)
    rounds = -(-tiles // multiprocessors)
    return tokens * rows / (rounds * multiprocessors * tile_tokens * tile_rows)


def plan_gated(tokens: int, rows: int, inputs: int, multiprocessors: int) -> int | None:
    """Consumers of the kernel for weights [rows, inputs]; None where the separate kernels were faster."""
    if tokens < MIN_GATED_TOKENS or inputs < MIN_GATED_INPUTS:
        return None
    two, three = (filled(tokens, rows, consumers, multiprocessors) for consumers in (2, 3))
    if max(two, three) < GATED_FULL:
        return None
    return 3 if three >= GATED_LEAD * two else 2


# ---- the deterministic mode: `invariant_kernel` ----


def choose_invariant_tiles(tokens: int, outputs: int, dtype: torch.dtype, multiprocessors: int) -> Tiles:
    """The fastest of those that the tests prove equal: as large as leaves no multiprocessor idle."""
    if dtype == torch.float32:  # no tensor cores in exact fp32
        return Tiles(32, 32, 32, 4, 2, False)
    narrow = outputs <= 16 * multiprocessors
    if tokens <= 16:
        return Tiles(16, 16, 512, 2, 3, False) if narrow else Tiles(16, 64, 128, 4, 6, True)
    if tokens <= 32:
        return Tiles(32, 16, 256, 2, 4, False) if narrow else Tiles(32, 64, 128, 4, 6, True)
    if tokens <= 64:
        few = outputs <= 32 * multiprocessors
        return Tiles(64, 32, 128, 4, 5, False) if few else Tiles(64, 64, 128, 4, 5, True)
    columns = -(-outputs // 128)
    programs, enough = -(-tokens // 128) * columns, multiprocessors * 7 // 10
    if programs // 2 >= 19 * multiprocessors // 10:
        return Tiles(128, 256, 64, 8, 4, True, copied=True)
    if programs >= 2 * multiprocessors:
        return Tiles(128, 128, 64, 8, 3, False, copied=True)  # two to a multiprocessor
    if programs >= enough:
        return Tiles(128, 128, 64, 8, 4, False, copied=True)
    if -(-tokens // 64) * columns >= enough:
        return Tiles(64, 128, 64, 4, 5, False, copied=True)
    return Tiles(64, 64, 128, 4, 5, False)
