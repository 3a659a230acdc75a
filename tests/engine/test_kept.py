"""Requests with an idempotency key outlive the front that sent them, on a core that makes up tokens."""

from __future__ import annotations

import msgspec
import pytest
from support.driver import FakeCore, RecordingFront, fake_request, fake_tokens, running, wait_for

from rayllm import timeouts
from rayllm.api.types import Abort, GenerationRequest, IdempotencyKey, TokenDelta, TokenLogprobs
from rayllm.engine.kept import KeptRequests
from rayllm.errors import InvalidRequestError

KEY = IdempotencyKey("k", b"a body", 1700)


class Clock:
    """Seconds, as the test says."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def keyed(request_id: str, key: IdempotencyKey = KEY, **fields) -> GenerationRequest:
    return msgspec.structs.replace(fake_request(request_id, **fields), key=key)


def created(front: RecordingFront, request_id: str) -> list[int]:
    """Of the front's deltas of this request, where they say it."""
    return [delta.created for delta in front.deltas if delta.request_id == request_id and delta.created]


def num_adds(core: FakeCore) -> int:
    return sum(call[0] == "add" for call in core.calls)


@pytest.mark.parametrize("how", ["its connection ends", "its client leaves"])
def test_who_comes_back_gets_all_from_the_beginning_and_it_is_computed_once(how):
    core = FakeCore(gated=True)
    with running(core, fronts=2) as (driver, one, two):
        driver.add(one, keyed("a", max_tokens=6, n=2, temperature=1.0))
        driver.add(one, fake_request("without a key", max_tokens=50))
        core.allow(2)
        wait_for(lambda: len(one.tokens("a")) == 2)
        if how == "its connection ends":
            driver.detach(one)
        else:
            driver.abort(one, [Abort("a"), Abort("without a key")])
        core.allow(1)
        wait_for(lambda: ("abort", "without a key") in core.calls)
        wait_for(lambda: driver.num_orphans == 2)
        assert driver.knows("k")
        again = keyed("b", msgspec.structs.replace(KEY, created=1800), max_tokens=6, n=2, temperature=1.0)
        driver.add(two, again)
        core.allow(9)
        wait_for(lambda: len(two.ends()) == 2)
        assert [two.tokens("b", index) for index in range(2)] == [fake_tokens(again, index) for index in range(2)]
        assert created(two, "b") == [1700], "when it was made first"
        assert two.deltas[0].created, "which comes before all else"
        assert num_adds(core) == 2
        assert driver.num_orphans == 0
        assert len(one.tokens("a")) <= 3
        wait_for(lambda: not driver.busy)
        driver.add(two, keyed("c", max_tokens=6, n=2, temperature=1.0))  # after its end
        wait_for(lambda: len(two.ends()) == 4)
        assert [two.tokens("c", index) for index in range(2)] == [fake_tokens(again, index) for index in range(2)]
        assert num_adds(core) == 2


def test_several_may_listen():
    core = FakeCore(gated=True)
    with running(core, fronts=2) as (driver, one, two):
        driver.add(one, keyed("a", max_tokens=5))
        core.allow(1)
        wait_for(lambda: one.tokens("a"))
        for front, request_id in ((two, "b"), (two, "c")):
            driver.add(front, keyed(request_id, max_tokens=5))
        core.allow(1)
        wait_for(lambda: two.tokens("c"))
        driver.abort(two, [Abort("c")])
        core.allow(9)
        wait_for(lambda: one.ends() and two.ends())
        assert one.tokens("a") == two.tokens("b") == fake_tokens(fake_request("", max_tokens=5))
        assert two.ends() == [("b", 0, "length", None)]
        assert num_adds(core) == 1


