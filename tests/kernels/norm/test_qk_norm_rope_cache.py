"""The fused kernel between the qkv projection and attention against its three references in sequence."""

from __future__ import annotations

import pytest
import torch
from support.capabilities import each_where_it_can_run
from support.closeness import check_close

from rayllm_kernels import ops
from rayllm_kernels.norm.qk_norm_rope_cache import rotate
from rayllm_kernels.ops import HeadNorms, KVCache, KVScales

ON_GPU = torch.cuda.is_available()
FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]
# The interpreter rounds to bf16 by cutting bits off: there, fp16 takes the place of bf16.
BRAIN = torch.bfloat16 if ON_GPU else torch.float16


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
    norms = HeadNorms(randn(head_dim, dtype=dtype), randn(head_dim, dtype=dtype), 1e-6) if norm else None
    return pool, {
        "qkv": qkv,
        "norms": norms,
        "positions": positions,
        "cos_sin_cache": cos_sin,
        "slot_mapping": slots.to(device),
    }


def cache_of(pool):
    return KVCache(pool[:, 1, 0], pool[:, 1, 1])


def run(module, pool, call):
    return module.qk_norm_rope_cache(cache=cache_of(pool), **call)


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
    ]
    + ([(64, (32, 8), 128, 128, 16), (5000, (32, 8), 128, 128, 16), (300, (16, 8), 128, 128, 16)] if ON_GPU else []),
)
def test_equals_the_sequence(
    randn, kernels, reference, device, tokens, heads, head_dim, rotary_dim, block_size, dtype, norm
):
    case = arguments(randn, device, tokens, heads, head_dim, rotary_dim, block_size, dtype, norm)
    check_sequence(*case, kernels, reference)


def test_many_tokens_equal_the_sequence(randn, kernels, reference, device):
    """More than 128, from which on a program takes more heads."""
    case = arguments(randn, device, 130, (6, 2), 16, 16, 16, torch.float16, True)
    check_sequence(*case, kernels, reference)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize(("tokens", "head_dim", "rotary_dim"), [(5, 16, 16), (9, 80, 32)])
def test_interleaved_pairs_and_scaled_queries(
    randn, kernels, reference, device, tokens, head_dim, rotary_dim, scaled, norm
):
    pool, call = arguments(randn, device, tokens, (6, 2), head_dim, rotary_dim, 16, torch.float16, norm)
    call |= {"interleaved": True, "query_scale": torch.rand(50, device=device) if scaled else None}
    check_sequence(pool, call, kernels, reference)
    halves = run(reference, pool.clone(), call | {"interleaved": False})
    assert not torch.equal(run(reference, pool, call)[..., :rotary_dim], halves[..., :rotary_dim])


def test_queries_are_scaled_by_their_position(randn, kernels, device):
    pool, call = arguments(randn, device, 7, (4, 2), 32, 32, 8, torch.float32, False)
    scale, other = torch.rand(50, device=device), pool.clone()
    plain = run(kernels, pool, call)
    scaled = run(kernels, other, call | {"query_scale": scale})
    torch.testing.assert_close(scaled, plain * scale[call["positions"]][:, None, None])
    assert torch.equal(other, pool)


