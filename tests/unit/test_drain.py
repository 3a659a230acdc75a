"""Health of a stalled engine, draining, and the exchange of loads: driver, replica and API server without a cluster."""

import asyncio
import os
import stat

import pytest
from unit.app_fakes import Api
from unit.serve_fakes import FakeHandle, Method, until
from unit.test_driver_fakes import FakeCore, fake_request, wait_for

from rayllm import ray_cluster
from rayllm.config import EngineConfig, ServerConfig
from rayllm.errors import EngineDeadError, StartupError
from rayllm.ray_cluster import ensure_token
from rayllm.serve import deployment, engine_replica
from rayllm.serve.admission import Load
from rayllm.serve.api_errors import ApiError
from rayllm.serve.deployment import ApiServer, FrontOptions, make_application
from rayllm.serve.engine_replica import Endpoint, EngineReplica


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


@pytest.fixture
def engine(monkeypatch):
    """(core, driver, front, replica) with a core whose steps wait for `core.allow`."""
    monkeypatch.setattr("rayllm.engine.core.build_engine_core", lambda _: FakeCore(gated=True))
    monkeypatch.setattr(engine_replica, "node_id", lambda: "here")
    replica = EngineReplica({"device": "cpu"}, drain_timeout=30.0)
    front = Front()
    replica._driver.attach(front)
    yield replica._driver._core, replica._driver, front, replica
    replica._driver._core.allow(1000)
    replica._driver.shutdown(timeout=5)


def test_a_stalled_engine_makes_health_a_503(engine, monkeypatch):
    """From the core up to GET /health: work is queued, and no step finishes."""
    core, driver, front, replica = engine
    monkeypatch.setattr(engine_replica, "STEP_DEADLINE_S", 0.05)
    monkeypatch.setattr("rayllm.engine.async_engine.AsyncEngine", FakeAsyncEngine)
    monkeypatch.setattr(deployment, "node_id", lambda: "here")
    server = ApiServer.__new__(ApiServer)

    async def scenario():
        await server.__init__(Handle(replica), "model", "name", skip_tokenizer_init=True)
        server._watcher.cancel()

    asyncio.run(scenario())
    api = Api()
    api.state.unhealthy_reason = server.unhealthy_reason
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
    wait_for(lambda: not driver.stats().num_running)
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


def test_running_requests_finish_before_the_engine_ends(engine):
    core, driver, front, replica = engine
    driver.add(front, fake_request("a", max_tokens=3))

    async def scenario():
        await replica.exchange_load("one", Load(1, 0))
        stopping = asyncio.create_task(replica.stop())
        await asyncio.sleep(0.1)
        endpoint = await replica.endpoint("one")
        assert endpoint.draining
        core.allow(2)
        await asyncio.sleep(0.1)
        assert not stopping.done()
        core.allow(1)
        await asyncio.wait_for(stopping, 10)

    asyncio.run(scenario())
    assert [d.finish_reason for d in front.deltas] == [None, None, "length"]
    assert driver.dead == "the engine was shut down"


def test_the_engine_waits_until_its_fronts_know(engine):
    """So that a request that a front accepts in the last moment still finds it."""
    *_, replica = engine

    async def scenario():
        for server in ("one", "two"):
            await replica.exchange_load(server, Load())
        stopping = asyncio.create_task(replica.stop())
        await asyncio.sleep(0.1)
        assert not stopping.done(), "nothing runs, but nobody knows"
        await replica.endpoint("one")
        await replica.endpoint()
        await asyncio.sleep(0.1)
        assert not stopping.done()
        await replica.endpoint("two")
        await asyncio.wait_for(stopping, 5)

    asyncio.run(scenario())


def test_fronts_that_are_gone_are_not_waited_for(engine, monkeypatch):
    *_, replica = engine
    monkeypatch.setattr(engine_replica, "GONE_S", 0.05)

    async def scenario():
        await replica.exchange_load("one", Load(5, 5))
        await asyncio.sleep(0.1)
        assert await replica.exchange_load("two", Load(1, 1)) == Load()
        await asyncio.wait_for(replica.stop(), 5)

    asyncio.run(scenario())


def test_what_does_not_finish_in_time_gets_an_answer(engine):
    core, driver, front, replica = engine
    replica._drain_timeout = 0.1
    driver.add(front, fake_request("a", max_tokens=3))
    wait_for(lambda: driver.stats() is not None)

    async def scenario():
        stopping = asyncio.create_task(replica.stop())
        await asyncio.sleep(0.3)
        core.allow(1)
        await asyncio.wait_for(stopping, 10)

    asyncio.run(scenario())
    assert front.reason == "the engine was shut down"
    assert front.deltas[-1].finish_reason == "error"


def test_each_front_hears_of_the_others_load(engine):
    *_, replica = engine

    async def scenario():
        assert await replica.exchange_load("one", Load(3, 30)) == Load()
        assert await replica.exchange_load("two", Load(1, 10)) == Load(3, 30)
        assert await replica.exchange_load("three", Load()) == Load(4, 40)
        assert await replica.exchange_load("one", Load(2, 0)) == Load(1, 10)

    asyncio.run(scenario())


def test_a_front_counts_the_others_and_refuses_while_the_engine_drains(monkeypatch):
    monkeypatch.setattr("rayllm.engine.async_engine.AsyncEngine", FakeAsyncEngine)
    monkeypatch.setattr(deployment, "node_id", lambda: "here")
    monkeypatch.setattr(deployment, "WATCH_S", 0.01)
    handle = FakeHandle()
    handle.others = Load(3, 0)
    options = FrontOptions(server=ServerConfig(max_queued_requests=1), max_running=4)

    async def scenario():
        server = ApiServer.__new__(ApiServer)
        await server.__init__(handle, "model", "name", skip_tokenizer_init=True, options=options)
        await until(lambda: server.admission.others == Load(3, 0))
        server.admission.enter()
        server.admission.enter()
        with pytest.raises(ApiError):
            server.admission.enter()
        await until(lambda: handle.loads[-1] == Load(2, 0))
        handle.current = Endpoint("ipc://one", "here", draining=True)
        await until(lambda: server._endpoint.draining)
        with pytest.raises(EngineDeadError, match="shutting down"):
            server.engine()
        server._watcher.cancel()

    asyncio.run(scenario())


def test_serve_waits_longer_than_the_drain(monkeypatch):
    made = []
    real = deployment.serve.deployment
    monkeypatch.setattr(deployment.serve, "deployment", lambda **options: made.append(options) or real(**options))
    make_application(EngineConfig(device="cpu"), ServerConfig(drain_timeout=60, log_format="json"))
    assert [options["name"] for options in made] == ["EngineReplica", "ApiServer"]
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
    monkeypatch.setattr(ray_cluster, "_has_no_cluster", lambda: True)
    monkeypatch.setattr(ray_cluster, "ensure_token", made.append)
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "x")
    assert ray_cluster.connect_to_ray() is True
    assert (asked["address"], asked["include_dashboard"]) == ("local", False)
    assert len(made) == (variable is None)
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
