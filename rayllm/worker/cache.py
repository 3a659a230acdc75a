"""`CacheEngine`: the KV pools of one rank, on the device and in host memory, and the moves between them.

Both are block-major: [num_blocks, numbers of a block], so that a block is one contiguous piece to copy. A block holds
the layers of one group (`config.kv_groups`) one after the other, each as [2 (K, V), num_kv_heads, block_size,
head_dim], or a recurrent layer's state and the last inputs of its convolution; which group's, only block tables know.
Layers see strided views of their own. Pools in fp8 are bytes to all but those views. A layer of latent attention has no
V: the first entries of its K are (`latent_cache`).

On CUDA, moves go beside the step that computes (`CopyStream`). Blocks are scattered over both pools, and one transfer a
block would be too small for PCIe where blocks are. So blocks go through staging blocks on the device: one kernel
gathers them there (or scatters them from there) at the speed of device memory, and the transfer itself covers as many
host blocks as follow one another. The host pool hands blocks out in such runs as long as it can.

Out: the gather runs on the compute stream, so that a block may be overwritten by whatever that stream does next; the
transfer follows on the copy stream. There are several slots of staging blocks, and compute waits only if all are still
on their way. In: transfer and scatter both run on the copy stream, behind what the compute stream had to do until then,
and compute waits for them when it is told to. Back: what is copied to the host long before its block is needed is
gathered and transferred on the copy stream, and compute goes on. A block that goes out and comes in again is in order,
because all transfers are on one stream.
"""

from __future__ import annotations

import math
from collections import deque
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch

from rayllm.api.types import KVBlocks
from rayllm.config.kv_groups import kv_groups
from rayllm.config.model_spec import GatedDeltaSpec, ModelSpec
from rayllm.errors import ConfigError
from rayllm.layers.attention import KVCache, LayerCache
from rayllm.layers.gated_delta import LayerState
from rayllm.models.base import Cache
from rayllm.sampling.transfer import to_device
from rayllm_kernels import ops
from rayllm_kernels.cache.kv_cache import FP8_MAX, KVScales, latent_cache
from rayllm_kernels.ops import StateCache

SLOT_BYTES = 64 << 20  # a transfer of this size is as fast as any
OUT_SLOTS = 4  # what swap-outs may be behind compute before it waits for them
MAX_SLOT_BLOCKS = 32768  # pairs of one `copy_blocks`


class LayerPlace(NamedTuple):
    """Where a layer is in the blocks of its group."""

    group: int
    # Numbers before it.
    offset: int
    # num_kv_heads, block_size, head_dim.
    shape: tuple[int, int, int]
    # Numbers of a key that are its value too; None where values are stored on their own.
    shared_values: int | None = None

    @property
    def end(self) -> int:
        """Numbers up to its end."""
        return self.offset + (2 if self.shared_values is None else 1) * math.prod(self.shape)

    def end_bytes(self, dtype: torch.dtype) -> int:
        """Bytes up to its end, in a cache of this dtype."""
        return self.end * dtype.itemsize

    def view(self, pool: torch.Tensor, dtype: torch.dtype, scales: KVScales | None) -> LayerCache:
        """The layer's part of all blocks of a pool [num_blocks, numbers]."""
        parts = pool.view(dtype)[:, self.offset : self.end].unflatten(1, (-1, *self.shape))
        if self.shared_values is None:
            kv = KVCache(parts[:, 0], parts[:, 1], scales)
        else:
            kv = latent_cache(parts[:, 0], self.shared_values)
        return LayerCache(kv, self.group)


