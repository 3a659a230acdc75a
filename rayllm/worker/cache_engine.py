"""`CacheEngine`: the KV pools of one rank, on the device and in host memory.

Both are block-major: [num_blocks, num_layers, 2 (K, V), num_kv_heads, block_size, head_dim], so that a block is one
contiguous piece to copy; attention sees strided views of one layer.
"""

from __future__ import annotations

import torch

from rayllm.layers.attention import KVCache
from rayllm_kernels import ops


def block_bytes(num_layers: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one block of one rank, all layers."""
    return num_layers * 2 * num_kv_heads * block_size * head_dim * dtype.itemsize


class CacheEngine:
    """Owns both pools. Block ids are checked by the driver's block manager, not here.

    The host pool is pinned (on CUDA hosts) and allocated by the first swap: pinning gigabytes takes seconds that
    an engine which never swaps should not pay.
    """

    def __init__(
        self, *, num_gpu_blocks: int, num_cpu_blocks: int, num_layers: int, num_kv_heads: int, block_size: int,
        head_dim: int, dtype: torch.dtype, device: torch.device,
    ):  # fmt: skip
        self._shape = (num_layers, 2, num_kv_heads, block_size, head_dim)
        self._num_cpu_blocks = num_cpu_blocks
        self._host: torch.Tensor | None = None
        # Zeros, not garbage: a masked position times a NaN would still be NaN.
        self.pool = torch.zeros(num_gpu_blocks, *self._shape, dtype=dtype, device=device)
        self.layers: list[KVCache] = [(self.pool[:, i, 0], self.pool[:, i, 1]) for i in range(num_layers)]

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy device blocks: (source, destination) pairs; no source may be a destination."""
        source, destination = self._indices(pairs, self.pool.device)
        ops.copy_blocks(self.pool, source, destination)

    def swap_out(self, pairs: list[tuple[int, int]]) -> None:
        """Copy (device block, host block) pairs to the host pool; returns when the host pool holds them."""
        source, destination = self._indices(pairs, self.pool.device)
        self._host_pool()[destination.cpu()] = self.pool[source].cpu()

    def swap_in(self, pairs: list[tuple[int, int]]) -> None:
        """Copy (host block, device block) pairs to the device pool, in order with the compute stream."""
        source, destination = self._indices(pairs, torch.device("cpu"))
        self.pool[destination.to(self.pool.device)] = self._host_pool()[source].to(self.pool.device)

    def _host_pool(self) -> torch.Tensor:
        if self._host is None:
            pinned = self.pool.device.type == "cuda"
            self._host = torch.zeros(self._num_cpu_blocks, *self._shape, dtype=self.pool.dtype, pin_memory=pinned)
        return self._host

    @staticmethod
    def _indices(pairs: list[tuple[int, int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        source, destination = torch.tensor(pairs, dtype=torch.int64).t().contiguous().to(device)
        return source, destination
