"""A KV cache in fp8: what is written, to the bit, and attention over it, by the kernels and by their references."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from rayllm_kernels import ops, reference
from rayllm_kernels.kv_format import FP8_MAX, KVScales, quantise

ON_GPU = torch.cuda.is_available()
MODULE = ops if ON_GPU else reference  # the interpreter's matrix products are not the GPU's
FORMATS = E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# The interpreter rounds to bf16 by cutting bits off: there, fp16 takes the place of bf16.
BRAIN = torch.bfloat16 if ON_GPU else torch.float16


def every_number(dtype):
    """All finite numbers of a format, ascending, in float64."""
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    return numbers[numbers.isfinite()].unique()


def borders(dtype):
    """Every number of a format, what lies halfway between neighbours, and the fp32 numbers on either side of that."""
    numbers = every_number(dtype)
    halves = ((numbers[1:] + numbers[:-1]) / 2).float()
    below, above = (halves.nextafter(torch.tensor(end)) for end in (-torch.inf, torch.inf))
    beyond = torch.tensor([0.0, -0.0, 1e9, -1e9, torch.inf, -torch.inf, torch.nan, 1e-30, -1e-30, 448.1, 57345.0])
    values = torch.cat([numbers.float(), halves, below, above, beyond])
    return torch.cat([values, values.new_zeros(-len(values) % 32)]).view(-1, 1, 32)


def same_bits(actual, expected):
    """NaN equals NaN whatever its sign: a GPU's has none."""
    wide, other = actual.float(), expected.float()
    return torch.equal(wide.isnan(), other.isnan()) and torch.equal(
        torch.where(wide.isnan(), 0, wide).view(torch.int32), torch.where(other.isnan(), 0, other).view(torch.int32)
    )


@pytest.mark.parametrize("dtype", FORMATS)
def test_quantise_takes_the_nearest_number(dtype):
    values, numbers = borders(dtype), every_number(dtype)
    finite = values[values.isfinite()]
    stored = quantise(finite.view(1, 1, -1), torch.ones(1), dtype).double().flatten()
    clamped = finite.double().clamp(-FP8_MAX[dtype], FP8_MAX[dtype])
    distance = (clamped[:, None] - numbers).abs().amin(1)
    assert torch.equal((stored - clamped).abs(), distance)
    halves = (numbers[1:] + numbers[:-1]) / 2
    ties = quantise(halves.view(1, 1, -1), torch.ones(1), dtype).view(torch.uint8)
    assert not (ties & 1).any()  # an even last bit
    assert quantise(torch.full((1, 1, 1), torch.nan), torch.ones(1), dtype).isnan().all()