def test_a_completion_that_one_of_them_stops_is_over_for_all():
    """By a stop string, which all of them find in the same text."""
    core = FakeCore(gated=True)
    with running(core, fronts=2) as (driver, one, two):
        driver.add(one, keyed("a", max_tokens=50, n=2, temperature=1.0))
        driver.add(two, keyed("b", max_tokens=50, n=2, temperature=1.0))
        core.allow(2)
        wait_for(lambda: one.tokens("a", 1) and two.tokens("b", 1))
        driver.abort(one, [Abort("a", 0)])
        core.allow(1)
        wait_for(lambda: ("abort", ("kept-a", 0)) in core.calls)
        driver.abort(two, [Abort("b", 0), Abort("b", 1)])
        core.allow(1)
        wait_for(lambda: any("kept-a" in call for call in core.calls if call[0] == "abort"))
        wait_for(lambda: not driver.busy)
        tokens = [one.tokens("a", index) for index in range(2)]
        driver.add(two, keyed("c", n=2))
        wait_for(lambda: created(two, "c"))
        assert [two.tokens("c", index)[: len(tokens[index])] for index in range(2)] == tokens
        assert num_adds(core) == 1


def test_one_that_nobody_will_come_for_ends_with_its_last_listener():
    core = FakeCore(gated=True)
    with running(core) as (driver, front):
        driver.add(front, keyed("a", max_tokens=500))
        core.allow(1)
        wait_for(lambda: front.tokens("a"))
        driver.forget("k")
        driver.forget("unknown")
        core.allow(1)  # it hears of it between two steps
        wait_for(lambda: not driver.knows("k"))
        core.allow(2)
        wait_for(lambda: len(front.tokens("a")) >= 3)
        driver.abort(front, [Abort("a")])
        core.allow(1)
        wait_for(lambda: ("abort", "kept-a") in core.calls)
        wait_for(lambda: not driver.busy)
        driver.add(front, keyed("b", max_tokens=500))
        core.allow(2)
        wait_for(lambda: front.tokens("b"))
        driver.abort(front, [Abort("b")])
        core.allow(1)
        wait_for(lambda: driver.num_orphans)
        driver.forget("k")  # now nobody listens
        core.allow(1)
        wait_for(lambda: ("abort", "kept-b") in core.calls)
        wait_for(lambda: not driver.busy)


def test_another_body_is_refused():
    with running(FakeCore()) as (driver, front):
        driver.add(front, keyed("a"))
        driver.add(front, keyed("b", IdempotencyKey("k", b"another", 1700)))
        wait_for(lambda: len(front.ends()) == 2)
        (refused,) = [delta for delta in front.deltas if delta.request_id == "b"]
        assert (refused.bad_param, "another body" in refused.stop_reason) == ("Idempotency-Key", True)
        assert front.tokens("a") == fake_tokens(fake_request(""))


def test_each_is_kept_for_a_minute_after_its_end_or_after_the_last_listener_left():
    clock, core = Clock(), FakeCore(gated=True)
    with running(core, clock=clock) as (driver, front):
        driver.add(front, keyed("ends", IdempotencyKey("ends", b"", 1), max_tokens=1))
        driver.add(front, keyed("goes on", IdempotencyKey("goes on", b"", 1), max_tokens=500))
        core.allow(1)
        wait_for(front.ends)
        clock.now += timeouts.KEEP_S - 1
        driver.abort(front, [Abort("goes on")])
        core.allow(1)
        wait_for(lambda: driver.num_orphans)
        assert driver.knows("ends")
        clock.now += 1
        core.allow(2)
        wait_for(lambda: not driver.knows("ends"))
        clock.now += timeouts.KEEP_S - 2
        driver.add(front, keyed("back", IdempotencyKey("goes on", b"", 1)))
        core.allow(2)
        wait_for(lambda: created(front, "back"))
        clock.now += timeouts.KEEP_S  # while somebody listens it is not counted
        core.allow(2)
        wait_for(lambda: len(front.tokens("back")) > 5)
        driver.abort(front, [Abort("back")])
        core.allow(2)
        wait_for(lambda: driver.num_orphans)
        clock.now += timeouts.KEEP_S
        core.allow(2)
        wait_for(lambda: ("abort", "kept-goes on") in core.calls)
        assert not driver.knows("goes on")
        wait_for(lambda: not driver.busy)
        driver.add(front, keyed("new", IdempotencyKey("goes on", b"", 2), max_tokens=1))
        core.allow(1)
        wait_for(lambda: created(front, "new") == [2])
        assert num_adds(core) == 3


class FlakyCore(FakeCore):
    """Refuses the first request, and ends the second with an error."""

    num_requests = 0

    def add(self, request: GenerationRequest) -> None:
        self.num_requests += 1
        if self.num_requests == 1:
            raise InvalidRequestError("not now", "prompt")
        super().add(request)

    def step(self) -> list[TokenDelta]:
        deltas = super().step()
        if self.num_requests == 2:
            return [msgspec.structs.replace(delta, finish_reason="error") for delta in deltas]
        return deltas


