"""What engines compile fits every GPU that they may run on, though none of them is here: only the compiler is asked.

Quick: steps of the most common shape. `--full-matrix`: all models of `gpu_targets` and all formats, in some minutes a
GPU.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support.gpu_targets import GPUS, MODELS

SPILLED = 256  # bytes of a thread's stack that cost next to nothing: what is read once a tile, not once a key
FORMATS = (
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "deterministic": True},
    {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"},
    {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e5m2"},
    {"dtype": "float16"},
    {"dtype": "float32"},
)


class Compiled(NamedTuple):
    name: str
    shared: int  # bytes of shared memory
    stack: int  # bytes a thread: registers that were spilled


def compiled(cache: Path) -> Iterator[Compiled]:
    """All kernels in a cache of Triton's. ptxas has accepted them."""
    from triton import knobs

    for cubin in sorted(cache.rglob("*.cubin")):
        metadata = json.loads(cubin.with_suffix(".json").read_text())
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin)]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        yield Compiled(metadata["name"], metadata["shared"], int(re.search(r"STACK:(\d+)", usage).group(1)))


def engines(gpu: str, full: bool) -> Iterator[list[dict]]:
    """Arguments of `run_engine`, those of one model after the other."""
    if not full:
        yield [{"model": "llama-3.1-8b", "dtype": "bfloat16", "max_tokens": 64, "max_num_seqs": 8, "sampling": False}]
        return
    formats = [each for each in FORMATS if GPUS[gpu].has_e4m3 or "fp8_e4m3" not in each.values()]
    for model in MODELS:
        sizes = {"max_tokens": 8192, "max_num_seqs": 256, "sampling": model == "llama-3.1-8b"}
        yield [{"model": model, **sizes, **each} for each in formats]


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("gpu", GPUS)
def test_kernels_fit(gpu, full_matrix, run_compiler, tmp_path):
    for arguments in engines(gpu, full_matrix):
        script = f"from support.gpu_targets import compile_engines\ncompile_engines({gpu!r}, {arguments})"
        run_compiler(script, GPUS[gpu].capability, timeout=3600, TRITON_CACHE_DIR=str(tmp_path))
    kernels = list(compiled(tmp_path))
    prefill = "_hopper_kernel" if GPUS[gpu].is_hopper else "_prefill_kernel"
    assert {prefill, "_decode_kernel", "_linear_rows_kernel"} <= {kernel.name for kernel in kernels}
    too_large = {kernel for kernel in kernels if kernel.shared > GPUS[gpu].shared_memory}
    assert not too_large, f"{gpu} has {GPUS[gpu].shared_memory} bytes of shared memory"
    assert not {kernel for kernel in kernels if kernel.stack > SPILLED}
