"""The engine loop and its fronts, in the process and over the socket, on a core that makes up tokens."""

from __future__ import annotations

import asyncio
import os
import stat
import statistics
import subprocess
import sys
import threading
import time
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
from support.driver import INFO, FakeCore, fake_request, fake_token, wait_for

from rayllm.api.types import TokenDelta
from rayllm.engine import client as wire
from rayllm.engine import socket as zmq_server
from rayllm.engine.client import InProcessClient, ZmqClient
from rayllm.engine.driver import EngineDriver
from rayllm.errors import ConfigError, EngineDeadError, InvalidRequestError


class RecordingFront:
    """Keeps what the driver delivers, with the time of each delivery."""

    def __init__(self):
        self.steps: list[list[TokenDelta]] = []
        self.times: list[float] = []
        self.reasons: list[str] = []
        self.order: list[str] = []

    def deliver(self, deltas):
        self.steps.append(deltas)
        self.times.append(time.monotonic())
        self.order.append("deltas")

    def dead(self, reason):
        self.reasons.append(reason)
        self.order.append("dead")

    def ends(self) -> list[tuple]:
        """(request id, index, finish reason, stop reason) of all that has ended."""
        deltas = [d for step in self.steps for d in step]
        return [(d.request_id, d.index, d.finish_reason, d.stop_reason) for d in deltas if d.finish_reason]

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        deltas = [d for step in self.steps for d in step]
        return [t for d in deltas if (d.request_id, d.index) == (request_id, index) for t in d.token_ids]


@contextmanager
def running(core: FakeCore, fronts: int = 1):
    driver = EngineDriver(core)
    driver.start()
    attached = [RecordingFront() for _ in range(fronts)]
    for front in attached:
        driver.attach(front)
    try:
        yield (driver, *attached)
    finally:
        if core._gate is not None:
            core.allow(1000)
        driver.shutdown(timeout=5)


def tokens_of(request) -> list[int]:
    return [fake_token(request, 0, position) for position in range(request.params.max_tokens)]


# ---- the loop


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
            assert (one, two)[i % 2].tokens(request.request_id) == tokens_of(request)
        assert core.thread_ids == {driver._thread.ident}, "the core belongs to the engine thread"
        assert driver._live == {}


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
        before, cpu = core.num_polls, time.process_time()
        time.sleep(0.2)
        assert core.num_polls == before, "it polls while idle"
        assert time.process_time() - cpu < 0.1
        delays = []
        for i in range(30):
            started = time.monotonic()
            driver.add(front, fake_request(f"r{i}", max_tokens=1))
            wait_for(lambda n=i: len(front.ends()) == n + 1)
            delays.append(front.times[-1] - started)
        assert statistics.median(delays) < 0.005


def test_a_refused_request_is_answered_and_the_engine_goes_on():
    with running(FakeCore()) as (driver, front):
        driver.add(front, fake_request("refused", n=2, temperature=1.0))
        driver.add(front, fake_request("broken"))
        driver.add(front, fake_request("good"))
        wait_for(lambda: len(front.ends()) == 4)
        assert front.ends()[:2] == [("refused", i, "error", "the core does not like it") for i in range(2)]
        assert front.ends()[2][:3] == ("broken", 0, "error")
        assert "a bug" in front.ends()[2][3]
        assert front.ends()[3][:3] == ("good", 0, "length")
        assert driver.dead is None


def test_an_id_in_use_is_refused_for_the_other_front():
    core = FakeCore(gated=True)
    with running(core, fronts=2) as (driver, one, two):
        driver.add(one, fake_request("r"))
        driver.add(two, fake_request("r"))
        driver.abort(two, ["r"])  # not its request
        core.allow(3)
        wait_for(lambda: one.ends() and two.ends())
        assert one.tokens("r") == tokens_of(fake_request("r"))
        assert two.ends() == [("r", 0, "error", "request_id is in use")]


def test_abort_stops_deltas():
    core = FakeCore(gated=True)
    with running(core) as (driver, front):
        driver.add(front, fake_request("r", max_tokens=50))
        driver.add(front, fake_request("other", max_tokens=4))
        core.allow(1)
        wait_for(lambda: front.steps)
        driver.abort(front, ["r", "unknown"])
        core.allow(5)
        wait_for(front.ends)
        assert ("abort", "r") in core.calls
        assert len(front.tokens("r")) <= 2
        assert [end[0] for end in front.ends()] == ["other"]


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


