"""The scheduler against a worker that checks every KV read, under random histories."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.fakes import VOCAB
from support.scheduler import CHEAP, DEAR, EVEN, Harness

from rayllm.api.sampling_params import SamplingParams
from rayllm.api.types import GenerationRequest, StepResult
from rayllm.config.kv_groups import STATE_WINDOW
from rayllm.core.memory import KVWindow, most_blocks
from rayllm.core.sequence import SequenceStatus

PROMPTS = st.one_of(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30),
    # prompts that share beginnings, so that the prefix cache has something to find
    st.builds(
        lambda n, tail: [i % 5 for i in range(n)] + tail, st.integers(1, 28), st.lists(st.integers(0, 3), max_size=4)
    ),
)
PARAMS = st.fixed_dictionaries(
    {
        "n": st.sampled_from([1, 1, 1, 2, 5]),
        "max_tokens": st.integers(1, 30),
        "seed": st.integers(0, 5),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=2),
        "prompt_logprobs": st.sampled_from([None, None, 1]),
        "logprobs": st.sampled_from([None, 0]),
        "pooling": st.sampled_from([None, None, None, "last", "mean"]),
        "beams": st.one_of(
            st.none(),
            st.none(),
            st.none(),
            st.fixed_dictionaries(
                {
                    "width": st.integers(2, 5),
                    "n": st.integers(1, 5),
                    "length_penalty": st.sampled_from([1.0, 0.0, 2.0, -1.0]),
                    "early_stopping": st.sampled_from([False, True, "never"]),
                    "min_tokens": st.sampled_from([0, 0, 4]),
                }
            ),
        ),
        "constraint": st.sampled_from([None, None, {"lag": 0}, {"lag": 3}, {"lag": 1, "fail_after": 2}]),
    }
)
WINDOWS = st.sampled_from([None, 1, 2, 5, 9, 16])
ADD = st.tuples(st.just("add"), PROMPTS, PARAMS, st.integers(0, 2), st.sampled_from(["", "", "other"]))
OPERATIONS = st.lists(
    st.one_of(
        ADD,
        st.tuples(st.just("step"), st.integers(1, 8)),
        st.tuples(st.just("abort"), st.integers(0, 20)),
        st.tuples(st.just("end"), st.integers(0, 20), st.integers(0, 5)),
        st.tuples(st.just("lose worker")),
        st.tuples(st.just("lose engine")),
    ),
    max_size=40,
)


def beam_params(params, beams, max_num_seqs):
    """Beams instead of samples, as many as can run."""
    width = min(beams["width"], max_num_seqs)
    options = {"use_beam_search": True, "best_of": width, "n": min(beams["n"], width), "constraint": None}
    options |= {name: beams[name] for name in ("length_penalty", "early_stopping")}
    return options | {"min_tokens": min(beams["min_tokens"], params["max_tokens"]), "pooling": None}


@settings(max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    operations=OPERATIONS,
    block_size=st.sampled_from([1, 2, 4, 8]),
    spare_blocks=st.integers(0, 12),
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(1, 40),
    depth=st.integers(1, 2),
    policy=st.sampled_from(["fcfs", "priority"]),
    caching=st.booleans(),
    num_cpu_blocks=st.sampled_from([0, 1, 3, 8, 40]),
    mode=st.sampled_from(["cost", "cost", "recompute", "swap"]),
    costs=st.sampled_from([CHEAP, DEAR, EVEN]),
    windows=st.one_of(
        st.just((None,)),
        st.tuples(st.sampled_from([1, 2, 5, 9, 16])),
        st.tuples(WINDOWS, WINDOWS),
        st.tuples(WINDOWS, WINDOWS, WINDOWS),
    ),
    states=st.sampled_from([0, 0, 1, 2]),
    growth_blocks=st.integers(0, 2),
)
def test_random_histories_leave_every_output_right(
    operations,
    block_size,
    spare_blocks,
    max_num_seqs,
    budget,
    depth,
    policy,
    caching,
    num_cpu_blocks,
    mode,
    costs,
    windows,
    states,
    growth_blocks,
):
    """states: groups of layers with a recurrent state, beside those of the windows."""
    groups = [*windows, *[STATE_WINDOW] * states]
    num_blocks = most_blocks([KVWindow(window, block_size) for window in groups], 32) + spare_blocks
    harness = Harness(
        num_blocks=num_blocks,
        block_size=block_size,
        depth=depth,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        policy=policy,
        caching=caching,
        num_cpu_blocks=num_cpu_blocks,
        preemption_mode=mode if num_cpu_blocks or mode != "swap" else "cost",
        costs=costs,
        windows=windows,
        states=states,
        max_model_len=max(32, num_blocks // len(groups) * block_size),
        growth_blocks=growth_blocks,
    )
    for operation in operations:
        if operation[0] == "add":
            _, prompt, params, priority, salt = operation
            params, beams = dict(params), params["beams"]
            del params["beams"]
            if beams is not None and max_num_seqs > 1:
                params |= beam_params(params, beams, max_num_seqs)
            if len(prompt) + (params["pooling"] is None) <= harness.scheduler.state.max_model_len:
                harness.add(f"r{len(harness.requests)}", prompt, priority, salt, **params)
        elif operation[0] == "step":
            for _ in range(operation[1]):
                harness.step()
        elif operation[0] == "end":
            harness.end(f"r{operation[1]}", operation[2])
        elif operation[0] == "lose worker":
            harness.lose_worker()
        elif operation[0] == "lose engine":
            harness.lose_engine()
        else:
            harness.abort(f"r{operation[1]}")
    harness.run()
    harness.check_done()


def test_a_completion_that_ended_before_anything_came_does_not_come_back_with_another_engine():
    harness = Harness(num_blocks=8, block_size=4)
    harness.add("a", [0], n=2, max_tokens=1, seed=0)
    harness.end("a", 0)
    harness.lose_engine()
    harness.run()
    harness.check_done()


@pytest.mark.parametrize(
    ("mode", "caching"), [("recompute", True), ("recompute", False), ("swap", True), ("swap", False), ("cost", True)]
)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_long_history_in_a_tight_pool_preempts_and_finishes(policy, depth, mode, caching):
    rng = random.Random(0)
    harness = Harness(
        num_blocks=12,
        block_size=4,
        depth=depth,
        max_num_seqs=8,
        max_num_batched_tokens=24,
        policy=policy,
        num_cpu_blocks=10,
        preemption_mode=mode,
        costs=EVEN,
        caching=caching,
        growth_blocks=0,
    )
    for i in range(80):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
        harness.add(
            f"r{i}",
            prompt,
            rng.randint(0, 2),
            n=rng.choice([1, 1, 3]),
            max_tokens=rng.randint(1, 28),
            seed=i,
            constraint=rng.choice([None, None, {"lag": rng.randint(0, 3)}]),
            pooling=rng.choice([None, None, None, "last", "mean"]),
        )
        for _ in range(rng.randint(0, 6)):
            harness.step()
        if rng.random() < 0.1:
            harness.abort(f"r{rng.randint(0, i)}")
        if i % 8 == 7:
            harness.end(f"r{i - 3}", i % 3)
    harness.run()
    harness.check_done()
    stats = harness.scheduler.stats()
    assert stats.num_preemptions > 25
    assert (stats.num_swap_preemptions > 10) == (mode != "recompute")
    assert stats.swapped_in_blocks > 0 or (mode == "recompute" and not caching)


def test_a_constrained_sequence_waits_for_its_mask_and_the_others_do_not():
    harness = Harness(num_blocks=64, block_size=4, depth=2)
    harness.add("free", [1, 2, 3], max_tokens=20, seed=1, ignore_eos=True)
    harness.add("bound", [4, 5, 6], max_tokens=20, seed=2, ignore_eos=True, constraint={"lag": 3})
    plans = []
    execute = harness.worker.execute
    harness.worker.execute = lambda plan: plans.append(plan) or execute(plan)  # type: ignore[method-assign]
    for _ in range(19):
        harness.step()
    assert len(harness.outputs["free", 0]) == 18, "one token a step, and the last step is in flight"
    assert [len(plan.masks) for plan in plans[:8]] == [1, 0, 0, 0, 1, 0, 0, 0], "known after a step and three looks"
    assert len(harness.outputs["bound", 0]) == 5
    harness.run()
    harness.check_done()


def test_a_failed_constraint_ends_its_sequence_alone():
    harness = Harness(num_blocks=64, block_size=4, depth=2)
    harness.add("last", [1, 2, 3], n=2, max_tokens=9, seed=1, ignore_eos=True, constraint={"lag": 2, "fail_after": 4})
    harness.run()
    harness.check_done()
    assert harness.reasons == {("last", 0): "error", ("last", 1): "error"}
    assert harness.scheduler.stats().generation_tokens == 8


def test_a_prompt_seen_before_is_not_computed_again():
    harness = Harness(num_blocks=16, block_size=4, max_num_batched_tokens=64)
    prompt = list(range(20, 42))
    harness.add("a", prompt, max_tokens=3, seed=0, ignore_eos=True)
    harness.run()
    computed = harness.worker.num_tokens_computed
    harness.add("b", prompt, max_tokens=3, seed=0, ignore_eos=True)
    harness.run()
    assert harness.worker.num_tokens_computed - computed == 2 + 2  # 20 of 22 prompt tokens are in full blocks
    assert harness.scheduler.stats().prefix_cache_hits == 20
    harness.add("c", prompt, salt="tenant", max_tokens=3, seed=0, ignore_eos=True)
    harness.run()
    assert harness.scheduler.stats().prefix_cache_hits == 20, "a hit across salts"


def test_siblings_share_the_prompt_and_copy_only_its_last_block():
    harness = Harness(num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, caching=False)
    harness.add("a", list(range(30)), n=8, max_tokens=4, seed=1, ignore_eos=True)
    harness.step()
    harness.step()
    stats = harness.scheduler.stats()
    assert stats.num_running == 8
    assert stats.num_used_blocks == 8 + 7, "8 blocks of prompt and one own block for each of 7 siblings"
    harness.run()
    harness.check_done()


def test_a_sample_that_is_ended_frees_its_blocks_and_the_others_go_on():
    harness = Harness(num_blocks=64, block_size=4, depth=2, max_num_seqs=8, max_num_batched_tokens=64, caching=False)
    harness.add("a", list(range(30)), n=4, max_tokens=9, seed=1, ignore_eos=True)
    for _ in range(4):
        harness.step()
    before = harness.scheduler.stats()
    harness.end("a", 0)
    harness.end("a", 2)
    stats = harness.scheduler.stats()
    assert before.num_used_blocks > stats.num_used_blocks == 7 + 2, "7 blocks of prompt and one own block for each"
    assert (before.num_running, stats.num_running) == (4, 2)
    harness.run()
    harness.check_done()
    assert len(harness.outputs["a", 1]) == len(harness.outputs["a", 3]) == 9
    assert harness.scheduler.stats().generation_tokens - before.generation_tokens < 18


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_another_sample_computes_the_prompt_if_the_first_is_ended(steps):
    """Before it runs, in its prompt and with its first token in flight; the prompt's log-probabilities come anyway."""
    harness = Harness(num_blocks=64, block_size=4, depth=2, max_num_batched_tokens=16)
    delivered, deliver = [], harness.deliver
    harness.deliver = lambda deltas: delivered.extend(deltas) or deliver(deltas)  # type: ignore[method-assign]
    harness.add("a", list(range(24)), n=3, max_tokens=4, seed=1, prompt_logprobs=0, ignore_eos=True)
    for _ in range(steps):
        harness.step()
    harness.end("a", 0)
    harness.run()
    harness.check_done()
    assert ("a", 0) not in harness.outputs
    assert [delta.index for delta in delivered if delta.prompt_logprobs or delta.times] == [1]
    assert None not in delivered[0].prompt_logprobs[1:]


