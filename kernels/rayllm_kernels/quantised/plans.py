"""Which kernel computes a product with weights in fewer bits, with which tiles: from shapes, dtype and hardware alone.

So a captured graph and an eager call agree. What says so was swept on Hopper (`benchmarks/sweep_tiles.py`); other tiles
follow from what limits a product (docs/performance.md, "Weights in fewer bits").
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..device import Hardware, hardware
from ..linear.plans import MAX_HOPPER_TOKENS, WELL_FULL, HopperPlan, HopperTile, Tiles, plan_hopper_fp8
from .fp8_operands import Fp8Rows, Fp8Weight

GROUPS = (32, 64, 128)  # inputs that share a scale of an fp8 weight

# ---- many tokens, and a scale a row or one a block of 128 x 128: PyTorch's product ----

LIBRARY_TOKENS = 65  # below, reading the weights is what takes long
SHARED_OUTPUTS = 32  # a multiprocessor: with no more, `hopper_kernel` has two programs for each of its tiles
# Compute capabilities for which PyTorch has a product of fp8 rows with scales.
LIBRARY_CAPABILITIES = ((8, 9), (9, 0), (10, 0))
LIBRARY_BLOCK = 128  # rows and inputs of a weight, and inputs of a token, that share a scale; on Hopper alone


def scales_by_group(tokens: int, inputs: int, group: int | None, dtype: torch.dtype, gpu: Hardware) -> bool:
    """Whether tokens of `dtype` get their scales in the order that PyTorch's product wants (`Fp8Rows`).

    It copies a row of blocks' scales with those of three more, so K is a multiple of four blocks.
    """
    return (
        gpu.is_hopper
        and group == LIBRARY_BLOCK
        and dtype == torch.bfloat16
        and tokens >= LIBRARY_TOKENS
        and inputs % (4 * LIBRARY_BLOCK) == 0
    )


def library_takes(x: Fp8Rows, weight: Fp8Weight, dtype: torch.dtype) -> bool:
    """Whether PyTorch's product is to compute x W^T of checked arguments: it rounds to bf16, in multiples of 16."""
    (tokens, inputs), outputs, gpu = x.values.shape, weight.values.shape[0], hardware(x.values.device)
    if dtype != torch.bfloat16 or outputs % 16 or inputs % 16:
        return False
    if x.group is not None:
        wanted = scales_by_group(tokens, inputs, x.group, dtype, gpu)
        others_win = tokens <= MAX_HOPPER_TOKENS and outputs <= SHARED_OUTPUTS * gpu.multiprocessors
        return wanted and not others_win and x.by_group and weight.rows == LIBRARY_BLOCK
    if gpu.is_hopper and tokens > MAX_HOPPER_TOKENS:
        return plan_hopper_fp8(tokens, outputs, inputs, gpu.multiprocessors, row_scales=True) is None
    narrow = gpu.is_hopper and is_narrow(outputs, gpu)  # outputs are too few for its tiles
    return tokens >= LIBRARY_TOKENS and not narrow and gpu.capability in LIBRARY_CAPABILITIES


def is_narrow(outputs: int, gpu: Hardware) -> bool:
    """Whether tiles of 64 outputs are too few to keep all multiprocessors at work."""
    return outputs <= 64 * gpu.multiprocessors


# ---- weights in fewer bits and many tokens in 16: `dequantised_product` ----

# Below, writing and reading 2 bytes a weight takes longer than the better product saves.
LEAST_DEQUANTISED_TOKENS = {4: 1536, 8: 257}  # by a weight's bits
DEQUANTISED_BYTES = 64 << 20  # of memory that a product takes for it


def dequantised_takes(x: Tensor, outputs: int, *, bits: int) -> bool:
    """Whether PyTorch's product of x [T, K] and a dequantised weight [outputs, K] is to compute theirs."""
    enough = x.shape[0] >= LEAST_DEQUANTISED_TOKENS[bits]
    return enough and x.dtype != torch.float32 and min(x.shape[1], outputs) > 0