def test_what_was_refused_or_failed_is_tried_again():
    core = FlakyCore()
    with running(core) as (driver, front):
        for number, (request_id, end) in enumerate([("a", "error"), ("b", "error"), ("c", "length"), ("d", "length")]):
            driver.add(front, keyed(request_id, max_tokens=1))
            wait_for(lambda n=number: len(front.ends()) > n)
            assert front.ends()[-1][::2] == (request_id, end)
        assert front.deltas[0].bad_param == "prompt"
        assert num_adds(core) == 2


def test_an_engine_that_takes_over_keeps_what_came_before():
    """The front sends it along, as it was told it, and is not told it again."""
    core = FakeCore()
    entries = [TokenLogprobs(token, -0.5, 1, [token], [-0.5]) for token in (8, 9)]
    before = [TokenDelta("old", 0, [], created=1600), TokenDelta("old", 0, [8, 9], entries)]
    before.append(TokenDelta("old", 1, [4], finish_reason="stop"))
    with running(core, fronts=2) as (driver, one, two):
        moved = keyed("a", msgspec.structs.replace(KEY, deltas=before), max_tokens=3)
        driver.add(one, msgspec.structs.replace(moved, emitted={0: [8, 9]}))
        wait_for(one.ends)
        tokens = fake_tokens(moved)
        assert one.tokens("a") == tokens
        assert not created(one, "a")
        driver.add(two, keyed("b", n=2))
        wait_for(lambda: len(two.ends()) == 2)
        assert (two.tokens("b"), two.tokens("b", 1)) == ([8, 9, *tokens], [4])
        assert created(two, "b") == [1600]
        assert [delta.logprobs for delta in two.deltas if delta.logprobs] == [entries]
        driver.add(one, moved)  # of a front that lost the same engine, and comes second
        wait_for(lambda: created(one, "a"))


# ---- bounds


def ended(kept: KeptRequests, name: str, num_tokens: int = 1):
    """A request with this key that has ended."""
    request = kept.open(IdempotencyKey(name, b"", 1))
    kept.begin(request, fake_request(f"kept-{name}"), [TokenDelta(name, 0, [7] * num_tokens)])
    kept.end(request)
    return request


def names(kept: KeptRequests) -> str:
    return "".join(name for name in "abcdefg" if name in kept)


def test_beyond_the_bounds_those_that_ended_first_are_forgotten():
    kept = KeptRequests(Clock(), max_requests=3, max_bytes=10_000)
    running = kept.open(IdempotencyKey("a", b"", 1))
    kept.begin(running, fake_request("kept-a"), [])
    for name in "bcd":
        ended(kept, name)
    assert names(kept) == "acd", "by number"
    ended(kept, "e", 225)
    assert names(kept) == "ade"
    kept.take(running, TokenDelta("kept-a", 0, [7] * 10))
    assert names(kept) == "ae", "by bytes"
    kept.take(running, TokenDelta("kept-a", 0, [7] * 200))
    assert names(kept) == "a"
    kept.join(running, "listener")
    kept.take(running, TokenDelta("kept-a", 0, [7] * 200))
    assert names(kept) == "", "nothing has ended, so it is the one that grows"
    assert kept.is_wanted(running), "by its listener"
    kept.leave(running, "listener")
    assert not kept.is_wanted(running)
    ended(kept, "f", 200)
    assert names(kept) == "f", "the bytes are free"


def test_if_none_has_ended_a_new_one_is_not_kept():
    kept = KeptRequests(Clock(), max_requests=1)
    kept.begin(kept.open(IdempotencyKey("a", b"", 1)), fake_request("kept-a"), [])
    second, first_delta = kept.open(IdempotencyKey("b", b"", 1)), TokenDelta("b", 0, [], created=1)
    kept.begin(second, fake_request("kept-b"), [first_delta])
    assert names(kept) == "a"
    assert kept.join(second, "b") == [first_delta]
    assert kept.is_wanted(second), "by its listener"
    kept.leave(second, "b")
    assert not kept.is_wanted(second)
