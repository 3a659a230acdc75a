"""The engine loop and its fronts, on a core that makes up tokens."""

from __future__ import annotations

import threading
import time

from support.driver import FakeCore, RecordingFront, fake_request, fake_token, fake_tokens, running, wait_for

from rayllm.api.types import Abort, TokenDelta
from rayllm.engine.driver import EngineDriver


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "rayllm-engine"]


def test_requests_run_and_each_front_gets_its_own_in_one_call_a_step():
    core = FakeCore(gated=True)
    with running(core, fronts=2) as (driver, one, two):
        requests = [fake_request(f"r{i}", prompt=[i + 1]) for i in range(4)]
        driver.add(one, fake_request("first"))
        wait_for(core.live)
        for i, request in enumerate(requests):
            driver.add((one, two)[i % 2], request)
        core.allow(5)
        wait_for(lambda: len(one.ends()) == 3 and len(two.ends()) == 2)
        assert {d.request_id for step in one.steps for d in step} == {"first", "r0", "r2"}
        assert {d.request_id for step in two.steps for d in step} == {"r1", "r3"}
        assert len(one.steps) == 4, "one call a step"
        assert [len(step) for step in two.steps] == [2, 2, 2]
        for i, request in enumerate(requests):
            assert (one, two)[i % 2].tokens(request.request_id) == fake_tokens(request)
        assert len(core.thread_ids) == 1, "the core belongs to the engine thread"
        assert threading.get_ident() not in core.thread_ids
        wait_for(lambda: not driver.busy)


def test_several_completions():
    with running(FakeCore()) as (driver, front):
        driver.add(front, fake_request("r", n=3, temperature=1.0))
        wait_for(lambda: len(front.ends()) == 3)
        assert len(front.steps) == 3
        assert front.tokens("r", 2) == [fake_token(fake_request("r"), 2, i) for i in range(3)]


def test_an_idle_engine_sleeps_and_wakes_at_once():
    core = FakeCore()
    with running(core) as (driver, front):
        wait_for(lambda: core.num_polls)
        (thread,) = engine_threads()
        clock = time.pthread_getcpuclockid(thread.ident)
        before, cpu = core.num_polls, time.clock_gettime(clock)
        time.sleep(0.2)
        assert core.num_polls == before, "it polls while idle"
        assert time.clock_gettime(clock) - cpu < 0.1
        delays = []
        for i in range(30):
            started = time.monotonic()
            driver.add(front, fake_request(f"r{i}", max_tokens=1))
            wait_for(lambda n=i: len(front.ends()) == n + 1)
            delays.append(front.times[-1] - started)
        assert min(delays) < 0.005  # a loop that sleeps between two looks would sleep each time


def test_those_that_run_go_on_while_many_requests_are_taken_in(monkeypatch):
    """What fronts sent is taken in for a bounded time between two steps; all of it within some steps."""
    monkeypatch.setattr("rayllm.engine.driver.INBOX_S", 0.0)
    core = FakeCore(gated=True)
    with running(core) as (driver, front):
        driver.add(front, fake_request("runs", max_tokens=100))
        wait_for(core.live)  # the engine waits in its step
        for i in range(20):
            driver.add(front, fake_request(f"r{i}", max_tokens=1))
        core.allow(100)
        wait_for(lambda: len(front.ends()) == 21)
        kinds = "".join(call[0][0] for call in core.calls if call[0] in ("add", "step"))
        assert "aa" not in kinds and kinds.count("a") == 21


def test_a_refused_request_is_answered_and_the_engine_goes_on():
    with running(FakeCore()) as (driver, front):
        driver.add(front, fake_request("refused", n=2, temperature=1.0))
        driver.add(front, fake_request("broken", n=2, temperature=1.0))
        driver.add(front, fake_request("good"))
        wait_for(lambda: len(front.ends()) == 4)
        assert front.ends()[0] == ("refused", 0, "error", "the core does not like it"), "one delta for the request"
        assert [delta.bad_param for delta in front.deltas if delta.finish_reason] == ["prompt", None, None, None]
        assert [end[:3] for end in front.ends()[1:3]] == [("broken", index, "error") for index in range(2)]
        assert "a bug" in front.ends()[1][3]
        assert front.ends()[3][:3] == ("good", 0, "length")
        assert driver.dead is None


def test_an_id_in_use_is_refused_for_the_other_front():
    core = FakeCore(gated=True)
    with running(core, fronts=2) as (driver, one, two):
        driver.add(one, fake_request("r"))
        driver.add(two, fake_request("r"))
        driver.abort(two, [Abort("r")])  # not its request
        core.allow(3)
        wait_for(lambda: one.ends() and two.ends())
        assert one.tokens("r") == fake_tokens(fake_request("r"))
        assert two.ends() == [("r", 0, "error", "request_id is in use")]


