"""What admission foresees, against a simulation of each step, and what comes of it."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scheduler import Harness

from rayllm.core.forecast import Need
from rayllm.core.output_lengths import PRIOR, RECENT, OutputLengths
from rayllm.core.sequence import SequenceStatus
from rayllm.core.window import KVWindow

FINISHED = SequenceStatus.FINISHED


class Running(NamedTuple):
    """A decoding sequence: tokens in the pool, and steps until its end."""

    tokens: int
    steps: int


def blocks_over_time(seq: Running, window: KVWindow) -> list[int]:
    """Blocks of its table now and in every step that is left to it."""
    size = window.block_size
    first, end = window.first_block(seq.tokens), -(-seq.tokens // size)
    table = [end - first]
    for position in range(seq.tokens, seq.tokens + seq.steps):
        if position >= end * size:
            first, end = window.first_block(position), end + 1
        table.append(end - first)
    return table


@given(
    sequences=st.lists(st.builds(Running, st.integers(1, 60), st.integers(0, 50)), min_size=1, max_size=12),
    size=st.sampled_from([1, 2, 4, 7]),
    tokens=st.sampled_from([None, None, 1, 6, 13]),
    kept=st.sampled_from([0, 0, 5]),
)
def test_the_peak_is_exact(sequences, size, tokens, kept):
    window = KVWindow(tokens, size)
    need, tables = Need(size), []
    for seq in sequences:
        table = blocks_over_time(seq, window)
        tables.append(table)
        most = max(table[0], window.most_blocks(10**6))
        need.add(seq.tokens, seq.steps, window.first_block(seq.tokens), table[0], table[0], most)
    peak = 0
    for step in range(max(len(table) for table in tables)):
        grown = sum(table[step] - table[0] for table in tables if step < len(table))
        freed = sum(table[0] for table in tables if step >= len(table))
        peak = max(peak, grown - max(0, freed - kept))
    assert need.steps_to_fit(peak, kept) == 0
    assert peak == 0 or need.steps_to_fit(peak - 1, kept) > 0


@given(
    lengths=st.lists(st.integers(1, 300), max_size=RECENT + 40),
    generated=st.integers(0, 300),
    room=st.integers(1, 300),
    share=st.floats(0, 1, exclude_max=True),
)
def test_expected_lengths(lengths, generated, room, share):
    model = OutputLengths()
    for length in lengths:
        model.add(length)
    limit = generated + room
    longer = sorted(length for length in [*PRIOR, *lengths][-RECENT:] if length > generated)
    expected = longer[int(share * len(longer))] if longer else max(generated + 1, 2 * generated)
    assert model.expected(generated, limit, share) == min(limit, expected)
    assert generated < min(limit, expected)


def test_many_sequences_are_expected_to_be_as_those_before():
    model, rng = OutputLengths(), random.Random(0)
    lengths = [int(rng.expovariate(0.01)) + 1 for _ in range(RECENT)]
    for length in lengths:
        model.add(length)
    drawn = [model.expected(0, 10**6, model.next_share()) for _ in range(100)]
    assert sum(drawn) / 100 == pytest.approx(sum(lengths) / RECENT, rel=0.05)
    assert sorted(drawn)[75] == pytest.approx(sorted(lengths)[3 * RECENT // 4], rel=0.1)


def test_recent_lengths_replace_older_ones():
    model = OutputLengths()
    for _ in range(RECENT):
        model.add(100)
    assert [model.expected(*args, 0.9) for args in ((0, 5000), (0, 30), (99, 5000))] == [100, 30, 100]
    assert model.expected(100, 5000, 0.1) == 200, "longer than all: as long again"
    for _ in range(RECENT):
        model.add(1000)
    assert model.expected(0, 5000, 0.0) == 1000


def crowd(foresight: bool, seed: int, ignore_eos: bool = True) -> Harness:
    """Requests of random lengths that need about three times the pool."""
    rng = random.Random(seed)
    harness = Harness(
        num_blocks=60,
        block_size=4,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        foresight=foresight,
        depth=2,
        max_model_len=100,
    )
    for i in range(24):
        prompt = [rng.randrange(20, 50) for _ in range(rng.randint(1, 20))]
        harness.add(f"r{i}", prompt, max_tokens=rng.randint(1, 40), seed=i, ignore_eos=ignore_eos)
    harness.run()
    harness.check_done()
    return harness


@pytest.mark.parametrize("seed", range(4))
def test_known_lengths_are_not_preempted_and_take_no_longer(seed):
    blind, foreseen = crowd(False, seed), crowd(True, seed)
    assert blind.scheduler.stats().num_preemptions > 3
    assert foreseen.scheduler.stats().num_preemptions == 0
    assert len(foreseen.plans) <= 1.1 * len(blind.plans)
    assert foreseen.worker.num_tokens_computed < blind.worker.num_tokens_computed


def test_who_was_refused_enters_when_somebody_ends_early():
    harness = Harness(num_blocks=30, block_size=4, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=100)
    for name in ("a", "b"):
        harness.add(name, [1, 2, 3, 4], max_tokens=50, seed=1, ignore_eos=True)
    harness.step()
    harness.add("c", [5] * 4, max_tokens=50, seed=1, ignore_eos=True)
    for _ in range(3):
        harness.step()
    stats = harness.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (2, 1) and stats.num_used_blocks < 6, "all three need 42 blocks"
    harness.abort("a")
    harness.step()
    assert harness.scheduler.stats().num_running == 2
    harness.run()
    harness.check_done()
    assert harness.scheduler.stats().num_preemptions == 0


def test_looking_less_often_delays_little(monkeypatch):
    steps = [len(crowd(True, seed).plans) for seed in range(4)]
    look = Need.steps_to_fit
    monkeypatch.setattr(Need, "steps_to_fit", lambda *args: min(1, look(*args)))
    assert sum(steps) <= 1.03 * sum(len(crowd(True, seed).plans) for seed in range(4))


def test_lengths_are_learned():
    """Answers of a few tokens that might be 60: at first few of them enter at once, then all that fit."""
    harness = Harness(num_blocks=40, block_size=4, max_num_seqs=32, max_num_batched_tokens=256, max_model_len=100)
    most = []
    for turn in range(20):
        for i in range(20):
            harness.add(f"{turn}/{i}", [turn, i, 3], max_tokens=60, seed=i, stop_token_ids=list(range(0, 50, 2)))
        plans = len(harness.plans)
        harness.run()
        most.append(max(len(plan.rows) for plan in harness.plans[plans:]))
    harness.check_done()
    assert most[0] < 10 and most[-1] == 20


@settings(max_examples=12, deadline=None)
@given(data=st.data(), policy=st.sampled_from(["fcfs", "priority"]), seed=st.integers(0, 99))
def test_the_first_in_order_is_next_and_nobody_starves(data, policy, seed):
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
            head = harness.scheduler.waiting.peek()
            harness.step()
            running = {seq.request_id for seq in harness.scheduler.running}
            newcomers = running - entered
            entered |= running
            waited = 0 if head is None or newcomers else waited + 1
            assert waited <= 6 * 80, "the first in order starves"
            if newcomers and head is not None:
                assert head.request_id in entered or head.status is FINISHED, "somebody overtook the first in order"
    harness.run()
    harness.check_done()