def test_a_front_that_raises_counts_as_gone():
    core = FakeCore()
    with running(core) as (driver, front):
        bad = RecordingFront()
        bad.deliver = lambda _deltas: 1 / 0
        driver.attach(bad)
        driver.add(bad, fake_request("bad", max_tokens=10**6))
        wait_for(lambda: ("abort", "bad") in core.calls)
        driver.add(front, fake_request("good"))
        wait_for(front.ends)
        assert driver.dead is None


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
        wait_for(lambda: len(one.ends()) == 3 and two.ends())
        reason = "the engine died: ValueError: CUDA error"
        assert one.ends() == [(i, k, "error", reason) for i, k in (("a", 0), ("a", 1), ("still in the inbox", 0))]
        assert two.ends() == [("b", 0, "error", reason)]
        assert one.reasons == two.reasons == [reason]
        assert one.order[-2:] == ["dead", "deltas"], "fronts hear of the death first"
        with pytest.raises(EngineDeadError, match="CUDA error"):
            driver.add(one, fake_request("late"))
        assert driver.dead == reason
        assert not driver.healthy(100)
        late = RecordingFront()
        driver.attach(late)
        assert late.reasons == [reason]
        wait_for(lambda: not driver._thread.is_alive())


def test_finished_completions_are_not_ended_twice():
    class OneEndsEarly(FakeCore):
        def step(self):
            first, second = super().step()
            return [msgspec.structs.replace(first, finish_reason="stop"), second]

    core = OneEndsEarly(gated=True)
    with running(core) as (driver, front):
        driver.add(front, fake_request("r", n=2, temperature=1.0, max_tokens=9))
        core.allow(1)
        wait_for(front.ends)
        core.crash = RuntimeError()
        core.allow(1)
        wait_for(lambda: front.reasons and len(front.ends()) > 1)
        assert [(end[1], end[2]) for end in front.ends()] == [(0, "stop"), (1, "error")]


def test_health():
    core = FakeCore(gated=True)
    with running(core) as (driver, front):
        time.sleep(0.05)
        assert driver.healthy(0.01), "idle is healthy, however long ago the last step was"
        assert driver.last_step_time is None
        driver.add(front, fake_request("r"))
        wait_for(core.live)
        assert driver.healthy(30)
        wait_for(lambda: not driver.healthy(0.03))
        assert "no step has finished" in driver.healthy(0.03).reason
        wait_for(lambda: not driver.healthy(0.3))
        core.allow(1)
        wait_for(lambda: driver.healthy(0.3))  # for as long as the next step has not hung for 0.3 s
        before = time.monotonic()
        core.allow(3)
        wait_for(front.ends)
        wait_for(lambda: driver.healthy(0.0001))
        assert driver.last_step_time > before
        assert driver.healthy(0.0001).reason == ""


def test_an_idle_engine_whose_worker_died_is_unhealthy():
    core = FakeCore()
    with running(core) as (driver, _front):
        assert driver.healthy(30)
        core.lost = "worker rank 1 failed"
        assert not driver.healthy(30)
        assert driver.healthy(30).reason == "worker rank 1 failed"


def test_stats_do_not_wait_for_the_step():
    core = FakeCore(gated=True)
    with running(core) as (driver, front):
        assert driver.stats().num_steps == 0
        driver.add(front, fake_request("r", max_tokens=9))
        core.allow(2)
        wait_for(lambda: driver.stats().num_steps == 2)
        assert driver.stats().num_running == 1  # and a third step hangs


def test_shutdown_answers_everyone_and_is_idempotent():
    core = FakeCore(gated=True)
    with running(core) as (driver, front):
        driver.add(front, fake_request("r", max_tokens=50))
        wait_for(core.live)
        threading.Timer(0.05, core.allow).start()
        driver.shutdown()
        driver.shutdown()
        assert front.ends() == [("r", 0, "error", "the engine was shut down")]
        assert front.reasons == ["the engine was shut down"]
        assert [call for call in core.calls if call == ("shutdown",)] == [("shutdown",)]
        assert not driver._thread.is_alive()
        with pytest.raises(EngineDeadError, match="shut down"):
            driver.add(front, fake_request("late"))


def test_shutdown_does_not_wait_for_ever():
    core = FakeCore(gated=True)
    with running(core) as (driver, front):
        driver.add(front, fake_request("r"))
        wait_for(core.live)
        driver.shutdown(timeout=0.05)
        assert front.ends()[0][2] == "error"
        assert ("shutdown",) in core.calls
        core.allow(1)
        wait_for(lambda: not driver._thread.is_alive())
        assert len(front.ends()) == 1


