"""Which gated projections of many tokens the fused Hopper kernel computes: from shapes alone, by sweeps on an H200.

The sweeps timed Llama-3.1-8B (whole and cut in four), Llama-3.2-1B, Qwen2.5-1.5B and Qwen3-0.6B in bf16 for 512 to
16,384 tokens. What decides is how full the programs' last round of tiles is: from about nine tenths on, all rounds
together, the kernel was faster than cuBLAS and the activation on its own; below, cuBLAS has smaller tiles to choose.
"""

from __future__ import annotations

BLOCK_TOKENS = 64  # of a consumer, by one instruction
TILE_OUTPUTS = 128
MIN_TOKENS = 512
MIN_INPUTS = 1024
FULL = 0.9  # of the multiprocessors' rounds of tiles, below which others are faster
LEAD = 0.98  # of two consumers' share that three must reach: large tiles read less from L2


def filled(tokens: int, rows: int, consumers: int, multiprocessors: int) -> float:
    """The useful share of what so many programs, one a multiprocessor, multiply in whole rounds of tiles."""
    tile_tokens, tile_rows = consumers * BLOCK_TOKENS, 2 * TILE_OUTPUTS
    tiles = -(-tokens // tile_tokens) * -(-rows // tile_rows)
    rounds = -(-tiles // multiprocessors)
    return tokens * rows / (rounds * multiprocessors * tile_tokens * tile_rows)


def plan_gated(tokens: int, rows: int, inputs: int, multiprocessors: int) -> int | None:
    """Consumers of the kernel for weights [rows, inputs]; None where the separate kernels were faster."""
    if tokens < MIN_TOKENS or inputs < MIN_INPUTS:
        return None
    two, three = (filled(tokens, rows, consumers, multiprocessors) for consumers in (2, 3))
    if max(two, three) < FULL:
        return None
    return 3 if three >= LEAD * two else 2
