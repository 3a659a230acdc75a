"""Seconds to load a checkpoint, which is made on the spot: random weights of a shape in configs/models.

    python benchmarks/loading.py [--model llama-3.1-8b] [--tp 1 2 4] [--device cuda] [--folder DIR] [--whole]

Weights are stored in bfloat16, or as the shape's quantization_config says: fp8 in blocks (qwen3-8b-fp8) or GPTQ
(llama-3.1-8b-gptq). A load is the whole phase "load model" of an engine's start, of all ranks together, as
`rayllm launch` prints it. Each number of ranks loads twice: the files come out of the page cache where they fit into
memory, which the first line says. Beside them stands one rank's share of the bytes, and a plain read of all files by as
many threads. --whole: also the whole start with everything that serving has (graphs, all of the memory), in which the
second finds all kernels compiled.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from rayllm import LLM

MODELS = Path(__file__).parents[1] / "configs" / "models"
SHARD_BYTES = 10**9
READ_BYTES = 16 * 2**20


class Stored(NamedTuple):
    """One tensor of a file. values: repeated until the tensor is full."""

    shape: tuple[int, ...]
    values: torch.Tensor


def stored(name: str, shape: tuple[int, ...], quantization: dict[str, Any] | None) -> dict[str, Stored]:
    """The tensors that stand for a weight, all with the same random numbers."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(1 << 22, generator=generator) * 0.02
    if quantization is None or not name.endswith("_proj.weight"):
        return {name: Stored(shape, numbers.bfloat16())}
    module, (outputs, inputs) = name.removesuffix("weight"), shape
    if quantization["quant_method"] == "fp8":
        rows, columns = quantization["weight_block_size"]
        scales = (-(-outputs // rows), -(-inputs // columns))
        return {
            name: Stored(shape, (1000 * numbers).to(torch.float8_e4m3fn)),
            module + "weight_scale_inv": Stored(scales, torch.tensor([1e-3])),
        }
    if quantization["quant_method"] != "gptq" or quantization["bits"] != 4 or quantization["desc_act"]:
        raise SystemExit(f"no checkpoint of {quantization} can be made")
    groups = inputs // quantization["group_size"]
    words = torch.randint(-(2**31), 2**31, (1 << 20,), generator=generator).int()
    return {
        module + "qweight": Stored((inputs // 8, outputs), words),
        module + "qzeros": Stored((groups, outputs // 8), torch.tensor([0x77777777], dtype=torch.int32)),
        module + "scales": Stored((groups, outputs), torch.tensor([0.01], dtype=torch.float16)),
        module + "g_idx": Stored((inputs,), (torch.arange(inputs) // quantization["group_size"]).int()),
    }


def make_checkpoint(config: Path, folder: Path) -> int:
    """Write a checkpoint in shards; returns its bytes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copy(config / "config.json", folder)
    quantization = json.loads((folder / "config.json").read_text()).get("quantization_config")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config))
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    size = total = 0
    for name, weight in model.named_parameters():  # tied ones once
        tensors = stored(name, tuple(weight.shape), quantization).values()
        num_bytes = sum(math.prod(each.shape) * each.values.element_size() for each in tensors)
        if size + num_bytes > SHARD_BYTES and size:
            shards.append({})
            size = 0
        shards[-1][name] = tuple(weight.shape)
        size += num_bytes
        total += num_bytes
    paths = [folder / f"model-{number:05d}.safetensors" for number in range(1, len(shards) + 1)]
    with ProcessPoolExecutor(min(len(shards), os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        names = list(pool.map(partial(_save, quantization), shards, paths))
    files = {name: path.name for shard, path in zip(names, paths, strict=True) for name in shard}
    document = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(document))
    return total


def _save(quantization: dict[str, Any] | None, shapes: dict[str, tuple[int, ...]], path: Path) -> list[str]:
    """Write a file with these weights; returns its tensors' names."""
    weights = {}
    for weight, weight_shape in shapes.items():
        for name, (shape, values) in stored(weight, weight_shape, quantization).items():
            count = math.prod(shape)
            plain = values.view(torch.uint8) if values.element_size() == 1 else values  # fp8 cannot be repeated
            weights[name] = plain.repeat(-(-count // len(plain)))[:count].view(values.dtype).view(shape)
    save_file(weights, path, metadata={"format": "pt"})
    return list(weights)


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


SMALL = {
    "max_model_len": 256,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 256,
    "enforce_eager": True,
    "num_gpu_blocks_override": 64,
}


def start(folder: Path, tp: int, device: str, options: dict[str, Any]) -> tuple[float, float]:
    """Seconds of an engine's start, and of its phase that loads the model."""
    begin = time.perf_counter()
    with LLM(str(folder), device=device, tensor_parallel_size=tp, skip_tokenizer_init=True, **options) as llm:
        seconds = time.perf_counter() - begin
        return seconds, dict(llm.engine.info.start.phases)["load model"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", help="where to make the checkpoint; a temporary folder if absent")
    parser.add_argument("--whole", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        begin = time.perf_counter()
        size = make_checkpoint(MODELS / args.model, folder)
        print(f"{args.model}: {size / 1e9:.2f} GB, made in {time.perf_counter() - begin:.0f} s", flush=True)
        columns = ["ranks", "GB a rank", "load, first", "load, again", "plain read of all"]
        columns += ["whole start, first", "whole start, again"] if args.whole else []
        print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|", flush=True)
        for tp in args.tp:
            seconds = [start(folder, tp, args.device, SMALL)[1] for _ in range(2)] + [read_all(folder, tp)]
            seconds += [start(folder, tp, args.device, {})[0] for _ in range(2 * args.whole)]
            cells = [str(tp), f"{size / tp / 1e9:.2f}", *(f"{each:.2f} s" for each in seconds)]
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