def test_a_driver_that_never_started_shuts_down():
    core = FakeCore()
    EngineDriver(core).shutdown()
    assert core.calls == [("shutdown",)]


# ---- the socket


class Recorder:
    """Callbacks of a client."""

    def __init__(self):
        self.steps: list[list[TokenDelta]] = []
        self.reasons: list[str] = []

    def ends(self):
        return [(d.request_id, d.finish_reason) for step in self.steps for d in step if d.finish_reason]


async def until(condition, timeout=10.0):
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.002)


@asynccontextmanager
async def connected(address: str, **options):
    client, recorder = ZmqClient(address, **options), Recorder()
    await client.start(recorder.steps.append, recorder.reasons.append)
    try:
        yield client, recorder
    finally:
        await client.close()


def test_zmq_two_fronts_get_one_frame_a_step():
    async def main():
        core = FakeCore(gated=True)
        with running(core) as (driver, _):
            address = driver.serve_zmq()
            async with connected(address) as (one, got_one), connected(address) as (two, got_two):
                assert one.info() == two.info() == INFO
                two.add(fake_request("first", max_tokens=1))
                await until(core.live)  # the engine waits in its step
                for i in range(3):
                    one.add(fake_request(f"a{i}", prompt=[i + 1], stop=["x"], logit_bias={1: 2.0}, temperature=0))
                two.add(fake_request("b", n=2, temperature=1.0))
                await until(lambda: driver._inbox.qsize() == 4)
                core.allow(4)
                await until(lambda: len(got_one.ends()) == 3 and len(got_two.ends()) == 3)
                first = fake_request("a1", prompt=[2])
                tokens = [t for step in got_one.steps for d in step if d.request_id == "a1" for t in d.token_ids]
                assert tokens == tokens_of(first)
                assert [len(step) for step in got_one.steps] == [3, 3, 3], "a frame a step"
                assert [len(step) for step in got_two.steps] == [1, 2, 2, 2]
                assert (await one.stats()).num_running == 0
                assert (await two.stats()).num_steps == driver.stats().num_steps

    asyncio.run(main())


def test_zmq_what_the_engine_could_not_read_ends_no_other_request():
    async def main():
        core = FakeCore(gated=True)
        with running(core) as (driver, _):
            async with connected(driver.serve_zmq()) as (client, recorder):
                client.add(fake_request("good", max_tokens=2))
                await until(core.live)
                bad = fake_request("bad")
                msgspec.structs.force_setattr(bad.params, "early_stopping", 0.0)
                with pytest.raises(InvalidRequestError, match=r"wrong type.*early_stopping"):
                    client.add(bad)
                core.allow(2)
                await until(recorder.ends)
                assert recorder.ends() == [("good", "length")] and not recorder.reasons

    asyncio.run(main())


def test_zmq_abort():
    async def main():
        core = FakeCore(gated=True)
        with running(core) as (driver, _):
            async with connected(driver.serve_zmq()) as (client, recorder):
                client.add(fake_request("r", max_tokens=50))
                await until(core.live)
                client.add(fake_request("other", max_tokens=3))
                client.abort(["r", "unknown"])
                await until(lambda: driver._inbox.qsize() == 2)
                core.allow(4)
                await until(recorder.ends)
                assert core.calls[:4] == [("add", "r"), ("step",), ("add", "other"), ("abort", "r")]
                assert [len(step) for step in recorder.steps] == [1, 1, 1, 1]
                assert recorder.ends() == [("other", "length")]

    asyncio.run(main())


def test_zmq_close_says_bye_and_requests_are_aborted():
    async def main():
        core = FakeCore(gated=True)
        with running(core) as (driver, _):
            async with connected(driver.serve_zmq(heartbeat_s=60)) as (client, _recorder):
                client.add(fake_request("r", max_tokens=10**6))
                await until(core.live)
            await until(lambda: ("abort", "r") in core.calls or core.allow(1))
            with pytest.raises(EngineDeadError, match="closed"):
                client.add(fake_request("late"))
            with pytest.raises(EngineDeadError):
                await client.stats()

    asyncio.run(main())


