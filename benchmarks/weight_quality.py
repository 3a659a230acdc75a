"""What weights in fewer bits cost in quality: perplexity of a small model in each format, and agreement of its tokens.

    python benchmarks/weight_quality.py [--model FOLDER] [--texts 4] [--tokens 1000] [--device cpu]

A checkpoint in 16 bits (the bundled model, or --model) is written once in each format, rounded to nearest by the
largest number of each block or group, which is the roughest way to make such a checkpoint: GPTQ and AWQ search for
better numbers. Texts are of Python's documentation, as in `kv_quality.py`.

  perplexity; agreement: share of positions whose most likely token is that of the checkpoint in 16 bits.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kv_quality import contexts, read
from safetensors.torch import load_file, save_file

from rayllm import LLM
from rayllm.config.options import BUNDLED_MODEL
from rayllm_kernels.quantised.formats import e4m3_numbers, int4_numbers

Tensors = dict[str, torch.Tensor]
DYNAMIC = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


def blocks(weight: torch.Tensor) -> Tensors:
    """fp8 in blocks of 128 x 128."""
    numbers = e4m3_numbers(weight, (128, 128))
    return {"weight": numbers.values, "weight_scale_inv": numbers.scales[::128].contiguous()}


def rows(weight: torch.Tensor) -> Tensors:
    """fp8 with a scale a row."""
    numbers = e4m3_numbers(weight, (1, None))
    return {"weight": numbers.values, "weight_scale": numbers.scales}


def packed(weight: torch.Tensor, group: int, *, symmetric: bool) -> Tensors:
    """pack-quantized of compressed-tensors."""
    numbers = int4_numbers(weight, group, symmetric=symmetric)

    def words(values: torch.Tensor, dim: int) -> torch.Tensor:
        shifted = values.long().unflatten(dim, (-1, 8)).movedim(dim + 1, -1) << (4 * torch.arange(8))
        unsigned = shifted.sum(-1)
        return (unsigned - ((unsigned >> 31) << 32)).to(torch.int32)

    tensors = {"weight_packed": words(numbers.values, 1), "weight_scale": numbers.scales}
    if not symmetric:
        assert numbers.zeros is not None
        tensors["weight_zero_point"] = words(numbers.zeros, 0)
    return tensors


def compressed(form: str, activations: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group"}
# name -> (quantization_config, what writes a weight)
FORMATS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], Tensors]]] = {
    "fp8, blocks of 128 x 128": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, blocks),
    "fp8, rows": (compressed("float-quantized", DYNAMIC, **FP8), rows),
    "fp8, rows, weights alone": (compressed("float-quantized", **FP8), rows),
}
for size in (128, 32):
    for is_symmetric in (True, False):
        FORMATS[f"int4, groups of {size}" + ("" if is_symmetric else ", zero points")] = (
            compressed("pack-quantized", **INT4, group_size=size, symmetric=is_symmetric),
            partial(packed, group=size, symmetric=is_symmetric),
        )


def write(model: Path, folder: Path, config: dict[str, Any], turn: Callable[[torch.Tensor], Tensors]) -> None:
    """The model with all its linear layers turned."""
    shutil.copytree(model, folder)
    tensors: Tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        module = name.removesuffix("weight")
        tensors |= {module + last: tensor for last, tensor in turn(tensors.pop(name)).items()}
    save_file(tensors, folder / "model.safetensors")
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(told | {"quantization_config": config}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=BUNDLED_MODEL)
    parser.add_argument("--texts", type=int, default=4, help="contexts")
    parser.add_argument("--tokens", type=int, default=1000, help="of a context")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as parent:
        runs: dict[str, tuple[str, str]] = {"as it is": (options.model, "none")}
        runs["--quantization fp8"] = (options.model, "fp8")
        for number, (name, how) in enumerate(FORMATS.items()):
            write(Path(options.model), Path(parent, str(number)), *how)
            runs[name] = (str(Path(parent, str(number))), "auto")
        print(f"{Path(options.model).name}, {options.texts} contexts of {options.tokens} tokens, in {options.dtype}")
        print(f"{'weights':36s} {'perplexity':>11s} {'change':>8s} {'agreement':>10s}")
        for name, (model, quantization) in runs.items():
            with LLM(
                model,
                device=options.device,
                dtype=options.dtype,
                quantization=quantization,
                max_num_seqs=8,
                enable_prefix_caching=False,
            ) as llm:
                text = contexts(llm, options.texts, options.tokens)[0]
                perplexity, best = results[name] = read(llm, text)
            base, base_best = results["as it is"]
            agreement = sum(a == b for a, b in zip(best, base_best, strict=True)) / len(best)
            print(f"{name:36s} {perplexity:11.4f} {perplexity / base - 1:+8.2%} {agreement:10.2%}", flush=True)


if __name__ == "__main__":
    main()
