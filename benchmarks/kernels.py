"""Times the kernels on one GPU and prints each figure beside its floor.

    PYTHONPATH=kernels python benchmarks/kernels.py [name ...]

A floor is the time that the fewest bytes (or operations) would take at the rates an H200 was seen to reach; the ratio
is floor over measured time, 1.00 the limit. Inputs are random and bf16; each call takes the next of several copies
that together exceed the L2 cache; calls are replayed from a CUDA graph, so launch overhead is not in the figures.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice

import torch
from torch import Tensor
from triton.testing import do_bench

from rayllm_kernels import ops

BYTES_PER_SECOND = 4.3e12
FLOPS_PER_SECOND = 790e12
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
PREFILL = [(1, 8192, 0), (8, 2048, 0), (1, 2048, 32768), (4, 512, 8192)]  # sequences, chunk, context before it
TOKENS = [8192, 64]
HIDDEN, INTERMEDIATE = 4096, 14336


@dataclass
class Case:
    """`calls` is a cycle of equal calls on different data; a call moves `bytes` or does `flops`."""

    name: str
    calls: list[Callable[[], object]]
    bytes: float = 0.0
    flops: float = 0.0

    def floor_us(self) -> float:
        return max(self.bytes / BYTES_PER_SECOND, self.flops / FLOPS_PER_SECOND) * 1e6

    def measure_us(self) -> float:
        """Median time of one call in microseconds."""
        for call in self.calls:
            call()
        torch.cuda.synchronize()
        # Enough calls a replay that the replay's own overhead vanishes.
        count = max(len(self.calls), min(50, int(1000 / self.floor_us())))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in islice(cycle(self.calls), count):
                call()
        return float(do_bench(graph.replay, warmup=20, rep=100, return_mode="median")) * 1e3 / count

    def row(self) -> str:
        us, floor = self.measure_us(), self.floor_us()
        if self.flops / FLOPS_PER_SECOND > self.bytes / BYTES_PER_SECOND:
            figure = f"{self.flops / us * 1e-6:7.0f} TFLOP/s"
        else:
            figure = f"{self.bytes / us * 1e-6:7.2f} TB/s   "
        return f"{self.name:34s} {us:10.1f} us {figure} {floor:10.1f} us {floor / us:6.2f}"


def normal(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="cuda").normal_()


def copies(call_bytes: float) -> int:
    return max(2, int(ROTATED_BYTES / call_bytes) + 1)


def paged_context(batch: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """A block-major pool [blocks, layers, 2, Hkv, block_size, D] of enough layers, shuffled tables, lengths."""
    blocks = -(-length // BLOCK_SIZE)
    layers = copies(batch * length * KV_HEADS * HEAD_DIM * 4)
    pool = normal(batch * blocks, layers, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    tables = torch.randperm(batch * blocks, device="cuda").to(torch.int32).view(batch, blocks)
    return pool, tables, torch.full((batch,), length, dtype=torch.int32, device="cuda")


def decode(name: str, lengths: list[int], heads: int, kv_heads: int, head_dim: int) -> Case:
    """One decode step's attention; the schedule is made once for all layers, as in the engine."""
    batch, tokens = len(lengths), sum(lengths)
    counts = [-(-length // BLOCK_SIZE) for length in lengths]
    layers = copies(tokens * kv_heads * head_dim * 4)
    pool = normal(sum(counts), layers, 2, kv_heads, BLOCK_SIZE, head_dim)
    tables = torch.zeros(batch, max(counts), dtype=torch.int32)
    for row, ids in enumerate(torch.randperm(sum(counts)).to(torch.int32).split(counts)):
        tables[row, : len(ids)] = ids
    tables, seq_lens = tables.cuda(), torch.tensor(lengths, dtype=torch.int32, device="cuda")
    q = normal(batch, heads, head_dim)
    out = torch.empty_like(q)
    schedule = ops.decode_schedule(q, pool[:, 0, 0], seq_lens)

    def layer_call(layer: int) -> Callable[[], object]:
        k, v = pool[:, layer, 0], pool[:, layer, 1]
        return lambda: ops.paged_decode_attention(
            q, k, v, tables, seq_lens, scale=head_dim**-0.5, schedule=schedule, out=out
        )

    return Case(name, [layer_call(i) for i in range(layers)], bytes=tokens * kv_heads * head_dim * 4 + 2 * q.nbytes)


def decodes() -> Iterator[Case]:
    for batch, length in DECODE:
        yield decode(f"decode {batch} x {length}", [length] * batch, HEADS, KV_HEADS, HEAD_DIM)
    for heads, kv_heads, head_dim in RAGGED_HEADS:
        for batch in RAGGED:
            lengths = (torch.randint(200, 1501, (batch,), generator=torch.Generator().manual_seed(batch)) + 75).tolist()
            name = f"decode {batch} ragged, {heads}/{kv_heads} x {head_dim}"
            yield decode(name, lengths, heads, kv_heads, head_dim)


def prefill(batch: int, chunk: int, context: int) -> Case:
    pool, tables, lengths = paged_context(batch, context + chunk)
    q = normal(batch * chunk, HEADS, HEAD_DIM)
    out = torch.empty_like(q)
    starts = torch.arange(0, batch * chunk + 1, chunk, dtype=torch.int32, device="cuda")

    def layer_call(layer: int) -> Callable[[], object]:
        k, v = pool[:, layer, 0], pool[:, layer, 1]
        return lambda: ops.paged_prefill_attention(
            q, k, v, tables, lengths, starts, chunk, scale=HEAD_DIM**-0.5, out=out
        )

    pairs = chunk * context + chunk * (chunk + 1) // 2
    name = f"prefill {batch} x {chunk}" + (f" on {context}" if context else "")
    return Case(
        name,
        [layer_call(i) for i in range(pool.shape[1])],
        bytes=2 * q.nbytes,
        flops=4 * batch * pairs * HEADS * HEAD_DIM,
    )


def token_ops(tokens: int) -> Iterator[Case]:
    """The kernels whose cost is one pass over `tokens` rows."""
    n = copies(tokens * HIDDEN * 2)
    hidden, weight = normal(n, tokens, HIDDEN), normal(HIDDEN)
    row = tokens * HIDDEN * 2
    yield Case(
        f"rms_norm {tokens} x {HIDDEN}", [lambda x=x: ops.rms_norm(x, weight, 1e-5) for x in hidden], bytes=2 * row
    )
    pairs = [(hidden[i], hidden[i - 1]) for i in range(n)]
    yield Case(f"fused_add_rms_norm {tokens} x {HIDDEN}",
               [lambda x=x, r=r: ops.fused_add_rms_norm(x, r, weight, 1e-5) for x, r in pairs],
               bytes=4 * row)  # fmt: skip

    gate_up = normal(copies(tokens * INTERMEDIATE * 4), tokens, 2 * INTERMEDIATE)
    yield Case(f"silu_and_mul {tokens} x {INTERMEDIATE}", [lambda x=x: ops.silu_and_mul(x) for x in gate_up],
               bytes=tokens * INTERMEDIATE * 6)  # fmt: skip

    head_row = HEAD_DIM * 2 * tokens
    fused = normal(copies(head_row * (HEADS + 2 * KV_HEADS)), tokens, HEADS + 2 * KV_HEADS, HEAD_DIM)
    cos_sin = torch.rand(tokens, HEAD_DIM, device="cuda")
    positions = torch.arange(tokens, device="cuda")
    split = [x.split([HEADS, KV_HEADS, KV_HEADS], dim=1) for x in fused]
    yield Case(f"rotary_embedding {tokens} x {HEADS}+{KV_HEADS}",
               [lambda q=q, k=k: ops.rotary_embedding(positions, q, k, cos_sin) for q, k, _ in split],
               bytes=2 * head_row * (HEADS + KV_HEADS) + cos_sin.nbytes)  # fmt: skip
    head_weight = normal(HEAD_DIM)
    yield Case(f"rms_norm of heads {tokens} x {HEADS}",
               [lambda q=q: ops.rms_norm(q, head_weight, 1e-5) for q, _, _ in split],
               bytes=2 * head_row * HEADS)  # fmt: skip
    blocks = -(-tokens // BLOCK_SIZE)
    pool = normal(blocks, len(split), 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    slots = torch.randperm(blocks * BLOCK_SIZE, device="cuda")[:tokens].contiguous()
    yield Case(f"reshape_and_cache {tokens} x {KV_HEADS}",
               [lambda i=i, k=k, v=v: ops.reshape_and_cache(k, v, pool[:, i, 0], pool[:, i, 1], slots)
                for i, (_, k, v) in enumerate(split)], bytes=4 * head_row * KV_HEADS)  # fmt: skip


def copy_blocks(count: int) -> Case:
    """Blocks of 32 layers, 2 MiB each; a pool of 2 GiB is its own rotation."""
    pool = normal(1024, 32, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    calls = []
    for _ in range(8):
        src, dst = torch.randperm(1024, device="cuda")[: 2 * count].view(2, count).unbind()
        calls.append(lambda src=src, dst=dst: ops.copy_blocks(pool, src, dst))
    return Case(f"copy_blocks {count} x 2 MiB", calls, bytes=2 * count * pool[0].nbytes)


def cases() -> Iterator[Case]:
    yield from decodes()
    for batch, chunk, context in PREFILL:
        yield prefill(batch, chunk, context)
    for tokens in TOKENS:
        yield from token_ops(tokens)
    yield copy_blocks(16)


def main() -> None:
    wanted = sys.argv[1:]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16")
    print(f"{'case':34s} {'time':>13s} {'figure':>14s} {'floor':>13s} {'ratio':>6s}")
    for case in cases():
        if not wanted or any(case.name.startswith(name) for name in wanted):
            print(case.row(), flush=True)


if __name__ == "__main__":
    main()
