"""An engine's sockets and their clients: what crosses, who may come in, and how each side notices the other's end."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq
from support.driver import INFO, FakeCore, fake_request, fake_tokens, running, until, wait_for, whole

from rayllm.api import wire
from rayllm.api.types import Abort, GenerationRequest, IdempotencyKey, Load
from rayllm.engine import socket as engine_socket
from rayllm.engine.client import Beats, EngineClient
from rayllm.engine.driver import EngineDriver
from rayllm.engine.socket import EngineSocket
from rayllm.errors import ConfigError, EngineDeadError, InvalidRequestError

LONG = 10**6  # tokens: until the request is aborted


@contextmanager
def listening(core: FakeCore, **options: float) -> Iterator[tuple[EngineSocket, EngineDriver]]:
    """The socket of a driver that runs the core."""
    with running(core, fronts=0) as (driver,):
        server = EngineSocket(driver, **options)
        try:
            yield server, driver
        finally:
            if core.gated:
                core.allow(1000)
            driver.shutdown(timeout=5)
            server.close()


@asynccontextmanager
async def client_at(address: str, **options: object) -> AsyncIterator[EngineClient]:
    """A client that is not connected yet."""
    client = EngineClient(address, None, **options)
    try:
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def connected(server: EngineSocket, **options: object) -> AsyncIterator[EngineClient]:
    """A client on the engine's host."""
    async with client_at(server.endpoint.ipc, **options) as client:
        await client.connect()
        yield client


def start(client: EngineClient, request: GenerationRequest) -> asyncio.Task:
    """Run a request to its end beside the test."""
    return asyncio.create_task(whole(client.generate(request)))


async def stepping_until(core: FakeCore, condition) -> None:
    """Let the engine step on, as what was sent to it is taken in between steps."""
    await until(lambda: condition() or core.allow())


def saying(**fields: object):
    """What a client's beats say."""
    return lambda: wire.FrontBeat(**fields)


class RawFront:
    """A front's socket without a client: it says what the test wants, or nothing."""

    def __init__(self, address: str, **options: int):
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.linger, self.socket.rcvtimeo = 0, 10_000
        for name, value in options.items():
            setattr(self.socket, name, value)
        self.socket.connect(address)
        self._decoder = msgspec.msgpack.Decoder(wire.EngineMessage)

    def __enter__(self) -> RawFront:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def send(self, message: wire.FrontMessage | bytes) -> None:
        self.socket.send(message if isinstance(message, bytes) else msgspec.msgpack.encode(message))

    def receive(self, kind: type) -> object:
        """The next message of a kind; others are skipped."""
        while not isinstance(message := self._decoder.decode(self.socket.recv()), kind):
            pass
        return message

    def close(self) -> None:
        self.socket.close()


@contextmanager
def raw_front(server: EngineSocket, **options: int) -> Iterator[RawFront]:
    """A front that has been welcomed."""
    with RawFront(server.endpoint.ipc, **options) as front:
        front.send(wire.Hello(uuid.uuid4().hex))
        assert front.receive(wire.Welcome) == wire.Welcome(INFO)
        yield front


def wait_until_handled(server: EngineSocket, *fronts: RawFront) -> None:
    """Until the engine has all that these fronts, which are no others than there are, have sent."""
    for front in fronts:
        front.send(wire.FrontBeat(here=Load(1, 0)))
    wait_for(lambda: server.load() == Load(len(fronts), 0))


# ---- requests and their tokens


def test_two_fronts_get_one_message_a_step():
    core = FakeCore(gated=True)
    with listening(core) as (server, _driver), raw_front(server) as one, raw_front(server) as two:
        two.send(wire.pack_request(fake_request("first", max_tokens=1)))
        wait_for(core.live)  # the engine waits in its step
        sent = [fake_request(f"a{i}", prompt=[i + 1], stop=["x"], logit_bias={1: 2.0}, temperature=0) for i in range(3)]
        for request in sent:
            one.send(wire.pack_request(request))
        two.send(wire.pack_request(fake_request("b", n=2, temperature=1.0)))
        wait_until_handled(server, one, two)
        core.allow(4)
        got_one = [one.receive(wire.Deltas).deltas for _ in range(3)]
        got_two = [two.receive(wire.Deltas).deltas for _ in range(4)]
        for request in sent:
            tokens = [t for step in got_one for d in step if d.request_id == request.request_id for t in d.token_ids]
            assert tokens == fake_tokens(request)
        assert [len(step) for step in got_one] == [3, 3, 3]
        assert [[d.request_id for d in step] for step in got_two] == [["first"], *[["b", "b"]] * 3]
        assert [d.finish_reason for d in got_one[-1] + got_two[-1]] == ["length"] * 5


