"""The fused kernel between the qkv projection and attention against its three references in sequence."""

from __future__ import annotations

import pytest
import torch

from rayllm_kernels import reference

ON_GPU = torch.cuda.is_available()


def arguments(randn, device, tokens, heads, head_dim, rotary_dim, block_size, dtype, norm):
    """Strided rows, a cache that is a slice of a pool, every fourth token a padding token."""
    query_heads, kv_heads = heads
    width = (query_heads + 2 * kv_heads) * head_dim
    qkv = randn(tokens, width + 8, dtype=dtype)[:, :width]
    pool = randn(tokens // block_size + 3, 2, 2, kv_heads, block_size, head_dim, dtype=dtype)
    generator = torch.Generator().manual_seed(11)
    slots = torch.randperm(pool.shape[0] * block_size, generator=generator)[:tokens]
    slots[1::4] = -1
    positions = torch.randint(0, 50, (tokens,), generator=generator).to(device)
    angles = torch.rand(50, rotary_dim // 2, generator=generator) * 6.28
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1).to(device)
    weights = (randn(head_dim, dtype=dtype), randn(head_dim, dtype=dtype)) if norm else (None, None)
    return pool, (qkv, positions, cos_sin, *weights, 1e-6), (slots.to(device), query_heads, kv_heads)


def run(module, pool, before, after):
    return module.qk_norm_rope_cache(*before, pool[:, 1, 0], pool[:, 1, 1], *after)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "rotary_dim", "block_size"),
    [
        (7, (4, 2), 64, 64, 16),
        (1, (16, 8), 128, 128, 16),
        (5, (5, 1), 80, 32, 5),
        (9, (3, 3), 96, 96, 8),
        (0, (4, 2), 32, 32, 16),
        (3, (40, 4), 16, 12, 1),
        (130, (6, 2), 16, 16, 16),
    ]
    + ([(64, (32, 8), 128, 128, 16), (5000, (32, 8), 128, 128, 16), (300, (16, 8), 128, 128, 16)] if ON_GPU else []),
)
def test_equals_the_sequence(
    randn, assert_kernel_close, kernels, device, tokens, heads, head_dim, rotary_dim, block_size, dtype, norm
):
    pool, before, after = arguments(randn, device, tokens, heads, head_dim, rotary_dim, block_size, dtype, norm)
    expected_pool, qkv = pool.clone(), before[0].clone()
    expected = run(reference, expected_pool, before, after)
    actual = run(kernels, pool, before, after)
    assert actual.is_contiguous()
    assert_kernel_close(actual, expected)
    assert_kernel_close(pool, expected_pool)
    assert torch.equal(before[0], qkv)
    # Values, and all that no slot names, are copies: equal to the last bit.
    assert torch.equal(pool[:, 1, 1], expected_pool[:, 1, 1])
    assert torch.equal(pool[:, 0], expected_pool[:, 0])
    if ON_GPU and tokens and dtype != torch.float32:
        # The same roundings as in sequence, but for the order of the norm's sum.
        assert (actual != expected).float().mean() < 0.01


def test_the_reference_is_the_three_references_in_sequence(randn, device):
    pool, before, after = arguments(randn, device, 6, (4, 2), 32, 32, 8, torch.float32, True)
    (qkv, positions, cos_sin, q_weight, k_weight, eps), (slots, *_) = before, after
    expected_pool = pool.clone()
    q, k, v = qkv.unflatten(1, (-1, 32)).split([4, 2, 2], dim=1)
    q, k = reference.rms_norm(q, q_weight, eps), reference.rms_norm(k, k_weight, eps)
    reference.rotary_embedding(positions, q, k, cos_sin)
    reference.reshape_and_cache(k, v, expected_pool[:, 1, 0], expected_pool[:, 1, 1], slots)
    assert torch.equal(run(reference, pool, before, after), q)
    assert torch.equal(pool, expected_pool)


def test_bad_arguments_are_named(randn, device, kernels):
    pool, before, after = arguments(randn, device, 6, (4, 2), 32, 32, 8, torch.float32, True)
    names = ["qkv", "positions", "cos_sin_cache", "q_weight", "k_weight"]
    for index, name in enumerate(names):
        bad = list(before)
        bad[index] = bad[index].to(torch.float16)
        for module in (reference, kernels):
            with pytest.raises(ValueError, match=f"^{name} "):
                run(module, pool, bad, after)
    for module in (reference, kernels):
        with pytest.raises(ValueError, match=r"^k_weight "):
            run(module, pool, (*before[:4], None, 1e-6), after)
        with pytest.raises(ValueError, match=r"^slot_mapping "):
            run(module, pool, before, (after[0].int(), *after[1:]))
        with pytest.raises(ValueError, match=r"^k_cache "):
            run(module, pool, before, (after[0], 4, 3))
        with pytest.raises(ValueError, match=r"^qkv "):
            run(module, pool, before, (after[0], 5, 2))


@pytest.mark.skipif(not ON_GPU, reason="needs CUDA graphs")
def test_capture(randn, device, kernels):
    pool, before, after = arguments(randn, device, 5, (16, 8), 128, 128, 16, torch.bfloat16, True)
    expected_pool = pool.clone()
    expected = run(kernels, expected_pool, before, after)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = run(kernels, pool, before, after)
    graph.replay()
    assert torch.equal(q, expected)
    assert torch.equal(pool, expected_pool)
