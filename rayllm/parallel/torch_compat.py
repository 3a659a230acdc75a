"""What PyTorch has no public call for. tests/parallel/test_torch_compat.py fails when one of these changes."""

from __future__ import annotations

from datetime import timedelta
from types import ModuleType

import torch.distributed as dist
from torch.distributed import distributed_c10d


def set_group_timeout(group: dist.ProcessGroup | None, timeout: timedelta) -> None:
    """How long one wait on this process group may take from now on; None for the default group."""
    distributed_c10d._set_pg_timeout(timeout, group)


def symmetric_memory() -> ModuleType:
    """The module of memory that the GPUs of a host map into each other's address space: `empty` and `rendezvous`."""
    import torch.distributed._symmetric_memory as module

    return module
