"""`SymmetricReducer`: small collectives through memory that the GPUs of one host write directly.

NCCL takes over 20 us for the few rows of a decode step, far longer than the bytes need. The kernels of
`rayllm_kernels.collectives` take a fraction of that, and add the residual and the RMSNorm in the same launch.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rayllm.parallel import torch_compat
from rayllm_kernels import ops

# More rows than this go to NCCL, which gains on us with every row; this many of 4096 bf16 take 70 MB on each GPU.
MAX_ROWS = 2048
MAX_PROGRAMS = 128
# Up to so many bytes (rows x hidden size x 2) one shot beats two, by number of ranks. Measured on H200s for 2 and 4
# (benchmarks/RESULTS.md); for 8 an estimate from the bytes: 7 times the rows against 1.75 times.
ONE_SHOT_BYTES = {2: 1536 << 10, 4: 224 << 10, 8: 64 << 10}

logger = logging.getLogger(__name__)


class Unavailable(Exception):
    """Why the ranks of a group cannot share memory; the same on all of them."""


class SymmetricReducer:
    """Sums and gathers [M, hidden_size] over the ranks of a group, on CUDA, capturable in graphs.

    All ranks call the same methods in the same order with the same shapes, on one stream. `takes` and `takes_gather`
    say which tensors are for it. If a rank never calls, the others wait on the device for ever. buffers: for calling
    the kernels directly; they are valid as long as this object lives.
    """

    def __init__(self, group: dist.ProcessGroup, hidden_size: int, dtype: torch.dtype, max_rows: int = MAX_ROWS):
        """Collective: allocates and exchanges the buffers on the current device. Raises Unavailable on all ranks."""
        device, programs = _check_place(group, dtype, hidden_size)
        rank, size = group.rank(), group.size()
        max_rows = -(-max_rows // programs) * programs
        shape = ops.PeerBuffers(rank, size, hidden_size, dtype, programs, max_rows, *[torch.empty(0)] * 2)
        self._memory, addresses = _share_words(group, shape.num_words, device)
        peers = torch.tensor(addresses, dtype=torch.int64, device=device)
        uses = torch.zeros(programs, dtype=torch.int32, device=device)
        self.buffers = ops.PeerBuffers(rank, size, hidden_size, dtype, programs, max_rows, peers, uses)
        # Nobody may write before everybody's words are empty.
        torch.cuda.synchronize(device)
        _agree(group, None)
        self._max_one_shot = min(shape.max_one_shot_rows, ONE_SHOT_BYTES[size] // (2 * hidden_size))

    @classmethod
    def connect(cls, group: dist.ProcessGroup, hidden_size: int, dtype: torch.dtype) -> SymmetricReducer | None:
        """Collective. None where the ranks cannot share memory: the group's own collectives then have to do."""
        try:
            return cls(group, hidden_size, dtype)
        except Unavailable as reason:
            if group.rank() == 0:
                backend = dist.get_backend(group)
                logger.log(
                    logging.WARNING if backend == "nccl" else logging.INFO, "all-reduces use %s: %s", backend, reason
                )
            return None

    def takes(self, x: Tensor) -> bool:
        """Whether x can be, and is better, summed here."""
        buffers = self.buffers
        return (
            x.dim() == 2
            and 0 < x.shape[0] <= buffers.max_rows
            and x.shape[1] == buffers.hidden_size
            and x.dtype == buffers.dtype
            and x.is_contiguous()
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        """x becomes the sum over the ranks; returns it."""
        return ops.all_reduce(x, self.buffers, two_shot=self._two_shot(x))

    def all_reduce_add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(norm(total), total), total = the sum of x over the ranks + residual; two new tensors."""
        return ops.all_reduce_add_rms_norm(x, residual, weight, eps, self.buffers, two_shot=self._two_shot(x))

    def takes_gather(self, x: Tensor) -> bool:
        """Whether the ranks' x can be gathered here."""
        return (
            x.dim() > 0
            and x.is_contiguous()
            and x.element_size() % 2 == 0
            and 0 < x.nbytes <= self.buffers.gather_limit
        )

    def gather_small(self, x: Tensor) -> Tensor:
        """The ranks' x in order of rank: [size, *x.shape]."""
        return ops.all_gather_small(x, self.buffers)

    def _two_shot(self, x: Tensor) -> bool:
        return x.shape[0] > self._max_one_shot


def prepare(device: torch.device) -> None:
    """For a process that is to join a group later: what PyTorch takes 2 s for before a process has its first words."""
    with contextlib.suppress(Exception):  # `connect` says why there is none
        _module().empty(1, dtype=torch.int32, device=device).fill_(-1)


def _module() -> ModuleType:
    # Each rank may see its GPU as device 0, which looks like one GPU used twice. Multicast stays off: it depends on a
    # fabric manager that works, and can hang all GPUs of a host where it does not.
    os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    return torch_compat.symmetric_memory()


def _agree(group: dist.ProcessGroup, problem: str | None, fact: object = None) -> list[Any]:
    """All ranks' facts, by rank. Collective; raises Unavailable on all ranks if one of them has a problem."""
    answers: list[Any] = [None] * group.size()
    dist.all_gather_object(answers, (problem, fact), group=group)
    for rank, (other, _) in enumerate(answers):
        if other is not None:
            raise Unavailable(f"{other} (rank {rank})")
    return [fact for _, fact in answers]


def _check_place(group: dist.ProcessGroup, dtype: torch.dtype, hidden_size: int) -> tuple[torch.device, int]:
    """(This rank's device, programs a kernel may have), if the ranks are different GPUs of one host."""
    if dist.get_backend(group) != "nccl":
        raise Unavailable("symmetric memory is for CUDA devices")
    if group.size() not in ONE_SHOT_BYTES:
        raise Unavailable(f"the kernels are for {sorted(ONE_SHOT_BYTES)} ranks, not {group.size()}")
    if dtype not in (torch.float16, torch.bfloat16) or hidden_size % 8:
        raise Unavailable(f"the kernels are for fp16 and bf16 rows of a multiple of 8, not {dtype} of {hidden_size}")
    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    host = Path("/proc/sys/kernel/random/boot_id").read_text()
    facts = _agree(group, None, (host, str(properties.uuid), properties.multi_processor_count))
    if len({host for host, _, _ in facts}) > 1:
        raise Unavailable("the ranks are on several hosts")
    if len({gpu for _, gpu, _ in facts}) < len(facts):
        raise Unavailable("ranks share a GPU")
    return device, min(MAX_PROGRAMS, *(count for _, _, count in facts))


def _share_words(group: dist.ProcessGroup, num_words: int, device: torch.device) -> tuple[object, list[int]]:
    """(What keeps the memory, the addresses of the ranks' `num_words` int32 words, all -1 on this rank)."""
    symmetric_memory = _module()
    words, handle, problem, offset = None, None, None, None
    try:
        words = symmetric_memory.empty(num_words, dtype=torch.int32, device=device).fill_(-1)
    except Exception as error:
        problem = f"no symmetric memory: {error}"
    _agree(group, problem)  # a rank without memory must not leave the others in the rendezvous
    assert words is not None
    try:
        handle = symmetric_memory.rendezvous(words, group)
        offset = words.data_ptr() - handle.buffer_ptrs[group.rank()]
    except Exception as error:
        problem = f"no peer access: {error}"
    offsets = _agree(group, problem, offset)
    assert handle is not None
    addresses = [address + offset for address, offset in zip(handle.buffer_ptrs, offsets, strict=True)]
    return (words, handle), addresses