def test_tokens_do_not_wait_until_all_requests_are_taken_in(monkeypatch):
    core, all_sent, handled = FakeCore(gated=True), threading.Event(), []
    with listening(core) as (server, driver), raw_front(server) as front:
        (known,) = server._fronts.values()

        def add(_front, request):
            if not handled:  # until the others have come too
                all_sent.wait(10)
                time.sleep(0.2)
                server.post(known, wire.Found("news", True))
            handled.append(request.request_id)

        at_once, send = [], server._send

        def note(peer, message):
            if isinstance(message, wire.Found):  # beats go out meanwhile
                at_once.append(len(handled))
            send(peer, message)

        monkeypatch.setattr(driver, "add", add)
        monkeypatch.setattr(server, "_send", note)
        for i in range(200):
            front.send(wire.pack_request(fake_request(f"r{i}")))
        all_sent.set()
        assert front.receive(wire.Found) == wire.Found("news", True)
        assert at_once == [1]
        wait_for(lambda: len(handled) == 200)


def test_clients_run_requests():
    async def main():
        with listening(FakeCore()) as (server, driver):
            async with connected(server) as one, connected(server) as two:
                assert one.info == two.info == INFO
                await until(lambda: driver.num_fronts == 2)
                requests = [fake_request(f"r{i}", max_tokens=5 + i, prompt=[i + 1]) for i in range(6)]
                totals = await asyncio.gather(*(start((one, two)[i % 2], r) for i, r in enumerate(requests)))
                for request, total in zip(requests, totals, strict=True):
                    assert total.outputs[0].token_ids == fake_tokens(request)
                    assert (total.finished, total.outputs[0].finish_reason) == (True, "length")
            await until(lambda: driver.num_fronts == 0)

    asyncio.run(main())


def test_abort():
    core = FakeCore(gated=True)
    with listening(core) as (server, _driver), raw_front(server) as front:
        front.send(wire.pack_request(fake_request("r", max_tokens=50)))
        wait_for(core.live)
        front.send(wire.pack_request(fake_request("other", max_tokens=3)))
        front.send(wire.Aborts([Abort("r"), Abort("unknown")]))
        wait_until_handled(server, front)
        core.allow(4)
        steps = [front.receive(wire.Deltas).deltas for _ in range(4)]
        assert core.calls[:4] == [("add", "r"), ("step",), ("add", "other"), ("abort", "r")]
        assert [[d.request_id for d in step] for step in steps] == [["r"], ["other"], ["other"], ["other"]]
        assert steps[-1][0].finish_reason == "length"


def test_a_request_with_a_key_outlives_its_front_and_is_found():
    async def main():
        core = FakeCore(gated=True)
        request = msgspec.structs.replace(fake_request("a", max_tokens=9), key=IdempotencyKey("k", b"", 1700))
        with listening(core, beat_s=0.02) as (server, driver):
            async with connected(server) as other:
                async with connected(server) as client:
                    lost = start(client, request)
                    await until(core.live)
                    assert [await other.knows("k"), await other.knows("another")] == [True, False], "during a step"
                    assert await asyncio.gather(other.knows("k"), other.knows("k")) == [True, True]
                    core.allow(2)
                await stepping_until(core, lambda: driver.num_orphans)
                assert isinstance((await asyncio.gather(lost, return_exceptions=True))[0], EngineDeadError)
                await other.ask()
                assert other.engine_beat.others_total == other.engine_beat.others_here == Load(1)
                again = start(other, msgspec.structs.replace(request, request_id="b"))
                await stepping_until(core, again.done)
                assert again.result().outputs[0].token_ids == fake_tokens(request)
                assert again.result().created == 1700
                assert [call for call in core.calls if call[0] != "step"] == [("add", "kept-a")]
                changed = IdempotencyKey("k", b"another body", 1)
                with pytest.raises(InvalidRequestError, match="with another body"):
                    await whole(other.generate(msgspec.structs.replace(request, key=changed)))
                other.forget("k")
                while await other.knows("k"):
                    await asyncio.sleep(0.01)
            assert not await other.knows("k"), "the client is closed"

    asyncio.run(main())


def test_a_refused_request_raises_and_the_others_go_on():
    async def main():
        core = FakeCore(gated=True)
        with listening(core) as (server, _):
            async with connected(server) as client:
                good = start(client, fake_request("good"))
                await until(core.live)
                refused = start(client, fake_request("refused", n=2, temperature=1.0))
                await stepping_until(core, refused.done)
                with pytest.raises(InvalidRequestError, match="the core does not like it") as caught:
                    await refused
                assert caught.value.param == "prompt"
                await stepping_until(core, good.done)
                assert good.result().outputs[0].token_ids == fake_tokens(fake_request("good"))
                again = start(client, fake_request("refused"))  # its id is free
                await stepping_until(core, again.done)
                assert isinstance(again.exception(), InvalidRequestError)
                assert client.dead is None

    asyncio.run(main())


