"""What the launchers must know of a device: which kernels it can run, and how large their tiles may be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch


class Hardware(NamedTuple):
    """One device. All that kernels ask of it is here, so that they can be compiled for one that is not there."""

    multiprocessors: int
    shared_memory: int  # bytes that one program may take
    capability: tuple[int, int] | None  # compute capability of an NVIDIA GPU, None for other devices

    @property
    def is_hopper(self) -> bool:
        """Whether the Gluon kernels are written for it."""
        return self.capability == (9, 0)

    @property
    def can_overlap(self) -> bool:
        """Whether launches may overlap as `dependent_launch` says."""
        return self.capability is not None and self.capability >= (9, 0)

    @property
    def has_e4m3(self) -> bool:
        """Whether Triton can convert float8_e4m3fn there, and tensor cores multiply it."""
        return self.capability is None or self.capability >= (8, 9)

    @property
    def rounds_to_e4m3(self) -> bool:
        """Whether it has an instruction that rounds to float8_e4m3fn; Triton's interpreter drops carries."""
        return self.capability is not None and self.capability >= (8, 9)

    def stages(self, wanted: int, stage_bytes: int) -> int:
        """Stages of a pipeline: as many as wanted, or as fit; 1 at least."""
        return max(1, min(wanted, self.shared_memory // stage_bytes))


INTERPRETER = Hardware(1, 1 << 30, None)  # of kernels on the CPU: large enough for every tile
_known: dict[torch.device, Hardware] = {}


def hardware(device: torch.device) -> Hardware:
    """Of a device, with or without its index; asked of the driver once."""
    found = _known.get(device)
    if found is None:
        device = _indexed(device)
        found = _known.get(device)
    if found is None:
        found = _known[device] = _ask(device)
    return found


@contextmanager
def assumed(device: torch.device, hardware: Hardware) -> Iterator[None]:
    """Within, kernels for tensors on `device` are chosen for this hardware; for tests, which compile for any GPU."""
    device = _indexed(device)
    before = _known.get(device)
    _known[device] = hardware
    try:
        yield
    finally:
        del _known[device]
        if before is not None:
            _known[device] = before


def _indexed(device: torch.device) -> torch.device:
    """As tensors name it: "cuda" is the current GPU."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _ask(device: torch.device) -> Hardware:
    if device.type != "cuda":
        return INTERPRETER
    found = torch.cuda.get_device_properties(device)
    # PyTorch's stubs lack the name.
    shared_memory = int(getattr(found, "shared_memory_per_block_optin", 48 << 10))
    capability = (found.major, found.minor) if torch.version.cuda is not None else None
    return Hardware(found.multi_processor_count, shared_memory, capability)
