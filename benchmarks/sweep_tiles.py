"""Times candidate tiles of products on one GPU, and prints the best as lines for `quantised/plans.py` and
`experts/plans.py`.

    python benchmarks/sweep_tiles.py experts-fp8 int4 --seconds 300 --save sweep.jsonl
    python benchmarks/sweep_tiles.py experts-fp8 --dry-run           # shapes and candidates, without a GPU
    python benchmarks/sweep_tiles.py --others                        # shapes that no tile was chosen by

A family is a kernel and a format of weights; all of them, one after the other, if none is named. Its candidates are
compiled first, for all shapes, in as many processes as there are cores, which needs no operands. Then its products are
timed as `kernel_times.py` times kernels, until the time is over: the most wanted shapes come first. A candidate has to
give what today's plan gives, or it does not count.

Shapes for which today's plan has one tile are a branch. Of each, the tile is printed that is the best over all of the
branch's shapes, not that of one of them. Experts have a branch for each number of rows of a tile; which number is best
for how many pairs an expert (`choose_rows`) is a table of its own.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import kernel_times as bench
import torch
import typer
from torch import Tensor

from rayllm.cli.main import main, make_app
from rayllm.errors import ConfigError
from rayllm_kernels import dispatch, ops
from rayllm_kernels.compile_ahead import compile_only
from rayllm_kernels.device import Hardware, assumed, hardware
from rayllm_kernels.dispatch import TritonModule
from rayllm_kernels.experts import plans as experts_plans
from rayllm_kernels.experts.experts import Projections
from rayllm_kernels.linear.plans import HOPPER_TILES, WIDEST, HopperPlan, HopperTile, Tiles, plan_hopper_fp8
from rayllm_kernels.quantised import plans
from rayllm_kernels.quantised.experts import QuantisedProjections

# Triton is imported when the first kernel is asked for.
_group = TritonModule("rayllm_kernels.experts.group_kernel")
_fp8, _int4, _vector, _int4_vector = (
    TritonModule(f"rayllm_kernels.quantised.{name}_kernel")
    for name in ("fp8_product", "int4_product", "fp8_vector", "int4_vector")
)
_hopper = TritonModule("rayllm_kernels.linear.hopper_kernel")
_int4_hopper = TritonModule("rayllm_kernels.quantised.int4_hopper_kernel")
_experts, _pairs = (TritonModule(f"rayllm_kernels.experts.{name}_kernel") for name in ("products", "pairs"))
_weights, _fp8_experts = (
    TritonModule(f"rayllm_kernels.quantised.{name}_kernel") for name in ("experts", "fp8_experts")
)

META = torch.device("meta")
H200 = Hardware(132, 227 << 10, (9, 0))  # what a dry run is for
MILLISECONDS = 20  # that a candidate is measured
CLOSE = 0.05  # of the root mean square: numbers that fall to the other side of a border of fp8 are off by 1/16
MOST_REGISTERS = 208  # of a thread that sums may take


class Shapes(NamedTuple):
    """What is timed, the most wanted first.

    dense: [outputs, inputs] of products. one_token_int4: outputs (of each of gate and up), inputs, whether gated,
    whether behind a norm. mixtures: by name, and how many ranks share the width.
    """

    dense: list[tuple[int, int]]
    one_token_int4: list[tuple[int, int, bool, bool]]
    mixtures: dict[tuple[str, int], bench.Mixture]


def of_layer(hidden: int, inner: int, qkv: int, heads: int) -> tuple[list[tuple[int, int]], list[Any]]:
    """The products of a layer, as `Shapes` has them: dense ones, and those of one token of 4 bits."""
    dense = [(2 * inner, hidden), (hidden, inner), (qkv, hidden), (hidden, heads)]
    one_token = [(inner, hidden, True, True), (hidden, inner, False, False)]
    return dense, [*one_token, (qkv, hidden, False, True), (hidden, heads, False, False)]


LLAMA, LLAMA_ONE_TOKEN = of_layer(4096, 14336, 6144, 4096)
SWEPT = Shapes(
    [*LLAMA, (14336, 4096), (4096, 7168), (3072, 4096)],  # Llama-3.1-8B, and its halves on two ranks
    LLAMA_ONE_TOKEN,
    {
        (name, ranks): bench.MIXTURES[name]
        for name, ranks in (("qwen3-30b-a3b", 1), ("mixtral-8x7b", 1), ("gpt-oss-20b", 1), ("qwen3-30b-a3b", 2))
    },
)
# Shapes that no tile was chosen by: they show whether the plans hold for others. Qwen3-14B's and Mistral Small 24B's.
QWEN, QWEN_ONE_TOKEN = of_layer(5120, 17408, 7168, 5120)
OTHERS = Shapes(
    [*QWEN, (65536, 5120), (5120, 32768)],
    QWEN_ONE_TOKEN,
    {
        ("glm-4.7-flash", 1): bench.Mixture(2048, 1536, 64, 4),
        ("qwen3.5-35b-a3b", 1): bench.Mixture(2048, 512, 256, 8),
        ("mixtral-8x7b", 4): bench.MIXTURES["mixtral-8x7b"],
    },
)
DENSE_TOKENS = [16, 32, 64, 256, 144, 2048, 8192]  # 144 fill no tile, as most batches do not
EXPERTS_TOKENS = [1, 256, 8192, 32, 64, 1024]

Choice = Tiles | HopperPlan | tuple[int, ...]
Calls = Callable[[Choice], list[Callable[[], Any]]]  # equal calls on different data, for one choice of tiles

app = make_app()


class Product(NamedTuple):
    """One product of one shape.

    branch: what it has in common with others of one tile. rows: of a tile of experts. planned: whether plans take so
    many rows here. operands: makes tensors on a device, and the calls from these. moved, flops, rate: as of
    `kernel_times.Case`.
    """

    family: str
    branch: str
    shape: str
    today: Choice
    candidates: list[Choice]
    operands: Callable[[str], Calls]
    moved: float
    flops: float
    rate: float
    rows: int | None = None
    planned: bool = True

    @property
    def name(self) -> str:
        return f"{self.family} {self.branch}, {self.shape}"


def text(choice: Choice) -> str:
    """As the plans have it."""
    if not isinstance(choice, Tiles):
        return str(choice)
    tokens, outputs, depth, num_warps, num_stages, weights_first, slices, copied = choice
    parts = [tokens, outputs, depth, num_warps, num_stages, weights_first]
    options = [f"slices={slices}"] * (slices > 1) + ["copied=True"] * copied
    return f"Tiles({', '.join([*map(str, parts), *options])})"


def candidates(
    gpu: Hardware,
    stage_bytes: Callable[[Tiles], int],
    *,
    tokens: int,
    outputs: Sequence[int],
    depths: Sequence[int],
    stages: Sequence[int] = (2, 3, 4, 6),
    copied: Sequence[bool] = (False,),
    sums: int = 1,
    either: bool = False,
) -> list[Choice]:
    """Tiles that fit. sums: tiles of sums that a program holds. either: operand may be the first."""
    found: list[Choice] = []
    for out, depth, warps, count, copy in itertools.product(outputs, depths, (4, 8), stages, copied):
        # Hopper's instruction takes 64 rows or more of its first operand: weights, or tokens where there are as many.
        for first in (False, True):
            tiles = Tiles(tokens, out, depth, warps, count, first, copied=copy)
            if (first and out < 64) or (not either and tokens < 64 and first == (out < 64)):
                continue
            registers = sums * tokens * out / (32 * warps)
            too_small = warps == 8 and tokens * out < 64 * 128
            if registers <= MOST_REGISTERS and not too_small and stage_bytes(tiles) * count <= gpu.shared_memory:
                found.append(tiles)
    return found


def sliced(
    gpu: Hardware, stage_bytes: Callable[[Tiles], int], tokens: int, parts: Sequence[int], wide: Sequence[int]
) -> list[Choice]:
    """Narrow tiles whose warps share the depth, each so much of it."""
    every = itertools.product(wide, parts, (4, 8), (2, 3, 4))
    tiles = [Tiles(tokens, out, warps * part, warps, count, False, slices=warps) for out, part, warps, count in every]
    return [each for each in tiles if stage_bytes(each) * each.num_stages <= gpu.shared_memory]


# ---- dense products ----


def dense(family: str, gpu: Hardware, shapes: Shapes, group: int | None, *, wide: bool, bits: int) -> Iterator[Product]:
    """Products with weights in fp8 or int4. group: inputs that share a scale. wide: tokens stay in bf16."""
    options: dict[str, Any]
    of_x = (1 if not wide else 2) * (2 if bits == 4 else 1)  # bytes of a token for each step of the depth
    per_step = 2 if bits == 4 else 1  # inputs

    def stage_bytes(tiles: Tiles) -> int:
        return (of_x * tiles.tokens + tiles.outputs) * tiles.depth

    for tokens, (outputs, inputs) in itertools.product(DENSE_TOKENS, shapes.dense):
        least = plans.LEAST_DEQUANTISED_TOKENS[bits] if wide else plans.LIBRARY_TOKENS
        if tokens >= least and (wide or group is None or gpu.is_hopper):
            continue  # PyTorch's product
        today: Choice
        if bits == 4:
            own = (
                plans.choose_int4_hopper(tokens, outputs, inputs, group, gpu.multiprocessors) if gpu.is_hopper else None
            )
            today = own or plans.choose_int4_tiles(tokens, outputs, group, torch.bfloat16, gpu)
            deepest = plans.int4_depth(group)
        elif wide:
            today = plans.choose_wide_tiles(tokens, outputs, group, torch.bfloat16, gpu)
            deepest = group or 256
        else:
            plan = None
            if gpu.is_hopper:
                plan = plan_hopper_fp8(tokens, outputs, inputs, gpu.multiprocessors, row_scales=group is None)
            today, deepest = plan or plans.choose_fp8_tiles(tokens, outputs, group, gpu), group or 256
        depths = [depth for depth in (32, 64, 128, 256) if depth <= deepest]
        if tokens <= 64:
            options = {"outputs": (32, 64, 128), "depths": depths[-2:], "stages": (3, 4, 6)}
            found = candidates(gpu, stage_bytes, tokens=tokens, **options)
            if tokens <= 32:
                found += sliced(gpu, stage_bytes, tokens, depths[-2:], (16, 32))
        else:
            found = []
            for tile in (64, 128):
                options = {"depths": depths[-2:]} if wide else {"depths": depths[-1:], "copied": (True,)}
                options |= {"outputs": (64, 128, 256), "stages": (3, 4)}
                sums = 1 if group is None and bits == 8 else 2
                found += candidates(gpu, stage_bytes, tokens=tile, sums=sums, **options)
        if bits == 8 and not wide:
            tiles = [tile for tile in HOPPER_TILES if tile.tokens == tokens and tile != WIDEST]
            found += hopper_candidates({tile: 3 - tile.consumers for tile in tiles}, tokens, outputs, gpu)
        if bits == 4 and gpu.is_hopper:
            padded = plans.int4_hopper_tokens(tokens)
            kinds = {tile: kind.programs for tile, kind in plans.INT4_HOPPER_TILES.items() if tile.tokens == padded}
            found += hopper_candidates(kinds, tokens, outputs, gpu)
        kept = inputs * outputs * bits // 8 + 4 * (outputs if group is None else outputs * inputs // group)
        if bits == 8 and group is not None:
            kept -= 4 * outputs * inputs // group * 127 // 128
        yield Product(
            family,
            f"{tokens} tokens" if tokens <= 64 else "many tokens",
            f"{tokens} x {inputs} -> {outputs}",
            today,
            found,
            partial(_dense_operands, tokens, inputs, outputs, group, wide=wide, bits=bits),
            kept + tokens * (of_x // per_step * inputs + 2 * outputs),
            2 * tokens * inputs * outputs,
            bench.FLOPS_PER_SECOND if wide else bench.FP8_FLOPS_PER_SECOND,
        )


def _dense_operands(
    tokens: int, inputs: int, outputs: int, group: int | None, device: str, *, wide: bool, bits: int
) -> Calls:
    x = bench.normal(tokens, inputs, device=device)
    if bits == 4:
        packed = bench.int4_weights(inputs, outputs, group or inputs, symmetric=True, device=device)

        def int4_calls(choice: Choice) -> list[Callable[[], Any]]:
            if isinstance(choice, Tiles):
                return [partial(_int4.multiply, x, weight, None, choice) for weight in packed]
            return [partial(_int4_hopper.linear_int4_hopper, x, weight, choice) for weight in packed]

        return int4_calls
    weights = bench.fp8_weights(inputs, outputs, 1 if group is None else 128, group, device=device)
    if wide:
        return lambda tiles: [partial(_fp8.multiply, x, None, weight, None, x.dtype, tiles) for weight in weights]
    rows = ops.to_fp8(x, ops.Rounding(group))

    def calls(choice: Choice) -> list[Callable[[], Any]]:
        if isinstance(choice, Tiles):
            return [partial(_fp8.multiply, rows.values, rows.scales, each, None, x.dtype, choice) for each in weights]
        return [partial(_hopper.linear_hopper_fp8, rows, each, choice, None, x.dtype) for each in weights]

    return calls


def hopper_candidates(tiles: dict[HopperTile, int], tokens: int, outputs: int, gpu: Hardware) -> list[Choice]:
    """These tiles, by as many programs a multiprocessor, one less, or as many as share tiles evenly."""
    found: list[Choice] = []
    for tile, programs in tiles.items():
        count, most = -(-outputs // tile.rows) * -(-tokens // tile.tokens), gpu.multiprocessors * programs
        even = {max(1, each // count) * count for each in (gpu.multiprocessors, most)}
        found += [(tile, number) for number in sorted({min(count, most), most} | even) if number <= most]
    return found


def vector_candidates(row_bytes: int, *, gated: bool) -> list[Choice]:
    """With 4 to 128 registers of weights a thread."""
    return [
        (rows, warps)
        for rows, warps in itertools.product((1, 2, 4, 8, 16, 32), (2, 4, 8, 16))
        if 4 <= rows * row_bytes * (2 if gated else 1) // (32 * warps * 4) <= 128
    ]


def one_token(family: str, gpu: Hardware, shapes: Shapes, group: int | None) -> Iterator[Product]:  # noqa: ARG001
    """Products of one token; choices are outputs and warps of a program."""
    for outputs, inputs in shapes.dense:
        for gated in (False, True) if outputs > inputs else (False,):
            padded, own = 1 << (inputs - 1).bit_length(), outputs // 2 if gated else outputs
            yield Product(
                family,
                f"{'gated, ' if gated else ''}{padded} inputs",
                f"{inputs} -> {outputs}",
                plans.choose_fp8_vector(padded, gated=gated),
                vector_candidates(padded, gated=gated),
                partial(_one_token_operands, inputs, outputs, group, gated=gated),
                inputs * outputs + 2 * (inputs + own),
                2 * inputs * outputs,
                bench.FLOPS_PER_SECOND,
            )


def _one_token_operands(inputs: int, outputs: int, group: int | None, device: str, *, gated: bool) -> Calls:
    weights = bench.fp8_weights(inputs, outputs, 1 if group is None else 128, group, device=device)
    x, norm = bench.normal(1, inputs, device=device), (None, None, 0.0)

    def call(weight: ops.Fp8Weight, choice: Choice) -> Tensor:
        y, _ = _vector.linear_fp8_vector(x, norm, weight, None, "silu" if gated else None, choice=choice)
        return y

    return lambda choice: [partial(call, weight, choice) for weight in weights]


def int4_vector_candidates(padded: int, *, gated: bool) -> list[Choice]:
    """(outputs, warps, programs a multiprocessor): what registers hold, and enough of it on the way; or many programs,
    of a tile each.
    """
    found: list[Choice] = []
    for outputs, warps, programs in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 3, 4, 6, 8, 64)):
        rows, vectors = outputs * (2 if gated else 1), max(1, padded // (32 * warps))
        registers = (32 + 10 * rows) * vectors + 16  # of inputs, words and scales of two tiles, and all else
        together = min(programs, 65536 // (32 * warps * registers))
        kilobytes = together * rows * padded / 64
        runs = programs == 64 or programs * warps <= 64  # on a multiprocessor
        if (padded >= 32 * warps or warps == 1) and registers <= 240 and runs and 16 <= kilobytes <= 128:
            found.append((outputs, warps, programs))
    return found


def one_token_int4(family: str, gpu: Hardware, shapes: Shapes, group: int) -> Iterator[Product]:  # noqa: ARG001
    """Products of one token and weights of 4 bits, with what a layer has before and behind them."""
    for outputs, inputs, gated, normed in shapes.one_token_int4:
        rows = 2 * outputs if gated else outputs
        padded = 1 << (inputs // 2 // plans.INT4_VECTOR_BYTES - 1).bit_length()
        yield Product(
            family,
            f"{'norm, ' if normed else ''}{'gated, ' if gated else ''}{padded} vectors",
            f"{inputs} -> {rows}",
            plans.choose_int4_vector(padded, gated=gated),
            int4_vector_candidates(padded, gated=gated),
            partial(_one_token_int4_operands, inputs, rows, group, gated=gated, normed=normed),
            inputs * rows / 2 + 4 * rows * inputs / group + 2 * (inputs * (4 if normed else 1) + outputs),
            2 * inputs * rows,
            bench.FLOPS_PER_SECOND,
        )


def _one_token_int4_operands(inputs: int, rows: int, group: int, device: str, *, gated: bool, normed: bool) -> Calls:
    weights = bench.int4_weights(inputs, rows, group, symmetric=True, device=device)
    x, residual, scale = (bench.normal(1, inputs, device=device) for _ in range(3))
    norm = (residual, scale[0], 1e-5) if normed else (None, None, 0.0)

    def call(weight: ops.Int4Weight, choice: Choice) -> Tensor:
        y, _ = _int4_vector.linear_int4_vector(x, norm, weight, None, "silu" if gated else None, choice=choice)
        return y

    return lambda choice: [partial(call, weight, choice) for weight in weights]


# ---- experts ----


def experts(family: str, gpu: Hardware, shapes: Shapes, found: bench.ExpertsFormat) -> Iterator[Product]:
    """Both products of mixtures, for all numbers of rows that may be the best for so many tokens."""
    for tokens, ((name, ranks), whole) in itertools.product(EXPERTS_TOKENS, shapes.mixtures.items()):
        if found.group == 32 and found.kind == "mxfp4" and (whole.inner // ranks) % 32:
            continue
        sizes = whole._replace(inner=whole.inner // ranks)
        shape = f"{name}{f' on {ranks}' if ranks > 1 else ''}, {tokens} tokens"
        pairs = tokens * sizes.top_k
        unsorted, mean = experts_plans.is_unsorted(tokens, sizes.top_k, sizes.num_experts), pairs / sizes.num_experts
        every = [16] if unsorted else [rows for rows in (16, 32, 64, 128) if mean / 8 <= rows <= max(16, 4 * mean)]
        for gated, rows in itertools.product((True, False), every[-3:]):
            yield _experts_product(family, gpu, found, sizes, tokens, rows, shape, gated=gated, unsorted=unsorted)


def _experts_product(
    family: str,
    gpu: Hardware,
    found: bench.ExpertsFormat,
    sizes: bench.Mixture,
    tokens: int,
    rows: int,
    shape: str,
    *,
    gated: bool,
    unsorted: bool,
) -> Product:
    hidden, inner, count, top_k = sizes
    inputs, outputs, tiles_of_sums = (hidden, 2 * inner, 2) if gated else (inner, hidden, 1)
    # Bytes of a token and of a weight for each step of the depth.
    of_x, of_weight = {"bf16": (2, 2), "fp8": (1 if found.fp8_tokens else 2, 1)}.get(found.kind, (4, 1))

    def stage_bytes(tiles: Tiles) -> int:
        return (of_x * tiles.tokens + of_weight * (2 if gated else 1) * tiles.outputs) * tiles.depth

    joined = plans.joins_scales(found.kind, torch.bfloat16, gpu)
    deepest = 256 if found.kind == "bf16" and rows < 64 else 128 if joined else min(128, found.group or 128)
    depths = [depth for depth in (32, 64, 128, 256) if depth <= deepest]
    wide: tuple[int, ...] = (16, 32, 64, 128) if unsorted else (32, 64, 128, 256) if rows <= 32 else (64, 128, 256)
    options: dict[str, Any] = {"depths": depths[-2:], "stages": (2, 3, 4) if found.kind != "bf16" else (3, 4, 6)}
    if found.kind != "bf16" and not joined:
        tiles_of_sums += 1
    options["either"] = joined
    if found.fp8_tokens:
        group = found.group or 128
        scaled = found.group is not None
        today: Choice = plans.choose_fp8_expert_tiles(rows, group, group, gpu, gated=gated, scaled=scaled)
        options = {"depths": [group], "copied": (False, True), "stages": (2, 3, 4)}
        if gated:  # what goes into the last product is rounded in whole groups
            wide = (128, 256)
    elif found.kind == "bf16":
        today = experts_plans.choose_tiles(rows, torch.bfloat16, gated=gated)
    else:
        today = plans.choose_expert_tiles(
            rows, found.kind, found.group, torch.bfloat16, gpu, gated=gated, joined=joined
        )
    if rows >= 64:
        options |= {"stages": (3, 4)}
    tiles = candidates(gpu, stage_bytes, tokens=rows, outputs=wide, sums=tiles_of_sums, **options)
    if unsorted and found.kind in ("bf16", "fp8"):
        row_bytes = of_weight << (inputs - 1).bit_length() + (0 if gated else (top_k - 1).bit_length())
        today, tiles = experts_plans.choose_pairs(row_bytes, gated=gated), vector_candidates(row_bytes, gated=gated)
    elif unsorted:
        places = 1 if gated else 1 << (top_k - 1).bit_length()
        today = experts_plans.choose_code_pairs(places, gated=gated)
        tiles = [(wide, places) for wide in (1, 2, 4, 8)]
    bits = {"bf16": 16, "fp8": 8}.get(found.kind, 4)
    scales = {"bf16": 0.0, "mxfp4": inputs / 32}.get(found.kind, 4 * -(-inputs // (found.group or inputs)) / found.rows)
    chosen = count * (1 - (1 - top_k / count) ** tokens)  # that tokens go through, on average
    moved_tokens = (tokens * hidden + tokens * top_k * inner) if gated else tokens * top_k * (hidden + inner)
    return Product(
        family,
        f"{'gate and up' if gated else 'down'}, {'each pair a tile' if unsorted else f'{rows} rows'}",
        shape,
        today,
        tiles,
        partial(_experts_operands, found, sizes, tokens, gated=gated, unsorted=unsorted),
        chosen * outputs * (inputs * bits / 8 + scales) + (1 if found.fp8_tokens else 2) * moved_tokens,
        2 * tokens * top_k * inputs * outputs,
        bench.FP8_FLOPS_PER_SECOND if found.fp8_tokens else bench.FLOPS_PER_SECOND,
        rows,
        rows == experts_plans.choose_rows(tokens * top_k, count, torch.bfloat16, unsorted=unsorted),
    )


def _experts_operands(
    found: bench.ExpertsFormat, sizes: bench.Mixture, tokens: int, device: str, *, gated: bool, unsorted: bool
) -> Calls:
    hidden, inner, count, top_k = sizes
    x = bench.normal(tokens if gated else tokens * top_k, hidden if gated else inner, device=device)
    chosen = [experts for _, experts in bench.routings(tokens, sizes, device=device)]
    # The product that is not timed has no weights of its own.
    projections: Any
    operand: Any = x
    of_pairs: Any = None
    if found.kind == "bf16":
        weight = bench.normal(count, *((2 * inner, hidden) if gated else (hidden, inner)), device=device).mul_(0.02)
        projections, kernel = Projections(weight, weight, None, None, "silu", None), _experts
        of_pairs = _pairs.PairWeight(weight) if unsorted else None
    else:
        own = bench.expert_weight(count, *((2 * inner, hidden) if gated else (hidden, inner)), found, device=device)
        projections = QuantisedProjections(own, own, None, None, "silu", None)
        kernel = _fp8_experts if found.fp8_tokens else _weights
        if unsorted:
            of_pairs = _weights.pair_weight(own, hardware(x.device))
        elif found.fp8_tokens:
            operand = ops.to_fp8(x, own.rounding)
            operand = operand._replace(scales=operand.scales.contiguous())
    groups: dict[int, list[Any]] = {}

    def calls(tiles: Choice) -> list[Callable[[], Any]]:
        if not isinstance(tiles, Tiles):
            weights = torch.ones(tokens, top_k, device=device)
            options = {"combined": None if gated else (weights, None), "choice": tiles}
            act = "silu" if gated else None, 0.0, 0.0
            return [partial(_pairs.multiply_pairs, x, of_pairs, None, experts, act, **options) for experts in chosen]
        if tiles.tokens not in groups:
            made = [None if unsorted else _group.group(experts, count, tiles.tokens) for experts in chosen]
            groups[tiles.tokens] = made
        dtype, options = (x.dtype,) if found.fp8_tokens else (), {}
        if found.kind in ("int4", "mxfp4"):
            options["joined"] = plans.joins_scales(found.kind, x.dtype, hardware(x.device))
        return [
            partial(kernel.multiply, operand, projections, experts, group, tiles, *dtype, gated=gated, **options)
            for experts, group in zip(chosen, groups[tiles.tokens], strict=True)
        ]

    return calls


FAMILIES: dict[str, Callable[[str, Hardware, Shapes], Iterator[Product]]] = {
    "experts-fp8": partial(experts, found=bench.EXPERTS_FORMATS["fp8 blocks"]),
    "experts-fp8-rows": partial(experts, found=bench.EXPERTS_FORMATS["fp8 rows"]),
    "experts-bf16": partial(experts, found=bench.EXPERTS_FORMATS["bf16"]),
    "experts-mxfp4": partial(experts, found=bench.EXPERTS_FORMATS["mxfp4"]),
    "experts-int4": partial(experts, found=bench.EXPERTS_FORMATS["int4 g128"]),
    "experts-fp8-weights": partial(experts, found=bench.EXPERTS_FORMATS["fp8 weights"]),
    "int4": partial(dense, group=128, wide=True, bits=4),
    "int4-vector": partial(one_token_int4, group=128),
    "fp8-one-token": partial(one_token, group=None),
    "fp8-rows": partial(dense, group=None, wide=False, bits=8),
    "fp8-blocks": partial(dense, group=128, wide=False, bits=8),
    "fp8-weights": partial(dense, group=128, wide=True, bits=8),
}


# ---- the sweep ----


class Timing(NamedTuple):
    """What one candidate gave; us None: it cannot be launched, or gives something else."""

    product: Product
    choice: Choice
    us: float | None


def compile_all(products: Sequence[Product], gpu: Hardware) -> None:
    """All candidates, side by side; those that cannot be compiled are left to show that later."""
    with assumed(META, gpu), dispatch.forced(triton=True), compile_only(ignore_errors=True):
        for product in products:
            calls = product.operands("meta")
            for choice in (product.today, *product.candidates):
                with suppress(Exception):
                    calls(choice)[0]()


def numbers(result: Tensor | ops.Fp8Rows) -> Tensor:
    return (result.dequantised() if isinstance(result, ops.Fp8Rows) else result).float()


def time_product(product: Product, deadline: float) -> Iterator[Timing]:
    """Today's tile first, whose result the others have to have, or else the first that runs; until the time is over."""
    if time.monotonic() > deadline:
        return
    calls, expected = product.operands(bench.DEVICE), None
    for choice in dict.fromkeys((product.today, *product.candidates)):
        if time.monotonic() > deadline:
            return
        us = None
        try:
            own = calls(choice)
            result = numbers(own[0]())
            expected = result if expected is None else expected
            error = (result - expected).square().mean().sqrt() / expected.square().mean().sqrt()
            if float(error) < CLOSE:
                case = bench.Case("", own, product.moved, product.flops, product.rate)
                us = case.measure_us(MILLISECONDS)
            else:
                print(f"# {product.name}: {text(choice)}: off by {float(error):.2g}", file=sys.stderr)
        except Exception as error:
            print(f"# {product.name}: {text(choice)}: {type(error).__name__}: {str(error)[:80]}", file=sys.stderr)
        yield Timing(product, choice, us)


