"""`StepMemory`: the device memory that steps use while they run, and the stream that they run on.

Eager steps and captured ones take their temporary memory from one pool. That is safe because all run on one stream, one
after the other, and what a step leaves for the next (ids, KV) lives outside; so the pool holds what the largest single
step needs, instead of that once for eager steps and once more for graphs.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")

STACK_BYTES = 256
CU_LIMIT_STACK_SIZE = 0

logger = logging.getLogger(__name__)


def limit_stacks(device: torch.device) -> None:
    """Let the driver keep STACK_BYTES of stack a thread instead of 1 KiB: on an H200 that is 198 MiB less of memory.

    It keeps as much for every thread that the device can run at once, and takes more by itself as soon as a kernel
    needs it. Says in the log if the driver refuses.
    """
    torch.cuda.synchronize(device)  # makes the context, if nothing has yet
    error = ctypes.CDLL("libcuda.so.1").cuCtxSetLimit(CU_LIMIT_STACK_SIZE, ctypes.c_size_t(STACK_BYTES))
    if error:
        logger.warning("the stacks of %s cannot be limited to %d bytes: CUDA error %d", device, STACK_BYTES, error)


class StepMemory:
    """On CPUs, `active` does nothing and `capture` is not called."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        if self._cuda:
            self._stream = torch.cuda.Stream(device)
            self._pool = torch.cuda.MemPool()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Around a step: run on the stream, allocate from the pool. Nothing allocated may outlive the step in use."""
        if not self._cuda:
            yield
            return
        with torch.cuda.stream(self._stream), torch.cuda.use_mem_pool(self._pool):
            yield

    def capture(self, step: Callable[[], T], mode: str = "global") -> tuple[torch.cuda.CUDAGraph, T]:
        """A graph of `step`, and what it returns, whose memory stays taken.

        mode: as torch.cuda.graph takes it; "thread_local" while other threads use the device beside the capture.
        Its kernels must have run before: a capture forbids to compile or load them, and libraries to allocate.
        """
        graph = torch.cuda.CUDAGraph()
        pool, stream = self._pool.id, self._stream
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode):  # type: ignore[arg-type] # too narrow a stub
            result = step()
        return graph, result