def test_what_comes_in_one_message_with_refusals_is_not_lost():
    """Grammars that turn out to be bad are refused beside the tokens of a step."""

    class Refusing(FakeCore):
        def step(self):
            deltas = super().step()
            if ("step",) not in self.calls[:-1]:
                return deltas
            refused = [d for d in deltas if d.request_id.startswith("bad")]
            for delta in refused:
                self._live.pop(delta.request_id, None)
            others = [d for d in deltas if d not in refused]
            return [
                msgspec.structs.replace(d, token_ids=[], finish_reason="error", stop_reason="no", bad_param="regex")
                for d in refused
            ] + others

    async def main():
        core, sent = Refusing(gated=True), 0
        with listening(core) as (server, _):
            async with connected(server, beat=lambda: wire.FrontBeat(here=Load(sent, 0)), beat_s=0.02) as client:
                good = start(client, fake_request("good", max_tokens=3))
                await until(core.live)
                bad = [start(client, fake_request(f"bad{i}")) for i in range(2)]
                await asyncio.sleep(0)
                sent = 3
                await until(lambda: server.load() == Load(3, 0))  # beats come behind what was sent before
                core.allow(3)
                for task in bad:
                    with pytest.raises(InvalidRequestError, match="no") as caught:
                        await task
                    assert caught.value.param == "regex"
                total = await good
                assert total.outputs[0].token_ids == fake_tokens(fake_request("good", max_tokens=3))

    asyncio.run(main())


def test_a_request_that_cannot_be_read_is_refused_alone():
    async def main():
        core = FakeCore(gated=True)
        with listening(core) as (server, _):
            async with connected(server) as client:
                good = start(client, fake_request("good", max_tokens=2))
                await until(core.live)
                bad = fake_request("bad")
                msgspec.structs.force_setattr(bad.params, "early_stopping", 0.0)
                with pytest.raises(InvalidRequestError, match=r"wrong type.*early_stopping"):
                    await whole(client.generate(bad))
                core.allow(2)
                assert (await good).outputs[0].finish_reason == "length"
                assert client.dead is None

    asyncio.run(main())


def test_bad_parameters_do_not_pass_the_wire():
    """Structs are checked again where they arrive."""
    request = {"request_id": "r", "prompt_token_ids": [1], "params": {"n": 10**9}}
    frame = msgspec.msgpack.encode({"type": "Add", "request_id": "r", "request": request})
    message = msgspec.msgpack.decode(frame, type=wire.FrontMessage)
    with pytest.raises(msgspec.ValidationError, match="n must be"):
        wire.unpack_request(message)
    good = fake_request("r", stop=["x"], seed=2**63 - 1)
    assert wire.unpack_request(wire.pack_request(good)) == good


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x80\x04N.",
        b"\x81",
        msgspec.msgpack.encode({"type": "Launch"}),
        msgspec.msgpack.encode({"type": "Aborts", "aborts": 1}),
        msgspec.msgpack.encode(wire.Welcome(INFO)),
    ],
)
def test_a_frame_that_is_no_message_ends_nothing(frame, caplog):
    with listening(FakeCore()) as (server, driver), raw_front(server) as front:
        front.send(frame)
        front.send(wire.pack_request(fake_request("good", max_tokens=1)))
        (delta,) = front.receive(wire.Deltas).deltas
        assert (delta.request_id, delta.finish_reason) == ("good", "length")
        assert driver.num_fronts == 1
        assert "no message" in caplog.text


def test_who_was_not_welcomed_is_told_so():
    with listening(FakeCore()) as (server, driver), RawFront(server.endpoint.ipc) as front:
        front.send(wire.Bye())  # needs no answer
        front.send(wire.pack_request(fake_request("r")))
        assert "does not know this front" in front.receive(wire.EngineMessage).reason
        assert driver.num_fronts == 0


def test_a_second_hello_is_a_new_start():
    core = FakeCore(gated=True)
    with listening(core) as (server, driver), raw_front(server) as front:
        front.send(wire.pack_request(fake_request("old", max_tokens=LONG)))
        wait_for(core.live)
        front.send(wire.Hello("new"))
        front.receive(wire.Welcome)
        wait_for(lambda: ("abort", "old") in core.calls or core.allow())
        wait_for(lambda: driver.num_fronts == 1)


# ---- beats


def test_beats_bring_the_engines_figures_and_health():
    async def main():
        core = FakeCore(gated=True)
        with listening(core, beat_s=0.02) as (server, driver):
            async with connected(server, beat_s=0.02) as client:
                assert client.engine_beat.unhealthy is None and not client.engine_beat.draining
                running = start(client, fake_request("r", max_tokens=3))
                core.allow(2)
                await until(lambda: driver.stats.num_steps == 2)
                await client.ask()
                assert client.engine_beat.stats.num_running == 1  # of what it was asked for; the rest it says unasked
                core.lost = "worker rank 1 failed"
                await until(lambda: client.engine_beat.unhealthy == "worker rank 1 failed")
                core.lost = None
                await until(lambda: client.engine_beat.unhealthy is None)
                core.allow(1)
                await running

    asyncio.run(main())


