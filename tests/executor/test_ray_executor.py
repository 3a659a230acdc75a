"""RayExecutor on CPU: real actors, gloo, workers without a model."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

import pytest
import ray
from support.processes import is_running
from support.stand_ins import AddingRank, FailingRank, Replica, StumblingRank, cpu_config, make_plan, pids_in, pids_of

from rayllm import timeouts
from rayllm.api.types import KVBlocks, KVCosts
from rayllm.errors import ConfigError, EngineDeadError, ModelError, StartupError
from rayllm.executor.local import LocalExecutor
from rayllm.executor.placement import actor_environment
from rayllm.executor.ray import RayExecutor

pytestmark = pytest.mark.usefixtures("ray_cluster")
full_matrix = pytest.mark.full_matrix  # of cases that differ little from others, as each starts processes with torch
SOON = 10.0  # seconds in which any failure has to show


def make_executor(load=AddingRank, tp=2, **options):
    return RayExecutor(cpu_config(tensor_parallel_size=tp, executor="ray"), load, **options)


def local_results(plans):
    executor = LocalExecutor(cpu_config(), AddingRank)
    executor.start()
    results = []
    for plan in plans:
        executor.submit(plan)
        results.append(executor.collect())
    executor.shutdown()
    return results


def live_groups():
    return {key for key, group in ray.util.placement_group_table().items() if group["state"] == "CREATED"}


@pytest.fixture
def started():
    """Start an executor; shut it down after the test, which must not take long whatever happened."""
    executors = []

    def start(*args, **options):
        executors.append(make_executor(*args, **options))
        executors[-1].start()
        return executors[-1]

    yield start
    for executor in executors:
        began = time.monotonic()
        executor.shutdown()
        assert time.monotonic() - began < SOON
        assert not any(map(is_running, pids_of(executor)))


def test_results_come_in_order_and_equal_the_local_ones():
    tp = 4  # the other tests have one or two
    executor = make_executor(tp=tp)
    assert executor.start() == KVBlocks(gpu=100 - (tp - 1), cpu=50)
    assert [ready.memory.weights for ready in executor.report.ready] == [8 + rank for rank in range(tp)]
    assert executor.report.kv_costs() == KVCosts(1e-5, 1e-6 * tp, 2e-6)
    assert len({place.split(", ")[1] for place in executor.report.placement}) == tp  # a process each
    names = [name for name, _ in executor.report.phases]
    assert names == ["place", "start actors", "connect", "load model", "warm up"]
    # The last is so large that its result does not fit into one message.
    plans = [make_plan(step_id, num_rows=(1, 5, 256)[step_id % 3]) for step_id in range(19)] + [make_plan(19, 9000)]
    results = []
    executor.submit(plans[0])
    for plan in plans[1:]:
        executor.submit(plan)
        results.append(executor.collect())
    results.append(executor.collect())
    assert results == local_results(plans)
    executor.check_health()

    with pytest.raises(StartupError, match="one Ray engine per process"):
        make_executor().start()
    plan = make_plan(20)
    executor.submit(plan)  # the one that runs goes on
    plan.rows.append(1000)  # a plan may change once it is submitted
    assert executor.collect() == local_results([make_plan(20)])[0]

    executor.submit(make_plan(21))
    executor.shutdown()
    executor.shutdown()
    assert not any(map(is_running, pids_of(executor)))
    with pytest.raises(EngineDeadError, match="was shut down"):
        executor.submit(make_plan(22))
    with pytest.raises(EngineDeadError, match="was shut down"):
        executor.check_health()


@pytest.mark.parametrize(
    ("rank", "where", "how", "error", "message"),
    [
        (1, "load", "raise", StartupError, "worker rank 1 on node .* failed to load the model: ValueError: made to"),
        (0, "load", "model", ModelError, "^made to fail in load$"),
        (0, "build", "config", ConfigError, "^made to fail in build$"),
        pytest.param(
            *(1, "load", "kill", StartupError, "worker rank 1 on node .* failed to load the model: its process died"),
            marks=full_matrix,
        ),
    ],
)
def test_a_start_that_fails(rank, where, how, error, message):
    executor = make_executor(partial(FailingRank, rank=rank, where=where, how=how), tp=rank + 1)
    began = time.monotonic()
    with pytest.raises(error, match=message) as raised:
        executor.start()
    assert type(raised.value) is error
    assert time.monotonic() - began - sum(seconds for _, seconds in executor.report.phases) < SOON
    assert not any(map(is_running, pids_of(executor)))
    with pytest.raises(EngineDeadError):
        executor.submit(make_plan(0))


@pytest.mark.parametrize(
    ("where", "purpose"), [("load", "load the model"), pytest.param("build", "get ready", marks=full_matrix)]
)
def test_a_rank_that_stops_while_it_starts(monkeypatch, where, purpose):
    monkeypatch.setattr(timeouts, "RANK_START_SILENCE_S", 3.0)
    monkeypatch.setattr(timeouts, "RANK_SILENCE_S", 0.5)
    executor = make_executor(partial(FailingRank, rank=1, where=where, how="stop"))
    with pytest.raises(
        StartupError, match=f"worker rank 1 on node .* has not answered for 3 s while it had to {purpose}"
    ):
        executor.start()
    assert not any(map(is_running, pids_of(executor)))


def test_a_rank_may_be_silent_for_longer_while_it_starts(started, monkeypatch):
    """A busy host, and imports that hold the interpreter's lock, are no failure."""
    monkeypatch.setattr(timeouts, "RANK_SILENCE_S", 1.0)
    executor = started(partial(FailingRank, rank=0, where="load", how="pause"), tp=1)
    time.sleep(1.5)
    executor.check_health()
    executor.submit(make_plan(0))
    assert executor.collect().step_id == 0