def test_abort_stops_deltas():
    core = FakeCore(gated=True)
    with running(core) as (driver, front):
        driver.add(front, fake_request("r", max_tokens=50))
        driver.add(front, fake_request("other", max_tokens=4))
        core.allow(1)
        wait_for(lambda: front.steps)
        driver.abort(front, [Abort("r"), Abort("unknown")])
        core.allow(5)
        wait_for(front.ends)
        assert ("abort", "r") in core.calls
        assert len(front.tokens("r")) <= 2
        assert [end[0] for end in front.ends()] == ["other"]


def test_a_completion_that_ends_alone_is_awaited_no_more():
    core = FakeCore(gated=True)
    with running(core, fronts=2) as (driver, one, two):
        driver.add(one, fake_request("r", n=3, max_tokens=50))
        driver.abort(two, [Abort("r", 1)])  # not its request
        driver.abort(one, [Abort("r", 1), Abort("r", 1), Abort("r", 9), Abort("r", 0)])
        wait_for(lambda: any(call[0] == "abort" for call in core.calls))
        assert core.calls[-1] == ("abort", ("r", 1), ("r", 1), ("r", 9), ("r", 0))
        driver.abort(one, [Abort("r", 2)])
        core.allow(1)
        wait_for(lambda: core.calls[-1] == ("abort", "r"))  # the last of them: all that the core knows of the request
        core.allow(100)
        driver.add(one, fake_request("r", max_tokens=2))  # the id is free
        wait_for(one.ends)
        assert one.ends() == [("r", 0, "length", None)]


def test_a_front_that_leaves_has_its_requests_aborted():
    core = FakeCore(gated=True)
    with running(core, fronts=2) as (driver, one, two):
        driver.add(one, fake_request("a", max_tokens=50))
        driver.add(one, fake_request("b", max_tokens=50))
        driver.add(two, fake_request("c", max_tokens=4))
        core.allow(1)
        wait_for(lambda: one.steps)
        driver.detach(one)
        driver.add(one, fake_request("late"))
        core.allow(4)
        wait_for(two.ends)
        assert core.calls.count(("abort", "a", "b")) == 1
        assert ("add", "late") not in core.calls
        assert len(one.steps) <= 2


def test_a_crash_ends_everything():
    core = FakeCore(gated=True)
    with running(core, fronts=2) as (driver, one, two):
        driver.add(one, fake_request("a", n=2, temperature=1.0, max_tokens=9))
        driver.add(two, fake_request("b", max_tokens=9))
        core.allow(1)
        wait_for(lambda: one.steps)
        core.crash = ValueError("CUDA error")
        driver.add(one, fake_request("still in the inbox"))
        core.allow(1)
        wait_for(lambda: one.reasons and two.reasons)
        reason = "the engine died: ValueError: CUDA error"
        assert one.reasons == two.reasons == [reason]
        assert one.order[-1] == two.order[-1] == "dead"
        driver.add(one, fake_request("late"))
        assert driver.dead == reason
        assert driver.unhealthy(100) == reason
        late = RecordingFront()
        driver.attach(late)
        assert late.reasons == [reason]
        wait_for(lambda: not engine_threads())
        assert not {("add", "still in the inbox"), ("add", "late")} & set(core.calls)


def test_a_stalled_engine_is_unhealthy_until_it_goes_on():
    core = FakeCore(gated=True)
    with running(core) as (driver, front):
        time.sleep(0.05)
        assert driver.unhealthy(0.01) is None, "idle is healthy, however long ago the last step was"
        driver.add(front, fake_request("r"))
        wait_for(core.live)
        assert driver.unhealthy(30) is None
        wait_for(lambda: driver.unhealthy(0.03))
        assert "no step has finished" in driver.unhealthy(0.03)
        assert "limit 0.03 s" in driver.unhealthy(0.03)
        wait_for(lambda: driver.unhealthy(0.3))
        core.allow(1)
        wait_for(lambda: driver.unhealthy(0.3) is None)  # for as long as the next step has not hung for 0.3 s
        core.allow(3)
        wait_for(front.ends)
        wait_for(lambda: driver.unhealthy(0.0001) is None)


def test_an_idle_engine_whose_worker_died_is_unhealthy():
    core = FakeCore()
    with running(core) as (driver, _front):
        assert driver.unhealthy(30) is None
        core.lost = "worker rank 1 failed"
        assert driver.unhealthy(30) == "worker rank 1 failed"


