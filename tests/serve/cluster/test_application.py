"""The application for Ray Serve: what the models' options come to, placement, versions, updates. No cluster."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from ray.serve.deployment import Application

from rayllm.config.options import BUNDLED_MODEL, EngineConfig, ModelConfig, ServerConfig
from rayllm.config.resolved import resolve
from rayllm.errors import ConfigError, ModelError
from rayllm.serve.cluster import application
from rayllm.serve.cluster.application import (
    NUM_CPUS,
    QueuedTokensPolicy,
    autoscaling_options,
    build_app,
    default_api_servers,
    engine_placement,
    make_application,
    resolve_models,
)
from rayllm.serve.cluster.capacity import Capacity, planned_capacity


def model(server=ServerConfig(), **options):
    return ModelConfig(EngineConfig(**{"device": "cpu", **options}), server)


def named(name, **options):
    return model(ServerConfig(served_model_name=name), **options)


@pytest.fixture
def deployed(monkeypatch):
    """Collects the options of all deployments, in the order in which they are made."""
    made = []
    real = application.serve.deployment
    monkeypatch.setattr(application.serve, "deployment", lambda **options: made.append(options) or real(**options))
    return made


def test_one_rank_holds_the_gpu_itself():
    assert engine_placement(resolve(EngineConfig(device="cuda"), 1))["ray_actor_options"]["num_gpus"] == 1
    assert engine_placement(resolve(EngineConfig(device="cpu"), 1))["ray_actor_options"]["num_gpus"] == 0


@pytest.mark.parametrize("options", [{"tensor_parallel_size": 4}, {"executor": "ray"}])
def test_more_ranks_get_a_bundle_each(options):
    config = resolve(EngineConfig(device="cuda", **options), 8)
    placement = engine_placement(config)
    own, *ranks = placement["placement_group_bundles"]
    assert "GPU" not in own
    assert [bundle["GPU"] for bundle in ranks] == [1] * config.tp
    assert placement["ray_actor_options"]["num_cpus"] <= own["CPU"]
    assert "num_gpus" not in placement["ray_actor_options"]


def test_a_deployment_fits_on_two_cores():
    config = resolve(EngineConfig(device="cpu", tensor_parallel_size=8), 0)
    bundles = engine_placement(config)["placement_group_bundles"]
    assert sum(bundle["CPU"] for bundle in bundles) + NUM_CPUS * 4 < 2


def test_replicas_of_all_models_need_gpus():
    server = ServerConfig(num_replicas=2)
    models = [
        model(server.model_copy(update={"served_model_name": device}), device=device)
        for device in ("cuda", "cpu", "auto")
    ]
    found = resolve_models(models, Capacity(4))
    assert [(each.name, each.engine.device) for each in found] == [("cuda", "cuda"), ("cpu", "cpu"), ("auto", "cuda")]
    with pytest.raises(ConfigError, match=r"the replicas need 4 GPUs \(cuda 2, auto 2\); the cluster has 3"):
        resolve_models(models, Capacity(3))


def test_a_cluster_that_may_grow_somehow_gets_the_gpus_that_are_asked_for():
    large = model(device="cuda", tensor_parallel_size=4)
    with pytest.raises(ConfigError, match="needs 4 GPUs"):
        resolve_models([large], Capacity(1))
    assert resolve_models([large], Capacity(0, is_open=True))[0].engine.device == "cuda"
    unspecified = model(device="auto", tensor_parallel_size=4)
    assert resolve_models([unspecified], Capacity(1, is_open=True))[0].engine.device == "cuda"
    assert resolve_models([unspecified], Capacity(0, is_open=True))[0].engine.device == "cpu"


CLUSTER = yaml.safe_load(Path(__file__).parents[3].joinpath("cluster.yaml").read_text())


def test_an_autoscaler_has_hosts_for_some_replicas():
    """The pool of hosts with four GPUs begins with none."""
    capacity = planned_capacity(CLUSTER, 1, 2)
    large = model(ServerConfig(num_replicas=2), device="auto", tensor_parallel_size=4)
    (found,) = resolve_models([large], capacity)
    assert found.engine.device == "cuda" and found.on_one_host
    assert engine_placement(found.engine, found.on_one_host)["placement_group_strategy"] == "STRICT_PACK"
    (spread,) = resolve_models([model(device="auto", tensor_parallel_size=8)], capacity)
    assert not spread.on_one_host, "no host has eight"
    with pytest.raises(
        ConfigError,
        match=r"the replicas need 12 GPUs \(m 12\); the cluster has 1, and its autoscaler can "
        r"bring it to 10 \(at most 4 nodes: 4 gpu-1 of 1, 2 gpu-4 of 4\)",
    ):
        resolve_models(
            [model(ServerConfig(num_replicas=3, served_model_name="m"), tensor_parallel_size=4, device="auto")],
            capacity,
        )
    small = [named(name, device="auto", tensor_parallel_size=4) for name in "abc"]
    with pytest.raises(ConfigError, match=r"need 12 GPUs \(a 4, b 4, c 4\)"):
        resolve_models(small, capacity)


def test_node_types_that_say_nothing():
    """As on machines of one's own, whose GPUs Ray finds when they have come."""
    config = {"max_workers": 2, "head_node_type": "h", "available_node_types": {"h": {"resources": {}}, "w": {}}}
    assert planned_capacity(config, 0, 2).is_open
    whole = planned_capacity(config, 2, 3)
    assert not whole.is_open and whole.most_gpus == 2 and not planned_capacity(config, 0, 3).has_hosts_for(1, 1)
    config["available_node_types"]["w"] = {"resources": {"CPU": 4}}
    assert resolve_models([model(device="auto")], planned_capacity(config, 0, 1))[0].engine.device == "cpu"
    with pytest.raises(ConfigError, match="needs a GPU"):
        resolve_models([model(device="cuda")], planned_capacity(config, 0, 1))


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
    with pytest.raises(ConfigError, match="api_key would be shown by Ray Serve"):
        build_app({"api_key": "secret", "device": "cpu"})