@pytest.mark.parametrize(
    ("rank", "where", "how", "message"),
    [
        (1, "collect", "raise", "worker rank 1 on node .* failed: ValueError: made to fail in collect"),
        (1, "submit", "kill", "worker rank 1 on node .* failed: its process died"),
        # Its other threads stop a moment after the one that asks for it.
        (0, "collect", "stop", "worker rank 0 on node .* has not answered for 3 s; the last finished step was [23]"),
        *(
            pytest.param(*others, marks=full_matrix)
            for others in [
                (1, "submit", "raise", "worker rank 1 on node .* failed: ValueError: made to fail in submit"),
                (0, "collect", "kill", "worker rank 0 on node .* failed: its process died"),
                (1, "submit", "stop", "worker rank 1 on node .* has not answered for 3 s; .* finished step was [23]"),
            ]
        ),
    ],
)
def test_a_step_that_fails(started, rank, where, how, message):
    executor = started(partial(FailingRank, rank=rank, where=where, how=how))
    for step_id in range(3):
        executor.submit(make_plan(step_id))
        assert executor.collect().step_id == step_id
    executor.submit(make_plan(3))
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match=message):  # noqa: PT012
        for step_id in range(4, 10_000):  # two in flight; rank 0 may get ahead of the one that fails
            executor.submit(make_plan(step_id))
            executor.collect()
    assert time.monotonic() - began < SOON
    for call in (executor.check_health, executor.collect, lambda: executor.submit(make_plan(5))):
        with pytest.raises(EngineDeadError, match=message):
            call()
    if where == "submit":
        check_that_new_ranks_take_over(executor)


def check_that_new_ranks_take_over(executor):
    """Plans in flight are forgotten, what comes after them is computed, and no old process is left."""
    old = pids_of(executor)
    executor.recover()
    assert not any(map(is_running, old))
    assert len(pids_of(executor)) == len(executor.report.ready) == 2
    assert [name for name, _ in executor.report.phases][:4] == ["end workers", "place", "start actors", "connect"]
    executor.check_health()
    plans = [make_plan(20_000), make_plan(20_001)]
    for plan in plans:
        executor.submit(plan)
    assert [executor.collect() for _ in plans] == local_results(plans)


@pytest.mark.parametrize(("where", "deadly_starts"), [pytest.param("load", (1, 2), marks=full_matrix), ("build", (1,))])
def test_a_rank_that_dies_while_it_takes_over(started, tmp_path, where, deadly_starts):
    executor = started(partial(StumblingRank, folder=tmp_path, deadly_starts=deadly_starts, where=where))
    os.kill(pids_of(executor)[0], signal.SIGKILL)
    executor.submit(make_plan(0))
    with pytest.raises(EngineDeadError, match="worker rank 0"):
        executor.collect()
    executor.recover()
    assert len(list(tmp_path.iterdir())) == len(deadly_starts) + 2, "the first start, those that failed, and the last"
    executor.submit(make_plan(1))
    assert executor.collect().step_id == 1


def test_ranks_that_cannot_take_over(started, tmp_path):
    executor = started(partial(StumblingRank, folder=tmp_path, deadly_starts=range(1, 100)))
    os.kill(pids_of(executor)[0], signal.SIGKILL)
    executor.submit(make_plan(0))
    with pytest.raises(EngineDeadError, match="worker rank 0"):
        executor.collect()
    with pytest.raises(EngineDeadError, match=r"worker rank 0 .* new workers failed to start: worker rank 1"):
        executor.recover()