@pytest.mark.parametrize("where", ["waiting", "swapped"])
def test_a_sample_that_is_ended_while_it_waits(where):
    mode = "swap" if where == "swapped" else "recompute"
    harness = Harness(
        num_blocks=8, block_size=4, num_cpu_blocks=16, preemption_mode=mode, growth_blocks=0, caching=False
    )
    harness.add("a", list(range(8)), n=3, max_tokens=20, seed=1, ignore_eos=True)
    while not (waiting := harness.scheduler.state.waiting) or not harness.outputs.get(("a", waiting[0].index)):
        harness.step()
    index = waiting[0].index
    assert harness.scheduler.stats().num_swapped == (where == "swapped")
    harness.end("a", index)
    assert harness.scheduler.stats().num_swapped == harness.scheduler.stats().num_waiting == 0
    harness.run()
    harness.check_done()


def test_a_sample_that_met_a_stop_has_nothing_in_flight_after_its_worker_is_lost():
    params = {"n": 2, "max_tokens": 6, "seed": 3, "ignore_eos": True}
    scout = Harness(num_blocks=64, block_size=4)
    scout.add("r0", [1, 2, 3, 4, 5], **params)
    scout.run()
    stop = next(token for token in scout.outputs["r0", 0][:3] if token not in scout.outputs["r0", 1])
    harness = Harness(num_blocks=64, block_size=4, depth=2)
    harness.add("r0", [1, 2, 3, 4, 5], **params, stop_token_ids=[stop])
    first = harness.scheduler.state.groups["r0"].sequences[0]
    while first.status is not SequenceStatus.FINISHED:
        harness.step()
    assert first.num_pending, "sampled beyond its end"
    harness.lose_worker()
    harness.run()
    harness.check_done()


