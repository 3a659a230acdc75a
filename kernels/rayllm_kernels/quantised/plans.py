"""Which kernel computes a product with weights in fewer bits, with which tiles: from shapes, dtype and hardware alone.

So a captured graph and an eager call agree. What says so was swept on Hopper (`benchmarks/sweep_tiles.py`); other tiles
follow from what limits a product (docs/performance.md, "Weights in fewer bits").
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..device import Hardware, hardware
from ..linear.plans import HopperPlan, Tiles, plan_hopper_fp8

GROUPS = (32, 64, 128)  # inputs that share a scale of an fp8 weight

# ---- many tokens and a scale a row: PyTorch's product ----

LIBRARY_TOKENS = 65  # below, reading the weights is what takes long
NARROW_LIBRARY_TOKENS = 193  # where outputs are too few for its tiles
# Compute capabilities for which PyTorch has a product of fp8 rows with scales.
LIBRARY_CAPABILITIES = ((8, 9), (9, 0), (10, 0))


def library_takes(x: Tensor, weight: Tensor, group: int | None, dtype: torch.dtype) -> bool:
    """Whether PyTorch's product is to compute x [T, K] W^T of fp8 tensors: it rounds to bf16, in multiples of 16."""
    gpu = hardware(x.device)
    narrow = gpu.is_hopper and is_narrow(weight.shape[0], gpu)
    return (
        group is None
        and dtype == torch.bfloat16
        and x.shape[0] >= (NARROW_LIBRARY_TOKENS if narrow else LIBRARY_TOKENS)
        and weight.shape[0] % 16 == weight.shape[1] % 16 == 0
        and gpu.capability in LIBRARY_CAPABILITIES
    )


def is_narrow(outputs: int, gpu: Hardware) -> bool:
    """Whether tiles of 64 outputs are too few to keep all multiprocessors at work."""
    return outputs <= 64 * gpu.multiprocessors


# ---- one token: `fp8_vector_kernel` ----

MAX_VECTOR_INPUTS = 16384  # of which a program holds all
VECTOR_BYTES = 256  # of weights that a thread holds; half as many of gate and up, whose programs do more


def vector_takes(tokens: int, inputs: int) -> bool:
    """Whether one program is to round a token, and what comes before, for each few outputs."""
    return tokens == 1 and 0 < inputs <= MAX_VECTOR_INPUTS