def test_api_servers_come_with_the_cores(monkeypatch, deployed):
    assert [default_api_servers([cores]) for cores in (1, 2, 7, 8, 16, 192)] == [1, 1, 1, 2, 4, 8]
    assert default_api_servers([2, 2]) == 2, "no single one for several hosts"
    assert default_api_servers([192] * 9) == 64
    assert default_api_servers([2], grows=True) == 2, "there will be more hosts"
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(application, "cores_by_host", lambda: [16])  # if this process is connected to a Ray
    for options, count in (({}, 4), ({"num_api_servers": "3"}, 3)):
        build_app({"device": "cpu", **options})
        assert (deployed[-1]["name"], deployed[-1]["num_replicas"]) == ("ApiServer", count)


def test_serve_waits_longer_than_the_drain(deployed):
    drains = {"replica_drain_timeout": 60, "api_server_drain_timeout": 300}
    server = ServerConfig(log_format="json", served_model_name="m", **drains)
    make_application(resolve_models([model(server)], Capacity(0)), server)
    assert [options["name"] for options in deployed] == ["engine-m", "ApiServer"]
    for options, drain in zip(deployed, (60, 300), strict=True):
        assert drain < options["graceful_shutdown_timeout_s"] < drain + 30
    assert all(options["logging_config"].encoding == "JSON" for options in deployed)


def test_a_new_version_is_what_replicas_are_made_of(monkeypatch):
    """Serve replaces the replicas of another version, and only those."""
    found = []
    monkeypatch.setattr(application, "with_version", lambda deployment, version: found.append(version) or deployment)

    def versions(server=ServerConfig(), **options):
        other = model(server.model_copy(update={"served_model_name": "other"}))
        make_application(resolve_models([model(server, **options), other], Capacity(0)), server)
        last, found[:] = found[:], []
        return last

    first = versions()
    assert len(first) == 3, "two engines and the API servers"
    assert versions() == first
    assert [a == b for a, b in zip(versions(block_size=8), first, strict=True)] == [False, True, True]
    assert [a == b for a, b in zip(versions(max_num_seqs=8), first, strict=True)] == [False, True, True]
    skipping = versions(skip_tokenizer_init=True)
    assert [a == b for a, b in zip(skipping, first, strict=True)] == [False, True, False], "API servers need to know"
    more = versions(ServerConfig(num_replicas=2, num_api_servers=2, port=9))
    assert more[:2] == first[:2]
    assert versions(ServerConfig(queue_timeout=3))[:2] == first[:2]
    assert versions(ServerConfig(queue_timeout=3))[2] != first[2]


