"""Which tiles compute the experts' products: from shapes, dtype and hardware alone.

So a captured graph and an eager call agree. All of them add an output's products in one order, one chain over K, so
that the bits of a token do not depend on how many there are (`linear/invariant_kernel.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..device import Hardware
from ..linear.plans import Tiles

PAIR_BYTES = 256  # of weights that a thread holds, at most, and a program of small outputs:
PAIR_PROGRAM_BYTES = 8192
CHUNK = 32  # vectors of 16 bytes of a row of 4-bit weights at a time: one a thread of a warp
UNSORTED = 4  # experts a pair from which two pairs of one expert are rare
HOPPER_ROWS, HOPPER_OUTPUTS = 192, 128  # of a tile of `hopper_kernel`, and outputs of a part of it
HOPPER_FROM = 64  # pairs an expert, from which it is faster
HOPPER_INNER = 1024  # of experts in 16 bits: copying tokens for narrower ones takes what the products win


def is_unsorted(tokens: int, top_k: int, num_experts: int) -> bool:
    """Whether every pair of a token and an expert is a tile of its own, and nothing is sorted.

    The experts of one token are all different, and those of a few tokens mostly are; their weights pass through L2.
    """
    return tokens == 1 or tokens * top_k * UNSORTED <= num_experts


def choose_pairs(row_bytes: int, *, gated: bool) -> tuple[int, int]:
    """Outputs and warps of a program of `pairs_kernel`, so small that none is waited for at the end.

    row_bytes: of the weights of one output, of all experts that the program multiplies. gated: of gate, and as many of
    up.
    """
    output_bytes, num_warps = (2 * row_bytes, 2) if gated else (row_bytes, 4)
    while num_warps < 16 and output_bytes > 32 * num_warps * PAIR_BYTES:
        num_warps *= 2
    return max(1, PAIR_PROGRAM_BYTES // output_bytes), num_warps


def choose_code_pairs(places: int, *, gated: bool) -> tuple[int, int]:
    """The same of weights of 4 bits: a warp an expert, of `places`; so few outputs of gate and up that both, and the
    chunk that is asked for, leave registers for several programs.
    """
    return 2 if gated else max(4, min(8, places)), places


def choose_rows(pairs: int, num_experts: int, dtype: torch.dtype, *, unsorted: bool) -> int:
    """Rows of a tile: as few as most experts' pairs fit in, until the products take longer than reading the weights."""
    if unsorted or dtype == torch.float32:
        return 16
    mean = pairs / num_experts
    return 16 if mean <= 12 else 32 if mean <= 24 else 64 if mean <= 64 else 128


def hopper_takes(gate_up: Tensor, down: Tensor, gpu: Hardware) -> bool:
    """Whether `hopper_kernel` can multiply with weights [E, 2 * I, H] and [E, H, I].

    Tensor copies want rows at multiples of 16 bytes, of the weights and of what meets them. Narrow experts in 16 bits
    are left to others.
    """
    weights = gate_up, down
    if down.element_size() > 1 and down.shape[2] < HOPPER_INNER:
        return False
    dtypes = torch.bfloat16, torch.float16, torch.float8_e4m3fn
    return (
        gpu.is_hopper
        and all(each.dtype in dtypes and each.is_contiguous() and each.data_ptr() % 16 == 0 for each in weights)
        and all(each.shape[2] * each.element_size() % 16 == 0 for each in weights)
    )


def choose_tiles(rows: int, dtype: torch.dtype, *, gated: bool) -> Tiles:
    """rows: of `choose_rows`. gated: a program has so many outputs of gate and as many of up."""
    if dtype == torch.float32:  # no tensor cores in exact fp32
        return Tiles(rows, 32, 32, 4, 2, False)
    if rows == 16:
        return Tiles(16, 32, 128, 4, 4, False) if gated else Tiles(16, 128, 128, 4, 3, True)
    if rows == 32:
        return Tiles(32, 128, 128, 4, 3, True) if gated else Tiles(32, 64, 128, 4, 3, True)
    if rows == 64:
        return Tiles(64, 64, 64, 4, 3, False) if gated else Tiles(64, 128, 64, 4, 3, False)
    return Tiles(128, 128 if gated else 256, 64, 8, 4, False, copied=True)
