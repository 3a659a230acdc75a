"""Copying whole blocks of a pool: Triton and reference against plain indexing."""

from __future__ import annotations

import pytest
import torch

ON_GPU = torch.cuda.is_available()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize(
    "shape", [(6, 3, 2, 2, 5, 7), (9, 10000), (5, 1)] + ([(64, 8, 2, 8, 16, 128)] if ON_GPU else [])
)
def test_copy_blocks(randn, each, device, shape, dtype):
    pool = (randn(*shape) * 20).to(dtype)
    expected = pool.clone()
    src, dst = torch.tensor([3, 0, 3], device=device), torch.tensor([1, 4, 2], device=device)
    expected[dst] = expected[src]
    each.copy_blocks(pool, src, dst)
    assert torch.equal(pool, expected)
    each.copy_blocks(pool, src[:0], dst[:0])
    assert torch.equal(pool, expected)


def test_copy_blocks_of_a_strided_pool(randn, each, device):
    """Blocks may lie apart, as the blocks of one layer do in a block-major pool."""
    pool = randn(6, 3, 40)
    expected = pool.clone()
    expected[1, 2] = expected[5, 2]
    each.copy_blocks(pool[:, 2], torch.tensor([5], device=device), torch.tensor([1], device=device))
    assert torch.equal(pool, expected)


@pytest.mark.skipif(not ON_GPU, reason="needs 4 GiB of pool")
def test_offsets_past_two_to_the_31(kernels, device):
    pool = torch.zeros(20, 1, 2, 8, 16, 1 << 20, dtype=torch.uint8, device=device).view(20, -1)
    pool[17] = torch.randint(0, 255, (pool.shape[1],), dtype=torch.uint8, device=device)
    kernels.copy_blocks(pool, torch.tensor([17], device=device), torch.tensor([19], device=device))
    assert torch.equal(pool[19], pool[17])
    assert not pool[18].any()
