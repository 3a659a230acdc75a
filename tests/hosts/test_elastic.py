"""A cluster that Ray's autoscaler scales: hosts come for replicas that wait, and replicas go when they are idle."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.driver import wait_for
from support.launched import BUNDLED, MODEL, Launched, clean_environment, free_port, session_processes

HEAD = "f" * 51 + "00000"  # as Ray's stand-in for a cloud knows it
# Replicas and API servers ask for half a core here instead of a tenth: a host has room for two of them.
PROGRAM = (
    "from rayllm.serve.cluster import application; application.NUM_CPUS = 0.5; from rayllm.cli.main import main; main()"
)
CLUSTER = {
    "cluster_name": "elastic",
    "max_workers": 3,
    "idle_timeout_minutes": 0.05,
    "head_node_type": "ray.head.default",
    "available_node_types": {
        "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
        "host": {"resources": {"CPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": 3},
    },
    **{name: {} for name in ("auth", "docker", "file_mounts")},
    **{f"{which}setup_commands": [] for which in ("", "head_", "worker_")},
    **{f"{which}_start_ray_commands": [] for which in ("head", "worker")},
    **{name: [] for name in ("initialization_commands", "cluster_synced_files", "rsync_exclude", "rsync_filter")},
    "file_mounts_sync_continuously": False,
}


@pytest.fixture
def cluster(tmp_path):
    """(its address, the session of all its processes): a head without room for replicas, and no other host."""
    port = free_port()
    address = f"127.0.0.1:{port}"
    provider = {"type": "fake_multinode", "gcs_address": address, "head_node_id": HEAD, "use_node_id_as_ip": True}
    config = tmp_path / "cluster.yaml"
    config.write_text(json.dumps({**CLUSTER, "provider": provider}))
    environment = {
        **clean_environment(),
        "RAY_FAKE_CLUSTER": "1",
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD,
        "RAY_enable_autoscaler_v2": "0",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_TMPDIR": str(tmp_path),
        "RAY_AUTH_MODE": "disabled",
    }
    command = [
        Path(sys.executable).with_name("ray"),
        "start",
        "--head",
        f"--port={port}",
        "--node-ip-address=127.0.0.1",
    ]
    options = [
        "--num-cpus=0",
        "--include-dashboard=false",
        "--disable-usage-stats",
        f"--ray-client-server-port={free_port()}",
    ]
    head = subprocess.Popen(
        [*command, *options, f"--autoscaling-config={config}"], env=environment, start_new_session=True
    )
    try:
        assert head.wait(60) == 0
        yield address, head.pid
    finally:
        while left := session_processes(head.pid):
            for pid, _ in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def test_hosts_come_for_replicas_that_wait(cluster, tmp_path):
    address, session = cluster
    count = lambda text: sum(text in command for _, command in session_processes(session))  # noqa: E731
    replicas, hosts = (lambda: count("ray::ServeReplica:rayllm:engine-")), (lambda: count("raylet/raylet ") - 1)
    elastic = ["--max-replicas", "3", "--upscale-delay", "0.5", "--downscale-delay", "3", "--max-num-seqs", "2"]
    server = Launched(
        tmp_path / "log",
        BUNDLED,
        "--device",
        "cpu",
        "--port",
        str(port := free_port()),
        *elastic,
        "--num-gpu-blocks-override",
        "500",
        program=(sys.executable, "-c", PROGRAM),
        RAY_ADDRESS=address,
        RAY_AUTH_MODE="disabled",
    )

    def generate(_):
        body = {"model": MODEL, "prompt": "def", "max_tokens": 300, "min_tokens": 300, "ignore_eos": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=100) as answer:
            return json.load(answer)["usage"]["completion_tokens"]

    try:
        server.wait_for("ready ")
        assert (replicas(), hosts()) == (1, 1)
        with ThreadPoolExecutor(12) as pool:
            answers = pool.map(generate, range(12))
            wait_for(lambda: replicas() == 3 and hosts() >= 2, 60)
            assert list(answers) == [300] * 12
        wait_for(lambda: replicas() == 1, 60)
        assert generate(0) == 300
        assert server.stop() == 0
    finally:
        server.kill()
