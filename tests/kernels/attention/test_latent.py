"""Attention over a cache of latents, whose values are the first entries of its keys: kernels against references."""

from __future__ import annotations

import pytest
import torch
from support.closeness import check_close

from rayllm_kernels.attention import schedule as schedules
from rayllm_kernels.device import Hardware, assumed
from rayllm_kernels.ops import KVCache, latent_cache

ON_GPU = torch.cuda.is_available()
# The interpreter's `tl.dot` multiplies bf16 bit patterns as integers: there, fp16 takes the place of bf16.
BRAIN = torch.bfloat16 if ON_GPU else torch.float16

# (context lengths, query heads, width of keys, of values, block size, dtype)
DECODES = [
    ([37, 1, 64, 0, 130], 4, 40, 32, 16, torch.float32),
    ([70, 3], 16, 80, 64, 5, BRAIN),
    ([40, 90], 20, 144, 96, 16, BRAIN),
    ([66], 3, 20, 12, 8, torch.float32),
    ([50, 0, 19], 16, 576, 512, 16, BRAIN),
]
if ON_GPU:
    DECODES += [
        ([4096, 1, 1777, 0, 333], 16, 576, 512, 16, torch.bfloat16),
        ([4096, 1, 1777, 0, 333], 128, 576, 512, 64, torch.bfloat16),
        ([4096, 64, 1777, 0, 65, 128], 20, 576, 512, 16, torch.float16),
        ([1200] * 256, 20, 576, 512, 24, torch.bfloat16),
        ([100, 1000], 5, 192, 128, 8, torch.bfloat16),
        ([700] * 300, 32, 320, 256, 16, torch.bfloat16),
        ([900, 20], 128, 576, 512, 16, torch.float32),
    ]


@pytest.mark.parametrize("num_ranges", [1, 5])
@pytest.mark.parametrize(("seq_lens", "heads", "width", "value_dim", "block_size", "dtype"), DECODES)
def test_decodes(paged_case, kernels, reference, seq_lens, heads, width, value_dim, block_size, dtype, num_ranges):
    case = paged_case(
        seq_lens, heads=(heads, 1), head_dim=width, value_dim=value_dim, block_size=block_size, dtype=dtype, spread=2.0
    )
    # The output is a strided slice, too.
    out = torch.full((len(seq_lens), heads + 1, value_dim), float("nan"), dtype=dtype, device=case.q.device)[:, 1:]
    assert case.decode_in_ranges(kernels, num_ranges, out) is out
    check_close(out, case.decode(reference), terms=case.terms)
    for row, length in enumerate(seq_lens):
        assert length > 0 or not out[row].any()


@pytest.mark.skipif(not ON_GPU, reason="the interpreter runs programs one by one, in order")
def test_decodes_have_the_same_bits_each_time(paged_case, kernels):
    case = paged_case(
        [1 + 211 * i % 1700 for i in range(60)], heads=(20, 1), head_dim=576, value_dim=512, dtype=torch.bfloat16
    )
    schedule, first = case.schedule(kernels), case.decode(kernels)
    for _ in range(50):
        assert torch.equal(case.decode(kernels, schedule), first)


@pytest.mark.parametrize("other", [{"softcap": 20.0}, {"sliding_window": 40}])
def test_scores_that_are_not_plain(paged_case, kernels, reference, other):
    """Another kernel than that of plain ones on a Hopper GPU, and other tiles."""
    case = paged_case([200, 3, 0, 90], heads=(20, 1), head_dim=576, value_dim=512, dtype=BRAIN, spread=2.0)
    check_close(case.decode(kernels, **other), case.decode(reference, **other), terms=case.terms)


def test_a_schedule_of_other_tiles_is_refused(paged_case, device):
    case = paged_case([20], heads=(20, 1), head_dim=576, value_dim=512, dtype=torch.bfloat16)
    with assumed(device, Hardware(132, 227 << 10, (9, 0))):
        plain, capped = case.scoring(), case.scoring(softcap=20.0)
        assert schedules.hopper_takes(case.q, case.cache, plain)
        assert not schedules.hopper_takes(case.q, case.cache, capped)
        keys = schedules.choose_tiles(case.q, case.cache, plain).keys
        assert schedules.choose_tiles(case.q, case.cache, capped).keys != keys
        made = schedules.DecodeSchedule(*torch.empty(5, 1, 20, 512, device=device), keys)
        made.check(case.q, case.cache, plain)
        with pytest.raises(ValueError, match=r"^schedule must be made for such a cache and such scoring"):
            made.check(case.q, case.cache, capped)


