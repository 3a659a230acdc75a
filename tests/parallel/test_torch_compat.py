"""PyTorch's private calls are still there, with the arguments that we give them."""

import inspect

from torch.distributed import distributed_c10d

from rayllm.parallel import torch_compat


def test_group_timeouts_can_be_set():
    assert list(inspect.signature(distributed_c10d._set_pg_timeout).parameters) == ["timeout", "group"]


def test_memory_can_be_shared():
    module = torch_compat.symmetric_memory()
    assert {"size", "dtype", "device"} <= set(inspect.signature(module.empty).parameters)
    assert list(inspect.signature(module.rendezvous).parameters)[:2] == ["tensor", "group"]