@pytest.mark.parametrize(("tokens", "heads", "head_dim"), [(7, (4, 2), 32), (9, (3, 3), 80), (130, (6, 2), 16)])
def test_normed_values(randn, kernels, reference, device, tokens, heads, head_dim):
    """Without a weight; the rest is as ever."""
    pool, call = arguments(randn, device, tokens, heads, head_dim, head_dim, 8, torch.float16, True)
    plain, expected, same = pool.clone(), pool.clone(), call
    run(reference, plain, same)
    call = call | {"norms": call["norms"]._replace(values=True)}
    run(reference, expected, call)
    q = run(kernels, pool, call)
    check_close(q, run(reference, plain.clone(), same), terms=2)
    check_close(pool, expected, terms=2)
    assert torch.equal(expected[:, 1, 0], plain[:, 1, 0])
    slots = call["slot_mapping"]
    rows = slots >= 0
    values = call["qkv"].unflatten(1, (-1, head_dim))[rows, heads[0] + heads[1] :].float()
    normed = values / (values.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    stored = pool[slots[rows] // 8, 1, 1, :, slots[rows] % 8]
    check_close(stored, normed.to(stored.dtype), terms=2)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("tokens", [0, 5])
def test_queries_alone(randn, each, device, tokens, norm):
    """Of a layer that reads the keys of another: those of a layer that has its own, and a cache that stays as it is."""
    pool, call = arguments(randn, device, tokens, (4, 2), 32, 32, 8, torch.float32, norm)
    expected, before = run(each, pool.clone(), call), pool.clone()
    norms = call["norms"]._replace(k=None) if norm else None
    alone = call | {"qkv": call["qkv"][:, : 4 * 32], "slot_mapping": None, "norms": norms}
    check_close(run(each, pool, alone), expected)
    assert torch.equal(pool, before)
    if norm:
        with pytest.raises(ValueError, match=r"^norms.k "):
            run(each, pool, call | {"norms": norms})


def check_sequence(pool, call, kernels, reference):
    expected_pool, qkv = pool.clone(), call["qkv"].clone()
    expected = run(reference, expected_pool, call)
    actual = run(kernels, pool, call)
    assert actual.is_contiguous()
    check_close(actual, expected, terms=2)
    check_close(pool, expected_pool, terms=2)
    assert torch.equal(call["qkv"], qkv)
    # Values, and all that no slot names, are copies: equal to the last bit.
    assert torch.equal(pool[:, 1, 1], expected_pool[:, 1, 1])
    assert torch.equal(pool[:, 0], expected_pool[:, 0])
    if ON_GPU and qkv.numel() and qkv.dtype != torch.float32:
        # The same roundings as in sequence, but for the order of the norm's sum.
        assert (actual != expected).float().mean() < 0.01


def test_the_reference_is_the_three_references_in_sequence(randn, device, reference):
    pool, call = arguments(randn, device, 6, (4, 2), 32, 32, 8, torch.float32, True)
    expected_pool, norms = pool.clone(), call["norms"]
    q, k, v = call["qkv"].unflatten(1, (-1, 32)).split([4, 2, 2], dim=1)
    q, k = reference.rms_norm(q, norms.q, norms.eps), reference.rms_norm(k, norms.k, norms.eps)
    for heads in (q, k):
        rotate(heads, call["positions"], call["cos_sin_cache"])
    reference.reshape_and_cache(k, v, cache_of(expected_pool), call["slot_mapping"])
    assert torch.equal(run(reference, pool, call), q)
    assert torch.equal(pool, expected_pool)


def test_bad_arguments_are_named(randn, device, each):
    pool, call = arguments(randn, device, 6, (4, 2), 32, 32, 8, torch.float32, True)
    norms = call["norms"]
    for change, name in (
        ({"qkv": call["qkv"].half()}, "qkv"),
        ({"qkv": call["qkv"][:, :-1]}, "qkv"),
        ({"qkv": call["qkv"][:, : 4 * 32]}, "qkv"),
        ({"positions": call["positions"].int()}, "positions"),
        ({"cos_sin_cache": call["cos_sin_cache"].half()}, "cos_sin_cache"),
        ({"cos_sin_cache": call["cos_sin_cache"][0]}, "cos_sin_cache"),
        ({"cos_sin_cache": call["cos_sin_cache"][:, :31]}, "cos_sin_cache"),
        ({"cos_sin_cache": call["cos_sin_cache"].repeat(1, 2)}, "cos_sin_cache"),
        ({"norms": norms._replace(q=norms.q.half())}, "norms.q"),
        ({"norms": norms._replace(k=norms.k[:5])}, "norms.k"),
        ({"slot_mapping": call["slot_mapping"].int()}, "slot_mapping"),
        ({"query_scale": torch.ones(49, device=device)}, "query_scale"),
    ):
        with pytest.raises(ValueError, match=f"^{name} "):
            run(each, pool, call | change)


@pytest.mark.skipif(not ON_GPU, reason="needs CUDA graphs")
def test_capture(randn, device, kernels):
    pool, call = arguments(randn, device, 5, (16, 8), 128, 128, 16, torch.bfloat16, True)
    expected_pool = pool.clone()
    expected = run(kernels, expected_pool, call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = run(kernels, pool, call)
    graph.replay()
    assert torch.equal(q, expected)
    assert torch.equal(pool, expected_pool)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "rotary_dim", "block_size", "dtype", "cache_dtype"),
    each_where_it_can_run(
        [
            (7, (4, 2), 64, 64, 16, torch.float16, torch.float8_e4m3fn),
            (5, (5, 1), 80, 32, 5, torch.float32, torch.float8_e5m2),
            (9, (6, 2), 16, 12, 1, BRAIN, torch.float8_e4m3fn),
        ]
        + ([(1300, (32, 8), 128, 128, 16, torch.bfloat16, kind) for kind in FORMATS] if ON_GPU else [])
    ),
)
def test_the_fp8_write_equals_the_sequence(
    randn, kernels, reference, device, tokens, heads, head_dim, rotary_dim, block_size, norm, dtype, cache_dtype
):
    query_heads, kv_heads = heads
    qkv = randn(tokens, (query_heads + 2 * kv_heads) * head_dim, dtype=dtype) * 3
    blocks = tokens // block_size + 3
    pool = randn(blocks, 2, 2, kv_heads, block_size, head_dim).expand(2, *[-1] * 6).to(cache_dtype)
    slots = torch.randperm(pool.shape[1] * block_size, generator=torch.Generator().manual_seed(1))[:tokens].to(device)
    slots[1::4] = -1
    positions = torch.arange(tokens, device=device)
    angles = torch.outer(torch.arange(tokens), torch.rand(rotary_dim // 2, generator=torch.Generator().manual_seed(2)))
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1).to(device)
    weight = randn(head_dim, dtype=dtype)
    # Not powers of two. Numbers up to ten or so saturate.
    scales = KVScales(*torch.linspace(0.003, 0.7, 2 * kv_heads, device=device).view(2, kv_heads))
    norms = HeadNorms(weight, weight, 1e-6) if norm else None
    results = [
        module.qk_norm_rope_cache(qkv, norms, positions, cos_sin, KVCache(part[:, 1, 0], part[:, 1, 1], scales), slots)
        for module, part in ((kernels, pool[0]), (reference, pool[1]))
    ]
    assert torch.allclose(results[0].float(), results[1].float(), rtol=1e-2, atol=1e-3)
    ours, theirs = pool.float().unbind()
    assert torch.equal(ours[:, :, 1], theirs[:, :, 1])  # values are only converted
    # Where the norm's sum differs in the last bit, a key may fall to the next number.
    assert (ours != theirs).float().mean() < 2e-3
    step = 0.25 if cache_dtype == torch.float8_e5m2 else 0.125
    assert ((ours - theirs).abs() <= step * theirs.abs() + 2.0**-9).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 8, 128), (8, 4, 32), (6, 2, 80)])