def test_zmq_a_front_that_vanishes_has_its_requests_aborted():
    """No Bye: only the closed connection tells."""
    core = FakeCore(gated=True)
    with running(core) as (driver, _):
        address = driver.serve_zmq(heartbeat_s=0.05, silence_s=60)
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.linger = 0
        socket.connect(address)
        encode = msgspec.msgpack.Encoder().encode
        socket.send(encode(wire.Hello()))
        assert isinstance(msgspec.msgpack.decode(socket.recv(), type=wire.EngineMessage), wire.Welcome)
        socket.send(encode(wire.Add(fake_request("r", max_tokens=10**6))))
        wait_for(core.live)
        socket.close()
        context.term()
        core.allow(1)
        wait_for(lambda: ("abort", "r") in core.calls or core.allow(1))


def test_zmq_a_silent_front_is_given_up_and_told():
    core = FakeCore(gated=True)
    with running(core) as (driver, _), zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger, socket.rcvtimeo = 0, 5000
        socket.connect(driver.serve_zmq(heartbeat_s=0.02, silence_s=0.1))
        encode = msgspec.msgpack.Encoder().encode
        decoder = msgspec.msgpack.Decoder(wire.EngineMessage)
        socket.send(encode(wire.Hello()))
        socket.send(encode(wire.Add(fake_request("r", max_tokens=10**6))))
        wait_for(core.live)
        core.allow(1)
        wait_for(lambda: ("abort", "r") in core.calls or core.allow(1))
        socket.send(encode(wire.Ping()))
        while not isinstance(message := decoder.decode(socket.recv()), wire.Dead):
            assert isinstance(message, wire.Welcome | wire.Pong | wire.Deltas)
        assert "does not know this front" in message.reason


def test_zmq_heartbeats_keep_idle_connections():
    async def main():
        with running(FakeCore()) as (driver, _):
            address = driver.serve_zmq(heartbeat_s=0.02, silence_s=0.3)
            async with connected(address, heartbeat_s=0.02, silence_s=0.3) as (client, recorder):
                await asyncio.sleep(0.7)
                client.add(fake_request("r"))
                await until(recorder.ends)
                assert recorder.ends() == [("r", "length")]
                assert recorder.reasons == []

    asyncio.run(main())


def test_zmq_a_front_that_stops_reading_is_given_up(monkeypatch):
    monkeypatch.setattr(zmq_server, "_MAX_FRAMES", 8)
    core = FakeCore()
    with running(core) as (driver, other), zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger, socket.rcvhwm = 0, 1
        socket.connect(driver.serve_zmq())
        encode = msgspec.msgpack.Encoder().encode
        socket.send(encode(wire.Hello()))
        for i in range(200):  # wide steps fill the kernel's buffers soon
            socket.send(encode(wire.Add(fake_request(f"r{i}", max_tokens=10**6))))
        wait_for(lambda: any(call[0] == "abort" and "r0" in call for call in core.calls))
        driver.add(other, fake_request("good"))
        wait_for(other.ends)


@pytest.mark.parametrize("frame", [b"", b"\x80\x04N.", b"\x81", msgspec.msgpack.encode({"type": "Add", "request": 1})])
def test_zmq_frames_that_are_no_message(frame):
    core = FakeCore()
    with running(core) as (driver, other), zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger, socket.rcvtimeo = 0, 5000
        socket.connect(driver.serve_zmq())
        socket.send(msgspec.msgpack.encode(wire.Hello()))
        socket.recv()
        socket.send(frame)
        decoder = msgspec.msgpack.Decoder(wire.EngineMessage)
        while not isinstance(message := decoder.decode(socket.recv()), wire.Dead):
            pass
        assert "no message" in message.reason
        driver.add(other, fake_request("good"))
        wait_for(other.ends)


def test_zmq_bad_parameters_do_not_pass_the_wire():
    """Structs are checked again where they arrive."""
    frame = msgspec.msgpack.encode(
        {"type": "Add", "request": {"request_id": "r", "prompt_token_ids": [1], "params": {"n": 10**9}}}
    )
    with pytest.raises(msgspec.ValidationError, match="n must be"):
        msgspec.msgpack.decode(frame, type=wire.FrontMessage)


def test_zmq_a_crash_reaches_the_client():
    async def main():
        core = FakeCore(gated=True)
        with running(core) as (driver, _):
            address = driver.serve_zmq()
            async with connected(address) as (client, recorder):
                client.add(fake_request("r", max_tokens=50))
                await until(core.live)
                core.crash = RuntimeError("boom")
                core.allow(1)
                await until(lambda: recorder.reasons and recorder.ends())
                assert recorder.reasons == ["the engine died: RuntimeError: boom"]
                assert recorder.ends() == [("r", "error")]
                with pytest.raises(EngineDeadError, match="boom"):
                    client.add(fake_request("late"))
            with pytest.raises(EngineDeadError, match="boom"):
                await ZmqClient(address).start(print, print)

    asyncio.run(main())


