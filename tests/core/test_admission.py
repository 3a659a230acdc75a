"""Who enters the batch and when: room for those that run to grow, and the policy's order."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scheduler import Harness

from rayllm.core.sequence import SequenceStatus


def crowd(growth_blocks: int, seed: int) -> Harness:
    """Requests of random lengths that need about three times the pool."""
    rng = random.Random(seed)
    harness = Harness(
        num_blocks=60,
        block_size=4,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        growth_blocks=growth_blocks,
        depth=2,
        max_model_len=100,
    )
    for i in range(24):
        prompt = [rng.randrange(20, 50) for _ in range(rng.randint(1, 20))]
        harness.add(f"r{i}", prompt, max_tokens=rng.randint(1, 40), seed=i, ignore_eos=True)
    harness.run()
    harness.check_done()
    return harness


def test_room_to_grow_makes_preemptions_rare_and_takes_no_longer():
    greedy, careful = ([crowd(growth, seed) for seed in range(8)] for growth in (0, 1))
    preemptions = [sum(h.scheduler.stats().num_preemptions for h in harnesses) for harnesses in (greedy, careful)]
    assert preemptions[0] > 30 and preemptions[1] < preemptions[0] / 2
    assert sum(len(h.plans) for h in careful) <= 1.1 * sum(len(h.plans) for h in greedy)
    computed = [sum(h.worker.num_tokens_computed for h in harnesses) for harnesses in (greedy, careful)]
    assert computed[1] < computed[0]


def test_sequences_that_need_no_more_blocks_leave_the_room_to_others():
    """Four prompts that fill the pool to a block, and generate what fits into their last blocks."""
    harness = Harness(num_blocks=21, block_size=4, max_num_seqs=8, max_num_batched_tokens=200, max_model_len=84)
    for i in range(4):
        harness.add(f"r{i}", [i] * 17, max_tokens=3, seed=i, ignore_eos=True)
    harness.step()
    assert harness.scheduler.stats().num_running == 4
    harness.run()
    harness.check_done()
    assert harness.scheduler.stats().num_preemptions == 0


def test_who_had_no_room_enters_when_somebody_ends():
    harness = Harness(num_blocks=12, block_size=4, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=48)
    for token, name in enumerate("ab"):
        harness.add(name, [token] * 16, max_tokens=20, seed=1, ignore_eos=True)
    harness.step()
    harness.add("c", [5] * 8, max_tokens=20, seed=1, ignore_eos=True)
    for _ in range(3):
        harness.step()
    stats = harness.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (2, 1)
    harness.abort("a")
    harness.step()
    assert harness.scheduler.stats().num_running == 2
    harness.run()
    harness.check_done()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@settings(max_examples=12, deadline=None)
@given(data=st.data(), seed=st.integers(0, 99))
def test_the_first_in_order_is_next_and_nobody_starves(policy, data, seed):
    """Requests keep coming: whoever is first in policy order enters first, and within the time of those that run."""
    harness = Harness(
        num_blocks=20, block_size=4, max_num_seqs=6, max_num_batched_tokens=24, policy=policy, max_model_len=80
    )
    rng = random.Random(seed)
    entered, waited = set(), 0
    for i in range(30):
        length = data.draw(st.integers(1, 40))
        harness.add(f"r{i}", [i] * length, rng.randint(0, 1), max_tokens=rng.randint(1, 80 - length), seed=i)
        for _ in range(data.draw(st.integers(0, 6))):
            head = next(iter(harness.scheduler.state.waiting), None)
            harness.step()
            running = {seq.request_id for seq in harness.scheduler.state.running}
            newcomers = running - entered
            entered |= running
            waited = 0 if head is None or newcomers else waited + 1
            assert waited <= 6 * 80, "the first in order starves"
            if newcomers and head is not None:
                ended = head.status is SequenceStatus.FINISHED
                assert head.request_id in entered or ended, "somebody overtook the first in order"
    harness.run()
    harness.check_done()
