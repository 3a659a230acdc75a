"""Health of a stalled engine, draining, and the exchange of loads: driver, replica and API server without a cluster."""

import asyncio
import os
import stat
import sys

import pytest
from support.app import Api
from support.driver import FakeCore, fake_request, wait_for
from support.serve import Answers, Method

from rayllm.api.types import Load
from rayllm.config.options import EngineConfig, ModelConfig, ServerConfig
from rayllm.errors import EngineDeadError, StartupError
from rayllm.executor import ray_cluster
from rayllm.executor.ray_cluster import ensure_token
from rayllm.serve.cluster import application as deployment
from rayllm.serve.cluster import front as model_front
from rayllm.serve.cluster import replica as engine_replica
from rayllm.serve.cluster.application import make_application
from rayllm.serve.cluster.front import FrontModel, ModelFront
from rayllm.serve.cluster.replica import EngineReplica, FrontReport
from rayllm.serve.http.telemetry import FrontMetrics


class Front:
    """Of the driver; keeps what comes."""

    def __init__(self):
        self.deltas = []
        self.reason = None

    def deliver(self, deltas):
        self.deltas += deltas

    def dead(self, reason):
        self.reason = reason


class Handle:
    """A Serve handle of a replica in this process."""

    def __init__(self, replica):
        self._replica = replica

    def __getattr__(self, name):
        return Method(getattr(self._replica, name))

    def broadcast(self, name, *args):
        return Answers([getattr(self._replica, name)(*args)])


@pytest.fixture
def engine(monkeypatch):
    """(core, driver, front, replica) with a core whose steps wait for `core.allow`."""
    monkeypatch.setattr("rayllm.engine.engine.build_engine_core", lambda _: FakeCore(gated=True))
    for name, value in (("node_id", "here"), ("replica_id", "one"), ("replica_index", 0)):
        monkeypatch.setattr(engine_replica, name, lambda value=value: value)
    switch_interval = sys.getswitchinterval()
    replica = EngineReplica({"device": "cpu"}, drain_timeout=30.0)
    assert sys.getswitchinterval() < switch_interval
    front = Front()
    replica._driver.attach(front)
    yield replica._driver._core, replica._driver, front, replica
    replica._driver._core.allow(1000)
    replica._driver.shutdown(timeout=5)
    sys.setswitchinterval(switch_interval)


def test_a_stalled_engine_makes_health_a_503(engine, monkeypatch):
    """From the core up to GET /health: work is queued, and no step finishes."""
    core, driver, front, replica = engine
    monkeypatch.setattr(engine_replica, "STEP_DEADLINE_S", 0.05)
    monkeypatch.setattr("rayllm.engine.async_engine.AsyncEngine", FakeAsyncEngine)
    monkeypatch.setattr(model_front, "node_id", lambda: "here")
    model = ModelFront(FrontModel(name="m", folder=""), Handle(replica), None, "server")

    async def fresh_reason():
        await model.refresh()
        return await model.unhealthy_reason()

    api = Api()
    api.state.unhealthy_reason = fresh_reason
    assert api.get("/health").status_code == 200, "an idle engine is healthy"
    driver.add(front, fake_request("a", max_tokens=2))
    wait_for(lambda: not driver.healthy(0.05))
    response = api.get("/health")
    assert response.status_code == 503
    error = response.json()["error"]
    assert error["code"] == "unhealthy"
    assert "work is queued and no step has finished for" in error["message"]
    assert "limit 0.05 s" in error["message"]
    with pytest.raises(EngineDeadError, match="no step has finished"):  # what makes Serve restart the replica
        asyncio.run(replica.check_health())
    core.allow(10)
    wait_for(lambda: not driver.busy)
    assert api.get("/health").status_code == 200


class FakeAsyncEngine:
    """Stands in for AsyncEngine."""

    dead = None

    def __init__(self, client, _tokenizer):
        pass

    async def start(self):
        pass

    async def close(self):
        pass


def report(server_id, total=Load(), here=Load(), **finished):
    """What an API server sends to the replica "one"."""
    metrics = FrontMetrics()
    for reason, count in finished.items():
        metrics.finished[reason].inc(count)
    return FrontReport(server_id, total, {"one": here, "two": Load(99, 99)}, metrics.snapshot())


def test_running_requests_finish_before_the_engine_ends(engine):
    core, driver, front, replica = engine
    driver.add(front, fake_request("a", max_tokens=3))

    async def scenario():
        assert not (await replica.exchange(report("one"))).draining
        stopping = asyncio.create_task(replica.stop(30))
        await asyncio.sleep(0.1)
        assert (await replica.exchange(report("one"))).draining
        core.allow(3)
        await asyncio.sleep(0.3)
        assert not stopping.done(), "the front may still send"
        driver.detach(front)
        await asyncio.wait_for(stopping, 10)

    asyncio.run(scenario())
    assert [d.finish_reason for d in front.deltas] == [None, None, "length"]
    assert driver.dead == "the engine was shut down"