def test_deterministic_heads_do_not_know_of_other_tokens(
    randn, device, assert_rows_independent, heads, kv_heads, dim, norm, dtype
):
    norms = HeadNorms(*randn(2, dim, dtype=dtype), 1e-6) if norm else None
    cos_sin, positions = randn(300, dim), torch.arange(300, device=device)

    def heads_of(qkv, positions):
        tokens = qkv.shape[0]
        k = randn(1, dtype=dtype).expand(tokens, kv_heads, 1, dim).clone()
        cache, slots = KVCache(k, k.clone()), torch.arange(tokens, device=device)
        q = ops.qk_norm_rope_cache(qkv, norms, positions, cos_sin, cache, slots, deterministic=True)
        return q, cache.k, cache.v

    assert_rows_independent(heads_of, randn(300, (heads + 2 * kv_heads) * dim, dtype=dtype), positions)


FORMS = """
qkv, positions = torch.ones(4, 8 * 128, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int64)
pool, norm = torch.zeros(2, 9, 2, 16, 128, dtype=torch.bfloat16), torch.ones(128, dtype=torch.bfloat16)
scaled = {"interleaved": True, "query_scale": torch.ones(50)}
with dispatch.forced(triton=True), ops.compile_only():
    for norms, form in ((None, scaled), (HeadNorms(norm, norm, 1e-6), {})):
        ops.qk_norm_rope_cache(qkv, norms, positions, torch.zeros(50, 96), KVCache(*pool), positions, **form)
    ops.rms_norm_add(qkv[:, :128], qkv[:, 128:256], norm, 1e-6)
print("compiled")
"""


def test_forms_compile(run_compiler, tmp_path):
    assert run_compiler(FORMS, TRITON_CACHE_DIR=str(tmp_path)).strip() == "compiled"


ONE_FORM = """
from rayllm_kernels.norm.qk_norm_rope_cache_kernel import _qk_norm_rope_cache_kernel
norm, pool = torch.ones(128, dtype=torch.bfloat16), torch.zeros(2, 30, 2, 16, 128, dtype=torch.bfloat16)
with dispatch.forced(triton=True), ops.compile_only():
    for tokens in (4, 300):
        qkv, positions = torch.ones(tokens, 8 * 128, dtype=torch.bfloat16), torch.zeros(tokens, dtype=torch.int64)
        cache, norms = KVCache(*pool), HeadNorms(norm, norm, 1e-6)
        ops.qk_norm_rope_cache(qkv, norms, positions, torch.zeros(50, 96), cache, positions, deterministic=True)
print(len(_qk_norm_rope_cache_kernel.device_caches[0][0]))
"""


def test_the_deterministic_form_is_one_for_any_number_of_tokens(run_compiler, tmp_path):
    """Two would have different bits: compilers fuse multiplications with sums as they find them."""
    assert run_compiler(ONE_FORM, TRITON_CACHE_DIR=str(tmp_path)).strip() == "1"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norms_in_fp32(randn, device, kernels, reference, dtype):
    """Their weights multiply what is not rounded yet."""
    norms, positions = HeadNorms(1.0 + randn(16), 1.0 + randn(16), 1e-6), torch.arange(5, device=device)
    qkv, pool = randn(5, 8 * 16, dtype=dtype), randn(2, 3, 2, 8, 16, dtype=dtype)
    caches = [KVCache(*pool.clone()) for _ in range(2)]
    angles = randn(5, 16).sin()
    ours, theirs = (
        each.qk_norm_rope_cache(qkv, norms, positions, angles, cache, positions)
        for each, cache in zip((kernels, reference), caches, strict=True)
    )
    check_close(ours, theirs, terms=2)
    check_close(caches[0].k, caches[1].k, terms=2)
