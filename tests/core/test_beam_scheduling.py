"""Beams in the scheduler: rows, blocks and turns. That the results are right in any history is in test_scheduler.py."""

from __future__ import annotations

import math
import random

import pytest
from support.fakes import VOCAB
from support.scheduler import EVEN, Harness

from rayllm.api.types import TokenLogprobs

BEAMS = {"use_beam_search": True, "early_stopping": "never", "ignore_eos": True}


def test_beams_share_blocks_and_nothing_is_computed_twice():
    harness = Harness(num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, caching=False)
    harness.add("a", list(range(30)), best_of=4, n=2, max_tokens=9, **BEAMS)
    used = []
    while harness.step():
        used.append(harness.scheduler.stats().num_used_blocks)
    harness.check_done()
    assert harness.scheduler.stats().computed_tokens == 30 + 8 * 4
    first, *later = harness.plans
    assert (len(first.new), len(first.tokens), sum(first.num_tokens)) == (1, 0, 30)
    for plan in later:  # a beam goes on in its row, or forks off
        assert len(plan.rows) == plan.num_decodes == len(plan.tokens) + len(plan.new) == 4
        assert not {row for row, _token in plan.tokens} & {data.row for data in plan.new}
        assert len(plan.copies) <= len(plan.new)
    assert sum(len(plan.new) for plan in later) < sum(len(plan.tokens) for plan in later)
    assert max(used) <= 7 + 4 * 3, "7 full blocks of the prompt once, and 3 for the rest of each beam"
    assert used[-1] == 0


def test_samples_hold_the_prompt_once_and_their_own_blocks_to_the_end():
    harness = Harness(num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, caching=False)
    harness.add("a", list(range(30)), n=8, max_tokens=14, seed=1, ignore_eos=True)
    used = []
    while harness.step():
        used.append(harness.scheduler.stats().num_used_blocks)
    harness.check_done()
    assert max(used) == 7 + 8 * 4, "7 full blocks of the prompt, and 4 for the rest of each sample"


def test_a_beam_that_dies_frees_its_blocks_at_once():
    harness = Harness(num_blocks=64, block_size=1, max_num_seqs=8, caching=False)
    harness.add("a", [1], best_of=5, n=1, max_tokens=25, **BEAMS)
    while harness.step():
        live = harness.scheduler.state.groups.values()
        tables = [set(seq.block_tables[0]) for group in live for seq in group.sequences]
        assert harness.scheduler.stats().num_used_blocks == len(set().union(*tables))
    assert any(plan.free_rows for plan in harness.plans)
    harness.check_done()


@pytest.mark.parametrize("depth", [1, 2])
def test_the_others_go_on_while_beams_wait_for_their_choice(depth):
    harness = Harness(num_blocks=64, block_size=4, depth=depth, max_num_seqs=8)
    harness.add("free", [1, 2, 3], max_tokens=20, seed=1, ignore_eos=True)
    harness.add("beams", [4, 5, 6], n=4, max_tokens=20, **BEAMS)
    for _ in range(12):
        harness.step()
    row = harness.plans[0].rows[0]
    assert all(row in plan.rows for plan in harness.plans), "a token in each step"
    assert [len(plan.rows) for plan in harness.plans] == ([2] + [5] * 11 if depth == 1 else [2, 1] + [5, 1] * 5)
    harness.run()
    harness.check_done()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("max_num_seqs", [4, 8])
def test_beams_take_turns_where_only_one_has_room(max_num_seqs, mode):
    harness = Harness(
        num_blocks=8, block_size=4, max_num_seqs=max_num_seqs, num_cpu_blocks=40, preemption_mode=mode, caching=False
    )
    harness.add("a", [1, 2, 3], n=4, max_tokens=29, **BEAMS)
    harness.add("b", [4, 5, 6], n=2, best_of=3, max_tokens=29, logprobs=1, **BEAMS)
    harness.add("c", [4, 5, 6], max_tokens=9, seed=3)
    harness.run()
    harness.check_done()
    stats = harness.scheduler.stats()
    assert stats.num_preemptions > 20
    assert (stats.num_swap_preemptions > 20) == (mode == "swap")


@pytest.mark.parametrize(("mode", "caching"), [("recompute", False), ("swap", True), ("cost", True)])
def test_a_long_history_of_beams_and_samples_in_a_tight_pool(mode, caching):
    rng = random.Random(mode)
    harness = Harness(
        num_blocks=12,
        block_size=4,
        depth=2,
        max_num_seqs=8,
        max_num_batched_tokens=24,
        policy="priority",
        num_cpu_blocks=10,
        preemption_mode=mode,
        costs=EVEN,
        caching=caching,
    )
    for i in range(40):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
        params = {"n": rng.choice([1, 3]), "seed": i}
        if rng.random() < 0.5:
            params = {**BEAMS, "best_of": rng.randint(2, 4), "n": 2, "ignore_eos": rng.random() < 0.5}
        harness.add(f"r{i}", prompt, rng.randint(0, 2), max_tokens=rng.randint(1, 28), **params)
        for _ in range(rng.randint(0, 6)):
            harness.step()
        if rng.random() < 0.1:
            harness.abort(f"r{rng.randint(0, i)}")
    harness.run()
    harness.check_done()
    stats = harness.scheduler.stats()
    assert stats.num_preemptions > 10
    assert (stats.num_swap_preemptions > 0) == (mode != "recompute")


def test_an_abort_in_mid_search_leaves_nothing_behind():
    for steps in range(1, 9):
        harness = Harness(num_blocks=12, block_size=4, depth=2, max_num_seqs=8, num_cpu_blocks=20)
        harness.add("a", list(range(9)), n=4, max_tokens=20, **BEAMS)
        harness.add("b", list(range(9)), n=3, max_tokens=20, **BEAMS)
        for _ in range(steps):
            harness.step()
        harness.abort("a")
        harness.run()
        harness.check_done()


def test_logits_that_are_no_numbers_end_the_search():
    harness = Harness(num_blocks=12, block_size=4)
    nan = TokenLogprobs(0, math.nan, 1, [0, 1, 2], [math.nan] * 3)
    harness.worker._best_tokens = lambda _row: nan
    harness.add("a", [1], n=2, max_tokens=5, **BEAMS)
    harness.run()
    assert harness.reasons == {("a", 0): "error", ("a", 1): "error"}
    assert "fewer sequences" in harness.last_deltas["a", 0].stop_reason


def test_no_fewer_than_no_request_waits():
    """Beams that are swapped out while they await their group's choice are in no queue."""
    least = []
    for seed in range(40):
        rng = random.Random(seed)
        harness = Harness(
            num_blocks=rng.randint(8, 12),
            block_size=rng.choice([1, 2, 4]),
            depth=rng.choice([1, 2]),
            max_num_seqs=4,
            num_cpu_blocks=40,
            preemption_mode="swap",
            growth_blocks=0,
            max_num_batched_tokens=16,
        )
        harness.add("a", [1, 2, 3], max_tokens=rng.randint(4, 5), seed=1, best_of=4, **BEAMS)
        while harness.step():
            stats = harness.scheduler.stats()
            least.append(stats.num_waiting)
    assert min(least) == 0