COMPILE = """
from rayllm_kernels.attention.latent_hopper import _latent_hopper_kernel, decode
from rayllm_kernels.attention.schedule import DecodeSchedule

heads = 20
q, lens = torch.zeros(3, heads, 576, dtype=torch.bfloat16), torch.ones(3, dtype=torch.int32)
parts = torch.zeros(14, heads, 512), torch.zeros(14, heads)
cuts = torch.zeros(3, 3, dtype=torch.int32)
schedule = DecodeSchedule(torch.zeros(3, 2, dtype=torch.int32), torch.zeros(7, 7, dtype=torch.int32), cuts, *parts, 64)
contexts = Contexts(torch.zeros(3, 5, dtype=torch.int32), lens)
cache = latent_cache(torch.zeros(4, 1, 16, 576, dtype=torch.bfloat16), 512)
with ops.compile_only():
    decode(q, cache, contexts, 0.1, schedule, 32, torch.empty(3, heads, 512, dtype=torch.bfloat16))
[kernel] = _latent_hopper_kernel.device_caches[0][0].values()
print(kernel.asm["ptx"].count("wgmma.mma"))
"""


@pytest.mark.skipif(ON_GPU, reason="a GPU runs the kernel itself")
def test_hopper_kernel_compiles(run_compiler, tmp_path):
    """36 steps of 16 entries of keys, and four of 16 keys for each 64 entries of values."""
    assert int(run_compiler(COMPILE, TRITON_CACHE_DIR=str(tmp_path))) == 36 + 4 * 8


# (context lengths, chunk lengths, query heads, width of keys, of values, dtype)
PREFILLS = [
    ([37, 64, 5], [37, 20, 1], 4, 40, 32, torch.float32),
    ([50, 33], [3, 33], 20, 80, 64, BRAIN),
    ([40], [9], 16, 576, 512, BRAIN),
    ([21, 0], [21, 0], 3, 20, 12, torch.float32),
]
if ON_GPU:
    PREFILLS += [
        ([2000, 300, 1], [700, 300, 1], 16, 576, 512, torch.bfloat16),
        ([2000, 300, 1], [70, 300, 1], 128, 576, 512, torch.bfloat16),
        ([300], [300], 16, 576, 512, torch.float32),
    ]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("seq_lens", "query_lens", "heads", "width", "value_dim", "dtype"), PREFILLS)
def test_prefills(paged_case, kernels, reference, seq_lens, query_lens, heads, width, value_dim, dtype, deterministic):
    case = paged_case(
        seq_lens, query_lens, heads=(heads, 1), head_dim=width, value_dim=value_dim, dtype=dtype, spread=2.0
    )
    out = case.prefill(kernels, deterministic=deterministic)
    assert out.shape == (sum(query_lens), heads, value_dim)
    check_close(out, case.prefill(reference), terms=case.terms)


def test_the_reference_is_attention_of_keys_and_values_of_their_own(paged_case, reference):
    case = paged_case([30, 7], heads=(4, 1), head_dim=24, value_dim=16)
    whole = paged_case([30, 7], heads=(4, 1), head_dim=24)
    k = case.cache.k
    own = torch.empty_strided(k.shape, k.stride(), device=k.device).copy_(k)
    whole.q, whole.cache, whole.contexts = case.q, KVCache(k, own), case.contexts
    check_close(case.decode(reference), whole.decode(reference)[..., :16])


def test_errors(paged_case, each):
    case = paged_case([20], heads=(4, 1), head_dim=24, value_dim=16)
    k, v, _ = case.cache
    for cache, message in (
        (KVCache(k, v + 0), "^cache.v must"),
        (KVCache(k, k[..., 1:17]), "^cache.v must be the first entries of cache.k"),
        (latent_cache(k.to(torch.float8_e5m2), 16), "^cache.k must not be in fp8"),
    ):
        case.cache = cache
        with pytest.raises(ValueError, match=message):
            case.decode(each)
    with pytest.raises(ValueError, match=r"^q must have a head_dim of at most 512 \(and 128 more"):
        paged_case([20], heads=(1, 1), head_dim=160, value_dim=16).decode(each)
    case = paged_case([20], heads=(4, 1), head_dim=24, value_dim=16)
    other = paged_case([20], heads=(4, 1), head_dim=24)
    schedule = other.schedule(each, num_ranges=2)
    if schedule is not None:
        with pytest.raises(ValueError, match=r"^schedule must be made for queries of shape \(1, 4, 16\)"):
            case.decode(each, schedule)
    with pytest.raises(ValueError, match=r"^out must have shape \(1, 4, 16\)"):
        case.decode(each, out=torch.empty_like(case.q))