def report(timings: Sequence[Timing]) -> str:
    """A line of one product."""
    product, known = timings[0].product, {each.choice: each.us for each in timings if each.us is not None}
    floor = bench.Case("", [], product.moved, product.flops, product.rate).floor_us()
    shown = [f"today {text(product.today)}", "does not run"]
    if (now := known.get(product.today)) is not None:
        shown[1] = f"{now:.1f} us ({floor / now:.2f} of the limit, {product.moved / now / 1e6:.2f} TB/s)"
    line = f"{product.name}: {' '.join(shown)}"
    if known:
        best = min(known, key=lambda choice: known[choice])
        us = known[best]
        line += f"; best {text(best)} {us:.1f} us ({floor / us:.2f}, {product.moved / us / 1e6:.2f} TB/s)"
    return line


def best_of_branch(timings: Sequence[Timing]) -> tuple[Choice, list[float]] | None:
    """(the choice with the least geometric mean over the products in which all were timed, its gains over today's)."""
    times: dict[Choice, dict[str, float]] = defaultdict(dict)
    for each in timings:
        if each.us is not None:
            times[each.choice][each.product.name] = each.us
    products = {each.product.name: each.product for each in timings if each.us is not None}
    whole = {choice: own for choice, own in times.items() if own.keys() == products.keys()}
    if not whole:
        return None
    best = min(whole, key=lambda choice: sum(map(math.log, whole[choice].values())))
    now = [times.get(product.today, {}).get(name, math.inf) for name, product in products.items()]
    return best, [old / new for old, new in zip(now, whole[best].values(), strict=True)]