@pytest.mark.parametrize("module", [reference, "kernels"])
@pytest.mark.parametrize("dtype", FORMATS)
def test_borders_between_numbers_are_written_to_the_bit(kernels, device, dtype, module):
    values = borders(dtype).to(device)
    cache = torch.zeros(2, len(values), 1, 1, 32, device=device).to(dtype)
    slots = torch.arange(len(values), device=device)
    for scale in (1.0, 0.25):
        scales = KVScales(*torch.full((2, 1), scale, device=device))
        chosen = kernels if module == "kernels" else module
        chosen.reshape_and_cache(values * scale, -values * scale, *cache, slots, kv_scales=scales)
        assert same_bits(cache[0, :, :, 0], quantise(values, torch.ones(1, device=device), dtype))
        assert same_bits(cache[1, :, :, 0], quantise(-values, torch.ones(1, device=device), dtype))


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "rotary_dim", "block_size", "dtype", "cache_dtype"),
    [
        (7, (4, 2), 64, 64, 16, torch.float16, E4M3),
        (5, (5, 1), 80, 32, 5, torch.float32, E5M2),
        (9, (6, 2), 16, 12, 1, BRAIN, E4M3),
    ]
    + ([(1300, (32, 8), 128, 128, 16, torch.bfloat16, kind) for kind in FORMATS] if ON_GPU else []),
)
def test_the_fused_write_equals_the_sequence(
    randn, kernels, device, tokens, heads, head_dim, rotary_dim, block_size, norm, dtype, cache_dtype
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
    weight = randn(head_dim, dtype=dtype) if norm else None
    # Not powers of two. Numbers up to ten or so saturate.
    scales = KVScales(*torch.linspace(0.003, 0.7, 2 * kv_heads, device=device).view(2, kv_heads))
    results = [
        module.qk_norm_rope_cache(
            qkv,
            positions,
            cos_sin,
            weight,
            weight,
            1e-6,
            cache[:, 1, 0],
            cache[:, 1, 1],
            slots,
            query_heads,
            kv_heads,
            kv_scales=scales,
        )
        for module, cache in ((kernels, pool[0]), (reference, pool[1]))
    ]
    assert torch.allclose(results[0].float(), results[1].float(), rtol=1e-2, atol=1e-3)
    ours, theirs = pool.float().unbind()
    assert torch.equal(ours[:, :, 1], theirs[:, :, 1])  # values are only converted
    # Where the norm's sum differs in the last bit, a key may fall to the next number.
    assert (ours != theirs).float().mean() < 2e-3
    step = 0.25 if cache_dtype == torch.float8_e5m2 else 0.125
    assert ((ours - theirs).abs() <= step * theirs.abs() + 2.0**-9).all()


# (context lengths, chunk lengths, (query heads, KV heads), head size, block size, dtype, of the cache)
SHAPES = [
    ([37, 1, 64, 0, 70], [30, 1, 5, 0, 1], (4, 2), 64, 16, torch.float32, E4M3),
    ([15, 16, 17], [1, 1, 1], (4, 4), 32, 8, BRAIN, E5M2),
    ([70, 3], [20, 3], (8, 1), 80, 1, torch.float16, E4M3),
    ([140], [40], (4, 1), 128, 128, BRAIN, E5M2),
    ([140], [40], (4, 1), 128, 32, BRAIN, E4M3),
    ([66], [1], (2, 1), 256, 5, torch.float16, E4M3),
    ([40], [2], (71, 1), 64, 64, torch.float32, E5M2),
    ([30, 300], [7, 3], (2, 2), 16, 16, torch.float16, E4M3),
]
if ON_GPU:
    SHAPES += [
        (*shape, kind)
        for kind in FORMATS
        for shape in (
            ([4096, 1, 1777, 0, 2048, 333], [1500, 1, 777, 0, 48, 300], (32, 8), 128, 16, torch.bfloat16),
            ([1000 + 37 * i for i in range(64)], [1 + 5 * i for i in range(64)], (16, 8), 128, 16, torch.bfloat16),
            ([9000], [700], (28, 4), 64, 32, torch.float16),
            ([3000, 5000], [1, 900], (16, 1), 256, 64, torch.bfloat16),
        )
    ]


@pytest.mark.parametrize(("seq_lens", "query_lens", "heads", "head_dim", "block_size", "dtype", "cache_dtype"), SHAPES)
def test_attention(
    paged_case, assert_kernel_close, kernels, seq_lens, query_lens, heads, head_dim, block_size, dtype, cache_dtype
):
    shape = {"heads": heads, "head_dim": head_dim, "block_size": block_size, "dtype": dtype}
    case = paged_case(seq_lens, cache_dtype=cache_dtype, spread=2.0, **shape)
    actual = case.decode(kernels, schedule=case.schedule(kernels, num_ranges=3))
    assert_kernel_close(actual, case.decode(reference))
    case = paged_case(seq_lens, query_lens, cache_dtype=cache_dtype, spread=2.0, **shape)
    assert_kernel_close(case.prefill(kernels), case.prefill(reference))


@pytest.mark.parametrize(
    ("window", "soft_cap", "alibi", "cache_dtype"),
    [(40, None, False, E4M3), (None, 3.0, False, E5M2), (None, None, True, E4M3), (40, 3.0, True, E4M3)],
)
def test_options(paged_case, assert_kernel_close, kernels, device, window, soft_cap, alibi, cache_dtype):
    slopes = 2.0 ** -torch.arange(1.0, 5.0, device=device) if alibi else None
    options = {"sliding_window": window, "soft_cap": soft_cap, "alibi_slopes": slopes}
    case = paged_case([70, 0, 50], spread=4.0, cache_dtype=cache_dtype)
    assert_kernel_close(case.decode(kernels, **options), case.decode(reference, **options))
    case = paged_case([70, 0, 50], [20, 0, 13], spread=4.0, cache_dtype=cache_dtype)
    assert_kernel_close(case.prefill(kernels, **options), case.prefill(reference, **options))


@pytest.mark.parametrize("cache_dtype", FORMATS)
def test_scales_are_factors_of_what_is_stored(paged_case, assert_close, cache_dtype):
    """The reference over an fp8 cache is the reference over the numbers that it stands for."""
    case = paged_case([100, 0, 70], [20, 0, 33], cache_dtype=cache_dtype)
    k, v = (
        cache.float() * scale[:, None, None]
        for cache, scale in zip((case.k_cache, case.v_cache), case.scales, strict=True)
    )
    plain = dataclasses.replace(case, k_cache=k, v_cache=v, scales=None)
    assert_close(case.prefill(reference), plain.prefill(reference))
    case = paged_case([100, 0, 70], cache_dtype=cache_dtype)
    plain = dataclasses.replace(plain, q=case.q, block_tables=case.block_tables)
    k, v = (
        cache.float() * scale[:, None, None]
        for cache, scale in zip((case.k_cache, case.v_cache), case.scales, strict=True)
    )
    assert_close(case.decode(reference), dataclasses.replace(plain, k_cache=k, v_cache=v).decode(reference))


@pytest.mark.parametrize("cache_dtype", FORMATS)
def test_queries_beyond_fp16_saturate(paged_case, kernels, cache_dtype):
    """Products are in fp16 for bf16 queries, too; one that is out of its range makes a sharp choice, and no NaN."""
    case = paged_case([60], dtype=torch.bfloat16, cache_dtype=cache_dtype)
    case.q.mul_(1e30)
    for attend in (case.decode, case.prefill):
        assert torch.isfinite(attend(kernels)).all()


@pytest.mark.parametrize("cache_dtype", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deterministic_chunks_do_not_show(paged_case, cache_dtype, dtype):
    case = paged_case([150], [150], heads=(8, 2), dtype=dtype, cache_dtype=cache_dtype)
    whole = case.prefill(MODULE, deterministic=True)
    for first, last in ((0, 1), (0, 37), (37, 150), (149, 150)):
        starts = torch.tensor([0, last - first]).to(case.seq_lens)
        lens = torch.tensor([last]).to(case.seq_lens)
        part = MODULE.paged_prefill_attention(
            case.q[first:last],
            case.k_cache,
            case.v_cache,
            case.block_tables,
            lens,
            starts,
            last - first,
            scale=case.scale,
            kv_scales=case.scales,
            deterministic=True,
        )
        assert torch.equal(part, whole[first:last])


def test_scales_belong_to_fp8_caches_alone(paged_case, kernels, device):
    plain, small = paged_case([20]), paged_case([20], cache_dtype=E4M3)
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    for module in (reference, kernels):
        for case, scales, name in (
            (plain, small.scales, "kv_scales"),
            (small, None, "kv_scales"),
            (small, KVScales(small.scales.k[:1], small.scales.v), "kv_scales.k"),
            (small, KVScales(small.scales.k, small.scales.v.double()), "kv_scales.v"),
        ):
            wrong = dataclasses.replace(case, scales=scales)
            rows = wrong.q[:, :2].contiguous()
            for call in (
                lambda wrong=wrong, module=module: wrong.decode(module),
                lambda wrong=wrong, module=module: wrong.prefill(module),
                lambda wrong=wrong, module=module, rows=rows: module.reshape_and_cache(
                    rows, rows, wrong.k_cache, wrong.v_cache, slots, kv_scales=wrong.scales
                ),
            ):
                with pytest.raises(ValueError, match=f"^{name} "):
                    call()
        odd = small.k_cache[..., 1:]
        with pytest.raises(ValueError, match=r"^k_cache in fp8 must have an even head_dim"):
            dataclasses.replace(small, k_cache=odd, v_cache=odd).decode(module)
        with pytest.raises(ValueError, match=r"^q must be float32"):
            dataclasses.replace(small, q=small.q.double()).decode(module)


COMPILE = """
import pathlib, sys, torch, triton
from triton.backends.compiler import GPUTarget

class Driver:
    get_current_device = get_current_stream = lambda self, *_: 0
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)

triton.runtime.driver.set_active(Driver())
from rayllm_kernels import ops, triton_kernels
from rayllm_kernels.kv_format import KVScales

pool = torch.zeros(4, 1, 2, 2, 16, 128).to(torch.float8_e4m3fn)
q, lens = torch.zeros(4, 8, 128, dtype=torch.bfloat16), torch.ones(4, dtype=torch.int32)
with ops.compile_only():
    triton_kernels.paged_decode_attention(
        q, pool[:, 0, 0], pool[:, 0, 1], torch.zeros(4, 2, dtype=torch.int32), lens, scale=0.1,
        kv_scales=KVScales(*torch.ones(2, 2)))
[ptx] = pathlib.Path(sys.argv[-1]).rglob("_decode_kernel.ptx")
print(ptx.read_text())
"""


@pytest.mark.skipif(ON_GPU, reason="a GPU runs the kernel itself")
def test_decodes_convert_in_registers(run_compiler, tmp_path):
    """Two numbers an instruction, from whole matrices of shared memory; no byte is loaded alone."""
    script = COMPILE.replace("sys.argv[-1]", repr(str(tmp_path)))
    ptx = run_compiler(script, TRITON_CACHE_DIR=str(tmp_path))
    keys, dims, threads = 128, 128, 128
    assert ptx.count("cvt.rn.f16x2.e4m3x2") == 2 * keys * dims // 2 // threads
    assert re.search(r"ldmatrix\S*trans", ptx)
    assert not re.search(r"ld\.shared\.[bu]8", ptx)
    assert "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" in ptx


def test_the_hopper_kernel_takes_no_fp8(paged_case):
    from rayllm_kernels.paged_prefill_attention import hopper_takes

    case = paged_case([40], [40], heads=(8, 2), head_dim=128, dtype=torch.float16)
    assert hopper_takes(case.q, case.k_cache, case.v_cache)
    assert not hopper_takes(case.q, case.k_cache.to(E4M3), case.v_cache.to(E4M3))


@pytest.mark.parametrize("seq_lens", [[], [0, 0], [0, 1, 300, 0, 2]])
def test_ranges_without_keys_and_padding(paged_case, assert_kernel_close, kernels, seq_lens):
    """Queries stay on chip from tile to tile: each sequence gets its own, also after padding rows."""
    case = paged_case(seq_lens, head_dim=32, cache_dtype=E4M3)
    out = torch.full_like(case.q, float("nan"))
    case.decode(kernels, schedule=case.schedule(kernels, num_ranges=4), out=out)
    if seq_lens:
        assert_kernel_close(out, case.decode(reference))
