"""`CacheEngine`: the KV pools of one rank, on the device and in host memory.

Both are block-major: [num_blocks, num_layers, 2 (K, V), num_kv_heads, block_size, head_dim], so that a block is one
contiguous piece to copy; attention sees strided views of one layer. Pools in fp8 are bytes to all but those views.
"""

from __future__ import annotations

import math

import torch

from rayllm.errors import ConfigError
from rayllm.layers.attention import KVCache
from rayllm.worker.copy_stream import CopyStream, staging_blocks
from rayllm_kernels import ops
from rayllm_kernels.cache.kv_cache import FP8_MAX, KVScales


def block_bytes(num_layers: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one block of one rank, all layers."""
    return num_layers * 2 * num_kv_heads * block_size * head_dim * dtype.itemsize


class CacheEngine:
    """Owns both pools. Block ids are checked by the driver's block manager, not here.

    On CUDA the host pool is pinned, the device has staging blocks behind its pool, and swaps run on a stream of their
    own: see `CopyStream`. On CPUs both pools are host memory and swaps are plain copies.

    scales: of each layer, exactly if dtype is an fp8 one.
    """

    def __init__(
        self,
        *,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        num_layers: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: list[KVScales] | None = None,
    ):
        if (scales is not None) != (dtype in FP8_MAX):
            raise ValueError(f"a cache of {dtype} must {'have' if dtype in FP8_MAX else 'not have'} scales")
        shape = (num_layers, 2, num_kv_heads, block_size, head_dim)
        pinned = device.type == "cuda" and num_cpu_blocks > 0
        num_staging = 0
        if pinned:
            num_staging = staging_blocks(
                block_bytes(num_layers, num_kv_heads, block_size, head_dim, dtype), num_cpu_blocks
            )
        storage = torch.uint8 if dtype in FP8_MAX else dtype
        # Zeros, not garbage: a masked position times a NaN would still be NaN.
        self._blocks = torch.zeros(num_gpu_blocks + num_staging, *shape, dtype=storage, device=device)
        self.pool = self._blocks[:num_gpu_blocks]
        numbers = self.pool.view(dtype)
        self.layers = [
            KVCache(numbers[:, i, 0], numbers[:, i, 1], None if scales is None else scales[i])
            for i in range(num_layers)
        ]
        self.host_pool = _host_memory((num_cpu_blocks, *shape), storage)
        self._copy_stream: CopyStream | None = None
        if pinned:
            _pin(self.host_pool)
            torch.cuda.current_stream().synchronize()  # the zeros, before other streams write
            self._copy_stream = CopyStream(self._blocks, self.host_pool, num_staging)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy device blocks: (source, destination) pairs; no source may be a destination."""
        source, destination = self._indices(pairs, self.pool.device)
        ops.copy_blocks(self.pool, source, destination)

    def swap_out(self, pairs: list[tuple[int, int]]) -> None:
        """Copy (device block, host block) pairs to the host pool, in order with the compute stream.

        What that stream does next may overwrite the device blocks; later swap-ins find the host blocks filled.
        """
        if self._copy_stream is not None:
            self._copy_stream.swap_out(pairs)
            return
        for block, host_block in pairs:  # faster than indexing, which looks at elements
            self.host_pool[host_block].copy_(self.pool[block])

    def swap_in(self, pairs: list[tuple[int, int]]) -> None:
        """Start copying (host block, device block) pairs to the device pool; they are there after `join_swap_ins`.

        Until then nothing else may use the device blocks.
        """
        if self._copy_stream is not None:
            self._copy_stream.swap_in(pairs)
            return
        for host_block, block in pairs:
            self.pool[block].copy_(self.host_pool[host_block])

    def write_back(self, pairs: list[tuple[int, int]], step_id: int) -> None:
        """Start copying (device block, host block) pairs to the host pool, behind all that is computed so far.

        The device blocks may be read meanwhile, and written after `join_write_backs` of this step or a later one.
        """
        if self._copy_stream is not None:
            self._copy_stream.write_back(pairs, step_id)
            return
        self.swap_out(pairs)

    def join_write_backs(self, step_id: int) -> None:
        """Let the compute stream wait for the write-backs of all steps up to this one."""
        if self._copy_stream is not None:
            self._copy_stream.join_write_backs(step_id)

    def join_swap_ins(self) -> None:
        """Let the compute stream wait for all swap-ins so far."""
        if self._copy_stream is not None:
            self._copy_stream.join()

    def synchronize(self) -> None:
        """Wait on the host until all swaps are done."""
        if self._copy_stream is not None:
            self._copy_stream.synchronize()

    def close(self) -> None:
        """Give the pinned memory back; the engine must not be used any more."""
        if self._copy_stream is not None:
            self._copy_stream.synchronize()
            self._copy_stream = None
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self.host_pool.data_ptr()))

    @staticmethod
    def _indices(pairs: list[tuple[int, int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        source, destination = torch.tensor(pairs, dtype=torch.int64).t().contiguous().to(device)
        return source, destination


def _host_memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory for the host pool, read only where it has been written. Raises ConfigError if there is not as much."""
    try:
        return torch.empty(shape, dtype=dtype)
    except RuntimeError as error:
        raise ConfigError(f"swap_space: {_gib(shape, dtype)} of host memory cannot be had: {error}") from None


def _pin(pool: torch.Tensor) -> None:
    """Pin host memory in place: PyTorch's pinned allocator would round its size up to a power of two.

    Raises ConfigError if that much cannot be pinned.
    """
    try:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(pool.data_ptr(), pool.nbytes, 0))
    except RuntimeError as error:
        raise ConfigError(
            f"swap_space: {_gib(pool.shape, pool.dtype)} of host memory cannot be pinned: {error}"
        ) from None


def _gib(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{math.prod(shape) * dtype.itemsize / (1 << 30):.1f} GiB"