def test_busy_is_who_has_requests():
    core = FakeCore(gated=True)
    with running(core) as (driver, front):
        wait_for(lambda: not driver.busy)
        driver.add(front, fake_request("r", max_tokens=1))
        wait_for(core.live)
        assert driver.busy
        core.allow(1)
        wait_for(lambda: not driver.busy)
        driver.add(front, fake_request("compiling"))
        wait_for(lambda: core.is_compiling)
        assert driver.busy, "a request waits for its grammar"
        driver.abort(front, [Abort("compiling")])
        wait_for(lambda: not driver.busy)


def test_fronts_are_counted():
    with running(FakeCore(), fronts=2) as (driver, one, _two):
        assert driver.num_fronts == 2
        driver.detach(one)
        driver.detach(one)
        assert driver.num_fronts == 1


# ---- requests that wait for a grammar


def test_the_engine_sleeps_while_a_grammar_is_compiled_and_wakes_when_it_is_ready():
    core = FakeCore()
    with running(core) as (driver, front):
        driver.add(front, fake_request("compiling"))
        wait_for(lambda: core.is_compiling)
        driver.add(front, fake_request("other"))
        wait_for(lambda: front.ends() == [("other", 0, "length", None)])
        polls = core.num_polls
        time.sleep(0.1)
        assert core.num_polls <= polls + 1, "it polls while a grammar is compiled"
        assert driver.unhealthy(0.05) is None, "waiting for a grammar is no stall"
        core.compiled("compiling")
        wait_for(lambda: front.tokens("compiling") == fake_tokens(fake_request("compiling")))


def test_a_front_that_leaves_takes_along_its_request_that_waits_for_a_grammar():
    core = FakeCore()
    with running(core, fronts=2) as (driver, one, two):
        driver.add(one, fake_request("compiling"))
        wait_for(lambda: core.is_compiling)
        driver.detach(one)
        wait_for(lambda: not core.is_compiling)
        assert core.calls == [("add", "compiling"), ("abort", "compiling")]
        core.compiled("compiling")
        driver.add(two, fake_request("good"))
        wait_for(two.ends)
        assert one.steps == []


def test_an_engine_that_stops_answers_what_waits_for_a_grammar():
    core = FakeCore()
    with running(core) as (driver, front):
        driver.add(front, fake_request("compiling", n=2, temperature=1.0))
        wait_for(lambda: core.is_compiling)
        driver.shutdown()
        assert front.reasons == ["the engine was shut down"]


def test_a_refusal_in_mid_step_ends_the_whole_request():
    """As of a grammar that cannot be compiled: one delta for all completions."""

    class Refusing(FakeCore):
        def step(self):
            return [TokenDelta("compiling", 0, [], finish_reason="error", stop_reason="no", bad_param="regex")]

        def has_work(self):
            return bool(self._compiled and self._compiled.pop())

    core = Refusing()
    with running(core) as (driver, front):
        driver.add(front, fake_request("compiling", n=3, temperature=1.0))
        wait_for(lambda: core.is_compiling)
        core.compiled("compiling")
        wait_for(front.ends)
        assert front.ends() == [("compiling", 0, "error", "no")]
        driver.abort(front, [Abort("compiling")])  # it is not the front's any more
        driver.shutdown()
        assert core.calls.count(("abort", "compiling")) == 1, "what the core still had of it"


# ---- figures and the end


def test_stats_do_not_wait_for_the_step():
    core = FakeCore(gated=True)
    with running(core) as (driver, front):
        assert driver.stats.num_steps == 0
        driver.add(front, fake_request("r", max_tokens=9))
        core.allow(2)
        wait_for(lambda: driver.stats.num_steps == 2)
        assert driver.stats.num_running == 1  # and a third step hangs


def test_shutdown_answers_everyone_and_is_idempotent():
    core = FakeCore(gated=True)
    with running(core) as (driver, front):
        driver.add(front, fake_request("r", max_tokens=50))
        wait_for(core.live)
        threading.Timer(0.05, core.allow).start()
        driver.shutdown()
        driver.shutdown()
        assert front.reasons == ["the engine was shut down"]
        assert ("shutdown",) in core.calls
        assert not engine_threads()


def test_shutdown_does_not_wait_for_ever():
    core = FakeCore(gated=True)
    with running(core) as (driver, front):
        driver.add(front, fake_request("r"))
        wait_for(core.live)
        driver.shutdown(timeout=0.05)
        assert front.order == ["dead"]
        assert ("shutdown",) in core.calls
        core.allow(1)
        wait_for(lambda: not engine_threads())
        assert front.order == ["dead"], "the step that came too late is nobody's"


def test_a_driver_that_was_never_used_shuts_down():
    core = FakeCore()
    EngineDriver(core).shutdown()
    assert core.calls == [("shutdown",)]
