"""Compiles many kernels side by side, before they are first launched.

A kernel is compiled when it is first launched, one after the other; on a machine with many cores that is most of an
engine's first start. Compiling happens outside of Python's lock for the most part, so threads share it well.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from triton.runtime._async_compile import AsyncCompileMode
from triton.runtime.jit import JITFunction

MAX_THREADS = 32


@contextmanager
def compile_only() -> Iterator[None]:
    """Within, launches compile their kernel, if need be, and do not run it: what they would write stays as it is.

    At the end all are compiled. For one thread, while no other one launches kernels. Raises what the compiler raises.
    """
    launch = JITFunction.run

    def compile_kernel(self: Any, *args: Any, **options: Any) -> Any:
        return launch(self, *args, **(options | {"warmup": True}))

    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads, AsyncCompileMode(threads):
        JITFunction.run = compile_kernel
        try:
            yield
        finally:
            JITFunction.run = launch
