"""A TPGroup whose ranks are threads of this process."""

from __future__ import annotations

import threading

import torch

from rayllm_kernels import ops


class ThreadGroup:
    """A TPGroup whose ranks are threads of this process."""

    def __init__(self, rank, size, barrier, slots):
        self.rank, self.size, self.barrier, self.slots = rank, size, barrier, slots

    @classmethod
    def make(cls, size):
        barrier, slots = threading.Barrier(size, timeout=60), [None] * size
        return [cls(rank, size, barrier, slots) for rank in range(size)]

    def with_symmetric_memory(self, _hidden_size, _dtype):
        return self

    def exchange(self, x):
        self.slots[self.rank] = x.clone()
        self.barrier.wait()
        everyone = list(self.slots)
        self.barrier.wait()
        return everyone

    def all_reduce(self, x):
        return x.copy_(sum(self.exchange(x)))

    def all_reduce_add_rms_norm(self, x, residual, weight, eps):
        return ops.fused_add_rms_norm(self.all_reduce(x), residual, weight, eps)

    def gather_small(self, x):
        return torch.stack(self.exchange(x))

    def all_gather(self, x):
        return torch.cat(self.exchange(x), dim=-1)
