"""Times each kernel on one GPU, beside the least time that it could take.

    python benchmarks/kernel_times.py [NAME]... [--json]     # cases whose names begin with NAME; all if there is none
    rayllm bench kernels ...                                 # the same from an installed package

The floor of a case is the time that the fewest bytes (or operations) would take at the rates that an H200 was seen to
reach. The ratio is floor over measured time, so 1.00 is the limit. Inputs are random and in bfloat16. Each call takes
the next of several copies of its inputs, which together exceed the L2 cache. Calls are replayed from a CUDA graph, so
the figures are without launch overhead. The floor of a case with an fp8 cache counts the bytes of that cache.

The file is not called kernels.py because transformers would take it for Hugging Face's package of that name, in every
script of this folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Annotated, NamedTuple

import torch
import typer
from torch import Tensor

from rayllm.cli.main import main, make_app
from rayllm.errors import ConfigError
from rayllm_kernels import ops
from rayllm_kernels.cache.kv_cache import FP8_MAX, KVCache, KVScales
from rayllm_kernels.quantised.formats import e4m3_numbers, int4_numbers
from rayllm_kernels.quantised.int4 import half_of, pack_int4

DEVICE = "cuda"
BYTES_PER_SECOND = 4.3e12
FLOPS_PER_SECOND = 790e12
FP8_FLOPS_PER_SECOND = 2 * FLOPS_PER_SECOND  # as the hardware's tables have it; not measured
ROTATED_BYTES = 256 << 20  # several times the 60 MB L2

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
DECODE = [
    (64, 4096),
    (64, 1024),
    (256, 1024),
    (16, 2048),
    (1, 8192),
    (1, 2048),
    (1, 512),
    (1, 128),
]  # sequences, context
RAGGED = [32, 64, 96, 128, 160, 256]  # sequences
RAGGED_HEADS = [(32, 8, 128), (16, 8, 128), (12, 2, 128), (32, 8, 64)]  # query heads, KV heads, head size
LATENT_HEADS = [16, 128]  # of a rank of eight of DeepSeek-V3, and of the whole
LATENT_DECODE = [(64, 4096), (16, 2048), (1, 8192)]
LATENT_PREFILL = [(8192, 0), (2048, 0), (2048, 30720), (256, 30720), (128, 30720)]  # chunk, context before it
LATENT_SIZES = (512, 64, 128, 128)  # of the latent, of what is rotated, of the rest of a key, of a value
FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
PREFILL = [(1, 8192, 0), (8, 2048, 0), (1, 2048, 32768), (4, 512, 8192)]  # sequences, chunk, context before it
TOKENS = [8192, 64]
HIDDEN, INTERMEDIATE = 4096, 14336
LINEAR = [(4096, 28672), (14336, 4096), (4096, 6144), (1024, 151936), (1024, 6144)]  # inputs, outputs
LINEAR_TOKENS = [1, 32, 128, 144]  # the last fills no tile, as most batches do not
QUANTISED_LINEAR = [*LINEAR[:3], (4096, 4096)]
QUANTISED_TOKENS = [1, 8, 16, 32, 64, 128, 144, 256, 1024, 8192]
LARGE = 8192  # rows, columns and depth of the product that says what tensor cores give
EXPERTS_TOKENS = [1, 32, 256, 8192]
ROUTINGS = 8  # of tokens to experts, in turn
DRAWS = [1, 32, 256]  # rows of logits
VOCAB_SIZE = 151936

app = make_app()


class Mixture(NamedTuple):
    """Sizes of a layer's experts."""

    hidden: int
    inner: int
    num_experts: int
    top_k: int


MIXTURES = {
    "qwen3-30b-a3b": Mixture(2048, 768, 128, 8),
    "mixtral-8x7b": Mixture(4096, 14336, 8, 2),
    "gpt-oss-20b": Mixture(2880, 2880, 32, 4),
}


