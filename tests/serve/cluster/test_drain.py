"""A replica with a core that makes up tokens: it registers, tells its health and load, and drains. No Ray."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import asynccontextmanager

import httpx
import pytest
from support.app import FakeState
from support.driver import FakeCore, fake_request, fake_tokens, until, whole
from support.serve import LocalDirectory, engine_member, place

from rayllm import timeouts
from rayllm.api import wire
from rayllm.api.types import Load
from rayllm.engine.client import EngineClient
from rayllm.errors import EngineDeadError
from rayllm.serve.cluster.directory import ServerMember
from rayllm.serve.cluster.front import FrontModel, ModelFront
from rayllm.serve.cluster.replica import EngineReplica
from rayllm.serve.http.app import create_app


@pytest.fixture(autouse=True)
def _short_stall(monkeypatch):
    """Engines that have work and finish no step are unhealthy soon."""
    monkeypatch.setattr(timeouts, "STALL_S", 0.05)


class Cluster:
    """A replica whose core's steps wait for `core.allow`, and its directory."""

    def __init__(self, drain_timeout, leaves_in=math.inf):
        self.core = FakeCore(gated=True)
        self.directory = LocalDirectory()
        self.replica = EngineReplica.__new__(EngineReplica)
        self._made = self.replica.__init__(
            None,
            "m",
            drain_timeout,
            "none",
            lambda _config: self.core,
            place("one", leaves_in=leaves_in),
            self.directory,
        )

    async def start(self):
        await self._made
        await until(self.members)

    def members(self):
        return self.directory.ask().engines

    def stop(self):
        """What Serve does."""
        return asyncio.create_task(self.replica.__del__())

    @asynccontextmanager
    async def client(self, **options):
        client = EngineClient(self.members()[0].endpoint.ipc, None, **options)
        try:
            await client.connect()
            yield client
        finally:
            await client.close()


def scenario(drain_timeout=30.0, **options):
    """Runs the test with a cluster whose replica Serve gives so many seconds, and then ends."""

    def decorate(test):
        def run():
            async def body():
                cluster = Cluster(drain_timeout, **options)
                await cluster.start()
                try:
                    await asyncio.wait_for(test(cluster), 20)
                finally:
                    cluster.core.allow(1000)
                    cluster.directory.stop(0)
                    await asyncio.wait_for(cluster.stop(), 10)
                assert not cluster.members()
                assert ("shutdown",) in cluster.core.calls

            asyncio.run(body())

        run.__name__ = test.__name__
        return run

    return decorate


def start(client, *args, **fields):
    return asyncio.create_task(whole(client.generate(fake_request(*args, **fields))))


@scenario()
async def test_it_is_in_the_directory_and_listens_there(cluster):
    (member,) = cluster.members()
    assert (member.member_id, member.model, member.index, member.node_id) == ("one", "m", 0, "here")
    assert not member.draining and not member.endpoint.tcp
    assert (await cluster.replica.info()).model == "fake"
    await cluster.replica.check_health()
    cluster.directory.ask(ServerMember("elsewhere", "another node"))
    await until(lambda: cluster.members()[0].endpoint.tcp.startswith("tcp://127.0.0.1:"))
    keys, key = cluster.directory.ask().front_keys, cluster.members()[0].endpoint.public_key
    client = EngineClient(cluster.members()[0].endpoint.tcp, None, server_key=key, keys=keys)
    await client.connect()
    await client.close()


def test_it_has_started_when_every_api_server_of_its_model_is_connected():
    """Serve ends the replicas of the version before then, and an API server must have somewhere to send requests."""

    async def body():
        cluster = Cluster(30)
        cluster.directory.ask(ServerMember("of another version", "here", ["m"], version=wire.VERSION - 1))
        starting = asyncio.create_task(cluster.start())
        await until(cluster.members)
        await asyncio.sleep(3 * timeouts.REGISTER_S)
        assert not starting.done(), "who cannot talk to it does not count, but others will come"
        for member in (
            ServerMember("front", "here", ["m"]),
            ServerMember("of another model", "here", ["n"]),
            ServerMember("that goes", "here", ["m"], draining=True),
        ):
            cluster.directory.ask(member)
        await asyncio.sleep(3 * timeouts.REGISTER_S)
        assert not starting.done()
        async with cluster.client(front_id="front"):
            await asyncio.wait_for(starting, 5)
        await asyncio.wait_for(cluster.stop(), 10)

    asyncio.run(body())


@scenario()
async def test_running_requests_finish_before_the_engine_ends(cluster):
    async with cluster.client() as client:
        request = fake_request("a", max_tokens=3)
        running = asyncio.create_task(whole(client.generate(request)))
        await until(lambda: cluster.core.live())
        stopping = cluster.stop()
        await until(lambda: client.engine_beat.draining and cluster.members()[0].draining)
        cluster.core.allow(3)
        assert (await running).outputs[0].token_ids == fake_tokens(request)
        await asyncio.sleep(0.3)
        assert not stopping.done(), "the front may still send"
    await asyncio.wait_for(stopping, 10)
    assert not cluster.members()


