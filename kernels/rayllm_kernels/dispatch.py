"""Which implementation computes an op: the Triton kernels for CUDA tensors, the torch references for CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from torch import Tensor

_forced: bool | None = None


def on_triton(tensor: Tensor) -> bool:
    """Whether the Triton kernels compute an op of this tensor. Raises ValueError for devices that have neither."""
    if _forced is not None:
        return _forced
    device = tensor.device.type
    if device not in ("cuda", "cpu"):
        raise ValueError(f"no kernels for tensors on {tensor.device}")
    return device == "cuda"


@contextmanager
def forced(*, triton: bool) -> Iterator[None]:
    """Within, one implementation computes the ops of all tensors; for tests, which compare the two on one device.

    Triton kernels take CPU tensors in Triton's interpreter only (TRITON_INTERPRET=1). For one thread at a time.
    """
    global _forced
    before, _forced = _forced, triton
    try:
        yield
    finally:
        _forced = before


class TritonModule:
    """The module of this name, which needs triton. It is imported when the first of its attributes is asked for."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(import_module(self._name), attribute)
        setattr(self, attribute, value)  # the next time it is found without this method
        return value