def test_a_checkpoint_that_is_replaced_in_its_place_makes_a_new_version(monkeypatch, tmp_path):
    found = []
    monkeypatch.setattr(application, "with_version", lambda deployment, version: found.append(version) or deployment)
    folder = shutil.copytree(BUNDLED_MODEL, tmp_path / "model")

    def versions():
        make_application(resolve_models([model(model=str(folder))], Capacity(0)), ServerConfig())
        last, found[:] = found[:], []
        return last

    first = versions()
    assert versions() == first
    (folder / "README.md").write_text("nothing that is read")
    assert versions() == first
    os.utime(next(folder.glob("*.safetensors")), ns=(1, 1))
    second = versions()
    assert [a == b for a, b in zip(second, first, strict=True)] == [False, True], "API servers read no weights"
    os.utime(folder / "tokenizer_config.json", ns=(1, 1))
    assert [a == b for a, b in zip(versions(), second, strict=True)] == [False, False]


def test_updates_start_as_many_replicas_as_there_is_room_for(deployed):
    def percent(free_gpus, device="cuda", num_replicas=4, tp=2):
        server = ServerConfig(num_replicas=num_replicas)
        models = resolve_models([model(server, device=device, tensor_parallel_size=tp)], Capacity(num_replicas * tp))
        make_application(models, server, free_gpus=free_gpus)
        return deployed[-2]["max_surge_percent"]

    assert percent(None) == percent(0, device="cpu") == 100
    assert [percent(free) for free in (0, 1, 2, 4, 8, 100)] == [0, 0, 25, 50, 100, 100]
    # Serve rounds up to whole replicas; there must not be more than fit.
    assert all(-(-percent(free, num_replicas=8, tp=1) * 8 // 100) <= free for free in range(9))


def test_deployment_names_are_harmless_and_differ():
    names = ["tiny", "org/tiny", "org-tiny", "x#y", "é" * 200]
    found = [each.deployment_name for each in resolve_models([named(name) for name in names], Capacity(0))]
    assert found[0] == "engine-tiny"
    assert len(set(found)) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9._-]{1,100}", name) for name in found)


# ---- autoscaling


def policy(**metrics):
    context = SimpleNamespace(aggregated_metrics=metrics)
    return QueuedTokensPolicy(target_queued_tokens=100)(context)


def test_the_policy_wants_replicas_for_what_waits_and_for_what_runs():
    assert policy() == (1, {})
    assert policy(queued_tokens={"a": 100.0, "b": 0.0}, batches={"a": 0.4, "b": 0.1})[0] == 1
    assert policy(queued_tokens={"a": 101.0, "b": 0.0})[0] == 2
    assert policy(queued_tokens={"a": 100.0, "b": 450.0})[0] == 6
    assert policy(queued_tokens={"a": 0.0}, batches={"a": 1.125, "b": 1.0})[0] == 3


def test_autoscaling_is_what_max_replicas_asks_for():
    assert autoscaling_options(ServerConfig(num_replicas=3)) == {"num_replicas": 3}
    server = ServerConfig(num_replicas=2, max_replicas=5, target_queued_tokens=70, upscale_delay=1, downscale_delay=9)
    config = autoscaling_options(server)["autoscaling_config"]
    assert (config.min_replicas, config.max_replicas) == (2, 5)
    assert (config.upscale_delay_s, config.downscale_delay_s) == (1, 9)
    assert config.policy.policy_kwargs == {"target_queued_tokens": 70}
    assert config.policy.get_policy() is QueuedTokensPolicy
