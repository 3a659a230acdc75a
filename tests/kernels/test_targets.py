"""What engines compile fits every GPU that they may run on, though none of them is here: only the compiler is asked.

Quick: few tokens of models with the largest tiles, where there is the least room, and of one of all kinds of layers, on
Hopper. `--full-matrix`: all GPUs, all models of `gpu_targets` and all formats, in some minutes a GPU.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from support.gpu_targets import GPUS, MODELS

from rayllm_kernels.attention.prefill_kernel import choose_tiles as prefill_tiles
from rayllm_kernels.attention.schedule import choose_tiles as decode_tiles
from rayllm_kernels.device import INTERPRETER, assumed, hardware

SPILLED = 256  # bytes of a thread's stack that cost next to nothing: what is read once a tile, not once a key
# (model, tokens of the largest step)
QUICK = {"L40S": [("heads-of-512", 32)], "H200": [("llama-3.1-8b", 64), ("qwen3.5-35b-a3b", 32)]}
FORMATS = (
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "deterministic": True},
    {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"},
    {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e5m2"},
    {"dtype": "float16"},
    {"dtype": "float32"},
)


def those(quick: Collection[str]) -> list[pytest.ParameterSet]:
    """All GPUs, of which only the quick ones are compiled for without --full-matrix."""
    return [pytest.param(gpu, marks=() if gpu in quick else pytest.mark.full_matrix) for gpu in GPUS]


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
        common = {"max_num_seqs": 1, "dtype": "bfloat16", "sampling": False}
        yield [{"model": model, "max_tokens": tokens, **common} for model, tokens in QUICK[gpu]]
        return
    formats = [each for each in FORMATS if GPUS[gpu].has_e4m3 or "fp8_e4m3" not in each.values()]
    for model in MODELS:
        sizes = {"max_tokens": 8192, "max_num_seqs": 256, "sampling": model == "llama-3.1-8b"}
        served = [each for each in formats if not model.startswith("deepseek") or "kv_cache_dtype" not in each]
        yield [{"model": model, **sizes, **each} for each in served]


@pytest.fixture(scope="module")
def cache_for(tmp_path_factory) -> Callable[[tuple[int, int]], Path]:
    """Compute capability -> Triton's cache: GPUs of the same one share most of their kernels."""
    return functools.cache(lambda capability: tmp_path_factory.mktemp("sm{}{}-".format(*capability)))


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("gpu", those(QUICK))
def test_kernels_fit(gpu, full_matrix, run_compiler, cache_for):
    cache = cache_for(GPUS[gpu].capability)
    for arguments in engines(gpu, full_matrix):
        script = f"from support.gpu_targets import compile_engines\ncompile_engines({gpu!r}, {arguments})"
        run_compiler(script, GPUS[gpu].capability, timeout=3600, TRITON_CACHE_DIR=str(cache))
    kernels = list(compiled(cache))
    prefill = "_hopper_kernel" if GPUS[gpu].is_hopper else "_prefill_kernel"
    assert {prefill, "_decode_kernel", "_linear_rows_kernel", "_shrink_kernel", "_expand_kernel"} <= {
        kernel.name for kernel in kernels
    }
    too_large = {kernel for kernel in kernels if kernel.shared > GPUS[gpu].shared_memory}
    assert not too_large, f"{gpu} has {GPUS[gpu].shared_memory} bytes of shared memory"
    assert not {kernel for kernel in kernels if kernel.stack > SPILLED}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("gpu", those(["H200"]))
def test_products_in_fewer_bits_fit(gpu, full_matrix, run_compiler, tmp_path):
    """Of one token for one GPU; of many sizes, in all dtypes and for all GPUs with --full-matrix."""
    # Token counts, dtypes, and whether deterministic.
    quick, full = (
        ((1,), ("bfloat16",), (False,)),
        ((1, 30, 60, 100, 8192), ("bfloat16", "float16", "float32"), (False, True)),
    )
    arguments = ", ".join(map(repr, full if full_matrix else quick))
    script = f"from support.gpu_targets import compile_quantised\ncompile_quantised({gpu!r}, {arguments})"
    run_compiler(script, GPUS[gpu].capability, timeout=1800, TRITON_CACHE_DIR=str(tmp_path))
    kernels = list(compiled(tmp_path))
    one_token = "_int4_stream_kernel" if GPUS[gpu].is_hopper else "_int4_vector_kernel"
    wanted = {"_fp8_vector_kernel", one_token, "_pairs_kernel", "_code_pairs_kernel"}
    if full_matrix:
        wanted |= {"_quantised_experts_kernel", "_fp8_product_kernel", "_dequantise_fp8_kernel", "_dequantise_kernel"}
    assert wanted | ({"_rms_norm_fp8_kernel"} if GPUS[gpu].has_e4m3 else set()) <= {kernel.name for kernel in kernels}
    assert not {kernel for kernel in kernels if kernel.shared > GPUS[gpu].shared_memory}
    assert not {kernel for kernel in kernels if kernel.stack > SPILLED}


def test_a_gpu_without_an_index_is_the_current_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    with assumed(torch.device("cuda"), GPUS["L4"]):
        assert hardware(torch.device("cuda", 1)) == hardware(torch.device("cuda")) == GPUS["L4"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
def test_h200_has_room_for_all_that_was_measured_there(paged_case, device, head_dim, dtype):
    """No tile is smaller than where there is no limit."""
    for rows in (1, 16, 64, 128, 1000):
        unlimited = prefill_tiles(head_dim, dtype.itemsize, rows, INTERPRETER)
        assert prefill_tiles(head_dim, dtype.itemsize, rows, GPUS["H200"]) == unlimited
    for heads in (1, 8, 32, 64, 130):
        for cache_dtype in (None, torch.float8_e5m2):
            case = paged_case([20], heads=(heads, 1), head_dim=head_dim, dtype=dtype, cache_dtype=cache_dtype)
            with assumed(device, INTERPRETER):
                unlimited = decode_tiles(case.q, case.cache, case.scoring())
            with assumed(device, GPUS["H200"]):
                assert decode_tiles(case.q, case.cache, case.scoring()) == unlimited
