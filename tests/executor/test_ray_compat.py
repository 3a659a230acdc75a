"""What `ray_compat` uses of Ray beyond its public API is still there, and does what it did."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from ray._private import services

from rayllm.executor.ray_compat import ask_cluster, autoscaler_config, log_folder, noted_cluster, raylet_socket


def test_the_cluster_that_ray_start_noted(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert noted_cluster() is None
    note = tmp_path / "ray" / "ray_current_cluster"
    note.parent.mkdir()
    note.write_text("10.1.2.3:6379\n")
    assert noted_cluster() == "10.1.2.3:6379"


def test_the_folder_of_the_logs(ray_cluster):
    folder = log_folder()
    assert folder is not None and folder.is_dir()
    assert any(each.name.startswith("raylet") for each in folder.iterdir())


def test_the_socket_of_the_raylet(ray_cluster):
    assert Path(raylet_socket()).is_socket()


NEVER_UP = """
import itertools, time, types
import ray
from ray._private import node
from rayllm.executor.ray_compat import gave_up_on_node

def not_there(*_):
    raise RuntimeError

node.Node.start_head_processes = node.Node.start_ray_processes = lambda self: None
node.Node.gcs_address = "127.0.0.1:1"
node.ray._private.services.get_node = not_there
node.time = types.SimpleNamespace(time=time.time, sleep=time.sleep, monotonic=itertools.count(step=31).__next__)
try:
    ray.init(address="local", include_dashboard=False)
except Exception as error:
    print(gave_up_on_node(error), gave_up_on_node(RuntimeError("else")))
"""


def test_a_node_that_is_not_up_in_time():
    """Ray's own 30 s, which no option changes."""
    done = subprocess.run([sys.executable, "-c", NEVER_UP], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["True", "False"], done.stderr


def test_clusters_that_answer_and_others(ray_cluster):
    ask_cluster(ray.get_runtime_context().gcs_address, 30, use_token=False)
    with pytest.raises(ConnectionError):
        ask_cluster("127.0.0.1:1", 30, use_token=True)


def test_the_autoscaler_that_ray_starts(tmp_path, monkeypatch):
    """By the command line that Ray gives it."""
    started = []
    monkeypatch.setattr(services, "start_ray_process", lambda command, *_args, **_more: started.append(command))
    config = tmp_path / "cluster.yaml"
    config.write_text("max_workers: 3\n")
    for is_v2 in (False, True):
        services.start_monitor("10.1.2.3:6379", "logs", autoscaling_config=str(config), autoscaler_v2=is_v2)
        command = [sys.executable, "-c", "input()", *started[-1][2:]]
        with subprocess.Popen(command, stdin=subprocess.PIPE):
            assert autoscaler_config("10.1.2.3:6379") == {"max_workers": 3}
            assert autoscaler_config("10.1.2.3:6380") is None
    services.start_monitor("10.1.2.3:6381", "logs")
    with subprocess.Popen([sys.executable, "-c", "input()", *started[-1][2:]], stdin=subprocess.PIPE):
        assert autoscaler_config("10.1.2.3:6381") is None, "every Ray has one, which adds nothing without a config"


def test_a_process_that_has_left_ray_does_not_start_it_by_a_call():
    """`rayllm launch` sets this before it imports Ray."""
    code = "import ray\ntry:\n    ray.get_actor('name')\nexcept Exception:\n    print(ray.is_initialized())"
    environment = os.environ | {"RAY_ENABLE_AUTO_CONNECT": "0"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"
