"""Attention over a cache of latents, whose values are the first entries of its keys: kernels against references."""

from __future__ import annotations

import pytest
import torch
from support.closeness import check_close

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