class StatePlace(NamedTuple):
    """Where a layer with a recurrent state is in the blocks of its group."""

    group: int
    # Layers before it.
    place: int
    spec: GatedDeltaSpec
    tp: int
    block_size: int

    def end_bytes(self, dtype: torch.dtype) -> int:
        """Bytes up to its end, in a model of this dtype."""
        return (self.place + 1) * self.spec.state_bytes(self.tp, dtype.itemsize)

    def view(self, pool: torch.Tensor, dtype: torch.dtype, _scales: KVScales | None) -> LayerState:
        """The layer's part of all blocks of a pool: the state first, and then the inputs."""
        state, conv = self.spec.state_shape(self.tp), self.spec.conv_shape(self.tp)
        begin = self.end_bytes(dtype) - self.spec.state_bytes(self.tp, dtype.itemsize)
        middle = begin + 4 * math.prod(state)
        stored = pool.view(torch.uint8)
        recurrent = stored[:, begin:middle].view(torch.float32).unflatten(1, state)
        inputs = stored[:, middle : middle + dtype.itemsize * math.prod(conv)].view(dtype).unflatten(1, conv)
        return LayerState(StateCache(inputs, recurrent, self.block_size), self.group)


Place = LayerPlace | StatePlace


def lay_out_blocks(spec: ModelSpec, tp: int, block_size: int) -> list[Place]:
    """Where each layer of a model is in the blocks of each of `tp` ranks; some layers may be at the same place."""
    places: dict[int, Place] = {}
    shared_values = None if spec.latent is None else spec.latent.kv_rank
    for number, group in enumerate(kv_groups(spec, tp)):
        if group.recurrent:
            assert spec.gated_delta is not None
            for place_in_group, layer in enumerate(group.layers):
                places[layer] = StatePlace(number, place_in_group, spec.gated_delta, tp, block_size)
            continue
        offset = 0
        for layer in group.layers:
            heads, head_dim = spec.kv_shape(layer, tp)
            places[layer] = place = LayerPlace(number, offset, (heads, block_size, head_dim), shared_values)
            offset = place.end
    return [places[spec.kv_layer(layer)] for layer in range(spec.num_layers)]


