"""Seconds to load a checkpoint, which is made on the spot: random weights of a shape in configs/models.

    python benchmarks/loading.py [--model llama-3.1-8b] [--tp 1 2 4] [--device cuda] [--folder DIR]

A load is the whole phase "load model" of an engine's start, of all ranks together, as `rayllm launch` prints it. Each
number of ranks loads twice: the files come out of the page cache where they fit into memory, which the first line
says. Beside them stands one rank's share of the bytes, and a plain read of all files by as many threads.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file

from rayllm import LLM

MODELS = Path(__file__).parents[1] / "configs" / "models"
SHARD_BYTES = 10**9
READ_BYTES = 16 * 2**20


def make_checkpoint(config: Path, folder: Path) -> int:
    """Write a checkpoint in bfloat16, in shards; returns its bytes. All weights repeat the same random numbers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copy(config / "config.json", folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config))
    shards: list[dict[str, torch.Size]] = [{}]
    size = total = 0
    for name, weight in model.named_parameters():  # tied ones once
        num_bytes = 2 * weight.numel()
        if size + num_bytes > SHARD_BYTES and size:
            shards.append({})
            size = 0
        shards[-1][name] = weight.shape
        size += num_bytes
        total += num_bytes
    paths = [folder / f"model-{number:05d}.safetensors" for number in range(1, len(shards) + 1)]
    with ProcessPoolExecutor(min(len(shards), os.cpu_count() or 1)) as pool:
        list(pool.map(_save, shards, paths))
    files = {name: path.name for shard, path in zip(shards, paths, strict=True) for name in shard}
    document = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(document))
    return total


def _save(shapes: dict[str, torch.Size], path: Path) -> None:
    numbers = (torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    weights = {}
    for name, shape in shapes.items():
        count = shape.numel()
        weights[name] = numbers.repeat(-(-count // len(numbers)))[:count].view(shape)
    save_file(weights, path, metadata={"format": "pt"})


def read_all(folder: Path, threads: int) -> float:
    """Seconds that so many threads take to read all files."""

    def read(part: tuple[Path, int, int]) -> None:
        path, start, stop = part
        buffer = bytearray(READ_BYTES)
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while start < stop:
                start += file.readinto(memoryview(buffer)[: stop - start]) or stop

    parts = []
    for path in folder.glob("*.safetensors"):
        size = path.stat().st_size
        parts += [(path, size * i // threads, size * (i + 1) // threads) for i in range(threads)]
    begin = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, parts))
    return time.perf_counter() - begin


def load(folder: Path, tp: int, device: str) -> float:
    """Seconds of the phase that loads the model."""
    options = {"max_model_len": 256, "max_num_seqs": 2, "max_num_batched_tokens": 256, "enforce_eager": True}
    with LLM(
        str(folder),
        device=device,
        tensor_parallel_size=tp,
        skip_tokenizer_init=True,
        num_gpu_blocks_override=64,
        **options,
    ) as llm:
        return dict(llm.engine.info.start.phases)["load model"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", help="where to make the checkpoint; a temporary folder if absent")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        begin = time.perf_counter()
        size = make_checkpoint(MODELS / args.model, folder)
        print(f"{args.model}: {size / 1e9:.2f} GB, made in {time.perf_counter() - begin:.0f} s", flush=True)
        print(
            "| ranks | GB a rank | load, first | load, again | plain read of all |\n|---|---|---|---|---|", flush=True
        )
        for tp in args.tp:
            seconds = [load(folder, tp, args.device) for _ in range(2)]
            cells = [tp, f"{size / tp / 1e9:.2f}", *(f"{each:.2f} s" for each in [*seconds, read_all(folder, tp)])]
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
