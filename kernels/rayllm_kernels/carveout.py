"""How much of a multiprocessor's memory is shared memory while a kernel runs; the rest is its L1 cache.

A kernel that wants another cut than what runs on a multiprocessor has to wait until that is empty, and cannot start
beside it (`dependent_launch.py`). Triton asks for as much shared memory as there is for every kernel that takes more
than 48 KiB, and for none in particular otherwise.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from triton.compiler import CompiledKernel

from .device import Hardware

PREFERRED_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT of CUDA's driver, in percent
RESERVED = 1024  # bytes that each program costs beside its own
_fitted: set[int] = set()


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def fit_carveout(kernel: Any, programs: int, gpu: Hardware) -> None:
    """Have a kernel ask for as much shared memory as so many of its programs need, from its next launch on.

    kernel: what `launch` returned, which in `compile_only` and in the interpreter is not a kernel that runs. Captured
    graphs keep what was asked for before.
    """
    if gpu.capability is None or not isinstance(kernel, CompiledKernel):
        return
    function = kernel.function
    if function is None or function in _fitted:
        return
    wanted = programs * (kernel.metadata.shared + RESERVED)
    percent = min(100, -(-100 * wanted // (gpu.shared_memory + RESERVED)))
    error = _driver().cuFuncSetAttribute(ctypes.c_void_p(function), PREFERRED_CARVEOUT, percent)
    if error:
        raise RuntimeError(f"CUDA error {error}: no shared memory of {percent}% for {kernel.metadata.name}")
    _fitted.add(function)
