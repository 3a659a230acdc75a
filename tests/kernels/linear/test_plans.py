"""Which projections the Hopper kernels take, and that their plans are such as the kernels can run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayllm_kernels.linear.plans import (
    GATED_BLOCK_TOKENS,
    GATED_FULL,
    HOPPER_TILES,
    MAX_HOPPER_TOKENS,
    MIN_GATED_INPUTS,
    MIN_GATED_TOKENS,
    NARROW,
    filled,
    plan_gated,
    plan_hopper,
)


@pytest.mark.parametrize("multiprocessors", [78, 132])
def test_plans_keep_to_what_the_kernel_can_do(multiprocessors):
    planned = 0
    for tokens in (1, 2, 5, 16, 17, 64, 65, 100, 128, 129, 5000):
        for rows in (16, 1024, 1536, 4096, 28672, 151936):
            for inputs in (64, 1024, 4096, 14336):
                for gated in (False, True):
                    plan = plan_hopper(tokens, rows, inputs, gated, multiprocessors)
                    if plan is None:
                        continue
                    tile, programs = plan
                    planned += 1
                    assert tokens <= MAX_HOPPER_TOKENS
                    assert tile in HOPPER_TILES
                    room = 2 * multiprocessors if tile in NARROW.values() else multiprocessors
                    assert 0 < programs <= room  # all run at once, since they wait for one another
    assert planned > 100


@given(
    tokens=st.integers(1, 40000),
    rows=st.integers(1, 2000).map(lambda n: 16 * n),
    inputs=st.integers(1, 1024),
    multiprocessors=st.sampled_from([1, 16, 78, 114, 132]),
)
def test_gated_plans(tokens, rows, inputs, multiprocessors):
    inputs *= 8
    consumers = plan_gated(tokens, rows, inputs, multiprocessors)
    shares = {n: filled(tokens, rows, n, multiprocessors) for n in (2, 3)}
    assert all(0 < share <= 1 for share in shares.values())
    if tokens < MIN_GATED_TOKENS or inputs < MIN_GATED_INPUTS:
        assert consumers is None
    elif consumers is None:
        assert max(shares.values()) < GATED_FULL
    else:
        assert shares[consumers] >= 0.98 * max(shares.values())
        assert shares[consumers] >= 0.98 * GATED_FULL


def test_gated_plans_of_the_layers_that_were_measured():
    def plan(tokens, rows, inputs):
        return plan_gated(tokens, rows, inputs, 132)

    assert plan(8192, 28672, 4096) == 3  # Llama-3.1-8B
    assert plan(1024, 28672, 4096) == 2
    assert plan(512, 28672, 4096) is None  # four rounds for 3.4
    assert plan(8192, 7168, 4096) == 2  # a quarter of it
    assert plan(8192, 6144, 1024) == 3  # Qwen3-0.6B
    assert plan(1024, 6144, 1024) is None
    assert filled(3 * GATED_BLOCK_TOKENS, 256 * 132, 3, 132) == 1.0
