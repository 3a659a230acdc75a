"""Workers that are lost: new ones take over, requests go on where they were, and who kills them ends alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from support.driver import wait_for
from support.engine import FakeExecutor, engine_request, fake_core, run_all
from support.fakes import expected_output

from rayllm.api.types import Abort, GenerationRequest, StepPlan, TokenDelta
from rayllm.engine.driver import EngineDriver
from rayllm.engine.engine import EngineCore
from rayllm.errors import EngineDeadError

POISON = 11  # the first token of a poisonous prompt


def core_that_recovers(**options) -> tuple[EngineCore, FakeExecutor]:
    core, executor = fake_core(**options)
    executor.can_recover = True
    return core, executor


def make_requests(count: int = 6, max_tokens: int = 8) -> list[GenerationRequest]:
    return [engine_request(f"r{i}", max_tokens + i, prompt=[i + 1] * (3 * i + 1), seed=i) for i in range(count)]


def check_outputs(deltas: list[TokenDelta], requests: list[GenerationRequest]) -> None:
    """Each request has its tokens, each of them once, and one end."""
    for request in requests:
        own = [delta for delta in deltas if delta.request_id == request.request_id]
        prompt, params = request.prompt_token_ids, request.params
        expected = expected_output(prompt, params.seed, len(prompt) + params.max_tokens, frozenset(), None)
        assert [token for delta in own for token in delta.token_ids] == expected
        assert [delta.finish_reason for delta in own if delta.finish_reason] == ["length"]


def each(count: int) -> Callable[[StepPlan], bool]:
    """Says of each plan of this number that it is deadly, whatever it computes."""
    ran = itertools.count(1)
    return lambda _plan: next(ran) % count == 0


class Poison:
    """Says of plans whether they compute a poisonous request's sequences, from so many of its tokens on."""

    def __init__(self, num_tokens: int = 0):
        self.num_tokens = num_tokens
        self.deaths: list[int] = []  # how many rows each deadly plan had
        self._lengths: dict[int, int] = {}  # of the rows that hold poison

    def __call__(self, plan: StepPlan) -> bool:
        for data in plan.new:
            self._lengths.pop(data.row, None)
            if data.token_ids[0] == POISON:
                self._lengths[data.row] = len(data.token_ids)
        deadly = False
        for row in plan.rows[: plan.num_sampled]:
            if row in self._lengths:
                deadly |= self._lengths[row] >= self.num_tokens
                self._lengths[row] += 1
        if deadly:
            self.deaths.append(len(plan.rows))
        return deadly


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("every", [5, 7, 11])
def test_requests_go_on_where_they_were(max_in_flight, every):
    core, executor = core_that_recovers()
    executor.max_in_flight = max_in_flight
    executor.fails = each(every)
    requests = make_requests()
    for request in requests:
        core.add(request)
    deltas = run_all(core)
    check_outputs(deltas, requests)
    core.check_integrity()
    stats = core.stats()
    assert stats.num_recoveries == executor.num_recoveries > 1
    assert stats.recovery_seconds > 0
    assert stats.num_used_blocks == 0
    assert max(delta.num_recoveries for delta in deltas) > 1
    core.check_health()


def test_without_new_workers_the_engine_ends():
    core, executor = fake_core()
    executor.fails = lambda _plan: True
    core.add(engine_request("r", 3))
    with pytest.raises(EngineDeadError, match="no more workers"):
        run_all(core)


@pytest.mark.parametrize("num_tokens", [0, 4 + 3])  # at once, or at its fourth token
def test_a_request_that_kills_workers_ends_and_all_others_are_unharmed(num_tokens):
    core, executor = core_that_recovers()
    executor.fails = poison = Poison(num_tokens)
    requests = make_requests()
    for request in requests[:3]:
        core.add(request)
    core.add(engine_request("poison", 20, prompt=[POISON, 1, 2, 3]))
    for request in requests[3:]:
        core.add(request)
    deltas = run_all(core)
    check_outputs(deltas, requests)
    (end,) = [delta for delta in deltas if delta.request_id == "poison" and delta.finish_reason]
    assert (end.finish_reason, end.bad_param) == ("error", None)
    assert "the workers died 3 times while they computed this request" in str(end.stop_reason)
    assert len(poison.deaths) == executor.num_recoveries == 3
    assert poison.deaths[0] > 1, "it ran among others"
    assert poison.deaths[-1] == 1, "it ran alone"
    core.check_integrity()


def test_several_that_kill_end_one_after_the_other():
    core, executor = core_that_recovers()
    executor.fails = Poison()
    requests = make_requests(3)
    for i, request in enumerate(requests):
        core.add(request)
        core.add(engine_request(f"poison{i}", 5, prompt=[POISON, i]))
    deltas = run_all(core)
    check_outputs(deltas, requests)
    ends = {delta.request_id for delta in deltas if delta.finish_reason == "error"}
    assert ends == {"poison0", "poison1", "poison2"}


def test_samples_and_searches_that_kill_end_whole():
    core, executor = core_that_recovers()
    executor.fails = Poison()
    core.add(engine_request("samples", 5, prompt=[POISON], n=3))
    core.add(engine_request("search", 5, prompt=[POISON, 1], n=2, best_of=3, use_beam_search=True))
    ends = sorted((delta.request_id, delta.index) for delta in run_all(core) if delta.finish_reason == "error")
    assert ends == [("samples", 0), ("samples", 1), ("samples", 2), ("search", 0), ("search", 1)]


def test_who_runs_alone_may_be_aborted_and_the_others_go_on():
    core, executor = core_that_recovers()
    executor.fails = Poison()
    requests = make_requests(2)
    for request in requests:
        core.add(request)
    core.add(engine_request("poison", 5, prompt=[POISON]))
    deltas = []
    while executor.num_recoveries < 2:
        deltas += core.step()
    core.abort([Abort("poison")])
    deltas += run_all(core)
    check_outputs(deltas, requests)
    assert executor.num_recoveries == 2


def test_deaths_without_a_culprit_end_nobody():
    core, executor = core_that_recovers()
    executor.fails = each(6)
    request = engine_request("long", 50, prompt=[1, 2, 3])
    core.add(request)
    check_outputs(run_all(core), [request])
    assert executor.num_recoveries > 10


def test_an_engine_without_work_replaces_its_workers_too():
    core, executor = core_that_recovers()
    driver = EngineDriver(core)
    executor.lost = "a worker died"
    wait_for(lambda: driver.unhealthy(1.0) is not None or executor.num_recoveries)
    assert driver.unhealthy(1.0) is None
    driver.shutdown()
    assert executor.num_recoveries == 1
