"""The Serve deployments without a cluster: placement, following a restarted engine, relaying, start-up errors."""

import asyncio
import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
from ray.serve.deployment import Application
from unit.serve_fakes import FakeHandle, until

from rayllm.config import BUNDLED_MODEL, EngineConfig, ServerConfig
from rayllm.errors import ConfigError, EngineDeadError, ModelError, StartupError
from rayllm.serve import deployment
from rayllm.serve.deployment import ApiServer, Endpoint, EngineReplica, build_app, engine_placement, resolve_device
from rayllm.serve.launcher import check_before_start, startup_error, with_port
from rayllm.serve.metrics import FrontMetrics
from rayllm.serve.processes import adopt_orphans, end_descendants
from rayllm.serve.relay import RelayClient


def test_one_rank_holds_the_gpu_itself():
    assert engine_placement(EngineConfig(device="cuda"))["ray_actor_options"]["num_gpus"] == 1
    assert engine_placement(EngineConfig(device="cpu"))["ray_actor_options"]["num_gpus"] == 0


@pytest.mark.parametrize("options", [{"tensor_parallel_size": 4}, {"executor": "ray"}])
def test_more_ranks_get_a_bundle_each(options):
    config = EngineConfig(device="cuda", **options)
    placement = engine_placement(config)
    own, *ranks = placement["placement_group_bundles"]
    assert "GPU" not in own
    assert [bundle["GPU"] for bundle in ranks] == [1] * config.tensor_parallel_size
    assert placement["ray_actor_options"]["num_cpus"] <= own["CPU"]
    assert "num_gpus" not in placement["ray_actor_options"]


def test_a_deployment_fits_on_two_cores():
    bundles = engine_placement(EngineConfig(device="cpu", tensor_parallel_size=8))["placement_group_bundles"]
    assert sum(bundle["CPU"] for bundle in bundles) + deployment.NUM_CPUS * 4 < 2


def test_device_is_settled_by_the_cluster():
    assert resolve_device(EngineConfig(), 0).device == "cpu"
    assert resolve_device(EngineConfig(), 2).device == "cuda"
    assert resolve_device(EngineConfig(device="cpu"), 2).device == "cpu"
    with pytest.raises(ConfigError, match=r"needs 4 GPUs; the cluster has 2"):
        resolve_device(EngineConfig(device="cuda", tensor_parallel_size=4), 2)


def test_application_builder_takes_strings_as_the_command_line_has_them():
    args = {"model": BUNDLED_MODEL, "tensor_parallel_size": "2", "device": "cpu", "enforce_eager": "true", "port": "9"}
    assert isinstance(build_app(args), Application)
    with pytest.raises(ConfigError, match="unknown option 'modle'"):
        build_app({"modle": "x"})
    with pytest.raises(ModelError, match="does not exist"):
        build_app({"model": "/no/such"})
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        build_app({"tensor_parallel_size": "3"})


def test_checks_before_anything_starts():
    assert check_before_start(EngineConfig(model=os.path.relpath(BUNDLED_MODEL))).model == BUNDLED_MODEL
    with pytest.raises(ConfigError, match="local"):
        check_before_start(EngineConfig(tensor_parallel_size=2, executor="local"))


def test_ports():
    server = with_port(ServerConfig(port=0))
    assert server.port > 0
    with socket.create_server((server.host, server.port)), pytest.raises(ConfigError, match="cannot listen on 127"):
        with_port(server)
    with pytest.raises(ConfigError, match="cannot listen on 203"):
        with_port(ServerConfig(host="203.0.113.9"))


@pytest.mark.parametrize(
    ("line", "kind", "text"),
    [
        ("rayllm.errors.ModelError: weights are broken", ModelError, "weights are broken"),
        ("rayllm.errors.ConfigError: max_model_len 9 is too long", ConfigError, "max_model_len 9 is too long"),
        ("rayllm.errors.StartupError: rank 1 died", StartupError, "rank 1 died"),
        ("RuntimeError: boom", StartupError, "RuntimeError: boom (Ray's logs"),
    ],
)
def test_errors_of_a_replica_keep_class_and_text(line, kind, text):
    message = (
        "A replica failed to start with exception. Retrying 0 more time(s). Error:\n"
        "Traceback (most recent call last):\n"
        f'  File "replica.py", line 1, in initialize\n    raise\n{line}\n'
    )
    error = startup_error(message)
    assert type(error) is kind
    assert text in str(error)


