"""Writing into the paged cache: Triton and reference against plain indexing."""

from __future__ import annotations

import pytest
import torch

from rayllm_kernels.ops import KVCache

ON_GPU = torch.cuda.is_available()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "kv_heads", "head_dim", "block_size"),
    [(9, 2, 64, 16), (5, 1, 80, 1), (6, 3, 32, 5), (4, 40, 128, 8), (1, 8, 112, 128), (0, 2, 64, 16)]
    + ([(5000, 8, 128, 16)] if ON_GPU else []),
)
def test_reshape_and_cache(randn, each, device, tokens, kv_heads, head_dim, block_size, dtype):
    blocks = tokens // block_size + 3
    pool = randn(blocks, 3, 2, kv_heads, block_size, head_dim, dtype=dtype)
    expected = pool.clone()
    qkv = randn(tokens, 4 + 2 * kv_heads, head_dim, dtype=dtype)
    key, value = qkv[:, 4 : 4 + kv_heads], qkv[:, 4 + kv_heads :]
    slots = torch.randperm(blocks * block_size, generator=torch.Generator().manual_seed(5))[:tokens]
    slots[1::4] = -1
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // block_size, 1, 0, :, slot % block_size] = key[token]
            expected[slot // block_size, 1, 1, :, slot % block_size] = value[token]
    each.reshape_and_cache(key, value, KVCache(pool[:, 1, 0], pool[:, 1, 1]), slots.to(device))
    assert torch.equal(pool, expected)