class ExpertsFormat(NamedTuple):
    """Of experts' weights.

    kind: of `ops.ExpertWeight`, or "bf16". rows, group: outputs and inputs that share a scale.
    """

    kind: str
    rows: int = 1
    group: int | None = None
    fp8_tokens: bool = False


EXPERTS_FORMATS = {
    "bf16": ExpertsFormat("bf16"),
    "fp8 rows": ExpertsFormat("fp8", 1, None, True),
    "fp8 blocks": ExpertsFormat("fp8", 128, 128, True),
    "fp8 weights": ExpertsFormat("fp8", 128, 128),  # tokens stay in bf16
    "int4 g128": ExpertsFormat("int4", 1, 128),
    "int4 g32": ExpertsFormat("int4", 1, 32),
    "mxfp4": ExpertsFormat("mxfp4", 1, 32),
}
EXPERTS = {
    "qwen3-30b-a3b": tuple(EXPERTS_FORMATS),
    "mixtral-8x7b": ("bf16", "fp8 blocks", "int4 g128"),
    "gpt-oss-20b": ("bf16", "mxfp4"),
}


class Measurement(NamedTuple):
    """What one case gave."""

    name: str
    us: float  # median time of a call in microseconds
    figure: float  # what the call reaches, in `unit`
    unit: str  # TB/s or TFLOP/s, by what limits the case
    floor_us: float  # the least time of a call in microseconds
    ratio: float  # floor over time, at most about 1