def test_zmq_shutdown_reaches_the_client_and_removes_the_socket():
    async def main():
        driver = EngineDriver(FakeCore(gated=True))
        driver.start()
        async with connected(driver.serve_zmq()) as (client, recorder):
            folder = Path(driver._server.address.removeprefix("ipc://")).parent
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            client.add(fake_request("r"))
            await until(driver._core.live)
            await asyncio.to_thread(driver.shutdown, 0.05)
            await until(lambda: recorder.reasons)
            driver._core.allow(9)
            assert recorder.reasons == ["the engine was shut down"]
            assert not folder.exists()

    asyncio.run(main())


ENGINE_PROCESS = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from support.driver import FakeCore
from rayllm.engine.driver import EngineDriver
driver = EngineDriver(FakeCore(gated=True))
driver.start()
print(driver.serve_zmq(sys.argv[2]), flush=True)
threading.Event().wait()
"""


def test_zmq_an_engine_process_that_is_killed_is_noticed_at_once(tmp_path):
    async def main(address):
        async with connected(address, silence_s=60) as (client, recorder):
            client.add(fake_request("r"))
            process.kill()
            await until(lambda: recorder.reasons, timeout=5)
            assert "closed the connection" in recorder.reasons[0]
            with pytest.raises(EngineDeadError):
                client.add(fake_request("late"))

    command = [sys.executable, "-c", ENGINE_PROCESS, str(Path(__file__).parents[1]), str(tmp_path / "private" / "s")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            asyncio.run(main(process.stdout.readline().strip()))
        finally:
            process.kill()


def test_zmq_a_silent_engine_is_given_up():
    async def main():
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.linger = 0
            port = router.bind_to_random_port("tcp://127.0.0.1")
            client, recorder = ZmqClient(f"tcp://127.0.0.1:{port}", heartbeat_s=0.02, silence_s=0.2), Recorder()
            with pytest.raises(EngineDeadError, match="no engine answers"):
                await client.start(recorder.steps.append, recorder.reasons.append)
            client = ZmqClient(f"tcp://127.0.0.1:{port}", heartbeat_s=0.02, silence_s=0.2)
            starting = asyncio.create_task(client.start(recorder.steps.append, recorder.reasons.append))
            await until(lambda: router.poll(0))
            while True:  # the first client's Hello and Bye may come first
                identity, _ = router.recv_multipart()
                router.send_multipart([identity, msgspec.msgpack.encode(wire.Welcome(INFO))])
                await asyncio.sleep(0.01)
                if starting.done():
                    break
                await until(lambda: router.poll(0))
            await until(lambda: recorder.reasons)
            assert "silent" in recorder.reasons[0]
            await client.close()

    asyncio.run(main())


def test_zmq_paths(tmp_path):
    with running(FakeCore()) as (driver, _):
        (tmp_path / "open").mkdir(mode=0o755)
        os.chmod(tmp_path / "open", 0o755)
        with pytest.raises(ConfigError, match="0700"):
            driver.serve_zmq(str(tmp_path / "open" / "s"))
        with pytest.raises(ConfigError, match="107 bytes"):
            driver.serve_zmq(str(tmp_path / ("x" * 100) / "s"))
        path = tmp_path / "private" / "s"
        assert driver.serve_zmq(str(path)) == f"ipc://{path}"
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        with pytest.raises(ConfigError, match="already"):
            driver.serve_zmq()
    assert not path.exists()


def test_in_process_client_that_does_not_own_its_driver():
    async def main():
        core = FakeCore(gated=True)
        with running(core) as (driver, other):
            client, recorder = InProcessClient(driver, owns_driver=False), Recorder()
            await client.start(recorder.steps.append, recorder.reasons.append)
            assert client.info() == INFO
            client.add(fake_request("r", max_tokens=50))
            await until(core.live)
            await client.close()
            await until(lambda: ("abort", "r") in core.calls or core.allow(1))
            driver.add(other, fake_request("good", max_tokens=1))
            await until(lambda: other.ends() or core.allow(1))
            assert (await client.stats()).num_steps >= 1

    asyncio.run(main())