def choose_fp8_vector(padded: int, *, gated: bool) -> tuple[int, int]:
    """Outputs and warps of a program for so many inputs: small programs, so that none is waited for at the end."""
    num_warps = 2 if gated and padded <= 2048 else 4
    weights = 32 * num_warps * VECTOR_BYTES
    return max(1, min(32, weights // padded // (4 if gated else 1))), num_warps


def vector_norms(padded: int, *, gated: bool) -> bool:
    """Whether every program finds the norm of so many inputs: it reads six bytes an input (the token, its residual and
    the norm's weight), which should be no more than its weights are.
    """
    rows, _ = choose_fp8_vector(padded, gated=gated)
    return rows * (2 if gated else 1) >= 6


# ---- one token: `int4_vector_kernel` ----

INT4_VECTOR_BYTES = 16  # of a row of 4-bit weights, by one thread: two inputs each


def int4_vector_takes(x: Tensor, codes: Tensor) -> bool:
    """Whether `int4_vector_kernel` is to multiply x [T, K] and codes [N, half]."""
    return vector_takes(*x.shape) and codes.shape[0] > 0 and codes.shape[1] % INT4_VECTOR_BYTES == 0


def choose_int4_vector(padded: int, *, gated: bool) -> tuple[int, int, int]:
    """Outputs of a tile, warps of a program and programs a multiprocessor, for rows of so many vectors.

    A thread has one vector of each row, whose 32 inputs it keeps, or two of long rows. In a sweep on an H200 no other
    choice was more than 5% faster for the shapes of Llama-3.1-8B.
    """
    num_warps = max(1, min(8, padded // 32))
    rows = max(2, min(8, 1024 // padded))
    return rows // 2 if gated else rows, num_warps, 16 // num_warps


# ---- fp8 weights and tokens on Hopper: `linear/hopper_kernel` ----


def plan_fp8_hopper(
    x: Tensor, weight: Tensor, block: tuple[int, int | None], dtype: torch.dtype, gpu: Hardware
) -> HopperPlan | None:
    """Of checked e4m3 x [T, K] W^T [K, N] -> `dtype`, W having a scale a row or one a block of 128 inputs.

    block: rows and inputs of W that share a scale. None where others win.
    """
    rows, group = block
    if not gpu.is_hopper or dtype == torch.float32 or not (group is None or (group == 128 and rows > 1)):
        return None
    if any(each.data_ptr() % 16 or each.shape[1] % 16 or not each.numel() for each in (x, weight)):
        return None  # tensor copies want rows at multiples of 16 bytes
    return plan_hopper_fp8(x.shape[0], weight.shape[0], weight.shape[1], gpu.multiprocessors)


# ---- fp8 weights: `fp8_product_kernel` ----


def choose_fp8_tiles(tokens: int, outputs: int, group: int | None, gpu: Hardware) -> Tiles:
    """Tiles for tokens in fp8 too. With groups, a tile's depth is a whole number of them, each a product of its own.

    Few tokens: weights come first, so that Hopper's instruction takes 64 of them against as few tokens as there are,
    and a tile of 64 x 256 bytes, four deep, keeps 48 KiB a program on their way. If those tiles are too few for the
    multiprocessors, the warps of narrower ones share the depth. Many: as large as accumulators leave registers for,
    which hold a second sum where groups have scales.
    """
    depth, multiprocessors = group or 128, gpu.multiprocessors
    padded = max(16, 1 << (tokens - 1).bit_length())
    if padded <= 32 and is_narrow(outputs, gpu):
        return Tiles(padded, 16, 4 * depth, 4, 4, False, slices=4)
    if padded <= 32:
        return Tiles(padded, 64, depth if group else 256, 4, 4 if group is None else 6, True)
    if padded <= 64:
        return Tiles(64, 64, depth, 4, 5, True)
    if group is None and gpu.is_hopper and tokens < NARROW_LIBRARY_TOKENS and is_narrow(outputs, gpu):
        return Tiles(64, 64, depth, 4, 5, False, copied=True)
    if group is None and -(-tokens // 128) * -(-outputs // 256) >= multiprocessors:
        return Tiles(128, 256, depth, 8, 4, False, copied=True)
    num_warps = 4 if group is None else 8  # for two sums
    if gpu.capability is not None and gpu.capability >= (10, 0) and group is not None:
        return Tiles(64, 64, depth, num_warps, 4, False, copied=True)  # there, larger ones spill
    if -(-tokens // 128) * -(-outputs // 128) >= multiprocessors * 7 // 10:
        return Tiles(128, 128, depth, 8, 4, False, copied=True)
    return Tiles(64, 128, depth, num_warps, 5, False, copied=True)


def choose_wide_tiles(tokens: int, outputs: int, group: int | None, dtype: torch.dtype, gpu: Hardware) -> Tiles:
    """Tiles for tokens that stay in `dtype`, in which a tile's weights are multiplied too."""
    depth, multiprocessors = group or 128, gpu.multiprocessors
    if dtype == torch.float32:  # no tensor cores in exact fp32
        return Tiles(32, 32, 32, 4, 2, False)
    padded = max(16, 1 << (tokens - 1).bit_length())
    if padded <= 32 and is_narrow(outputs, gpu):
        return Tiles(padded, 16, 4 * depth, 4, 3, False, slices=4)
    if padded <= 32:
        return Tiles(padded, 64, depth, 4, 4, True)
    if padded <= 64:
        return Tiles(64, 64, depth, 4, 3, True)
    if gpu.capability is not None and gpu.capability >= (10, 0) and group is not None:
        return Tiles(64, 64, min(depth, 64), 4, 4, True)  # there, larger ones spill
    if -(-tokens // 128) * -(-outputs // 128) >= multiprocessors * 7 // 10:
        return Tiles(128, 128, min(depth, 64), 8, 3, False)
    return Tiles(64, 128, min(depth, 64), 4, 3, False)


def fixed_fp8_tiles(group: int | None, *, wide: bool, dtype: torch.dtype) -> Tiles:
    """For the deterministic mode: one tile for any number of tokens, as nobody has shown that all give equal bits."""
    if wide and dtype == torch.float32:
        return Tiles(32, 32, 32, 4, 2, False)
    return Tiles(64, 64, min(group or 128, 64 if wide else 128), 4, 4, True)


# ---- weights of 4 bits: `int4_product_kernel` ----

LEAST_INT4_GROUP = 32  # inputs that share a scale: a product's depth is as many at least


def int4_depth(group: int | None) -> int:
    """Bytes of a row of which each half's inputs have one scale: the largest up to 128."""
    return 128 if group is None else math.gcd(128, group)


def choose_int4_tiles(tokens: int, outputs: int, group: int | None, dtype: torch.dtype, gpu: Hardware) -> Tiles:
    """As for fp8 with half the bytes a weight, and two tiles of x, which are read again for every tile of outputs."""
    depth, multiprocessors = int4_depth(group), gpu.multiprocessors
    if dtype == torch.float32:  # no tensor cores in exact fp32
        return Tiles(32, 32, 32, 4, 2, False)
    padded = max(16, 1 << (tokens - 1).bit_length())
    if padded <= 16 and is_narrow(outputs, gpu):
        return Tiles(padded, 16, 4 * depth, 4, 3, False, slices=4)
    if padded <= 32:
        return Tiles(padded, 64, depth, 4, 4, True)
    if padded <= 64:
        return Tiles(64, 64, min(depth, 64), 4, 3, True)
    if -(-tokens // 128) * -(-outputs // 128) >= multiprocessors * 7 // 10:
        return Tiles(128, 128, min(depth, 32), 8, 3, True)
    return Tiles(64, 128, min(depth, 32), 4, 3, True)


def fixed_int4_tiles(group: int | None, dtype: torch.dtype) -> Tiles:
    """For the deterministic mode: one tile for any number of tokens."""
    if dtype == torch.float32:
        return Tiles(32, 32, 32, 4, 2, False)
    return Tiles(64, 64, min(int4_depth(group), 64), 4, 3, True)


# ---- experts: `experts_kernel`, and `fp8_experts_kernel` for tokens in fp8 ----


def choose_expert_tiles(
    rows: int, group: int | None, dtype: torch.dtype, gpu: Hardware, *, gated: bool, deterministic: bool = False
) -> Tiles:
    """Of so many rows, for tokens that stay in `dtype`; the depth (of 4 bits: bytes) is of inputs that share a scale.

    Weights come first: Hopper's instruction takes them from the registers in which they become floats. gated: a program
    has so many outputs of gate and as many of up. deterministic: one depth for any number of rows, as scales meet a
    sum at the end of each.
    """
    if dtype == torch.float32:  # no tensor cores in exact fp32
        return Tiles(rows, 32, 32, 4, 2, False)
    # Elsewhere than there and on 10.0, both operands and two sums of a gated product are in registers, and would spill.
    in_registers = gpu.capability is not None and gpu.capability[0] not in (9, 10)
    deepest = min(128, group or 128)
    depth = min(deepest, 32 if gated and in_registers else 64)
    if rows <= 32:
        return Tiles(rows, 64, depth if deterministic else deepest, 4, 3, True)
    num_warps = 8 if gated or rows == 128 else 4
    return Tiles(rows, 64 if gated or rows == 64 else 128, depth, num_warps, 3, True)


FP8_DOWN_OUTPUTS = 128
FIXED_FP8_EXPERT_ROWS = 64  # in the deterministic mode, for any number of tokens, see `fixed_fp8_tiles`


def fp8_expert_outputs(own_group: int) -> int:
    """Outputs of gate, and of up, that a program has where it rounds what it makes of them: whole groups of these."""
    return max(64, own_group)


def most_fp8_expert_rows(gpu: Hardware, *, shared_scales: bool) -> int:
    """Of a tile, so that two tiles of sums and one that is not yet scaled stay in registers.

    shared_scales: all outputs of a tile have one scale of a group; else each thread has those of all of its outputs.
    On Hopper 128 rows would fit if they do, and take longer: 1,035 us instead of 947 for both products of 8,192 tokens
    of Qwen3-30B-A3B.
    """
    return 64 if gpu.capability is None or gpu.capability[0] != 10 or shared_scales else 32


def choose_fp8_expert_tiles(
    rows: int, depth: int, own_group: int, gpu: Hardware, *, gated: bool, scaled: bool
) -> Tiles:
    """Of so many rows, for tokens in fp8; depth: inputs of a token that share a scale. own_group: of what a gated
    product makes. scaled: the weights of each depth have scales of their own, which should be few. Few rows: weights
    come first, as in `choose_fp8_tiles`.
    """
    outputs = fp8_expert_outputs(own_group) if gated else FP8_DOWN_OUTPUTS
    wide = outputs if scaled else 256
    if gpu.is_hopper and rows <= 32:  # swept with Qwen3-30B-A3B's experts, whole and halved
        if gated:
            num_warps, stages = (4, 2 if rows == 16 else 3) if scaled else (8, 3)
            return Tiles(rows, outputs, depth, num_warps, stages, True, copied=True)
        return Tiles(rows, *((64, depth, 4, 2) if rows == 16 else (wide, depth, 4, 3)), True, copied=True)
    if gpu.is_hopper and rows == 64:
        return Tiles(rows, *((wide, depth, 8, 3) if gated else (outputs, depth, 4, 4)), False, copied=True)
    if rows <= 32:
        return Tiles(rows, outputs, depth, 4, 3 if gated else 4, True)
    return Tiles(rows, outputs, depth, 8, 4, False, copied=True)
