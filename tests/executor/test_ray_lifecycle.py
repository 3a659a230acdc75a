"""What an engine leaves behind in a process of its own: nothing, however that process ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray
from support.processes import is_running

SCRIPT = """
import json, sys
import ray
from support.stand_ins import AddingRank, cpu_config, make_plan, pids_in, pids_of
from rayllm.executor.ray import RayExecutor
from rayllm.executor.ray_cluster import connect_to_ray

owns_ray = connect_to_ray()
executor = RayExecutor(cpu_config(executor="ray", standby_ranks="auto"), AddingRank, owns_ray=owns_ray)
executor.start()
import psutil
executor.submit(make_plan(1))
assert executor.collect().token_ids == [0, 29, 58]
processes = [child.pid for child in psutil.Process().children(recursive=True)] + pids_of(executor)
processes += pids_in(executor.standbys.places)
print(json.dumps(processes), flush=True)
if sys.argv[1] == "shutdown":
    executor.shutdown()
    left = [child.name() for child in psutil.Process().children() if child.status() != "zombie"]
    assert not ray.is_initialized() and not left, left
elif sys.argv[1] == "wait":
    sys.stdin.read()
"""


def wait_until_gone(pids: list[int], seconds: float) -> list[int]:
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def start(end: str, address: str) -> tuple[subprocess.Popen, list[int]]:
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, end],
        env={**os.environ, "PYTHONPATH": path, "RAY_ADDRESS": address},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        process.kill()
        pytest.fail("the engine's process printed nothing")
    return process, json.loads(line)


@pytest.mark.parametrize("end", ["shutdown", "exit"])
def test_a_ray_of_its_own_ends_with_the_engine_or_the_process(end):
    process, pids = start(end, "local")
    assert len(pids) >= 4  # gcs_server, raylet, its agents, the worker
    assert process.wait(timeout=30) == 0
    assert not wait_until_gone(pids, 30)


def test_workers_in_a_cluster_end_when_their_driver_is_killed(ray_cluster):
    process, pids = start("wait", ray.get_runtime_context().gcs_address)
    assert pids
    assert all(is_running(pid) for pid in pids)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not wait_until_gone(pids, 30)
