"""`to_device`: what a step's tensors are made of, from the host to the device in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

_TORCH_DTYPES = {np.dtype(name): getattr(torch, name) for name in ("int64", "int32", "float32", "uint8")}


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Arrays of int64, int32, float32 or uint8 on a device, of their shapes: views of one copy.

    To CUDA the copy starts from pinned memory and is not waited for: the allocator of pinned memory does not hand the
    source out again before the copy is done.
    """
    starts = list(accumulate((-(-array.nbytes // 8) * 8 for array in arrays), initial=0))  # views need aligned starts
    host = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = host.numpy()
    for array, start in zip(arrays, starts, strict=False):
        target[start : start + array.nbytes].view(array.dtype)[:] = array.reshape(-1)
    packed = host.to(device, non_blocking=True)
    return [
        packed[start : start + array.nbytes].view(_TORCH_DTYPES[array.dtype]).view(array.shape)
        for array, start in zip(arrays, starts, strict=False)
    ]
