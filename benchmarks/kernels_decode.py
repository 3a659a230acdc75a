"""Times the kernels of a small decode step on one GPU, one by one and as whole layers, against cuBLAS and unfused ops.

    PYTHONPATH=kernels python benchmarks/kernels_decode.py [ops] [layers] [--context 1024]

Every figure is a CUDA-graph replay of a chain of different layers whose weights together exceed the L2 cache several
times, in microseconds per call or per layer. A floor is the bytes of the weights at the rate an H200 was seen to reach;
"ours" and "before" are the ops that a model calls now and unfused projections, the products in the latter by cuBLAS.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.testing import do_bench

from rayllm_kernels import ops

BYTES_PER_SECOND = 4.3e12
ROTATED_BYTES = 200 << 20
HEAD_DIM, BLOCK_SIZE, EPS = 128, 16, 1e-6
TOKENS = [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256]


@dataclass(frozen=True)
class Shape:
    name: str
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    head_norms: bool
    layers: int  # of a chain

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * HEAD_DIM


SHAPES = [
    Shape("Qwen3-0.6B", 1024, 16, 8, 3072, True, 12),
    Shape("Qwen2.5-1.5B", 1536, 12, 2, 8960, False, 8),
    Shape("Llama-3.1-8B", 4096, 32, 8, 14336, False, 8),
]


def normal(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="cuda").normal_()


def weights(rows: int, columns: int) -> Tensor:
    return normal(rows, columns).mul_(columns**-0.5)


def replay_us(calls: list[Callable[[], object]], *, minimum: int = 8) -> float:
    """Median microseconds of one call in a captured chain of them all, several times over if they are few."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    chain = calls * -(-minimum // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in chain:
            call()
    return float(do_bench(graph.replay, warmup=3, rep=15, return_mode="median")) * 1e3 / len(chain)


def floor_us(weight: Tensor) -> float:
    return weight.nbytes / BYTES_PER_SECOND * 1e6


def op_row(name: str, floor: float, before: list[Callable[[], object]], ours: list[Callable[[], object]]) -> None:
    slow, fast = replay_us(before), replay_us(ours)
    print(f"{name:44s} {slow:8.2f} {fast:8.2f} {floor:8.2f} {floor / fast:6.2f}", flush=True)