def rows_at_once(outputs: int, inputs: int) -> int:
    """Rows of W [outputs, inputs] that are dequantised together: equal parts, whole tiles of PyTorch's products."""
    parts = -(-outputs * inputs * 2 // DEQUANTISED_BYTES)
    return min(outputs, -(-outputs // (parts * 128)) * 128)


# ---- one token: `fp8_vector_kernel` ----

MAX_VECTOR_INPUTS = 16384  # of which a program holds all
VECTOR_BYTES = 128  # of weights that a thread holds


def vector_takes(tokens: int, inputs: int) -> bool:
    """Whether one program is to round a token, and what comes before, for each few outputs."""
    return tokens == 1 and 0 < inputs <= MAX_VECTOR_INPUTS


def choose_fp8_vector(padded: int, *, gated: bool) -> tuple[int, int]:
    """Outputs and warps of a program for so many inputs: small programs, so that none is waited for at the end."""
    num_warps = 2 if gated and padded <= 2048 else 4
    weights = 32 * num_warps * VECTOR_BYTES
    return max(1, min(32, weights // padded // (2 if gated else 1))), num_warps


def vector_norms(padded: int, *, gated: bool) -> bool:
    """Whether every program finds the norm of so many inputs: it reads six bytes an input (the token, its residual and
    the norm's weight), which should be no more than its weights are.
    """
    rows, _ = choose_fp8_vector(padded, gated=gated)
    return rows * (2 if gated else 1) >= 6


# ---- one token of many inputs, on Hopper: `fp8_stream_kernel` ----

# `fp8_vector_kernel` reads all of a token for a few outputs: of more inputs, as many bytes as weights.
LEAST_STREAM_INPUTS = 8192
STREAM_LINE = 128  # inputs that share a scale, if a row does not


class StreamPlan(NamedTuple):
    """What `fp8_stream_kernel` works with."""

    rows: int  # of a stage, of 2,048 inputs each
    stages: int  # of a program's ring
    num_warps: int
    programs: int


def stream_takes(weight: Fp8Weight, gpu: Hardware) -> bool:
    """Whether `fp8_stream_kernel` is to multiply a token, normed already if at all, and a checked weight."""
    values, _, rows, group = weight
    scaled = group is None or (group == STREAM_LINE and rows > 1 and rows % plan_fp8_stream(gpu).rows == 0)
    outputs, inputs = values.shape
    fits = LEAST_STREAM_INPUTS < inputs <= MAX_VECTOR_INPUTS and inputs % STREAM_LINE == 0 and outputs > 0
    return gpu.is_hopper and scaled and fits and values.data_ptr() % 16 == 0


def plan_fp8_stream(gpu: Hardware) -> StreamPlan:
    """Two programs a multiprocessor, with 48 KiB on their way each."""
    return StreamPlan(4, 6, 8, 2 * gpu.multiprocessors)


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


# ---- one token on Hopper: `int4_stream_kernel` ----

INT4_LINE = 128  # bytes of a row that a warp has of a stage
INT4_STREAM_ROWS = 16  # of a stage
LEAST_INT4_STREAM_GROUPS = 8  # rows of what a tensor copy writes in a swizzled order


class Int4StreamPlan(NamedTuple):
    """What `int4_stream_kernel` works with."""

    num_warps: int  # that multiply
    stages: int  # of a program's ring
    programs: int
    registers: int  # of a thread when a program starts


def int4_stream_takes(x: Tensor, codes: Tensor, gpu: Hardware) -> bool:
    """Whether `int4_stream_kernel` is to multiply x [T, K] and codes [N, half] of a checked weight."""
    half = codes.shape[1]
    fits = x.shape[0] == 1 and 0 < half <= MAX_VECTOR_INPUTS // 2 and half % INT4_LINE == 0 and codes.shape[0] > 0
    return gpu.is_hopper and fits and x.dtype != torch.float32 and codes.data_ptr() % 16 == 0


def plan_int4_stream(gpu: Hardware) -> Int4StreamPlan:
    """Two programs a multiprocessor, with 32 KiB on their way each. In layers of Llama-3.1-8B longer rings were slower,
    and so were one program or three.
    """
    return Int4StreamPlan(8, 2, 2 * gpu.multiprocessors, 80)


def int4_stream_groups(scales: Tensor, group: int | None, num_warps: int, *, gated: bool) -> int:
    """How many groups of either half a stage has, if tensor copies can take their scales; else 0."""
    rows = scales.shape[1] // 2 if gated else scales.shape[1]
    if group not in (32, 64, 128) or rows % 8 or scales.data_ptr() % 16:
        return 0  # rows of copies are at multiples of 32 bytes; not all that were at multiples of 16 worked
    groups = num_warps * INT4_LINE // group
    return groups if groups >= LEAST_INT4_STREAM_GROUPS else 0


# ---- fp8 weights and tokens on Hopper: `linear/hopper_kernel` ----


def plan_fp8_hopper(x: Fp8Rows, weight: Fp8Weight, dtype: torch.dtype, gpu: Hardware) -> HopperPlan | None:
    """Of checked x W^T -> `dtype`, W having a scale a row or one a block of 128 inputs; None where others win."""
    values, _, rows, group = weight
    if not gpu.is_hopper or dtype == torch.float32 or not (group is None or (group == 128 and rows > 1)):
        return None
    if any(each.data_ptr() % 16 or each.shape[1] % 16 or not each.numel() for each in (x.values, values)):
        return None  # tensor copies want rows at multiples of 16 bytes
    outputs, inputs = values.shape
    return plan_hopper_fp8(x.values.shape[0], outputs, inputs, gpu.multiprocessors, row_scales=group is None)


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
    if gpu.is_hopper and padded == 16:  # this and those below were swept, with blocks of 128 x 128
        return Tiles(16, 32, 4 * depth, 4, 2, False, slices=4)
    if padded <= 32:
        return Tiles(padded, 64, depth, 4, 4, True)
    if gpu.is_hopper and padded == 64 and is_narrow(outputs, gpu):
        return Tiles(64, 32, depth, 4, 4, False)
    if padded <= 64:
        return Tiles(64, 64, depth, 4, 4 if gpu.is_hopper else 3, True)
    if gpu.is_hopper:
        return Tiles(128, 64, depth, 4, 3, True)
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
EXACT_INT4_TILES = Tiles(32, 32, 32, 8, 2, False)  # no tensor cores in exact fp32; four warps would spill on 12.0


def int4_depth(group: int | None) -> int:
    """Bytes of a row of which each half's inputs have one scale: the largest up to 128."""
    return 128 if group is None else math.gcd(128, group)


def choose_int4_tiles(tokens: int, outputs: int, group: int | None, dtype: torch.dtype, gpu: Hardware) -> Tiles:
    """As for fp8 with half the bytes a weight, and two tiles of x, which are read again for every tile of outputs."""
    depth, multiprocessors = int4_depth(group), gpu.multiprocessors
    if dtype == torch.float32:
        return EXACT_INT4_TILES
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


# ---- weights of 4 bits on Hopper: `int4_hopper_kernel` ----

# Swept with the layers of Llama-3.1-8B for 1 to 8,192 tokens. What decides: with 128 bytes of a row a step there are
# half the barriers; narrow tiles, two or three programs a multiprocessor, hide each other's waits; the larger a tile,
# the less often its tokens are read from L2, and its weights decoded.
INT4_HOPPER_TOKENS = (16, 32, 48, 64, 80, 96, 128)  # of a tile
INT4_TILE_TOKENS = 132  # of which a tile's weights and sums take as long as a token does
INT4_WIDE_UNITS = 4  # of a wide tile for each multiprocessor: with fewer, handing over its sums takes long
INT4_HOPPER_MEMORY = 226 << 10  # bytes of a multiprocessor that programs share, each of which costs 1 KiB more


class Int4HopperKind(NamedTuple):
    """Tiles that are alike but for their tokens."""

    consumers: int  # warp groups, of 64 rows of each block
    blocks: int
    programs: int  # a multiprocessor


INT4_NARROWEST, INT4_NARROW = Int4HopperKind(1, 1, 3), Int4HopperKind(1, 1, 2)
INT4_WIDE, INT4_WIDEST = Int4HopperKind(2, 1, 1), Int4HopperKind(2, 2, 1)


def int4_hopper_tile(tokens: int, kind: Int4HopperKind, depth: int) -> HopperTile:
    """With as many stages as fit. depth: bytes of a row; there are four of tokens to each."""
    consumers, blocks, programs = kind
    memory = INT4_HOPPER_MEMORY // programs - 128 * consumers * min(tokens, 64) - 1024
    stages = min(16, memory // ((64 * consumers * blocks + 4 * tokens) * depth))
    return HopperTile(tokens, consumers, blocks, stages, {1: 168, 2: 128, 3: 80}[programs], None, depth)


INT4_HOPPER_TILES = {
    int4_hopper_tile(tokens, kind, depth): kind
    for depth in (64, 128)
    for kind, sizes in (
        (INT4_NARROWEST, (16,)), (INT4_NARROW, (32, 48, 64, 80)), (INT4_WIDE, (96, 128)),
        (INT4_WIDEST, (64, 80, 96, 128)),
    )
    for tokens in sizes
}  # fmt: skip


def plan_int4_hopper(x: Tensor, codes: Tensor, group: int | None, gpu: Hardware, *, gated: bool) -> HopperPlan | None:
    """Of checked x [T, K] and codes [N, half]. None where another kernel is to compute the product.

    A unit's inputs of one half share a scale. Tensor copies want rows at multiples of 16 bytes, and both halves of a
    token. Gate and up are cut into groups of eight rows.
    """
    half = codes.shape[1]
    if not gpu.is_hopper or x.dtype not in (torch.bfloat16, torch.float16) or (group or 64) % 64:
        return None
    if not (x.numel() and codes.numel()) or half % 16 or half >= x.shape[1] or (gated and codes.shape[0] % 16):
        return None
    if any(each.data_ptr() % 16 for each in (x, codes)) or x.stride(0) % 8 or x.stride(0) < x.shape[1]:
        return None
    return choose_int4_hopper(x.shape[0], codes.shape[0], x.shape[1], group, gpu.multiprocessors)


def int4_hopper_tokens(tokens: int) -> int:
    """Of a tile, for so many altogether."""
    for size in INT4_HOPPER_TOKENS:
        if tokens <= size:
            return size
    # Of the larger ones, that with which all tiles take the least.
    return min(reversed(INT4_HOPPER_TOKENS[-3:]), key=lambda size: -(-tokens // size) * (size + INT4_TILE_TOKENS))


def choose_int4_hopper(tokens: int, rows: int, inputs: int, group: int | None, multiprocessors: int) -> HopperPlan:
    """Tile and number of programs for weights [rows, inputs]: all share the units evenly, or whole tiles if that leaves
    few multiprocessors idle.
    """
    depth = 128 if (group or 128) % 128 == 0 else 64
    padded = int4_hopper_tokens(tokens)
    units = -(-rows // 128) * -(-tokens // padded) * -(-inputs // (2 * depth))
    if padded == 16:
        kind = INT4_NARROWEST
    elif padded >= 64 and -(-rows // 256) * -(-tokens // padded) >= WELL_FULL * multiprocessors:
        kind = INT4_WIDEST
    elif padded <= 80:
        kind = INT4_NARROW
    elif units < INT4_WIDE_UNITS * multiprocessors:
        kind, padded = INT4_NARROW, padded // 2
    else:
        kind = INT4_WIDE
    tile = int4_hopper_tile(padded, kind, depth)
    tiles, most = -(-rows // tile.rows) * -(-tokens // tile.tokens), multiprocessors * kind.programs
    whole = tiles if tiles <= most < 2 * tiles else most // tiles * tiles
    return tile, whole if whole >= WELL_FULL * most else most


def fixed_int4_tiles(group: int | None, dtype: torch.dtype) -> Tiles:
    """For the deterministic mode: one tile for any number of tokens."""
    if dtype == torch.float32:
        return EXACT_INT4_TILES
    return Tiles(64, 64, min(int4_depth(group), 64), 4, 3, True)


# ---- experts: `experts_kernel`, and `fp8_experts_kernel` for tokens in fp8 ----


def pairs_take(kind: str, row_bytes: int) -> bool:
    """Whether few pairs of a token and an expert are vector products: of 4 bits, 16 bytes of a row must have one scale
    of each half.
    """
    return kind == "fp8" or row_bytes % INT4_VECTOR_BYTES == 0


def joins_scales(kind: str, dtype: torch.dtype, gpu: Hardware) -> bool:
    """Whether experts' weights are multiplied with their scales, and not the sums of their groups: in bf16 MXFP4 is
    exact. The tiles have been swept on Hopper alone.
    """
    return gpu.is_hopper and kind == "mxfp4" and dtype == torch.bfloat16


def choose_expert_tiles(
    rows: int,
    kind: str,
    group: int | None,
    dtype: torch.dtype,
    gpu: Hardware,
    *,
    gated: bool,
    joined: bool = False,
    deterministic: bool = False,
) -> Tiles:
    """Of so many rows, for tokens that stay in `dtype`; the depth (of 4 bits: bytes) is of inputs that share a scale.
    kind: of the weights.

    Weights come first: Hopper's instruction takes them from the registers in which they become floats. gated: a program
    has so many outputs of gate and as many of up. deterministic: one depth for any number of rows, as scales meet a
    sum at the end of each.
    """
    if dtype == torch.float32:  # no tensor cores in exact fp32
        return Tiles(rows, 32, 32, 4, 2, False)
    if joined:
        return choose_joined_tiles(rows, gated=gated, deterministic=deterministic)
    # Elsewhere than there and on 10.0, both operands and two sums of a gated product are in registers, and would spill.
    in_registers = gpu.capability is not None and gpu.capability[0] not in (9, 10)
    deepest = min(128, group or 128)
    depth = min(deepest, 32 if gated and in_registers else 64)
    if gpu.is_hopper and kind == "int4":  # swept with three models' experts in groups of 128
        return Tiles(rows, 64, depth, 8 if gated and rows == 128 else 4, 3, True)
    if gpu.is_hopper and kind == "fp8" and not deterministic:  # swept with three models' experts in blocks of 128
        if gated:
            return Tiles(rows, 64, deepest, 8 if rows == 128 else 4, {32: 2, 128: 4}.get(rows, 3), True)
        return Tiles(rows, 64, depth if rows == 64 else deepest, 4, 3, True)
    if rows <= 32:
        return Tiles(rows, 64, depth if deterministic else deepest, 4, 3, True)
    num_warps = 8 if gated or rows == 128 else 4
    return Tiles(rows, 64 if gated or rows == 64 else 128, depth, num_warps, 3, True)


LEAST_DEQUANTISED_PAIRS = 512  # an expert; with fewer, writing and reading 2 bytes a weight takes what the products win
DEQUANTISED_EXPERTS_BYTES = 1 << 30  # of memory that they are written to at a time; more parts are more launches


def dequantised_experts_take(kind: str, inputs: int, mean_pairs: float, dtype: torch.dtype, gpu: Hardware) -> bool:
    """Whether a product with so many pairs an expert is to be that of dequantised weights (`dequantised_experts.py`).

    kind: of the weights. Tensor copies want rows at multiples of 16 bytes. MXFP4 is exact in bf16.
    """
    fits = kind == "int4" or (kind == "mxfp4" and dtype == torch.bfloat16)
    copies = gpu.is_hopper and dtype != torch.float32 and inputs % 8 == 0
    return fits and copies and mean_pairs >= LEAST_DEQUANTISED_PAIRS


def experts_at_once(count: int, hidden: int, inner: int) -> int:
    """Experts that are dequantised together: equal parts of all `count`, gate, up and down in 2 bytes a weight."""
    parts = -(-2 * 3 * count * hidden * inner // DEQUANTISED_EXPERTS_BYTES)
    return -(-count // parts)


def choose_joined_tiles(rows: int, *, gated: bool, deterministic: bool) -> Tiles:
    """Of weights that are multiplied with their scales; swept with gpt-oss-20b's experts."""
    if deterministic:
        return Tiles(rows, 64, 64, 4, 3, True)
    if rows <= 32:
        return Tiles(rows, 64, 64, 4, 4 if rows == 16 else 3, False)
    if rows == 64:
        return Tiles(64, 128, 64, 4, 3, False)
    return Tiles(rows, 64, 64, 4, 3, True) if gated else Tiles(rows, 256, 64, 8, 3, False)


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