def test_what_has_ended_leaves_no_prompt_behind():
    """At once, not when the garbage collector comes by, and wherever the request was."""
    harness = Harness(num_blocks=64, block_size=4, max_num_batched_tokens=64)
    gc.collect()
    gc.disable()
    try:
        for name, request in (("aborted", {}), ("run", {}), ("beams", {"use_beam_search": True, "best_of": 2})):
            harness.add(name, list(range(20)), max_tokens=3, seed=1, ignore_eos=True, **request)
            sequences = [weakref.ref(seq) for seq in harness.scheduler.state.groups[name].sequences]
            if name == "aborted":
                harness.abort(name)
            harness.run()
            assert [sequence() for sequence in sequences] == [None], name
    finally:
        gc.enable()


def test_high_priority_overtakes_and_preempts():
    harness = Harness(num_blocks=8, block_size=4, max_num_seqs=2, policy="priority")
    for i in range(3):
        harness.add(f"low{i}", [1, 2, 3], priority=5, max_tokens=20, seed=i, ignore_eos=True)
    harness.step()
    harness.step()
    harness.add("high", [4, 5, 6], priority=0, max_tokens=2, seed=9, ignore_eos=True)
    harness.step()
    harness.step()
    assert ("high", 0) in harness.reasons
    harness.run()
    harness.check_done()