def projections(shape: Shape, tokens: int) -> Iterator[tuple]:
    """(name, floor, unfused calls, our calls) of each projection with what fuses into it."""
    norm, residual = normal(shape.hidden), normal(tokens, shape.hidden)
    for name, rows, columns in (
        ("qkv", shape.qkv, shape.hidden),
        ("o", shape.hidden, shape.heads * HEAD_DIM),
        ("gate_up", 2 * shape.intermediate, shape.hidden),
        ("down", shape.hidden, shape.intermediate),
    ):
        x = normal(tokens, columns)
        copies = [weights(rows, columns) for _ in range(max(2, -(-ROTATED_BYTES // (2 * rows * columns))))]

        def product(w: Tensor, x: Tensor = x) -> Tensor:
            return F.linear(x, w)

        def normed(w: Tensor, x: Tensor = x) -> Tensor:
            return F.linear(ops.fused_add_rms_norm(x, residual, norm, EPS)[0], w)

        pairs: list[tuple[str, Callable, Callable]] = {
            "qkv": [
                ("", product, lambda w, x=x: ops.linear(x, w)),
                ("+norm", normed, lambda w, x=x: ops.add_rms_norm_linear(x, residual, norm, EPS, w)),
            ],
            "gate_up": [
                (
                    "+silu",
                    lambda w: ops.act_and_mul(product(w), "silu"),
                    lambda w, x=x: ops.linear_act_mul(x, w, "silu"),
                ),
                (
                    "+norm+silu",
                    lambda w: ops.act_and_mul(normed(w), "silu"),
                    lambda w, x=x: ops.add_rms_norm_linear(x, residual, norm, EPS, w, act="silu"),
                ),
            ],
        }.get(name, [("", product, lambda w, x=x: ops.linear(x, w))])
        for suffix, before, ours in pairs:
            title = f"{shape.name} {name}{suffix} {rows}x{columns}, {tokens} tokens"
            calls = [[lambda w=w, f=function: f(w) for w in copies] for function in (before, ours)]
            yield title, floor_us(copies[0]), *calls


class Layers:
    """A chain of layers on one batch of decodes, unfused and fused."""

    def __init__(self, shape: Shape, tokens: int, context: int):
        self.shape, self.tokens, self.context = shape, tokens, context
        width = shape.heads * HEAD_DIM
        self.weights = [
            (
                weights(shape.qkv, shape.hidden),
                weights(shape.hidden, width),
                weights(2 * shape.intermediate, shape.hidden),
                weights(shape.hidden, shape.intermediate),
            )
            for _ in range(shape.layers)
        ]
        self.norm = normal(shape.hidden)
        self.head_norm = normal(HEAD_DIM) if shape.head_norms else None
        self.resize(tokens)

    def resize(self, tokens: int) -> None:
        self.tokens = tokens
        blocks = tokens * self.context // BLOCK_SIZE
        self.pool = normal(blocks, self.shape.layers, 2, self.shape.kv_heads, BLOCK_SIZE, HEAD_DIM)
        self.tables = torch.randperm(blocks, device="cuda").to(torch.int32).view(tokens, -1)
        self.lengths = torch.full((tokens,), self.context, dtype=torch.int32, device="cuda")
        self.positions = self.lengths.long() - 1
        self.slots = self.tables[:, -1].long() * BLOCK_SIZE + BLOCK_SIZE - 1
        self.cos_sin = torch.rand(self.context, HEAD_DIM, device="cuda")
        self.x = normal(tokens, self.shape.hidden)
        q = normal(tokens, self.shape.heads, HEAD_DIM)
        self.contexts, self.scoring = ops.Contexts(self.tables, self.lengths), ops.Scoring(HEAD_DIM**-0.5)
        self.schedule = ops.decode_schedule(q, self.cache(0), self.contexts, self.scoring)

    def floor_us(self) -> float:
        return sum(floor_us(w) for w in self.weights[0])

    def cache(self, layer: int) -> ops.KVCache:
        return ops.KVCache(self.pool[:, layer, 0], self.pool[:, layer, 1])

    def attend(self, q: Tensor, layer: int) -> Tensor:
        call = q, self.cache(layer), self.contexts, self.scoring
        return ops.paged_decode_attention(*call, schedule=self.schedule).flatten(1)

    def queries(self, qkv: Tensor, layer: int) -> Tensor:
        norms = None if self.head_norm is None else ops.HeadNorms(self.head_norm, self.head_norm, EPS)
        return ops.qk_norm_rope_cache(qkv, norms, self.positions, self.cos_sin, self.cache(layer), self.slots)

    def before(self) -> Tensor:
        x = residual = self.x
        for layer, (qkv, o, gate_up, down) in enumerate(self.weights):
            x, residual = ops.fused_add_rms_norm(x, residual, self.norm, EPS)
            x = F.linear(self.attend(self.queries(F.linear(x, qkv), layer), layer), o)
            x, residual = ops.fused_add_rms_norm(x, residual, self.norm, EPS)
            x = F.linear(ops.act_and_mul(F.linear(x, gate_up), "silu"), down)
        return x + residual

    def ours(self) -> Tensor:
        x = residual = self.x
        for layer, (qkv, o, gate_up, down) in enumerate(self.weights):
            heads, residual = ops.add_rms_norm_linear(x, residual, self.norm, EPS, qkv)
            x = ops.linear(self.attend(self.queries(heads, layer), layer), o)
            x, residual = ops.add_rms_norm_linear(x, residual, self.norm, EPS, gate_up, act="silu")
            x = ops.linear(x, down)
        return x + residual

    def row(self) -> str:
        expected = self.before().float()
        error = float((self.ours().float() - expected).norm() / expected.norm())
        before, ours = (replay_us([call], minimum=1) / self.shape.layers for call in (self.before, self.ours))
        name = f"{self.shape.name} layer, {self.tokens} tokens"
        floor = self.floor_us()
        return f"{name:44s} {before:8.2f} {ours:8.2f} {floor:8.2f} {floor / ours:6.2f}  difference {error:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["ops", "layers"], help="ops, layers")
    parser.add_argument("--context", type=int, default=256, help="tokens of each sequence, a multiple of 16")
    options = parser.parse_args()
    wanted, context = options.parts, options.context
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16")
    print(f"{'case':44s} {'before':>8s} {'ours':>8s} {'floor':>8s} {'ratio':>6s}")
    for shape in SHAPES if "ops" in wanted else []:
        for tokens in TOKENS:
            for row in projections(shape, tokens):
                op_row(*row)
    for shape in SHAPES if "layers" in wanted else []:
        layers = Layers(shape, TOKENS[0], context)
        for tokens in TOKENS:
            layers.resize(tokens)
            print(layers.row(), flush=True)


if __name__ == "__main__":
    main()