def watch_until(executor, condition):
    """Look at the ranks as an engine without work does."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        executor.check_health()
        time.sleep(0.05)


def test_standbys_take_over_and_are_replaced(started, tmp_path, monkeypatch):
    # Only deaths count here: processes that import take both cores from the ranks for seconds at a time.
    monkeypatch.setattr(timeouts, "RANK_SILENCE_S", 20.0)
    monkeypatch.setattr(timeouts, "STANDBY_DELAY_S", {"cpu": 0.1})
    monkeypatch.setattr(timeouts, "STANDBY_RETRY_S", 0.1)
    load = partial(StumblingRank, folder=tmp_path, deadly_starts=(2,))
    executor = RayExecutor(cpu_config(tensor_parallel_size=2, executor="ray", standby_ranks="auto"), load)
    executor.start()
    try:
        assert len(executor.report.standbys) == 2
        assert min(executor.report.standbys) > 1 << 20
        waiting = pids_in(executor.standbys.places)
        everyone = {*pids_of(executor), *waiting}

        def lose_a_rank(step_id):
            os.kill(pids_of(executor)[0], signal.SIGKILL)
            executor.submit(make_plan(step_id))
            with pytest.raises(EngineDeadError, match="worker rank 0"):
                executor.collect()
            old = pids_of(executor)
            executor.recover()
            assert not any(map(is_running, old))
            executor.submit(make_plan(step_id + 1))
            assert executor.collect().step_id == step_id + 1

        lose_a_rank(0)
        assert pids_of(executor) == waiting
        assert [name for name, _ in executor.report.phases][:2] == ["end workers", "connect"]

        # New ones come while the engine runs, and if one dies, others come.
        watch_until(executor, lambda: executor.standbys.places)
        lost = pids_in(executor.standbys.places)
        assert not everyone & set(lost)
        os.kill(lost[1], signal.SIGKILL)
        watch_until(executor, lambda: executor.standbys.places and pids_in(executor.standbys.places)[1] != lost[1])
        everyone |= {*lost, *pids_in(executor.standbys.places)}
        watch_until(executor, lambda: not is_running(lost[0]))

        lose_a_rank(2)  # and a standby dies when it takes over
        assert len(list(tmp_path.iterdir())) == 4
        assert not everyone & set(pids_of(executor))
        assert "start actors" in [name for name, _ in executor.report.phases]
        watch_until(executor, lambda: executor.standbys.places)
        everyone |= {*pids_of(executor), *pids_in(executor.standbys.places)}
        assert len(everyone) == 12
    finally:
        executor.shutdown()
    assert not any(map(is_running, everyone))


def test_a_standby_that_stands_still_when_it_is_needed(monkeypatch):
    """It cannot connect; processes that are started then take over instead, and nothing of it is left."""
    monkeypatch.setattr(timeouts, "RANK_START_SILENCE_S", 2.0)
    executor = RayExecutor(cpu_config(tensor_parallel_size=2, executor="ray", standby_ranks="auto"), AddingRank)
    executor.start()
    try:
        ranks, waiting = pids_of(executor), pids_in(executor.standbys.places)
        os.kill(waiting[1], signal.SIGSTOP)
        os.kill(ranks[0], signal.SIGKILL)
        executor.submit(make_plan(0))
        with pytest.raises(EngineDeadError, match="worker rank 0"):
            executor.collect()
        executor.recover()
        assert not {*ranks, *waiting} & set(pids_of(executor))
        assert not any(map(is_running, [*ranks, *waiting]))
        executor.submit(make_plan(1))
        assert executor.collect().step_id == 1
    finally:
        executor.shutdown()


def test_a_step_that_hangs_ends_at_the_deadline(started):
    executor = started(partial(FailingRank, rank=0, where="submit", how="hang"), tp=1, step_seconds=2.0)
    executor.submit(make_plan(3))
    with pytest.raises(EngineDeadError, match="no result of step 3 came within 2 s"):
        executor.collect()


def test_idling_longer_than_a_step_may_take_is_healthy_and_a_death_shows(started):
    executor = started(step_seconds=1.0)
    time.sleep(2.5)
    executor.check_health()
    executor.submit(make_plan(0))
    assert executor.collect().step_id == 0
    os.kill(pids_of(executor)[1], signal.SIGKILL)
    deadline = time.monotonic() + SOON
    with pytest.raises(EngineDeadError, match=r"worker rank 1 .* its process died"):  # noqa: PT012
        while time.monotonic() < deadline:
            executor.check_health()
            time.sleep(0.05)


def test_inside_an_actor_the_workers_take_the_bundles_of_its_placement_group():
    group = ray.util.placement_group([{"CPU": 0.1}] * 3)
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, 0, True)
    replica = (
        ray.remote(Replica)
        .options(num_cpus=0.1, scheduling_strategy=strategy, runtime_env={"env_vars": actor_environment()})
        .remote()
    )
    before = live_groups()
    result, during = ray.get(replica.run.remote(cpu_config(tensor_parallel_size=2)), timeout=60)
    assert result == local_results([make_plan(7)])[0]
    assert set(during) == live_groups() == before, "it makes none of its own, and leaves this one"
    ray.kill(replica)
    ray.util.remove_placement_group(group)