def test_prompt_logprobs_cover_the_prompt_in_chunks_and_after_a_cache_hit():
    harness = Harness(num_blocks=16, block_size=4, max_num_batched_tokens=5)
    prompt = list(range(17))
    for name in ("a", "b"):
        harness.scheduler.add(
            GenerationRequest(
                request_id=name, prompt_token_ids=prompt, params=SamplingParams(max_tokens=2, prompt_logprobs=0)
            )
        )
        deltas = []
        while harness.scheduler.has_work():
            plan = harness.scheduler.schedule()
            deltas += harness.scheduler.update(harness.worker.execute(plan))
        entries = deltas[0].prompt_logprobs
        assert entries[0] is None and [e.token_id for e in entries[1:]] == prompt[1:]
        assert all(delta.prompt_logprobs is None for delta in deltas[1:])


@pytest.mark.parametrize("depth", [1, 2])
def test_pooled_prompts_sample_nothing_and_means_compute_every_token(depth):
    harness = Harness(num_blocks=32, block_size=4, depth=depth, max_num_batched_tokens=6)
    prompt = list(range(17))
    harness.add("before", prompt, max_tokens=3, seed=0)
    harness.run()
    harness.plans.clear()
    for kind, num_computed in (("last", 1), ("mean", 17)):
        harness.add(kind, prompt, pooling=kind)
        harness.run()
        assert sum(sum(plan.num_tokens) for plan in harness.plans) == num_computed
        assert not any(plan.num_sampled or plan.num_decodes for plan in harness.plans)
        assert harness.last_deltas[kind, 0].num_cached_tokens == (16 if kind == "last" else 0)
        harness.plans.clear()
    tokens_before = harness.scheduler.stats().generation_tokens
    assert tokens_before == len(harness.outputs["before", 0])
    harness.check_done()


def test_a_mean_is_never_swapped_because_its_sum_would_stay_behind():
    harness = Harness(
        num_blocks=8,
        block_size=4,
        max_num_batched_tokens=6,
        policy="priority",
        num_cpu_blocks=8,
        preemption_mode="swap",
    )
    for kind, swaps in (("last", 1), ("mean", 1)):
        harness.add(kind, list(range(25)), priority=1, pooling=kind)
        harness.step()
        harness.add(f"urgent {kind}", [9] * 20, priority=0, max_tokens=2, seed=0)
        harness.run()
        assert harness.last_deltas[kind, 0].num_preemptions == 1
        assert harness.scheduler.stats().num_swap_preemptions == swaps
    harness.check_done()


def test_a_pooled_prompt_may_fill_the_context():
    harness = Harness(num_blocks=4, block_size=4, max_model_len=16)
    harness.add("whole", [3] * 16, pooling="mean")
    harness.run()
    harness.check_done()


def test_an_embedding_that_is_missing_is_an_error():
    harness = Harness(num_blocks=4, block_size=4)
    harness.add("a", [1, 2], pooling="last")
    plan = harness.scheduler.schedule()
    with pytest.raises(RuntimeError, match="does not belong"):
        harness.scheduler.update(StepResult(plan.step_id, []))


def test_a_suspect_that_was_not_computed_is_not_ended_for_the_death_of_workers():
    harness = Harness(num_blocks=16, block_size=4)
    for name, deaths in (("computed", 2), ("waits", 3)):  # so many engines have died while they had it
        params = SamplingParams(max_tokens=4, seed=1, ignore_eos=True)
        harness.scheduler.add(
            GenerationRequest(request_id=name, prompt_token_ids=[1, 2, 3], num_deaths=deaths, params=params)
        )
    harness.scheduler.schedule()
    assert [delta.request_id for delta in harness.scheduler.new_deltas] == ["computed"]
    assert [delta.request_id for delta in harness.scheduler.restart(1.0)] == ["computed"]