def test_a_draining_engine_says_so_to_all_fronts():
    async def main():
        with listening(FakeCore(), beat_s=60) as (server, _):
            async with connected(server) as early:
                assert not early.engine_beat.draining
                server.drain()
                await until(lambda: early.engine_beat.draining)
                async with connected(server) as late:
                    await until(lambda: late.engine_beat.draining)
                    # A request of the last moment still runs.
                    assert (await start(late, fake_request("r"))).finished

    asyncio.run(main())


def test_the_load_is_that_of_the_fronts_that_are_here():
    async def main():
        with listening(FakeCore(), beat_s=0.02) as (server, _):
            assert server.load() == Load()
            mine, others = Load(completions=3, queued_tokens=30), Load(completions=1, queued_tokens=5)
            async with connected(server, beat=saying(total=Load(9, 90), here=mine), beat_s=0.02):
                await until(lambda: server.load() == mine)
                async with connected(server, beat=saying(here=others), beat_s=0.02):
                    await until(lambda: server.load() == mine + others == Load(4, 35))
                await until(lambda: server.load() == mine)
            await until(lambda: server.load() == Load())

    asyncio.run(main())


def test_a_front_hears_of_the_others():
    async def main():
        with listening(FakeCore(), beat_s=0.02) as (server, _):
            metrics = {name: wire.Snapshot(1, {name: 1}) for name in ("one", "two")}
            one = saying(total=Load(3, 30), here=Load(1, 10), metrics={"one": metrics["one"]})
            two = saying(total=Load(2, 20), here=Load(2, 15), metrics={"two": metrics["two"]})
            async with connected(server, front_id="one", beat=one, beat_s=0.02) as first:
                await until(lambda: server.load() == Load(1, 10))
                assert (first.engine_beat.others_total, first.engine_beat.others_here) == (Load(), Load())
                assert first.peer_metrics == {}
                async with (
                    connected(server, front_id="two", beat=two, beat_s=0.02) as second,
                    connected(server, beat=saying(total=Load()), beat_s=0.02) as third,
                ):
                    await until(lambda: first.peer_metrics == {"two": metrics["two"]})
                    assert first.engine_beat.others_total == Load(2, 20)
                    assert first.engine_beat.others_here == Load(2, 15)
                    await until(lambda: second.peer_metrics == {"one": metrics["one"]})
                    assert second.engine_beat.others_here == Load(1, 10)
                    await until(lambda: third.peer_metrics == metrics)
                    assert third.engine_beat.others_total == Load(5, 50)
                await until(lambda: first.engine_beat.others_total == Load())
                async with connected(server) as late:
                    await until(lambda: late.peer_metrics == metrics)  # those of one that is gone still count

    asyncio.run(main())


def test_metrics_are_sent_when_they_are_new():
    with listening(FakeCore(), beat_s=0.02) as (server, _), raw_front(server) as front, raw_front(server) as other:

        def news() -> dict[str, wire.Snapshot]:
            other.send(wire.FrontBeat())
            return other.receive(wire.EngineBeat).metrics

        front.send(wire.Hello("busy"))
        for each in (front, other):
            each.receive(wire.EngineBeat)  # with the welcome
        front.receive(wire.EngineBeat)  # with the second one
        for number, text in ((1, "1"), (1, "not newer"), (2, "2"), (1, "late"), (3, "3")):
            front.send(wire.FrontBeat(metrics={"busy": wire.Snapshot(number, {text: 1})}))
            front.receive(wire.EngineBeat)
            assert news() == ({"busy": wire.Snapshot(number, {text: 1})} if text == str(number) else {})
            assert news() == {}
        of_another = {"gone": wire.Snapshot(7, {"x": 1})}  # of which this front has heard
        front.send(wire.FrontBeat(metrics=of_another))
        front.receive(wire.EngineBeat)
        assert news() == of_another


def test_metrics_of_a_bounded_number_of_fronts_are_kept(monkeypatch):
    monkeypatch.setattr(wire, "MAX_FRONTS", 2)
    with listening(FakeCore(), beat_s=0.02) as (server, _), raw_front(server) as watcher:
        for front_id, number in (("a", 1), ("b", 1), ("a", 2), ("c", 1)):
            sent = (front_id, wire.Snapshot(number, {"text": 1}))
            with RawFront(server.endpoint.ipc) as front:
                front.send(wire.Hello(front_id))
                front.send(wire.FrontBeat(metrics=dict([sent])))

                def is_known(sent=sent):
                    watcher.send(wire.FrontBeat())
                    return sent in watcher.receive(wire.EngineBeat).metrics.items()

                wait_for(is_known)
        with raw_front(server) as late:
            kept = late.receive(wire.EngineBeat).metrics
        assert {front_id: snapshot.number for front_id, snapshot in kept.items()} == {"a": 2, "c": 1}