class CacheEngine:
    """Owns both pools. Block ids are checked by the driver's block manager, not here.

    blocks: of the pools. places: of each layer. scales: of each layer, exactly if dtype is an fp8 one.

    layers: of each, its cache.

    swaps: moves blocks between the pools. On CUDA the host pool is pinned, and the device has staging blocks behind its
    pool.
    """

    def __init__(
        self,
        blocks: KVBlocks,
        places: list[Place],
        dtype: torch.dtype,
        device: torch.device,
        scales: list[KVScales] | None = None,
    ):
        if (scales is not None) != (dtype in FP8_MAX):
            raise ValueError(f"a cache of {dtype} must {'have' if dtype in FP8_MAX else 'not have'} scales")
        storage = torch.uint8 if dtype in FP8_MAX else dtype
        pinned = device.type == "cuda" and blocks.cpu > 0
        num_staging = staging_blocks(block_bytes(places, dtype), blocks.cpu) if pinned else 0
        # Zeros, not garbage: a masked position times a NaN would still be NaN.
        size = block_bytes(places, dtype) // storage.itemsize
        shape = (blocks.gpu + num_staging, size)
        with_staging = _device_memory(shape, storage, device)
        self.pool = with_staging[: blocks.gpu]
        self.layers: list[Cache] = [
            place.view(self.pool, dtype, None if scales is None else scales[i]) for i, place in enumerate(places)
        ]
        self.host_pool = _host_memory((blocks.cpu, size), storage, pinned)
        self.swaps: CopyStream | PlainCopies = PlainCopies(self.pool, self.host_pool)
        if pinned:
            torch.cuda.current_stream().synchronize()  # the zeros, before other streams write
            self.swaps = CopyStream(with_staging, self.host_pool, num_staging)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy device blocks: (source, destination) pairs; no source may be a destination."""
        _copy_blocks(self.pool, [source for source, _ in pairs], [destination for _, destination in pairs])

    def close(self) -> None:
        """Give the pinned memory back; the engine must not be used any more."""
        if isinstance(self.swaps, CopyStream):
            self.swaps.synchronize()
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self.host_pool.data_ptr()))


class PlainCopies:
    """What `CopyStream` does, where both pools are host memory: each move is done when its call returns."""

    def __init__(self, pool: torch.Tensor, host: torch.Tensor):
        self._pool, self._host = pool, host

    def swap_out(self, pairs: list[tuple[int, int]]) -> None:
        """Copy (device block, host block) pairs to the host pool."""
        for block, host_block in pairs:  # faster than indexing, which looks at elements
            self._host[host_block].copy_(self._pool[block])

    def swap_in(self, pairs: list[tuple[int, int]]) -> None:
        """Copy (host block, device block) pairs to the device pool."""
        for host_block, block in pairs:
            self._pool[block].copy_(self._host[host_block])

    def write_back(self, pairs: list[tuple[int, int]], step_id: int) -> None:  # noqa: ARG002 # nothing to wait for
        """The same as `swap_out`."""
        self.swap_out(pairs)

    def join_write_backs(self, step_id: int) -> None:
        """Nothing is on its way."""

    def join_swap_ins(self) -> None:
        """Nothing is on its way."""

    def synchronize(self) -> None:
        """Nothing is on its way."""


class CopyStream:
    """device: [blocks + staging_blocks, ...], of which the last are the staging blocks. host: [num_cpu_blocks, ...].

    Called with the compute stream current.
    """

    def __init__(self, device: torch.Tensor, host: torch.Tensor, num_staging: int):
        self._device, self._host = device, host
        self._slot_size = num_staging // (OUT_SLOTS + 1)
        first = device.shape[0] - num_staging
        self._out_slots = [first + i * self._slot_size for i in range(OUT_SLOTS)]
        self._own_slot = first + OUT_SLOTS * self._slot_size
        self._stream = torch.cuda.Stream(device.device)
        self._sent = [torch.cuda.Event() for _ in range(OUT_SLOTS)]  # each slot's last transfer
        self._turn = 0
        self._ready = torch.cuda.Event()  # on the compute stream: gathered, or nothing there uses the blocks any more
        self._arrived: torch.cuda.Event | None = None  # the swap-ins that compute has not waited for
        self._written: deque[tuple[int, torch.cuda.Event]] = deque()  # write-backs that it has not, with their steps

    def swap_out(self, pairs: list[tuple[int, int]]) -> None:
        """Start moving (device block, host block) pairs; the device blocks may be overwritten by what follows."""
        compute = torch.cuda.current_stream()
        for chunk in self._chunks(pairs, host=1):
            slot, sent = self._out_slots[self._turn], self._sent[self._turn]
            self._turn = (self._turn + 1) % OUT_SLOTS
            compute.wait_event(sent)
            _copy_blocks(self._device, [block for block, _host in chunk], range(slot, slot + len(chunk)))
            self._ready.record(compute)
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(self._ready)
                self._send(slot, chunk)
                sent.record(self._stream)

    def write_back(self, pairs: list[tuple[int, int]], step_id: int) -> None:
        """Start copying (device block, host block) pairs; compute may read the device blocks."""
        self._ready.record(torch.cuda.current_stream())
        slot = self._own_slot
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._ready)
            for chunk in self._chunks(pairs, host=1):
                _copy_blocks(self._device, [block for block, _host in chunk], range(slot, slot + len(chunk)))
                self._send(slot, chunk)
            written = torch.cuda.Event()
            written.record(self._stream)
        self._written.append((step_id, written))

    def join_write_backs(self, step_id: int) -> None:
        """Let the compute stream wait for the write-backs of all steps up to this one."""
        last = None
        while self._written and self._written[0][0] <= step_id:
            _step, last = self._written.popleft()
        if last is not None:
            torch.cuda.current_stream().wait_event(last)

    def swap_in(self, pairs: list[tuple[int, int]]) -> None:
        """Start moving (host block, device block) pairs; they are there after `join_swap_ins`."""
        self._ready.record(torch.cuda.current_stream())
        slot = self._own_slot
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._ready)
            for chunk in self._chunks(pairs, host=0):
                for place, block, count in runs([host for host, _block in chunk]):
                    staged = self._device[slot + place : slot + place + count]
                    staged.copy_(self._host[block : block + count], non_blocking=True)
                _copy_blocks(self._device, range(slot, slot + len(chunk)), [block for _host, block in chunk])
            self._arrived = torch.cuda.Event()
            self._arrived.record(self._stream)

    def join_swap_ins(self) -> None:
        """Let the compute stream wait for all swap-ins so far."""
        if self._arrived is not None:
            torch.cuda.current_stream().wait_event(self._arrived)
            self._arrived = None

    def _chunks(self, pairs: list[tuple[int, int]], host: int) -> list[list[tuple[int, int]]]:
        """The pairs in the order of their host blocks, entry `host` of each, in parts that fit a slot."""
        pairs = sorted(pairs, key=itemgetter(host))
        return [pairs[begin : begin + self._slot_size] for begin in range(0, len(pairs), self._slot_size)]

    def _send(self, slot: int, chunk: list[tuple[int, int]]) -> None:
        """Transfer what is staged from `slot` on to the host blocks of (device block, host block) pairs."""
        for place, block, count in runs([host for _block, host in chunk]):
            staged = self._device[slot + place : slot + place + count]
            self._host[block : block + count].copy_(staged, non_blocking=True)

    def synchronize(self) -> None:
        """Wait on the host until everything has moved."""
        self._stream.synchronize()


def _copy_blocks(pool: torch.Tensor, source: list[int] | range, destination: list[int] | range) -> None:
    """Copy blocks of a pool on its device, on the current stream."""
    ops.copy_blocks(pool, *to_device([np.array(source, np.int64), np.array(destination, np.int64)], pool.device))


def block_bytes(places: list[Place], dtype: torch.dtype) -> int:
    """Bytes of one block of one rank: those of the largest group, and a multiple of 16 if there are states."""
    largest = max(place.end_bytes(dtype) for place in places)
    return -(-largest // 16) * 16 if any(isinstance(place, StatePlace) for place in places) else largest


def slot_blocks(block_bytes: int, num_cpu_blocks: int) -> int:
    """Staging blocks of a slot; 0 if there is nothing to move to."""
    return min(num_cpu_blocks, MAX_SLOT_BLOCKS, max(1, SLOT_BYTES // block_bytes))


def staging_blocks(block_bytes: int, num_cpu_blocks: int) -> int:
    """Staging blocks on the device: slots for swap-outs, and one for what the copy stream moves alone."""
    return (OUT_SLOTS + 1) * slot_blocks(block_bytes, num_cpu_blocks)


def runs(blocks: list[int]) -> list[tuple[int, int, int]]:
    """(place in the list, first block, count) of each maximal run of consecutive ids."""
    ids = np.array(blocks)
    starts = np.flatnonzero(np.append(True, ids[1:] != ids[:-1] + 1))
    counts = np.diff(np.append(starts, len(ids)))
    return list(zip(starts.tolist(), ids[starts].tolist(), counts.tolist(), strict=True))


def _device_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros for the device pool. Raises ConfigError if that much cannot be had."""
    try:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        # The system's zeros, when a block is first used: no start has to wait for all of them.
        pages = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
        return torch.from_numpy(pages).view(dtype).view(shape)
    except (MemoryError, ValueError, torch.OutOfMemoryError):
        size = math.prod(shape) * dtype.itemsize / (1 << 30)
        raise ConfigError(
            f"the KV cache of {shape[0]} blocks (num_gpu_blocks_override) takes {size:.1f} GiB, which cannot be had"
        ) from None


def _host_memory(shape: tuple[int, ...], dtype: torch.dtype, pinned: bool) -> torch.Tensor:
    """Memory for the host pool, read only where it has been written, unless it is pinned.

    Pinned in place: PyTorch's pinned allocator would round its size up to a power of two. Raises ConfigError if that
    much cannot be had or pinned.
    """
    wanted = "had"
    try:
        pool = torch.empty(shape, dtype=dtype)
        if pinned:
            wanted = "pinned"
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(pool.data_ptr(), pool.nbytes, 0))
    except RuntimeError as error:
        size = f"{math.prod(shape) * dtype.itemsize / (1 << 30):.1f} GiB"
        raise ConfigError(f"swap_space: {size} of host memory cannot be {wanted}: {error}") from None
    return pool
