"""The formats of a KV cache: the fp8 numbers that are written, to the bit, and which caches are refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.capabilities import each_where_it_can_run, needs_e4m3

from rayllm_kernels.cache.kv_cache import FP8_MAX, KVCache, KVScales, quantise
from rayllm_kernels.device import assumed, hardware

FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]


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


@pytest.mark.parametrize("dtype", each_where_it_can_run(FORMATS))
def test_borders_between_numbers_are_written_to_the_bit(each, device, dtype):
    values = borders(dtype).to(device)
    cache = torch.zeros(2, len(values), 1, 1, 32, device=device).to(dtype)
    slots = torch.arange(len(values), device=device)
    for scale in (1.0, 0.25):
        scales = KVScales(*torch.full((2, 1), scale, device=device))
        each.reshape_and_cache(values * scale, -values * scale, KVCache(*cache, scales), slots)
        assert same_bits(cache[0, :, :, 0], quantise(values, torch.ones(1, device=device), dtype))
        assert same_bits(cache[1, :, :, 0], quantise(-values, torch.ones(1, device=device), dtype))


@needs_e4m3
def test_scales_belong_to_fp8_caches_alone(paged_case, each, device):
    plain, small = paged_case([20]), paged_case([20], cache_dtype=torch.float8_e4m3fn)
    scales, slots = small.cache.scales, torch.zeros(1, dtype=torch.int64, device=device)
    for case, wrong, name in (
        (plain, scales, "cache.scales"),
        (small, None, "cache.scales"),
        (small, KVScales(scales.k[:1], scales.v), "cache.scales.k"),
        (small, KVScales(scales.k, scales.v.double()), "cache.scales.v"),
    ):
        bad = dataclasses.replace(case, cache=case.cache._replace(scales=wrong))
        rows = bad.q[:, :2].contiguous()
        calls = [
            lambda bad=bad: bad.decode(each),
            lambda bad=bad: bad.prefill(each),
            lambda bad=bad, rows=rows: each.reshape_and_cache(rows, rows, bad.cache, slots),
        ]
        for call in calls:
            with pytest.raises(ValueError, match=f"^{name} "):
                call()
    odd = KVCache(small.cache.k[..., 1:], small.cache.v[..., 1:], scales)
    with pytest.raises(ValueError, match=r"^cache.k in fp8 must have an even head_dim"):
        dataclasses.replace(small, cache=odd).decode(each)
    with pytest.raises(ValueError, match=r"^q must be float32"):
        dataclasses.replace(small, q=small.q.double()).decode(each)


def test_e4m3_is_refused_where_it_cannot_be_converted(paged_case, each, device):
    cases = {dtype: paged_case([20], cache_dtype=dtype) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)}
    with assumed(device, hardware(device)._replace(capability=(8, 6))):
        for attend in (cases[torch.float8_e4m3fn].decode, cases[torch.float8_e4m3fn].prefill):
            with pytest.raises(ValueError, match=r"^cache.k in float8_e4m3fn needs .* 8\.9 or more, got \(8, 6\)"):
                attend(each)
        assert cases[torch.float8_e5m2].decode(each).isfinite().all()
