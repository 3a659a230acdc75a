"""Attention over a KV cache in fp8, by the kernels and by their references."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from support.capabilities import each_where_it_can_run, needs_e4m3
from support.closeness import check_close

from rayllm_kernels.ops import KVCache

ON_GPU = torch.cuda.is_available()
FORMATS = E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# The interpreter rounds to bf16 by cutting bits off: there, fp16 takes the place of bf16.
BRAIN = torch.bfloat16 if ON_GPU else torch.float16

# (context lengths, chunk lengths, (query heads, KV heads), head size, block size, dtype, of the cache)
SHAPES = [
    ([37, 1, 64, 0, 70], [30, 1, 5, 0, 1], (4, 2), 64, 16, torch.float32, E4M3),
    ([15, 16, 17], [1, 1, 1], (4, 4), 32, 8, BRAIN, E5M2),
    ([70, 3], [20, 3], (8, 1), 80, 1, torch.float16, E4M3),
    ([140], [40], (4, 1), 128, 128, BRAIN, E5M2),
    ([140], [40], (4, 1), 128, 32, BRAIN, E4M3),
    ([66], [1], (2, 1), 256, 5, torch.float16, E4M3),
    ([40], [3], (4, 1), 512, 16, torch.float16, E4M3),
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


@pytest.mark.parametrize(
    ("seq_lens", "query_lens", "heads", "head_dim", "block_size", "dtype", "cache_dtype"), each_where_it_can_run(SHAPES)
)
def test_attention(
    paged_case, kernels, reference, seq_lens, query_lens, heads, head_dim, block_size, dtype, cache_dtype
):
    shape = {"heads": heads, "head_dim": head_dim, "block_size": block_size, "dtype": dtype}
    case = paged_case(seq_lens, cache_dtype=cache_dtype, spread=2.0, **shape)
    check_close(case.decode_in_ranges(kernels, 3), case.decode(reference), terms=case.terms)
    case = paged_case(seq_lens, query_lens, cache_dtype=cache_dtype, spread=2.0, **shape)
    check_close(case.prefill(kernels), case.prefill(reference), terms=case.terms)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
@pytest.mark.parametrize(
    ("window", "alibi", "softcap", "has_sinks", "cache_dtype"),
    each_where_it_can_run(
        [
            (40, False, None, False, E4M3),
            (None, False, None, False, E5M2),
            (None, True, None, False, E4M3),
            (40, True, None, False, E4M3),
            (None, False, 3.0, True, E4M3),
            (40, True, 3.0, True, E5M2),
        ]
    ),
)
def test_options(paged_case, kernels, reference, alibi_slopes, sinks, window, alibi, softcap, has_sinks, cache_dtype):
    options = {"sliding_window": window, "alibi_slopes": alibi_slopes(4) if alibi else None, "softcap": softcap}
    options["sinks"] = sinks(4) if has_sinks else None
    case = paged_case([70, 0, 50], spread=4.0, cache_dtype=cache_dtype)
    check_close(case.decode(kernels, **options), case.decode(reference, **options), terms=case.terms)
    case = paged_case([70, 0, 50], [20, 0, 13], spread=4.0, cache_dtype=cache_dtype)
    check_close(case.prefill(kernels, **options), case.prefill(reference, **options), terms=case.terms)


@pytest.mark.parametrize("query_lens", [None, [20, 0, 33]])
@pytest.mark.parametrize("cache_dtype", each_where_it_can_run(FORMATS))
def test_scales_are_factors_of_what_is_stored(paged_case, reference, query_lens, cache_dtype):
    """The reference over an fp8 cache is the reference over the numbers that it stands for."""
    case = paged_case([100, 0, 70], query_lens, cache_dtype=cache_dtype)
    numbers = (part.float() * scale[:, None, None] for part, scale in zip(case.cache, case.cache.scales, strict=False))
    plain = dataclasses.replace(case, cache=KVCache(*numbers))
    if query_lens is None:
        check_close(case.decode(reference), plain.decode(reference), terms=case.terms)
    else:
        check_close(case.prefill(reference), plain.prefill(reference), terms=case.terms)


@pytest.mark.parametrize("cache_dtype", each_where_it_can_run(FORMATS))
def test_queries_beyond_fp16_saturate(paged_case, kernels, cache_dtype):
    """Products are in fp16 for bf16 queries, too; one that is out of its range makes a sharp choice, and no NaN."""
    case = paged_case([60], dtype=torch.bfloat16, cache_dtype=cache_dtype)
    case.q.mul_(1e30)
    for attend in (case.decode, case.prefill):
        assert torch.isfinite(attend(kernels)).all()


COMPILE = """
from rayllm_kernels.attention.decode_kernel import _decode_kernel

pool = torch.zeros(4, 1, 2, 2, 16, 128).to(torch.float8_e4m3fn)
q, lens = torch.zeros(4, 8, 128, dtype=torch.bfloat16), torch.ones(4, dtype=torch.int32)
cache = KVCache(pool[:, 0, 0], pool[:, 0, 1], KVScales(*torch.ones(2, 2)))
with dispatch.forced(triton=True), ops.compile_only():
    ops.paged_decode_attention(q, cache, Contexts(torch.zeros(4, 2, dtype=torch.int32), lens), Scoring(0.1))
[kernel] = _decode_kernel.device_caches[0][0].values()
print(kernel.asm["ptx"])
"""


@pytest.mark.skipif(ON_GPU, reason="a GPU runs the kernel itself")
def test_decodes_convert_in_registers(run_compiler, tmp_path):
    """Two numbers an instruction, from whole matrices of shared memory; no byte is loaded alone."""
    ptx = run_compiler(COMPILE, TRITON_CACHE_DIR=str(tmp_path))
    keys, dims, threads = 128, 128, 128
    assert ptx.count("cvt.rn.f16x2.e4m3x2") == 2 * keys * dims // 2 // threads
    assert re.search(r"ldmatrix\S*trans", ptx)
    assert not re.search(r"ld\.shared\.[bu]8", ptx)
    assert "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" in ptx


def test_the_hopper_kernel_takes_no_fp8(paged_case):
    from rayllm_kernels.attention.prefill_kernel import hopper_takes

    case = paged_case([40], [40], heads=(8, 2), head_dim=128, dtype=torch.float16)
    assert hopper_takes(case.q, case.cache, case.q)
    assert not hopper_takes(case.q, KVCache(case.cache.k.to(E4M3), case.cache.v.to(E4M3)), case.q)


@needs_e4m3
@pytest.mark.parametrize("seq_lens", [[], [0, 0], [0, 1, 300, 0, 2]])
def test_ranges_without_keys_and_padding(paged_case, kernels, reference, seq_lens):
    """Queries stay on chip from tile to tile: each sequence gets its own, also after padding rows."""
    case = paged_case(seq_lens, head_dim=32, cache_dtype=E4M3)
    out = torch.full_like(case.q, float("nan"))
    case.decode_in_ranges(kernels, 4, out)
    if seq_lens:
        check_close(out, case.decode(reference), terms=case.terms)
