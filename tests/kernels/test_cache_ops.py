"""Writing into the paged cache and copying its blocks: Triton and reference against plain indexing."""

from __future__ import annotations

import pytest
import torch

from rayllm_kernels import reference

ON_GPU = torch.cuda.is_available()


@pytest.fixture(params=["reference", "triton"])
def module(request, kernels):
    return reference if request.param == "reference" else kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "kv_heads", "head_dim", "block_size"),
    [(9, 2, 64, 16), (5, 1, 80, 1), (6, 3, 32, 5), (4, 40, 128, 8), (1, 8, 112, 128), (0, 2, 64, 16)]
    + ([(5000, 8, 128, 16)] if ON_GPU else []),
)
def test_reshape_and_cache(randn, module, device, tokens, kv_heads, head_dim, block_size, dtype):
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
    module.reshape_and_cache(key, value, pool[:, 1, 0], pool[:, 1, 1], slots.to(device))
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize(
    "shape", [(6, 3, 2, 2, 5, 7), (9, 10000), (5, 1)] + ([(64, 8, 2, 8, 16, 128)] if ON_GPU else [])
)
def test_copy_blocks(randn, module, device, shape, dtype):
    pool = (randn(*shape) * 20).to(dtype)
    expected = pool.clone()
    src, dst = torch.tensor([3, 0, 3], device=device), torch.tensor([1, 4, 2], device=device)
    expected[dst] = expected[src]
    module.copy_blocks(pool, src, dst)
    assert torch.equal(pool, expected)
    module.copy_blocks(pool, src[:0], dst[:0])
    assert torch.equal(pool, expected)


def test_copy_blocks_of_a_strided_pool(randn, module, device):
    """Blocks may lie apart, as the blocks of one layer do in a block-major pool."""
    pool = randn(6, 3, 40)
    expected = pool.clone()
    expected[1, 2] = expected[5, 2]
    module.copy_blocks(pool[:, 2], torch.tensor([5], device=device), torch.tensor([1], device=device))
    assert torch.equal(pool, expected)


@pytest.mark.skipif(not ON_GPU, reason="needs 4 GiB of pool")
def test_offsets_past_two_to_the_31(kernels, device):
    pool = torch.zeros(20, 1, 2, 8, 16, 1 << 20, dtype=torch.uint8, device=device).view(20, -1)
    pool[17] = torch.randint(0, 255, (pool.shape[1],), dtype=torch.uint8, device=device)
    kernels.copy_blocks(pool, torch.tensor([17], device=device), torch.tensor([19], device=device))
    assert torch.equal(pool[19], pool[17])
    assert not pool[18].any()