def shares_of_best(timings: Sequence[Timing]) -> Iterator[float]:
    """The time of each product's fastest candidate over that of today's choice."""
    products: dict[str, list[Timing]] = defaultdict(list)
    for each in timings:
        if each.product.planned:
            products[each.product.name].append(each)
    for own in products.values():
        times = [each.us for each in own if each.us is not None]
        now = [each.us for each in own if each.us is not None and each.choice == each.product.today]
        if now:
            yield min(times) / now[0]


def lines_for_plans(timings: Sequence[Timing]) -> Iterator[str]:
    """The best tile of each branch, then what the numbers of rows of experts' tiles give with these."""
    branches: dict[tuple[str, str, str], list[Timing]] = defaultdict(list)
    for each in timings:
        branches[each.product.family, each.product.branch, text(each.product.today)].append(each)
    chosen: dict[str, tuple[Product, float]] = {}
    for (family, branch, today), own in branches.items():
        if (found := best_of_branch(own)) is None:
            continue
        best, gains = found
        mean = math.prod(gains) ** (1 / len(gains))
        over = f"{mean:.2f} times as fast over {len(gains)} shapes, {min(gains):.2f} at least"
        yield f"# {family} {branch}, now {today}: {over}"
        yield f"return {text(best)}"
        for each in own:
            if each.choice == best and each.us is not None:
                chosen[each.product.name] = each.product, each.us
    if shares := list(shares_of_best(timings)):
        worst = f"{min(shares):.2f} at worst, {sum(share < 0.95 for share in shares)} of {len(shares)} under 0.95"
        yield f"# {timings[0].product.family}: today's tiles as fast as the best of each shape: {worst}"
    sums: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for product, us in chosen.values():
        if product.rows is not None:
            sums[product.family, product.shape][product.rows].append(us)
    for (family, shape), rows in sums.items():
        if len(rows) > 1:
            shown = [f"{count} rows {sum(us):.1f} us" for count, us in sorted(rows.items()) if len(us) == 2]
            yield f"# {family} {shape}, both products: {', '.join(shown)}"