def test_other_status_messages_are_no_errors():
    assert startup_error("") is None
    assert startup_error("Deployment has 1 replicas that have taken more than 30s to initialize.") is None


def test_no_descendant_is_left_behind():
    """A child that ignores SIGTERM and an orphan of a child are found and ended."""
    code = (
        "import subprocess, sys\n"
        "from rayllm.serve.processes import adopt_orphans, end_descendants\n"
        "adopt_orphans()\n"
        "subprocess.run(['sh', '-c', 'sleep 77 & exit 0'], check=True)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(77)'])\n"
        "print(len(end_descendants(0.3)), end_descendants(0))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.strip() == "2 []"
    assert callable(adopt_orphans)
    assert callable(end_descendants)


class FakeEngine:
    """Stands in for AsyncEngine."""

    def __init__(self, client, _tokenizer):
        self.client = client
        self.dead = None
        self.closed = False

    async def start(self):
        pass

    async def close(self):
        self.closed = True


@pytest.fixture
def api(monkeypatch):
    """An ApiServer in the middle of its life, outside of Serve, and its handle."""
    monkeypatch.setattr("rayllm.engine.async_engine.AsyncEngine", FakeEngine)
    monkeypatch.setattr(deployment, "node_id", lambda: "here")
    monkeypatch.setattr(deployment, "WATCH_S", 0.01)
    return FakeHandle()


def run_api(handle, scenario):
    async def run():
        server = ApiServer.__new__(ApiServer)
        await server.__init__(handle, "model", "name", skip_tokenizer_init=True)
        try:
            await scenario(server)
        finally:
            server._watcher.cancel()

    asyncio.run(run())


def engine_or_none(server):
    try:
        return server.engine()
    except EngineDeadError:
        return None


def test_front_follows_a_restarted_engine(api):
    async def scenario(server):
        first = server.engine()
        assert await server.unhealthy_reason() is None
        api.current = Endpoint("ipc://two", "here")
        await until(lambda: engine_or_none(server) not in (None, first))
        assert first.closed

    run_api(api, scenario)


def test_front_says_so_while_the_engine_is_away(api):
    async def scenario(server):
        first = server.engine()
        api.gone = True
        await until(lambda: engine_or_none(server) is None)
        assert "restarted" in await server.unhealthy_reason()
        assert first.closed
        api.gone = False
        await until(lambda: engine_or_none(server) is not None)

    run_api(api, scenario)


def test_front_reconnects_a_broken_connection(api):
    async def scenario(server):
        first = server.engine()
        first.dead = "the connection was closed"
        with pytest.raises(EngineDeadError, match="the connection was closed"):
            server.engine()
        await until(lambda: engine_or_none(server) not in (None, first))

    run_api(api, scenario)


def test_front_refuses_requests_while_the_engine_drains(api):
    async def scenario(server):
        first = server.engine()
        api.current = Endpoint("ipc://one", "here", draining=True)
        await until(lambda: engine_or_none(server) is None)
        assert not first.closed  # what runs goes on
        assert await server.unhealthy_reason() == "the server is shutting down"

    run_api(api, scenario)


def test_front_relays_to_another_node(api):
    api.current = Endpoint("ipc://one", "elsewhere")

    async def scenario(server):
        assert isinstance(server.engine().client, RelayClient)

    run_api(api, scenario)


def test_engine_adds_up_the_figures_of_all_fronts():
    replica = SimpleNamespace(_figures={})

    def exchange(server_id, **finished):
        return asyncio.run(EngineReplica.exchange_metrics(replica, server_id, FrontMetrics(finished=finished)))

    exchange("a", stop=1)
    exchange("a", stop=3)
    total = exchange("b", stop=2, length=1)
    assert total.finished == {"stop": 5, "length": 1}
