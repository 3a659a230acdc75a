"""Sequences with adapters over few slots: nobody starves, and who finds no slot does not hold up the others."""

from __future__ import annotations

import random

import pytest
from support.scheduler import Harness

from rayllm.core.adapter_slots import AdapterSlots


def harness(num_slots: int, **options: object) -> Harness:
    sizes = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 60}
    return Harness(num_slots=num_slots, **{**sizes, **options})


def running(there: Harness) -> set[str]:
    return {seq.request_id for seq in there.scheduler.state.running}


def add(there: Harness, name: str, adapter: int | None, max_tokens: int = 6, **options: object) -> None:
    there.add(name, [ord(name[0])] * 5, adapter=adapter, max_tokens=max_tokens, seed=1, ignore_eos=True, **options)


def test_a_step_has_as_many_adapters_as_slots_and_others_go_past_who_finds_none():
    there = harness(2)
    for name, adapter in (("a", 0), ("b", 1), ("c", 2), ("d", None), ("e", None)):
        add(there, name, adapter)
    there.step()
    assert running(there) == {"a", "b", "d", "e"}
    add(there, "f", 1)  # what is there can be used, unless somebody waits for its slot
    there.step()
    assert running(there) == {"a", "b", "d", "e", "f"}
    there.run()
    there.check_done()
    assert {adapter for plan in there.plans for _slot, adapter in plan.adapters} == {0, 1, 2}


def test_nobody_waits_for_ever_for_a_slot():
    """While one waits, no new request takes the slot that it is to have, however many come."""
    there = harness(2)
    add(there, "a", 0)
    add(there, "b", 1)
    there.step()
    add(there, "z", 9, max_tokens=2)
    for turn in range(40):
        add(there, f"a{turn}", 0)
        add(there, f"b{turn}", 1)
        there.step()
        if ("z", 0) in there.reasons:
            break
    assert turn < 15, "the first slot's last request ended long before"
    assert len(there.outputs["z", 0]) == 2
    there.run()
    there.check_done()


def test_an_unused_adapter_keeps_its_slot_until_another_one_needs_it():
    there = harness(2)
    for name, adapter in (("a", 0), ("b", 1), ("c", 0), ("d", 2), ("e", 0), ("f", 1)):
        add(there, name, adapter)
        there.run()
    puts = [adapter for plan in there.plans for _slot, adapter in plan.adapters]
    assert puts == [0, 1, 2, 1], "the least recent one goes"


def test_an_adapter_that_workers_lack_holds_up_nobody_else():
    there = harness(2)
    there.scheduler.state.adapters.loaded.discard(5)
    add(there, "a", 5)
    add(there, "b", 1)
    add(there, "c", None)
    there.step()
    assert running(there) == {"b", "c"}
    there.scheduler.state.adapters.loaded.add(5)
    there.run()
    there.check_done()


def test_an_urgent_request_is_the_next_to_get_a_slot():
    there = harness(1, policy="priority")
    for name, adapter, priority in (("a", 0, 5), ("c", 2, 5), ("b", 1, 1), ("d", None, 9)):
        add(there, name, adapter, priority=priority)
        there.step()
    assert running(there) == {"a", "d"}, "who needs no slot is not preempted for one"
    while "c" not in running(there):
        assert ("b", 0) not in there.reasons or "a" not in running(there)
        there.step()
    assert ("b", 0) in there.reasons
    there.run()
    there.check_done()


@pytest.mark.parametrize("seed", range(12))
def test_whatever_comes_every_request_gets_its_tokens(seed):
    """Small pools, forks, beams, priorities, aborts and lost workers, over one to three slots."""
    rng = random.Random(seed)
    there = harness(
        rng.randint(1, 3),
        num_blocks=rng.choice((16, 30)),
        policy=rng.choice(("fcfs", "priority")),
        depth=rng.randint(1, 2),
        num_cpu_blocks=rng.choice((0, 12)),
    )
    for number in range(40):
        if rng.random() < 0.7:
            beams = rng.random() < 0.15
            there.add(
                f"r{number}",
                [rng.randrange(4) for _ in range(rng.randint(1, 12))],
                adapter=rng.choice((None, 0, 1, 2, 3, 4)),
                priority=rng.randrange(3),
                max_tokens=rng.randint(1, 12),
                seed=number,
                ignore_eos=rng.random() < 0.5,
                n=rng.choice((2, 3) if beams else (1, 1, 2, 3)),
                use_beam_search=beams,
                **({"temperature": 0.0} if beams else {}),
            )
        for _ in range(rng.randrange(3)):
            there.step()
        if rng.random() < 0.1:
            there.abort(f"r{rng.randrange(number + 1)}")
        if rng.random() < 0.03:
            there.lose_worker()
    there.run()
    there.check_done()


def test_adapters_that_are_forgotten_leave_their_slots():
    slots = AdapterSlots(2)
    slots.loaded.update((1, 2, 3))
    assert (slots.hold(1), slots.hold(2), slots.can_hold(3)) == (0, 1, False)
    slots.release(1)
    slots.forget(1)
    assert (slots.drops, slots.puts, slots.can_hold(1)) == ([1], [(1, 2)], False)
    assert slots.hold(3) == 0
    slots.check_integrity([2, 3])
    with pytest.raises(AssertionError, match="adapters are held"):
        slots.check_integrity([2])