def test_beats_keep_idle_connections():
    async def main():
        with listening(FakeCore(), beat_s=0.02, silence_s=0.3) as (server, _):
            async with connected(server, beat_s=0.02, idle_s=0.05, silence_s=0.3) as client:
                await asyncio.sleep(0.7)
                assert (await start(client, fake_request("r"))).finished
                assert client.dead is None

    asyncio.run(main())


def test_beats_go_when_they_say_something_new_or_are_due():
    says = wire.FrontBeat()
    beats = Beats(lambda: says, idle_s=10)
    assert beats.due(100.0) == says, "the first, by which the engine knows that this front is ready"
    assert beats.due(101.0) is None
    says = wire.FrontBeat(Load(1, 5))
    assert (beats.due(101.5), beats.due(102.0)) == (says, None)
    assert (beats.due(111.0), beats.due(111.5)) == (None, says)
    says = wire.FrontBeat(Load(1, 5), Load())
    assert [beats.due(112.0 + i) for i in range(3)] == [says] * 3, "its answer tells of the other fronts"


def test_an_engine_answers_beats_and_says_at_once_that_it_drains():
    async def main():
        with listening(FakeCore(), beat_s=0.02) as (server, driver):
            changes = []
            async with connected(server, on_change=lambda: changes.append(client.engine_beat.draining)) as client:
                first = client.engine_beat
                await asyncio.sleep(0.2)
                assert client.engine_beat.stats == first.stats and not changes
                await start(client, fake_request("r", max_tokens=3))
                await asyncio.gather(client.ask(), client.ask())
                assert client.engine_beat.stats == driver.stats
                server.drain()
                await until(lambda: client.engine_beat.draining)
                assert changes == [True]
                driver.shutdown(timeout=5)
                await until(lambda: client.dead)
                assert len(changes) == 2
                await client.ask()  # which nobody answers

    asyncio.run(main())


# ---- fronts that go


def test_a_client_that_closes_says_so_and_its_requests_are_aborted():
    async def main():
        core = FakeCore(gated=True)
        with listening(core, beat_s=60) as (server, driver):
            async with connected(server) as client:
                task = start(client, fake_request("r", max_tokens=LONG))
                await until(core.live)
            with pytest.raises(EngineDeadError, match="closed"):
                await task
            await stepping_until(core, lambda: ("abort", "r") in core.calls)
            assert driver.num_fronts == 0
            with pytest.raises(EngineDeadError, match="closed"):
                client.generate(fake_request("late"))
            await client.close()  # no error

    asyncio.run(main())


def test_a_front_that_vanishes_has_its_requests_aborted():
    """No Bye: only the closed connection tells."""
    core = FakeCore(gated=True)
    with listening(core, beat_s=0.05, silence_s=60) as (server, driver):
        with raw_front(server) as front:
            front.send(wire.pack_request(fake_request("r", max_tokens=LONG)))
            wait_for(core.live)
        wait_for(lambda: ("abort", "r") in core.calls or core.allow())
        assert driver.num_fronts == 0


def test_the_work_of_a_front_that_vanishes_counts_no_more_even_if_nothing_is_sent_to_it():
    core = FakeCore(gated=True)
    with listening(core, beat_s=0.05, silence_s=60) as (server, driver), raw_front(server) as other:
        with raw_front(server) as front:
            front.send(wire.FrontBeat(here=Load(2, 9), total=Load(3, 9)))
            front.send(wire.pack_request(fake_request("r", max_tokens=LONG)))
            wait_for(core.live)  # the engine stays in its step
            wait_for(lambda: server.load() == Load(2, 9))
        wait_for(lambda: server.load() == Load())
        assert driver.num_fronts == 1
        other.receive(wire.EngineBeat)  # with the welcome
        other.send(wire.FrontBeat())
        assert other.receive(wire.EngineBeat).others_total == Load()


def test_a_silent_front_is_given_up_and_told():
    core = FakeCore(gated=True)
    with listening(core, beat_s=0.02, silence_s=0.5) as (server, driver), raw_front(server) as front:
        front.send(wire.FrontBeat(here=Load(1, 1)))
        front.send(wire.pack_request(fake_request("r", max_tokens=LONG)))
        wait_for(core.live)
        wait_for(lambda: ("abort", "r") in core.calls or core.allow())
        assert driver.num_fronts == 0
        assert server.load() == Load()
        front.send(wire.FrontBeat())
        assert "does not know this front" in front.receive(wire.Dead).reason


