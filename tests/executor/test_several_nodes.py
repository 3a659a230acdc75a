"""Ranks on two Ray nodes and the driver on a third, all on one machine: placement, rendezvous, steps, a rank's end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json, os, signal, time
import ray
from ray.cluster_utils import Cluster
from support.processes import is_running
from support.stand_ins import AddingRank, cpu_config, make_plan, pids_of
from rayllm.errors import EngineDeadError
from rayllm.executor import placement
from rayllm.executor.ray import RayExecutor
from rayllm.executor.ray_compat import drain_node, draining_nodes

placement.CPUS_PER_RANK = 1.0  # a node holds one rank, as if each had one GPU
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
for _ in range(2):
    cluster.add_node(num_cpus=1)
cluster.wait_for_nodes()
ray.init(cluster.address, log_to_driver=False, logging_level="error")

def make():
    return RayExecutor(cpu_config(tensor_parallel_size=2), AddingRank)

executor = make()
executor.start()
(group,) = [group for group in ray.util.placement_group_table().values() if group["state"] == "CREATED"]
nodes = list(group["bundles_to_node_id"].values())
driver = ray.get_runtime_context().get_node_id()
tokens = []
for step in range(5):
    executor.submit(make_plan(step))
    tokens.append(executor.collect().token_ids)
pids = pids_of(executor)
os.kill(pids[1], signal.SIGKILL)
began = time.monotonic()
message = ""
try:
    for step in range(5, 10_000):
        executor.submit(make_plan(step))
        executor.collect()
except EngineDeadError as error:
    message = str(error)
seconds = time.monotonic() - began
executor.shutdown()
left = [pid for pid in pids if is_running(pid)]
again = make()
again.start()
again.submit(make_plan(1))
second = again.collect().token_ids
drain_node(nodes[0], 60.0, "a test", 30.0)
draining = draining_nodes(30.0)
again.shutdown()
ray.shutdown()
cluster.shutdown()
report = {"driver": driver, "nodes": nodes, "tokens": tokens, "message": message, "seconds": seconds, "left": left}
print(json.dumps({**report, "second": second, "draining": draining}))
"""


def test_an_engine_over_several_nodes_and_its_end():
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads(result.stdout.strip().splitlines()[-1])
    assert len({report["driver"], *report["nodes"]}) == 3
    assert report["tokens"] == [[(28 + step) * row for row in range(3)] for step in range(5)]
    assert "worker rank 1 on node" in report["message"]
    assert report["seconds"] < 10
    assert report["left"] == []
    assert report["second"] == [0, 29, 58]
    ((drained, seconds),) = report["draining"].items()
    assert drained == report["nodes"][0]
    assert 20 < seconds <= 60
