"""Where ranks go, and what users are told when there is no room."""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
import time
from pathlib import Path

import pytest
import ray
from support.stand_ins import AddingRank, cpu_config

import rayllm
from rayllm import timeouts
from rayllm.errors import StartupError
from rayllm.executor.placement import actor_environment, reserve
from rayllm.executor.ranks import RankActors
from rayllm.executor.ray_cluster import connect_to_ray
from rayllm.parallel.process_groups import interface_variables


def test_a_cluster_that_is_too_small(ray_cluster, monkeypatch):
    monkeypatch.setattr(timeouts, "PLACEMENT_S", 0.5)
    with (
        pytest.raises(StartupError, match=r"^tensor_parallel_size=999 needs 99\.9 CPUs; \S+ of \d+ are free$"),
        reserve(999, "cpu"),
    ):
        pass
    with (
        pytest.raises(StartupError, match=r"^tensor_parallel_size=1 needs 1 GPU; 0 of 0 are free$"),
        reserve(1, "cuda"),
    ):
        pass


def test_resources_that_are_taken(ray_cluster, monkeypatch):
    monkeypatch.setattr(timeouts, "PLACEMENT_S", 1.0)
    taken = ray.util.placement_group([{"CPU": ray.cluster_resources()["CPU"]}])
    assert taken.wait(10)
    began = time.monotonic()
    with (
        pytest.raises(StartupError, match=r"^tensor_parallel_size=2 needs 0\.2 CPUs; 0 of \d+ are free$"),
        reserve(2, "cpu"),
    ):
        pass
    assert time.monotonic() - began < 15  # it gives up after PLACEMENT_S; a busy machine takes its time
    ray.util.remove_placement_group(taken)
    monkeypatch.setattr(timeouts, "PLACEMENT_S", 15.0)
    with reserve(2, "cpu") as place:  # which waits for what is being freed
        assert set(place.addresses) == {ray.util.get_node_ip_address()}
        assert place.bundles == (0, 1)
    with reserve(2, "cpu"):
        pass


def test_ranks_tell_where_they_are(ray_cluster):
    """Where Ray has a place for one may not be known beforehand: after its host's death it waits for another one."""
    with reserve(1, "cpu") as place:
        unknown = dataclasses.replace(place, addresses=("",))
        ranks = RankActors(unknown, cpu_config(executor="ray"), AddingRank)
        try:
            ranks.wait_until_up(60)
            assert ranks.places[0].startswith(f"node {ray.util.get_node_ip_address()}, process ")
            assert ranks.on_one_node()
        finally:
            ranks.kill(5)


def test_the_connection_that_is_there_is_used(ray_cluster):
    assert connect_to_ray() is False


@pytest.mark.parametrize(
    ("address", "message"),
    [("ray://head:10001", "Ray Client"), ("127.0.0.1:1", "RAY_ADDRESS 127.0.0.1:1: no Ray cluster answers there")],
)
def test_addresses_that_cannot_work(monkeypatch, address, message):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(StartupError, match=message):
        connect_to_ray()


@pytest.mark.parametrize(("noted", "address"), [(None, "local"), ("127.0.0.1:1", "local"), ("alive", None)])
def test_a_cluster_of_ray_start_is_joined_if_it_still_lives(ray_cluster, monkeypatch, noted, address):
    addresses = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", lambda **options: addresses.append(options["address"]))
    if noted == "alive":
        noted = ray.get_runtime_context().gcs_address
    monkeypatch.setattr(ray._private.utils, "read_ray_address", lambda: noted)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    assert connect_to_ray() is (address == "local")
    assert addresses == [address]


def test_gloo_and_nccl_are_kept_on_the_interface_of_the_rendezvous(ray_cluster):
    assert interface_variables("127.0.0.1", "10.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    names = {name for _, name in socket.if_nameindex()}
    here = ray.util.get_node_ip_address()
    assert interface_variables(here, here)["GLOO_SOCKET_IFNAME"] in names


def test_actors_get_the_users_settings_and_the_way_to_our_modules(monkeypatch, tmp_path):
    for name in ("NCCL_NVLS_ENABLE", "NCCL_DEBUG", "GLOO_X", "SECRET"):
        monkeypatch.delenv(name, raising=False)
    assert actor_environment()["NCCL_NVLS_ENABLE"] == "0"
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    monkeypatch.setenv("GLOO_X", "2")
    monkeypatch.setenv("SECRET", "3")
    package = str(Path(rayllm.__file__).parent)
    monkeypatch.setattr(sys, "path", [str(tmp_path), package, str(tmp_path / "missing"), *sys.path])
    environment = actor_environment()
    assert (environment["NCCL_NVLS_ENABLE"], environment["GLOO_X"]) == ("1", "2")
    assert environment["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] == "1"
    assert "SECRET" not in environment
    folders = environment["PYTHONPATH"].split(os.pathsep)
    assert folders[0] == str(tmp_path)
    assert package not in folders
    assert not any(folder.startswith(sys.prefix) for folder in folders)


@pytest.mark.parametrize("told", ["1", None])
def test_threads_of_cpu_ranks(ray_cluster, monkeypatch, told):
    """As many as the driver's process was told to have, or the cores shared out; never all cores for each replica."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if told is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", told)
    with reserve(1, "cpu") as place:
        ask = ray.remote(_Threads).options(**place.actor_options(0, 1.0)).remote()
        assert ray.get(ask.count.remote()) == int(told or len(os.sched_getaffinity(0)))


class _Threads:
    def count(self):
        import torch

        return torch.get_num_threads()