@app.command()
def sweep(
    families: Annotated[list[str] | None, typer.Argument(metavar="FAMILY", help=", ".join(FAMILIES))] = None,
    seconds: Annotated[float, typer.Option(help="After which no further candidate is timed.")] = 420.0,
    match: Annotated[str, typer.Option(help="Only shapes and branches whose names contain this.")] = "",
    save: Annotated[Path | None, typer.Option(help="File to which every time is added, as a line of JSON.")] = None,
    others: Annotated[bool, typer.Option("--others", help="Shapes that no tile was chosen by.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print shapes and candidates, for an H200.")] = False,
) -> None:
    """Time candidate tiles of products on one GPU, and print the best as lines for the plans."""
    deadline = time.monotonic() + seconds
    if unknown := [family for family in families or [] if family not in FAMILIES]:
        raise ConfigError(f"no family is called {unknown[0]!r}; there are {', '.join(FAMILIES)}")
    if not dry_run and not torch.cuda.is_available():
        raise ConfigError("sweep_tiles.py needs a GPU that PyTorch can use; there is none (--dry-run needs none)")
    gpu = H200 if dry_run else hardware(torch.device(bench.DEVICE))
    found = {
        family: list(FAMILIES[family](family, gpu, OTHERS if others else SWEPT)) for family in families or FAMILIES
    }
    found = {family: [product for product in own if match in product.name] for family, own in found.items()}
    if dry_run:
        for product in itertools.chain.from_iterable(found.values()):
            print(f"{product.name}: {len(product.candidates)} candidates, today {text(product.today)}")
            print("    " + ", ".join(map(text, product.candidates)))
        return
    print(f"# {torch.cuda.get_device_name()}, torch {torch.__version__}, limits as of kernel_times.py", flush=True)
    for family, products in found.items():
        timings: list[Timing] = []
        if time.monotonic() < deadline:
            started = time.monotonic()
            compile_all(products, gpu)
            print(f"# {family}: compiled in {time.monotonic() - started:.0f} s", flush=True)
        for product in products:
            own = list(time_product(product, deadline))
            if own:
                print(report(own), flush=True)
            if save is not None:
                with save.open("a") as file:
                    for _, choice, us in own:
                        file.write(json.dumps({"product": product.name, "choice": text(choice), "us": us}) + "\n")
            timings += own
            torch.cuda.empty_cache()
        print("\n".join(lines_for_plans(timings)), flush=True)
        if left := len(products) - len({each.product.name for each in timings}):
            print(f"# {family}: {seconds:g} s were over before {left} of {len(products)} products")


if __name__ == "__main__":
    main(app)