def test_a_request_of_the_last_moment_still_finds_the_engine(engine):
    """A front that has not heard of the drain sends one more, and disconnects when it is done."""
    core, driver, front, replica = engine

    async def scenario():
        stopping = asyncio.create_task(replica.stop(30))
        await asyncio.sleep(0.2)
        driver.add(front, fake_request("a", max_tokens=2))
        core.allow(2)
        await asyncio.to_thread(wait_for, lambda: front.deltas and front.deltas[-1].finish_reason)
        driver.detach(front)
        await asyncio.wait_for(stopping, 5)

    asyncio.run(scenario())
    assert [d.finish_reason for d in front.deltas] == [None, "length"]


def test_what_does_not_finish_in_time_gets_an_answer(engine):
    core, driver, front, replica = engine
    driver.add(front, fake_request("a", max_tokens=3))
    wait_for(lambda: driver.stats() is not None)

    async def scenario():
        stopping = asyncio.create_task(replica.stop(0.1))
        await asyncio.sleep(0.3)
        core.allow(1)
        await asyncio.wait_for(stopping, 10)

    asyncio.run(scenario())
    assert front.reason == "the engine was shut down"
    assert front.deltas[-1].finish_reason == "error"


def test_who_stops_later_can_only_shorten_the_drain(engine):
    *_, replica = engine

    async def scenario():
        long = asyncio.create_task(replica.__del__())
        await asyncio.sleep(0.1)
        assert not long.done()
        await asyncio.wait_for(replica.stop(0.1), 5)
        await asyncio.wait_for(long, 1)

    asyncio.run(scenario())


def test_each_front_hears_of_the_others_load(engine):
    *_, replica = engine

    async def scenario():
        async def exchange(*args):
            answer = await replica.exchange(report(*args))
            return answer.others_total, answer.others_here

        assert await exchange("one", Load(3, 30), Load(1, 10)) == (Load(), Load())
        assert await exchange("two", Load(1, 10), Load(1, 5)) == (Load(3, 30), Load(1, 10))
        assert await exchange("three") == (Load(4, 40), Load(2, 15))
        assert await exchange("one", Load(2, 0), Load(2, 0)) == (Load(1, 10), Load(1, 5))
        assert replica.record_autoscaling_stats() == {"queued_tokens": 5.0, "completions": 3.0}

    asyncio.run(scenario())


def test_fronts_that_are_gone_do_not_count(engine, monkeypatch):
    *_, replica = engine
    monkeypatch.setattr(engine_replica, "GONE_S", 0.05)

    async def scenario():
        await replica.exchange(report("one", Load(5, 5), Load(5, 5)))
        await asyncio.sleep(0.1)
        assert replica.record_autoscaling_stats() == {"queued_tokens": 0.0, "completions": 0.0}
        assert (await replica.exchange(report("two", Load(1, 1)))).others_total == Load()

    asyncio.run(scenario())


def test_a_replica_keeps_the_figures_of_a_bounded_number_of_fronts(engine, monkeypatch):
    *_, replica = engine
    monkeypatch.setattr(engine_replica, "MAX_SERVERS", 2)

    async def scenario():
        for server_id, count in (("a", 1), ("b", 2), ("a", 3), ("c", 4)):
            answer = await replica.exchange(report(server_id, stop=count))
        return answer.metrics

    kept = asyncio.run(scenario())
    assert kept.keys() == {"a", "c"}
    assert b'finished_reason="stop"} 3.0' in kept["a"]
    assert b'finished_reason="stop"} 4.0' in kept["c"]


def test_figures_of_a_replica_that_is_gone_are_not_taken_for_anothers(engine):
    *_, replica = engine
    assert asyncio.run(replica.stats("one")) == asyncio.run(replica.stats())
    with pytest.raises(EngineDeadError, match="two is gone"):
        asyncio.run(replica.stats("two"))


def test_serve_waits_longer_than_the_drain(monkeypatch):
    made = []
    real = deployment.serve.deployment
    monkeypatch.setattr(deployment.serve, "deployment", lambda **options: made.append(options) or real(**options))
    server = ServerConfig(drain_timeout=5, replica_drain_timeout=60, log_format="json", served_model_name="m")
    make_application([ModelConfig(EngineConfig(device="cpu"), server)], server)
    assert [options["name"] for options in made] == ["engine-m", "ApiServer"]
    assert all(options["graceful_shutdown_timeout_s"] > 60 for options in made)
    assert all(options["logging_config"].encoding == "JSON" for options in made)


# ---- Ray's token


def test_the_token_is_made_once_and_private(tmp_path):
    path = tmp_path / "home" / ".ray" / "auth_token"
    ensure_token(path)
    token = path.read_text()
    assert len(token) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    ensure_token(path)
    assert path.read_text() == token
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="cannot be made"):
        ensure_token(tmp_path / "file" / "auth_token")


@pytest.mark.parametrize("variable", [None, "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"])
def test_a_cluster_of_ours_has_a_token_and_no_dashboard(monkeypatch, tmp_path, variable):
    asked = {}
    made = []
    monkeypatch.setattr(ray_cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray_cluster.ray, "init", lambda **options: asked.update(options))
    monkeypatch.setattr(ray_cluster, "has_no_cluster", lambda: True)
    monkeypatch.setattr(ray_cluster, "ensure_token", made.append)
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "x")
    assert ray_cluster.connect_to_ray() is True
    assert (asked["address"], asked["include_dashboard"]) == ("local", False)
    assert len(made) == (variable is None)
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
