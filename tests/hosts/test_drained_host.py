"""A notice that a host goes: its replicas start elsewhere, its streams go on, and `rayllm status` shows it. CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time

import httpx
import pytest
from support.launched import RAYLLM, Launched, clean_environment, free_port

LIMIT_S = 120  # of each wait; other tests may share the cores
CLUSTER = """
import sys
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
for _ in range(2):
    cluster.add_node(num_cpus=1)
cluster.wait_for_nodes()
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
NOTICE = """
import pathlib, time
import ray

def notice():
    node_id, _, at = pathlib.Path("{file}").read_text().partition(" ")
    return float(at) - time.time() if node_id == ray.get_runtime_context().get_node_id() else None
"""


class Hosts:
    """A Ray cluster of three nodes on this machine, with a server on two of them, each of which can be taken away."""

    def __init__(self, folder):
        self.notice = folder / "notice"
        self.notice.write_text("none")
        (folder / "cloud_of_test.py").write_text(NOTICE.format(file=self.notice))
        self.ray_files = tempfile.TemporaryDirectory(prefix="ray")  # a short path, for its sockets
        path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
        self.environment = clean_environment() | {"RAY_TMPDIR": self.ray_files.name, "PYTHONPATH": path}
        command, pipe = [sys.executable, "-c", CLUSTER], subprocess.PIPE
        self.cluster = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=self.environment)
        self.environment["RAY_ADDRESS"] = self.cluster.stdout.readline().strip()
        self.port = free_port()
        args = "--ingress haproxy --num-replicas 2 --num-api-servers 2 --device cpu --num-gpu-blocks-override 600"
        drain = "--replica-drain-timeout 0 --spot-notices cloud_of_test:notice"
        args = [*args.split(), *drain.split(), "--port", str(self.port)]
        self.server = Launched(folder / "log", *args, **self.environment)

    def close(self):
        self.server.kill()
        self.cluster.stdin.close()
        self.cluster.wait(60)
        self.ray_files.cleanup()

    def status(self, *flags):
        return subprocess.run(
            [RAYLLM, "status", *flags], env=self.environment, capture_output=True, text=True, timeout=60
        )

    def application(self):
        (found,) = json.loads(self.status("--json").stdout)["applications"]
        return found

    def nodes(self, kind):
        """Of the replicas of this kind."""
        return [report["member"]["node_id"] for report in self.application()[kind]]

    def stream(self, prompt):
        """A whole stream: its text."""
        body = {"prompt": prompt, "max_tokens": 200, "ignore_eos": True, "stream": True}
        return httpx.post(f"http://127.0.0.1:{self.port}/v1/completions", json=body, timeout=LIMIT_S).text


@pytest.fixture
def hosts(tmp_path):
    found = Hosts(tmp_path)
    try:
        found.server.wait_for("ready")
        yield found
    finally:
        found.close()


def wait_for(condition):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.5)


def test_a_host_that_is_taken_away_loses_no_stream(hosts):
    texts, stop = [], threading.Event()

    def ask(number):
        while not stop.is_set():
            texts.append(hosts.stream(f"Item {number} of the list"))  # each goes where it was before

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    wait_for(lambda: len(set(hosts.nodes("engines"))) == len(set(hosts.nodes("servers"))) == 2)
    for thread in threads:
        thread.start()
    wait_for(lambda: len(texts) > 2)
    victim = hosts.nodes("engines")[0]
    hosts.notice.write_text(f"{victim} {time.time() + 60}")
    wait_for(lambda: "drains, goes in" in hosts.status().stdout)
    wait_for(lambda: victim not in hosts.nodes("engines") + hosts.nodes("servers"))
    assert len(hosts.nodes("engines")) == 2, "another one came first"
    count = len(texts)
    wait_for(lambda: len(texts) > count + 4)
    stop.set()
    for thread in threads:
        thread.join(LIMIT_S)
    assert [text[-500:] for text in texts if '{"error"' in text or not text.endswith("data: [DONE]\n\n")] == []
    metrics = httpx.get(f"http://127.0.0.1:{hosts.port}/metrics").text
    (resumed,) = [line for line in metrics.splitlines() if line.startswith("rayllm:request_resumed_total")]
    assert float(resumed.split()[-1]) > 0
    assert hosts.application()["incidents"] == [], "nobody died"
