"""GB/s of swaps between the device's and the host's KV pool, against one large copy of the same bytes.

    python benchmarks/swap.py [--device cuda|cpu] [--mib 512] [--model configs/models/qwen3-8b ...]
                              [--block-sizes 8 16 32] [--tp 1]

For each model shape and block size, out to the host and in again:

    one copy      the bytes as one contiguous copy: what the bus gives
    engine        `CacheEngine`, host blocks that follow one another, as a fresh pool hands them out
    engine, far   `CacheEngine`, no two host blocks next to each other, the worst that a used pool can hand out
    a block each  block-major pools, one copy a block, without staging
    layer-major   pools of [layer][K, V][block], one copy a block, layer and K or V

Device blocks are scattered in all of them but the first. With --tp, the blocks are those of one rank of so many.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch

from rayllm.api.types import KVBlocks
from rayllm.config.model_folder import load_model_spec
from rayllm.config.model_spec import ModelSpec
from rayllm.worker.cache import CacheEngine, block_bytes, lay_out_blocks

MIB = 1 << 20
MODELS = Path(__file__).parents[1] / "configs" / "models"
LAYER_MAJOR_COPIES = 4096  # at most in one measurement: they are slow


def seconds(run: Callable[[], None], synchronize: Callable[[], None], repeat: int = 5) -> float:
    """The least of several runs, each to its end, after one that is not measured."""
    taken = []
    for _ in range(repeat + 1):
        synchronize()
        started = time.perf_counter()
        run()
        synchronize()
        taken.append(time.perf_counter() - started)
    return min(taken[1:])


def pinned(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.bfloat16, pin_memory=device.type == "cuda")


def copies_of(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[Callable[[], None], Callable[[], None]]:
    """Run (device, host) pairs out and in, one asynchronous copy a pair."""

    def out() -> None:
        for device, host in pairs:
            host.copy_(device, non_blocking=True)

    def into() -> None:
        for device, host in pairs:
            device.copy_(host, non_blocking=True)

    return out, into


def measure(spec: ModelSpec, block_size: int, tp: int, num_bytes: int, device: torch.device) -> list[list[str]]:
    """Rows of the table: shape, way, GB/s out, GB/s in."""
    places = lay_out_blocks(spec, tp, block_size)
    a_block = block_bytes(places, torch.bfloat16)
    count = max(2, num_bytes // a_block)
    elements = a_block // 2
    rng = random.Random(0)
    scattered = rng.sample(range(2 * count), count)
    engine = CacheEngine(KVBlocks(2 * count, 2 * count), places, torch.bfloat16, device)

    def synchronize() -> None:
        engine.swaps.join_swap_ins()
        if device.type == "cuda":
            torch.cuda.synchronize()

    def through_engine(host: list[int]) -> tuple[Callable[[], None], Callable[[], None]]:
        out = list(zip(scattered, host, strict=True))
        into = [(host_block, block) for block, host_block in out]
        return lambda: engine.swaps.swap_out(out), lambda: engine.swaps.swap_in(into)

    far = [2 * i for i in rng.sample(range(count), count)]
    host, pool = pinned(device, count, elements), engine.pool.view(2 * count, -1)
    pieces = 2 * sum(place.group == 0 for place in places)
    few = min(count, max(1, LAYER_MAJOR_COPIES // pieces))
    by_layer = torch.ones(pieces, 2 * count, elements // pieces, dtype=torch.bfloat16, device=device)
    host_by_layer = pinned(device, pieces, few, elements // pieces)
    parts = [(by_layer[p, b], host_by_layer[p, i]) for p in range(pieces) for i, b in enumerate(scattered[:few])]
    ways = {
        "one copy": (copies_of([(pool[:count], host)]), count),
        "engine": (through_engine(list(range(count))), count),
        "engine, far": (through_engine(far), count),
        "a block each": (copies_of([(pool[block], host[i]) for i, block in enumerate(scattered)]), count),
        "layer-major": (copies_of(parts), few),
    }
    rows = []
    for name, ((out, into), blocks) in ways.items():
        rates = [blocks * a_block / seconds(run, synchronize) / 1e9 for run in (out, into)]
        rows.append([f"{a_block / MIB:.3f}", str(blocks), name, *(f"{rate:.1f}" for rate in rates)])
    engine.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--mib", type=int, default=512, help="bytes of a measurement, in MiB")
    parser.add_argument("--model", nargs="+", default=[str(MODELS / "qwen3-0.6b"), str(MODELS / "qwen3-8b")])
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--tp", type=int, default=1, help="ranks that share the KV heads")
    args = parser.parse_args()
    device = torch.device(args.device)
    print(f"{'model':>14} {'block':>5} {'MiB':>7} {'blocks':>6}  {'way':<13} {'out GB/s':>8} {'in GB/s':>8}")
    for model in args.model:
        for block_size in args.block_sizes:
            for mib, blocks, name, out, into in measure(
                load_model_spec(model), block_size, args.tp, args.mib * MIB, device
            ):
                print(f"{Path(model).name:>14} {block_size:>5} {mib:>7} {blocks:>6}  {name:<13} {out:>8} {into:>8}")


if __name__ == "__main__":
    main()