@dataclass
class Case:
    """One kernel with one shape."""

    name: str
    calls: Sequence[Callable[[], object]]  # equal calls on different data, made in turn
    bytes: float = 0.0  # that one call has to move
    flops: float = 0.0  # that one call has to do
    flops_per_second: float = FLOPS_PER_SECOND

    def floor_us(self) -> float:
        return max(self.bytes / BYTES_PER_SECOND, self.flops / self.flops_per_second) * 1e6

    def measure_us(self, milliseconds: int = 100) -> float:
        """Median time of one call in microseconds. milliseconds: how long it is measured."""
        from triton.testing import do_bench

        for call in self.calls:
            call()
        torch.cuda.synchronize()
        # Enough calls a replay that the replay's own overhead vanishes.
        count = max(len(self.calls), min(50, int(1000 / self.floor_us())))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in islice(cycle(self.calls), count):
                call()
        times = {"warmup": milliseconds // 5, "rep": milliseconds}
        return float(do_bench(graph.replay, **times, return_mode="median")) * 1e3 / count

    def measure(self) -> Measurement:
        us, floor = self.measure_us(), self.floor_us()
        if self.flops / self.flops_per_second > self.bytes / BYTES_PER_SECOND:
            return Measurement(self.name, us, self.flops / us * 1e-6, "TFLOP/s", floor, floor / us)
        return Measurement(self.name, us, self.bytes / us * 1e-6, "TB/s", floor, floor / us)


def normal(*shape: int, device: str | None = None) -> Tensor:
    """Random bfloat16 numbers. device: None, here and below, for DEVICE."""
    return torch.empty(*shape, dtype=torch.bfloat16, device=device or DEVICE).normal_()


def copies(call_bytes: float) -> int:
    """How many copies of the inputs of a call of so many bytes exceed the L2 cache together."""
    return max(2, int(ROTATED_BYTES / call_bytes) + 1)


def kv_pool(blocks: int, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """A block-major pool [blocks, layers, 2, Hkv, block_size, D] of normal numbers."""
    pool = torch.empty(blocks, layers, 2, kv_heads, BLOCK_SIZE, head_dim, dtype=dtype, device=DEVICE)
    for part in pool.split(max(1, ROTATED_BYTES // pool[0].nbytes)):
        part.copy_(normal(*part.shape))
    return pool


def layers_of(pool: Tensor) -> list[KVCache]:
    """The cache of each layer; if the pool is in fp8, all have the same scales."""
    scales = None
    if pool.dtype in FP8_MAX:
        scales = KVScales(*torch.rand(2, pool.shape[3], device=DEVICE).add_(0.5).unbind())
    return [KVCache(pool[:, i, 0], pool[:, i, 1], scales) for i in range(pool.shape[1])]


def paged_context(batch: int, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(a pool of enough layers, shuffled block tables, lengths) of sequences of one length."""
    blocks = -(-length // BLOCK_SIZE)
    layers = copies(batch * length * KV_HEADS * HEAD_DIM * 2 * dtype.itemsize)
    pool = kv_pool(batch * blocks, layers, KV_HEADS, HEAD_DIM, dtype)
    tables = torch.randperm(batch * blocks, device=DEVICE).to(torch.int32).view(batch, blocks)
    return pool, tables, torch.full((batch,), length, dtype=torch.int32, device=DEVICE)


def decode(
    name: str,
    lengths: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    value_dim: int | None = None,
) -> Case:
    """One decode step's attention; the schedule is made once for all layers, as in the engine.

    value_dim: of a cache of latents.
    """
    batch, tokens = len(lengths), sum(lengths)
    counts = [-(-length // BLOCK_SIZE) for length in lengths]
    context_bytes = tokens * kv_heads * head_dim * (2 if value_dim is None else 1) * dtype.itemsize
    layers = copies(context_bytes)
    pool = kv_pool(sum(counts), layers, kv_heads, head_dim, dtype)
    tables = torch.zeros(batch, max(counts), dtype=torch.int32)
    for row, ids in enumerate(torch.randperm(sum(counts)).to(torch.int32).split(counts)):
        tables[row, : len(ids)] = ids
    tables, seq_lens = tables.to(DEVICE), torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    q = normal(batch, heads, head_dim)
    out = torch.empty_like(q) if value_dim is None else q.new_empty(batch, heads, value_dim)
    caches = layers_of(pool)
    if value_dim is not None:
        caches = [ops.latent_cache(part, value_dim) for part in pool.flatten(1, 2).unbind(1)]
    contexts, scoring = ops.Contexts(tables, seq_lens), ops.Scoring(head_dim**-0.5)
    schedule = ops.decode_schedule(q, caches[0], contexts, scoring)
    calls = [
        partial(ops.paged_decode_attention, q, cache, contexts, scoring, schedule=schedule, out=out) for cache in caches
    ]
    flops = 0 if value_dim is None else 2 * tokens * heads * (head_dim + value_dim)
    return Case(name, calls, bytes=context_bytes + q.nbytes + out.nbytes, flops=flops)


def ragged_lengths(batch: int) -> list[int]:
    """Lengths of sequences, drawn uniformly from 275 to 1,575 tokens."""
    return (torch.randint(200, 1501, (batch,), generator=torch.Generator().manual_seed(batch)) + 75).tolist()


def prefill(name: str, batch: int, chunk: int, context: int, dtype: torch.dtype = torch.bfloat16) -> Case:
    """Attention of a chunk of each sequence to itself and to the context before it."""
    pool, tables, lengths = paged_context(batch, context + chunk, dtype)
    q = normal(batch * chunk, HEADS, HEAD_DIM)
    out = torch.empty_like(q)
    starts = torch.arange(0, batch * chunk + 1, chunk, dtype=torch.int32, device=DEVICE)

    contexts, scoring = ops.Contexts(tables, lengths), ops.Scoring(HEAD_DIM**-0.5)
    calls = [
        partial(ops.paged_prefill_attention, q, cache, contexts, scoring, starts, chunk, out=out)
        for cache in layers_of(pool)
    ]
    pairs = chunk * context + chunk * (chunk + 1) // 2
    return Case(name, calls, bytes=2 * q.nbytes, flops=4 * batch * pairs * HEADS * HEAD_DIM)


def latent_prefill(name: str, chunk: int, context: int, heads: int, *, expanded: bool) -> Case:
    """Latent attention of one chunk, with what brings queries to the latents' space and results back, or with keys and
    values made of latents.
    """
    latent, rest, key_dim, value_dim = LATENT_SIZES
    length = context + chunk
    blocks = -(-length // BLOCK_SIZE)
    pool = kv_pool(blocks, copies(length * (latent + rest) * 2), 1, latent + rest, torch.bfloat16)
    caches = [ops.latent_cache(part, latent) for part in pool.flatten(1, 2).unbind(1)]
    tables = torch.randperm(blocks, device=DEVICE).to(torch.int32)[None]
    lengths, starts = (torch.tensor(numbers, dtype=torch.int32, device=DEVICE) for numbers in ([length], [0, chunk]))
    q, weight, scale = normal(chunk, heads, key_dim + rest), normal(heads, key_dim + value_dim, latent), 0.1
    out = q.new_empty(chunk, heads, value_dim)
    positions = torch.arange(length, device=DEVICE)
    rows = ops.latent_rows(caches[0], tables, torch.zeros_like(positions), positions)
    bounds = torch.tensor([[0, length, 0]], dtype=torch.int32, device=DEVICE)
    piece = ops.KeyPiece(rows, bounds, lengths, starts, chunk)
    contexts, scoring = ops.Contexts(tables, lengths), ops.Scoring(scale)

    def absorbed(cache: KVCache) -> None:
        queries = q.new_empty(chunk, heads, latent + rest)
        ops.linear_heads(q[..., :key_dim], weight[:, :key_dim].transpose(1, 2), out=queries[..., :latent])
        queries[..., latent:] = q[..., key_dim:]
        found = ops.paged_prefill_attention(queries, cache, contexts, scoring, starts, chunk)
        ops.linear_heads(found, weight[:, key_dim:], out=out)

    def expand(cache: KVCache) -> None:
        ops.expanded_prefill_attention(q, cache, weight, scale, [piece], length, out)

    pairs, made = chunk * context + chunk * (chunk + 1) // 2, latent * (key_dim + value_dim)
    flops = (
        pairs * (key_dim + rest + value_dim) + made * length if expanded else pairs * (2 * latent + rest) + made * chunk
    )
    calls = [partial(expand if expanded else absorbed, cache) for cache in caches]
    return Case(name, calls, bytes=q.nbytes + out.nbytes, flops=2 * heads * flops)


def add_norm(name: str, tokens: int) -> Case:
    """Adding to the residual, and its norm."""
    hidden, weight = normal(copies(tokens * HIDDEN * 2), tokens, HIDDEN), normal(HIDDEN)
    pairs = [(hidden[i], hidden[i - 1]) for i in range(len(hidden))]
    calls = [partial(ops.fused_add_rms_norm, x, residual, weight, 1e-5) for x, residual in pairs]
    return Case(name, calls, bytes=4 * tokens * HIDDEN * 2)


def silu(name: str, tokens: int) -> Case:
    """SiLU of one half of the columns times the other half."""
    gate_up = normal(copies(tokens * INTERMEDIATE * 4), tokens, 2 * INTERMEDIATE)
    return Case(name, [partial(ops.act_and_mul, x, "silu") for x in gate_up], bytes=tokens * INTERMEDIATE * 6)


def norm_rope_cache(name: str, tokens: int, dtype: torch.dtype = torch.bfloat16) -> Case:
    """Head norms, rotary positions and the cache write."""
    head_row, heads = HEAD_DIM * 2 * tokens, HEADS + 2 * KV_HEADS
    fused = normal(copies(head_row * heads), tokens, heads * HEAD_DIM)
    cos_sin, positions = torch.rand(tokens, HEAD_DIM, device=DEVICE), torch.arange(tokens, device=DEVICE)
    weight = normal(HEAD_DIM)
    blocks = -(-tokens // BLOCK_SIZE)
    pool = kv_pool(blocks, len(fused), KV_HEADS, HEAD_DIM, dtype)
    norms = ops.HeadNorms(weight, weight, 1e-5)
    slots = torch.randperm(blocks * BLOCK_SIZE, device=DEVICE)[:tokens].contiguous()
    calls = [
        partial(ops.qk_norm_rope_cache, qkv, norms, positions, cos_sin, cache, slots)
        for qkv, cache in zip(fused, layers_of(pool), strict=True)
    ]
    written = head_row * HEADS + tokens * HEAD_DIM * 2 * KV_HEADS * dtype.itemsize
    return Case(name, calls, bytes=head_row * heads + written + cos_sin.nbytes)


def linear(name: str, tokens: int, inputs: int, outputs: int) -> Case:
    """A product with a weight [outputs, inputs]."""
    weights = [normal(outputs, inputs).mul_(inputs**-0.5) for _ in range(copies(2 * inputs * outputs))]
    x = normal(tokens, inputs)
    moved, flops = 2 * (inputs * outputs + tokens * (inputs + outputs)), 2 * tokens * inputs * outputs
    return Case(name, [partial(ops.linear, x, weight) for weight in weights], moved, flops)


def fp8_weights(
    inputs: int, outputs: int, rows: int, group: int | None, device: str | None = None
) -> list[ops.Fp8Weight]:
    """Copies of [outputs, inputs] in e4m3."""
    weights = []
    for _ in range(copies(inputs * outputs)):
        found = e4m3_numbers(normal(outputs, inputs, device=device).mul_(inputs**-0.5), (rows, group))
        scales = found.scales[::rows][:, found.groups[:: group or inputs]].contiguous()
        weights.append(ops.Fp8Weight(found.values.contiguous(), scales, rows, group))
    return weights


def linear_fp8(name: str, tokens: int, inputs: int, outputs: int, rows: int, group: int | None, *, wide: bool) -> Case:
    """A product with a weight [outputs, inputs] in e4m3, a scale a row or a block. wide: tokens stay in bf16."""
    weights = fp8_weights(inputs, outputs, rows, group)
    x, of_token = normal(tokens, inputs), inputs * (2 if wide else 1) + 2 * outputs
    moved, flops = inputs * outputs + tokens * of_token + weights[0].scales.nbytes, 2 * tokens * inputs * outputs
    if wide:
        return Case(name, [partial(ops.linear_fp8_weight, x, weight) for weight in weights], moved, flops)
    how = ops.Rounding(group)
    if tokens == 1:  # which is not rounded
        return Case(
            name, [partial(ops.linear_rounding_fp8, x, how, weight) for weight in weights], moved + inputs, flops
        )
    rounded = ops.to_fp8(x, how)
    calls = [partial(ops.linear_fp8, rounded, weight, None, x.dtype) for weight in weights]
    return Case(name, calls, moved, flops, FP8_FLOPS_PER_SECOND)


def copy(name: str, size: int) -> Case:
    """What memory gives: so many bytes read and written, by a kernel; a captured copy is not by one, and is slower."""
    source, target = normal(size // 2), normal(size // 2)
    return Case(name, [partial(torch.neg, x, out=y) for x, y in ((source, target), (target, source))], bytes=2 * size)


def library_fp8(name: str, size: int) -> Case:
    """What tensor cores give: PyTorch's product of e4m3 numbers with one scale for all, without any of ours."""
    parts = [normal(2, size, size).to(torch.float8_e4m3fn).unbind() for _ in range(2)]
    one = torch.ones((), device=DEVICE)
    product = partial(torch._scaled_mm, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)
    calls = [partial(product, x, weight.t()) for x, weight in parts]
    return Case(name, calls, bytes=4 * size * size, flops=2 * size**3, flops_per_second=FP8_FLOPS_PER_SECOND)


def int4_weights(
    inputs: int, outputs: int, group: int, *, symmetric: bool, device: str | None = None
) -> list[ops.Int4Weight]:
    """Copies of [outputs, inputs] in 4 bits."""
    weights = []
    for _ in range(copies(inputs * outputs // 2)):
        weight = normal(outputs, inputs, device=device).mul_(inputs**-0.5)
        codes, scales, zeros = pack_int4(int4_numbers(weight, group, symmetric=symmetric), group)
        zero = None if symmetric else zeros.T.contiguous()
        weights.append(ops.Int4Weight(codes, scales.T.contiguous(), zero, inputs, group))
    return weights


def weight_bytes(weight: ops.Int4Weight | ops.ExpertWeight) -> int:
    """Of numbers, scales and zero points."""
    return sum(part.nbytes for part in (weight.codes, weight.scales, weight.zeros) if part is not None)


def linear_int4(name: str, tokens: int, inputs: int, outputs: int, group: int, *, symmetric: bool) -> Case:
    """A product with a weight [outputs, inputs] in 4 bits."""
    weights, x = int4_weights(inputs, outputs, group, symmetric=symmetric), normal(tokens, inputs)
    moved = weight_bytes(weights[0]) + 2 * tokens * (inputs + outputs)
    calls = [partial(ops.linear_int4, x, weight) for weight in weights]
    return Case(name, calls, moved, 2 * tokens * inputs * outputs)


def expert_weight(
    count: int, outputs: int, inputs: int, found: ExpertsFormat, device: str | None = None
) -> ops.ExpertWeight:
    """[count, outputs, inputs] of valid numbers, which are random and not rounded from others."""
    (kind, rows, group, _), device = found, device or DEVICE
    shape = (count, -(-outputs // rows), 1 if group is None else -(-inputs // group))
    scales = torch.full(shape, inputs**-0.5, device=device)
    if kind == "fp8":
        codes = torch.empty(count, outputs, inputs, dtype=torch.uint8, device=device)
        for own in codes:  # one by one: floats of all would be twice the bytes
            own.copy_(normal(outputs, inputs, device=device).to(torch.float8_e4m3fn).view(torch.uint8))
        return ops.ExpertWeight("fp8", codes, scales, None, inputs, group, rows)
    codes = torch.randint(256, (count, outputs, half_of(inputs, group)), dtype=torch.uint8, device=device)
    if kind == "mxfp4":
        return ops.ExpertWeight("mxfp4", codes, torch.full_like(scales, 120, dtype=torch.uint8), None, inputs, group)
    return ops.ExpertWeight("int4", codes, scales, None, inputs, group)


def routings(tokens: int, sizes: Mixture, device: str | None = None) -> list[tuple[Tensor, Tensor]]:
    """Several of (weights, experts) of tokens, uniformly random, as of `ops.route`."""
    made, shape = [], (tokens, sizes.num_experts)
    for _ in range(ROUTINGS):
        weights, chosen = torch.randn(*shape, device=device or DEVICE).softmax(-1).topk(sizes.top_k)
        made.append((weights.contiguous(), chosen.to(torch.int32)))
    return made


def experts(name: str, tokens: int, sizes: Mixture, found: ExpertsFormat) -> Case:
    """All of a layer's experts but their router: sort, both products and the weighted sum.

    The bytes are those of the experts that the tokens go through, on average over the routings, which take turns.
    """
    hidden, inner, count, top_k = sizes
    product: Callable[..., Tensor]
    if found.kind == "bf16":
        gate_up = normal(count, 2 * inner, hidden).mul_(hidden**-0.5)
        down = normal(count, hidden, inner).mul_(inner**-0.5)
        one, product = (gate_up.nbytes + down.nbytes) / count, partial(ops.experts, gate_up=gate_up, down=down)
    else:
        first, last = expert_weight(count, 2 * inner, hidden, found), expert_weight(count, hidden, inner, found)
        one = (weight_bytes(first) + weight_bytes(last)) / count
        product = partial(ops.experts_quantised, gate_up=first, down=last, fp8_tokens=found.fp8_tokens)
    x, ways = normal(tokens, hidden), routings(tokens, sizes)
    chosen = sum(len(experts.unique()) for _, experts in ways) / len(ways)
    calls = [partial(product, x, *way) for way in ways]
    flops = 6 * tokens * top_k * hidden * inner
    rate = FP8_FLOPS_PER_SECOND if found.fp8_tokens else FLOPS_PER_SECOND
    return Case(name, calls, chosen * one + 2 * x.nbytes, flops, rate)


def rounding(name: str, tokens: int, group: int | None) -> Case:
    """Adding to the residual, its norm, and rounding that to fp8."""
    hidden, weight = normal(copies(tokens * HIDDEN * 2), tokens, HIDDEN), normal(HIDDEN)
    how = ops.Rounding(group)
    pairs = [(hidden[i], hidden[i - 1]) for i in range(len(hidden))]
    calls = [partial(ops.rms_norm_fp8, x, residual, weight, 1e-5, how) for x, residual in pairs]
    return Case(name, calls, bytes=7 * tokens * HIDDEN)


def silu_fp8(name: str, tokens: int, group: int | None) -> Case:
    """SiLU of one half of the columns times the other half, rounded to fp8."""
    gate_up, how = normal(copies(tokens * INTERMEDIATE * 4), tokens, 2 * INTERMEDIATE), ops.Rounding(group)
    return Case(name, [partial(ops.act_and_mul_fp8, x, how, "silu") for x in gate_up], bytes=5 * tokens * INTERMEDIATE)


def gumbel(name: str, rows: int) -> Case:
    """Drawing one token a row of logits."""
    logits = normal(copies(rows * VOCAB_SIZE * 2), rows, VOCAB_SIZE)
    seeds, ones = torch.arange(rows, device=DEVICE), torch.ones(rows, device=DEVICE)
    draw = ops.DrawRows(seeds, seeds, ones, ones)
    return Case(name, [partial(ops.gumbel_argmax, x, draw) for x in logits], bytes=rows * VOCAB_SIZE * 2)


def copy_blocks(name: str, count: int) -> Case:
    """Blocks of 32 layers, 2 MiB each; a pool of 2 GiB is its own rotation."""
    pool = normal(1024, 32, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    calls = []
    for _ in range(8):
        src, dst = torch.randperm(1024, device=DEVICE)[: 2 * count].view(2, count).unbind()
        calls.append(partial(ops.copy_blocks, pool, src, dst))
    return Case(name, calls, bytes=2 * count * pool[0].nbytes)


def cases() -> dict[str, Callable[[str], Case]]:
    """Functions that make the cases, by name; inputs are allocated only when one is called."""
    made: dict[str, Callable[[str], Case]] = {}
    for batch, length in DECODE:
        made[f"decode {batch} x {length}"] = partial(
            decode, lengths=[length] * batch, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM
        )
        for kind, dtype in FP8.items():
            made[f"decode {batch} x {length} {kind}"] = partial(
                decode, lengths=[length] * batch, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=dtype
            )
    for heads, kv_heads, head_dim in RAGGED_HEADS:
        for batch in RAGGED:
            made[f"decode {batch} ragged, {heads}/{kv_heads} x {head_dim}"] = partial(
                decode, lengths=ragged_lengths(batch), heads=heads, kv_heads=kv_heads, head_dim=head_dim
            )
    for heads in LATENT_HEADS:
        for batch, length in LATENT_DECODE:
            made[f"decode latents {batch} x {length}, {heads} heads"] = partial(
                decode, lengths=[length] * batch, heads=heads, kv_heads=1, head_dim=576, value_dim=512
            )
    for batch, chunk, context in PREFILL:
        name = f"prefill {batch} x {chunk}" + (f" on {context}" if context else "")
        made[name] = partial(prefill, batch=batch, chunk=chunk, context=context)
        for kind, dtype in FP8.items():
            made[f"{name} {kind}"] = partial(prefill, batch=batch, chunk=chunk, context=context, dtype=dtype)
    for chunk, context in LATENT_PREFILL:
        for form in ("absorbed", "expanded"):
            name = f"prefill latents {chunk}" + (f" on {context}" if context else "") + f", 16 heads {form}"
            made[name] = partial(latent_prefill, chunk=chunk, context=context, heads=16, expanded=form == "expanded")
    for inputs, outputs in LINEAR:
        for tokens in LINEAR_TOKENS:
            made[f"linear {tokens} x {inputs} -> {outputs}"] = partial(
                linear, tokens=tokens, inputs=inputs, outputs=outputs
            )
    for inputs, outputs in QUANTISED_LINEAR:
        for tokens in QUANTISED_TOKENS:
            shape = {"tokens": tokens, "inputs": inputs, "outputs": outputs}
            size = f"{tokens} x {inputs} -> {outputs}"
            for kind, rows, group in (("rows", 1, None), ("blocks", 128, 128)):
                made[f"linear_fp8 {size} {kind}"] = partial(linear_fp8, **shape, rows=rows, group=group, wide=False)
                made[f"linear_fp8_weight {size} {kind}"] = partial(
                    linear_fp8, **shape, rows=rows, group=group, wide=True
                )
            for group, symmetric in ((32, True), (128, True), (128, False)):
                name = f"linear_int4 {size} g{group}" + ("" if symmetric else " zeros")
                made[name] = partial(linear_int4, **shape, group=group, symmetric=symmetric)
    for mixture, formats in EXPERTS.items():
        for kind in formats:
            for tokens in EXPERTS_TOKENS:
                made[f"experts {mixture} {kind}, {tokens}"] = partial(
                    experts, tokens=tokens, sizes=MIXTURES[mixture], found=EXPERTS_FORMATS[kind]
                )
    for rows in DRAWS:
        made[f"draw {rows} x {VOCAB_SIZE}"] = partial(gumbel, rows=rows)
    for tokens in TOKENS:
        made[f"add and rms_norm {tokens} x {HIDDEN}"] = partial(add_norm, tokens=tokens)
        made[f"silu_and_mul {tokens} x {INTERMEDIATE}"] = partial(silu, tokens=tokens)
        for kind, group in (("rows", None), ("groups", 128)):
            made[f"rms_norm_fp8 {tokens} x {HIDDEN} {kind}"] = partial(rounding, tokens=tokens, group=group)
            made[f"silu_and_mul_fp8 {tokens} x {INTERMEDIATE} {kind}"] = partial(silu_fp8, tokens=tokens, group=group)
        made[f"qk_norm_rope_cache {tokens} x {HEADS}+2x{KV_HEADS}"] = partial(norm_rope_cache, tokens=tokens)
        for kind, dtype in FP8.items():
            name = f"qk_norm_rope_cache {tokens} x {HEADS}+2x{KV_HEADS} {kind}"
            made[name] = partial(norm_rope_cache, tokens=tokens, dtype=dtype)
    made["copy_blocks 16 x 2 MiB"] = partial(copy_blocks, count=16)
    made["limit: copy of 1 GiB"] = partial(copy, size=1 << 30)
    made[f"limit: e4m3 product of {LARGE} x {LARGE} x {LARGE}"] = partial(library_fp8, size=LARGE)
    return made


@app.command()
def kernels(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Beginning of the cases' names; all if none.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object a case.")] = False,
) -> None:
    """Measure the kernels one by one on one GPU: time, figure, floor and ratio of each shape."""
    known = cases()
    for prefix in names or []:
        if not any(name.startswith(prefix) for name in known):
            kinds = ", ".join(dict.fromkeys(name.split()[0] for name in known))
            raise ConfigError(f"no kernel case begins with {prefix!r}; they begin with {kinds}")
    if not torch.cuda.is_available():
        raise ConfigError("rayllm bench kernels needs a GPU that PyTorch can use; there is none")
    if not json_output:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16")
        print(f"{'case':40s} {'time':>13s} {'figure':>14s} {'floor':>13s} {'ratio':>6s}")
    for name, make in known.items():
        if names and not name.startswith(tuple(names)):
            continue
        result = make(name).measure()
        torch.cuda.empty_cache()
        if json_output:
            print(json.dumps(result._asdict()), flush=True)
        else:
            figure = f"{result.figure:7.2f} {result.unit:7s}"
            print(f"{name:40s} {result.us:10.1f} us {figure} {result.floor_us:8.1f} us {result.ratio:6.2f}", flush=True)


if __name__ == "__main__":
    main(app)