def test_a_front_that_stops_reading_is_given_up(monkeypatch):
    monkeypatch.setattr(engine_socket, "_MAX_FRAMES", 8)
    core = FakeCore()
    with listening(core) as (server, _), raw_front(server, rcvhwm=1) as front, raw_front(server) as other:
        for i in range(200):  # wide steps fill the kernel's buffers soon
            front.send(wire.pack_request(fake_request(f"r{i}", max_tokens=LONG)))
        wait_for(lambda: any(call[0] == "abort" and "r0" in call for call in core.calls))
        other.send(wire.pack_request(fake_request("good", max_tokens=1)))
        assert other.receive(wire.Deltas).deltas[0].request_id == "good"


# ---- engines that go


def test_a_crash_reaches_the_client():
    async def main():
        core = FakeCore(gated=True)
        with listening(core) as (server, _):
            async with connected(server) as client:
                task = start(client, fake_request("r", max_tokens=50))
                await until(core.live)
                unread = client.generate(fake_request("unread"))
                core.crash = RuntimeError("boom")
                core.allow(1)
                with pytest.raises(EngineDeadError, match="the engine died: RuntimeError: boom"):
                    await task
                assert client.dead == "the engine died: RuntimeError: boom"
                with pytest.raises(EngineDeadError, match="boom"):
                    await anext(unread)  # made before, started only now
                with pytest.raises(EngineDeadError, match="boom"):
                    client.generate(fake_request("late"))
            with pytest.raises(EngineDeadError, match="boom"):
                async with connected(server):
                    pass

    asyncio.run(main())


def test_a_shutdown_reaches_the_client_and_close_removes_the_socket():
    async def main():
        core = FakeCore(gated=True)
        with listening(core) as (server, driver):
            folder = Path(server.endpoint.ipc.removeprefix("ipc://")).parent
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            async with connected(server) as client:
                task = start(client, fake_request("r"))
                await until(core.live)
                await asyncio.to_thread(driver.shutdown, 0.05)
                server.close()
                assert not folder.exists()
                with pytest.raises(EngineDeadError, match="the engine was shut down"):
                    await task
                server.close()  # no error

    asyncio.run(main())


def test_an_engine_that_closes_its_socket_is_noticed_at_once():
    async def main():
        with listening(FakeCore()) as (server, _):
            async with connected(server, silence_s=60) as client:
                server.close()
                await until(lambda: client.dead, timeout=5)
                assert "was closed" in client.dead

    asyncio.run(main())