@pytest.mark.parametrize(
    ("contradiction", "said"),
    [("", "its records agree with each other"), ("rows are lost", "contradict each other: rows are lost")],
)
def test_it_says_whether_its_records_agree(caplog, contradiction, said):
    @scenario()
    async def end(cluster):
        cluster.core.contradiction = contradiction
        await asyncio.wait_for(cluster.stop(), 10)

    with caplog.at_level("INFO", "ray.serve"):
        end()
    assert said in caplog.text


@scenario()
async def test_a_request_of_the_last_moment_still_finds_the_engine(cluster):
    """A front that has not heard of the drain sends one more, and disconnects when it is done."""
    async with cluster.client() as client:
        stopping = cluster.stop()
        await asyncio.sleep(0.2)
        running = start(client, "a", max_tokens=2)
        cluster.core.allow(2)
        assert (await running).outputs[0].finish_reason == "length"
    await asyncio.wait_for(stopping, 5)


@scenario(drain_timeout=0.1)
async def test_what_does_not_finish_in_time_gets_an_answer(cluster):
    async with cluster.client() as client:
        running = start(client, "a", max_tokens=3)
        await until(lambda: cluster.core.live())
        stopping = cluster.stop()
        await asyncio.sleep(0.3)
        cluster.core.allow(1)
        await asyncio.wait_for(stopping, 10)
        with pytest.raises(EngineDeadError, match="the engine was shut down"):
            await running


@scenario(leaves_in=60)
async def test_on_a_host_that_goes_it_serves_until_there_is_another(cluster):
    """Serve may not have waited for one."""
    async with cluster.client() as client:
        cluster.directory.ask(engine_member("drains too", "there", draining=True))
        cluster.directory.ask(engine_member("goes with it", "here"))
        stopping = cluster.stop()
        await asyncio.sleep(3 * timeouts.REGISTER_S)
        assert not client.engine_beat.draining
        assert cluster.members()[0].draining, "no successor for others that go"
        cluster.core.allow(2)
        await whole(client.generate(fake_request("a", max_tokens=2)))
        cluster.directory.ask(engine_member("another", "there"))
        await until(lambda: client.engine_beat.draining)
    await asyncio.wait_for(stopping, 5)
    for other in ("another", "drains too", "goes with it"):
        cluster.directory.leave(other)


@scenario(leaves_in=timeouts.LEAVE_S + 0.5)
async def test_it_has_handed_on_what_runs_before_its_host_goes(cluster):
    async with cluster.client() as client:
        running = start(client, "a", max_tokens=3)
        await until(lambda: cluster.core.live())
        stopping = cluster.stop()
        await asyncio.sleep(0.2)
        assert not running.done()
        await asyncio.sleep(0.5)
        cluster.core.allow(1)
        with pytest.raises(EngineDeadError, match="the engine was shut down"):
            await asyncio.wait_for(running, 5)
    await asyncio.wait_for(stopping, 5)


@scenario()
async def test_who_stops_later_can_only_shorten_the_drain(cluster):
    async with cluster.client():
        stopping = cluster.stop()
        await asyncio.sleep(0.1)
        assert not stopping.done()
        cluster.directory.stop(0.1)  # what `rayllm launch` does
        await asyncio.wait_for(stopping, 5)


@scenario()
async def test_the_autoscaler_hears_what_all_fronts_have_here(cluster):
    def beat(completions, tokens):
        return lambda: wire.FrontBeat(Load(completions, tokens), Load(9, 99))

    def stats():
        return cluster.replica.record_autoscaling_stats()

    assert stats() == {"queued_tokens": 0.0, "batches": 0.0}
    async with cluster.client(beat=beat(1, 10)), cluster.client(beat=beat(2, 5)):
        await until(lambda: stats() == {"queued_tokens": 15.0, "batches": 3 / 256})
    await until(lambda: stats() == {"queued_tokens": 0.0, "batches": 0.0})


@scenario()
async def test_a_stalled_engine_makes_health_a_503(cluster):
    """From the core up to GET /health: work is queued, and no step finishes."""
    front = ModelFront(FrontModel(name="m", folder=""), None, "server", "here")
    state = FakeState()
    state.unhealthy_reason = front.unhealthy_reason

    async def updated():
        view = cluster.directory.ask()
        await front.update(view.engines, view.front_keys)

    async def wait_for_beat(unhealthy):
        end = time.monotonic() + 10
        while (await front.unhealthy_reason() is not None) != unhealthy:
            assert time.monotonic() < end
            await asyncio.sleep(0.02)

    transport = httpx.ASGITransport(app=create_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        await updated()
        await until(lambda: front.num_replicas == 1)
        assert (await http.get("/health")).status_code == 200, "an idle engine is healthy"
        running = start(front, "a", max_tokens=2)
        await wait_for_beat(unhealthy=True)
        error = (await http.get("/health")).json()["error"]
        assert error["code"] == "unhealthy"
        assert "work is queued and no step has finished for" in error["message"]
        assert "limit 0.05 s" in error["message"]
        with pytest.raises(EngineDeadError, match="no step has finished"):  # what makes Serve restart the replica
            await cluster.replica.check_health()
        cluster.core.allow(10)
        await running
        await wait_for_beat(unhealthy=False)
        assert (await http.get("/health")).status_code == 200
    await front.close()
