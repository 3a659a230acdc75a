"""What the launchers must know of a device. On the CPU, in Triton's interpreter, the answers let every kernel run."""

from __future__ import annotations

from functools import cache

import torch


@cache
def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors; 1 for a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may take."""
    if device.type != "cuda":
        return 1 << 30
    # PyTorch's stubs lack the name.
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 48 << 10))


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether it is an NVIDIA GPU of compute capability 9.0, for which the Gluon kernels are written."""
    return _is_nvidia(device) and torch.cuda.get_device_capability(device) == (9, 0)


@cache
def can_overlap(device: torch.device) -> bool:
    """Whether launches may overlap as `dependent_launch` says: on NVIDIA GPUs of compute capability 9.0 and above."""
    return _is_nvidia(device) and torch.cuda.get_device_capability(device) >= (9, 0)


def _is_nvidia(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.cuda is not None