ENGINE_PROCESS = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from support.driver import FakeCore
from rayllm.engine.driver import EngineDriver
from rayllm.engine.socket import EngineSocket
server = EngineSocket(EngineDriver(FakeCore(gated=True)))
print(server.endpoint.ipc, flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_process_that_is_killed_or_stopped_is_noticed_soon(number, tmp_path, monkeypatch):
    """Long before its silence would tell."""

    async def main(address):
        async with client_at(address, silence_s=60) as client:
            await client.connect()
            task = start(client, fake_request("r"))
            await asyncio.sleep(0)
            process.send_signal(number)
            await until(lambda: client.dead, timeout=20)
            assert "was closed" in client.dead
            with pytest.raises(EngineDeadError, match="was closed"):
                await task
            with pytest.raises(EngineDeadError, match="was closed"):
                client.generate(fake_request("late"))

    monkeypatch.setenv("TMPDIR", str(tmp_path))  # it leaves its folder behind
    command = [sys.executable, "-c", ENGINE_PROCESS, str(Path(__file__).parents[1])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            asyncio.run(main(process.stdout.readline().strip()))
        finally:
            process.kill()


# ---- engines that say nothing: the test is the engine


class SilentEngine:
    """The engine's end of a connection; it says only what the test sends."""

    def __init__(self):
        self.router = zmq.Context.instance().socket(zmq.ROUTER)
        self.router.linger = 0
        self.address = f"tcp://127.0.0.1:{self.router.bind_to_random_port('tcp://127.0.0.1')}"
        self._identity = b""

    def __enter__(self) -> SilentEngine:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.router.close()

    def messages(self) -> list[wire.FrontMessage]:
        """What has come."""
        found = []
        while self.router.poll(0):
            self._identity, frame = self.router.recv_multipart()
            found.append(msgspec.msgpack.decode(frame, type=wire.FrontMessage))
        return found

    def send(self, message: wire.EngineMessage | bytes) -> None:
        frame = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
        self.router.send_multipart([self._identity, frame])

    @asynccontextmanager
    async def welcomed(self, **options: float) -> AsyncIterator[EngineClient]:
        """A client that is connected to this."""
        async with client_at(self.address, **options) as client:
            connecting = asyncio.create_task(client.connect())
            await until(lambda: any(isinstance(message, wire.Hello) for message in self.messages()))
            self.send(wire.Welcome(INFO))
            await connecting
            yield client


def test_nobody_answers(tmp_path):
    async def main():
        with SilentEngine() as engine:
            for address in (engine.address, f"ipc://{tmp_path}/none"):
                async with client_at(address, silence_s=0.1) as client:
                    with pytest.raises(EngineDeadError, match="no engine answers"):
                        await client.connect()
                    with pytest.raises(EngineDeadError):
                        client.generate(fake_request("r"))

    asyncio.run(main())


def test_a_client_that_is_closed_before_an_engine_answers():
    async def main():
        with SilentEngine() as engine:
            async with client_at(engine.address) as client:
                connecting = asyncio.create_task(client.connect())
                await until(engine.messages)
                await client.close()
                with pytest.raises(EngineDeadError, match="closed"):
                    await connecting
                with pytest.raises(EngineDeadError, match="closed"):
                    await client.connect()

    asyncio.run(main())


def test_a_client_that_was_never_connected():
    async def main():
        async with client_at("ipc:///none") as client:
            with pytest.raises(EngineDeadError, match="not connected"):
                client.info  # noqa: B018
            with pytest.raises(EngineDeadError, match="not connected"):
                client.generate(fake_request("r"))
            await client.abort("unknown")

    asyncio.run(main())


def test_a_silent_engine_is_given_up():
    async def main():
        with SilentEngine() as engine:
            async with engine.welcomed(beat_s=0.02, silence_s=0.5) as client:
                task = start(client, fake_request("r"))
                await until(lambda: client.dead)
                assert "silent" in client.dead
                with pytest.raises(EngineDeadError, match="silent"):
                    await task

    asyncio.run(main())


def test_a_client_whose_own_process_stood_still_does_not_give_the_engine_up():
    async def main():
        with SilentEngine() as engine:
            async with engine.welcomed(beat_s=0.02, idle_s=0.02, silence_s=0.5) as client:
                await until(engine.messages)
                time.sleep(1.0)  # nothing runs here, and the engine says nothing
                engine.messages()
                await until(engine.messages)  # a beat: the client has looked at the clock since
                assert client.dead is None
                engine.send(wire.EngineBeat(draining=True))
                await until(lambda: client.engine_beat.draining)
                assert client.dead is None
                await until(lambda: client.dead)
                assert "silent" in client.dead, "it has not stopped looking"

    asyncio.run(main())


def test_a_client_that_gets_what_it_cannot_read_gives_the_engine_up():
    """Nothing else would end its requests."""

    async def main():
        with SilentEngine() as engine:
            async with engine.welcomed() as client:
                task = start(client, fake_request("r"))
                engine.send(b"\x81")
                with pytest.raises(EngineDeadError, match="reading from the engine"):
                    await task

    asyncio.run(main())


# ---- tcp


def keys() -> wire.CurveKeys:
    return wire.CurveKeys(*(key.decode() for key in zmq.curve_keypair()))


@asynccontextmanager
async def connected_by_tcp(endpoint: wire.Endpoint, **options: object) -> AsyncIterator[EngineClient]:
    """A client on another host."""
    async with client_at(endpoint.tcp, **{"server_key": endpoint.public_key} | options) as client:
        await client.connect()
        yield client


async def assert_kept_out(endpoint: wire.Endpoint, **options: object) -> None:
    with pytest.raises(EngineDeadError, match="no engine answers"):
        async with connected_by_tcp(endpoint, silence_s=0.3, **options):
            pass


def listening_ports() -> set[int]:
    """tcp ports on which this process listens."""
    mine = {os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()}
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return {int(line[1].rpartition(":")[2], 16) for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in mine}


def test_no_tcp_port_is_open_before_open_tcp():
    before = listening_ports()
    with listening(FakeCore()) as (server, _):
        assert (server.endpoint.tcp, server.endpoint.public_key) == ("", "")
        assert listening_ports() <= before  # what another test had open may close meanwhile
        server.open_tcp("127.0.0.1")
        (port,) = listening_ports() - before
        assert server.endpoint.tcp == f"tcp://127.0.0.1:{port}"
        assert len(server.endpoint.public_key) == 40
    assert listening_ports() == before


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_front_with_an_allowed_key_comes_in_over_tcp(host):
    async def main():
        with listening(FakeCore()) as (server, driver):
            server.open_tcp(host)
            mine = keys()
            server.allow([keys().public, mine.public])
            # The other socket still needs no key.
            async with connected_by_tcp(server.endpoint, keys=mine) as remote, connected(server) as local:
                for client in (remote, local):
                    total = await start(client, fake_request("r"))
                    assert total.outputs[0].token_ids == fake_tokens(fake_request("r"))
                assert driver.num_fronts == 2
            await until(lambda: driver.num_fronts == 0)

    asyncio.run(main())


def test_a_front_without_an_allowed_key_does_not_come_in():
    async def main():
        with listening(FakeCore()) as (server, driver):
            server.open_tcp("127.0.0.1")
            mine, other = keys(), keys()
            await assert_kept_out(server.endpoint, keys=mine)  # nobody is allowed yet
            server.allow([mine.public])
            await assert_kept_out(server.endpoint, keys=other)
            await assert_kept_out(server.endpoint, keys=wire.CurveKeys(mine.public, other.secret))
            await assert_kept_out(server.endpoint)
            await assert_kept_out(server.endpoint, keys=mine, server_key=other.public)
            await assert_kept_out(server.endpoint, keys=mine, server_key="")
            assert driver.num_fronts == 0
            async with connected_by_tcp(server.endpoint, keys=mine):
                await until(lambda: driver.num_fronts == 1)
            server.allow([])
            await assert_kept_out(server.endpoint, keys=mine)

    asyncio.run(main())


def test_a_host_that_is_not_ours():
    async def main():
        with listening(FakeCore()) as (server, _):
            with pytest.raises(zmq.ZMQError):
                server.open_tcp("203.0.113.1")
            assert server.endpoint.tcp == ""
            async with connected(server) as client:
                assert (await start(client, fake_request("r"))).finished

    asyncio.run(main())


# ---- paths


def test_the_folder_is_private_and_the_path_short(tmp_path, monkeypatch):
    with running(FakeCore(), fronts=0) as (driver,):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        server = EngineSocket(driver)
        path = Path(server.endpoint.ipc.removeprefix("ipc://"))
        assert path.is_socket()
        assert path.is_relative_to(tmp_path)
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        server.close()
        assert list(tmp_path.iterdir()) == []
        long = tmp_path / ("x" * 100)
        long.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(long))
        with pytest.raises(ConfigError, match=r"107 bytes.*TMPDIR"):
            EngineSocket(driver)
        assert list(long.iterdir()) == []


def test_each_start_of_an_engine_has_a_folder_of_its_own():
    with listening(FakeCore()) as (one, _), listening(FakeCore()) as (two, _):
        assert one.endpoint != two.endpoint


# ---- other versions


def test_a_front_of_another_version_is_told_so():
    with listening(FakeCore()) as (server, driver), RawFront(server.endpoint.ipc) as front:
        front.send(wire.Hello("old", wire.VERSION - 1))
        assert f"speaks version {wire.VERSION} of the protocol" in front.receive(wire.Dead).reason
        assert driver.num_fronts == 0


def test_an_engine_of_another_version_is_no_engine():
    async def main():
        with SilentEngine() as engine:
            async with client_at(engine.address) as client:
                connecting = asyncio.create_task(client.connect())
                await until(lambda: any(isinstance(message, wire.Hello) for message in engine.messages()))
                engine.send(wire.Welcome(INFO, wire.VERSION + 1))
                with pytest.raises(EngineDeadError, match=f"version {wire.VERSION + 1} of the protocol"):
                    await connecting

    asyncio.run(main())


def test_connections_share_threads_and_leave_none_behind():
    async def scenario(address):
        before, clients = 0, [EngineClient(address, None) for _ in range(9)]
        for client in clients:
            await client.connect()
            before = before or psutil.Process().num_threads()
        assert psutil.Process().num_threads() == before
        for client in clients[:8]:
            await client.close()
        cut_off = EngineClient(f"ipc://{tempfile.gettempdir()}/nobody", None)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(cut_off.connect(), 0.1)
        gc.collect()
        assert await whole(clients[8].generate(fake_request("a", max_tokens=2)))
        await clients[8].close()

    with listening(FakeCore()) as (server, _):
        asyncio.run(scenario(server.endpoint.ipc))


def test_a_front_that_left_before_its_hello_was_read_is_not_counted():
    with listening(FakeCore()) as (server, driver):
        welcome, read = server._welcome, threading.Event()

        def late(peer, hello):
            read.wait(5)
            welcome(peer, hello)

        server._welcome = late
        front = zmq.Context.instance().socket(zmq.DEALER)
        front.connect(server.endpoint.ipc)
        front.send(msgspec.msgpack.encode(wire.Hello("raw")))
        time.sleep(0.1)
        front.close()
        time.sleep(0.1)
        read.set()
        time.sleep(1.0)
        assert (len(server._fronts), driver.num_fronts) == (0, 0)


@pytest.mark.parametrize("message", [b"\xff", msgspec.msgpack.encode(wire.Hello("x")).replace(b"\xa1x", b"\xa1\xff")])
def test_what_is_no_message_ends_nothing(message):
    with listening(FakeCore()) as (server, _driver):
        front = zmq.Context.instance().socket(zmq.DEALER)
        front.linger = 0
        front.connect(server.endpoint.ipc)
        front.send(message)
        front.send(msgspec.msgpack.encode(wire.Hello("x")))
        assert front.poll(5000), "it is welcome"
        assert server.is_alive
        front.close()
