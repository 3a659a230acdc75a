"""What tests ask of test hosts that run Ray."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import yaml
from support import cluster_file
from support.hosts import Host, Hosts
from support.stream_client import Options, Result

AUTOSCALER = "--autoscaling-config=~/ray_bootstrap_config.yaml"
LIMIT_S = 200  # of a client, beginning to end


def processes(host: Host) -> str:
    """Command lines of all processes of a host, each with its id before it."""
    return host.run("ps axww -o pid,args")


def engines(host: Host) -> list[int]:
    """Ids of the processes of replicas on a host, as the host has them."""
    return [int(pid) for pid in re.findall(r"^ *(\d+) ray::ServeReplica:\w+:engine", processes(host), re.MULTILINE)]


def check_private(host: Host) -> None:
    """Nobody but the user reads Ray's token on a host; none of its processes of Ray reports usage."""
    assert host.run("stat -c %a ~/.ray/auth_token").strip() == "600"
    pids = "pgrep -x 'raylet|gcs_server'; pgrep -f 'dashboard.py|monitor.py'"
    found = host.run(f"for pid in $({pids}); do tr '\\0' '\\n' < /proc/$pid/environ; done")
    values = re.findall("^RAY_USAGE_STATS_ENABLED=(.*)$", found, re.MULTILINE)
    assert values and set(values) == {"0"}, values


class Streams:
    """Streams that a client on a host has begun; the constructor returns when all have."""

    def __init__(self, host: Host, **options):
        command = f"timeout {LIMIT_S} python -m stream_client '{json.dumps(asdict(Options(**options)))}'"
        self._process = host.start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        first = json.loads(self._process.stdout.readline())
        assert "begun" in first, first

    def results(self) -> list[Result]:
        """Of all, when the last has ended."""
        return [Result(**json.loads(line)) for line in self._process.stdout]


class OwnCluster:
    """A cluster of own machines, the bundled model with a replica on each worker: `head`, and `workers` by name.

    Made by `ray up` with cluster.yaml, from a laptop. redis: where the head's GCS keeps what it knows, "HOST:PORT",
    with the password "secret"; None for in its memory.
    """

    def __init__(self, hosts: Hosts, laptop: Host, redis: str | None = None, num_workers: int = 3):
        self._hosts, self._laptop = hosts, laptop
        hosts.start("head", 1)
        self.workers = [f"w{number}" for number in range(2, 2 + num_workers)]
        for number, name in enumerate(self.workers, 2):
            hosts.start(name, number)
        config = cluster_file.own_machines()
        config["provider"]["worker_ips"] = [hosts[name].ip for name in self.workers]
        config["min_workers"] = config["max_workers"] = num_workers
        if redis is not None:
            *others, start = config["head_start_ray_commands"]
            config["head_start_ray_commands"] = [*others, f"RAY_REDIS_ADDRESS={redis} {start} --redis-password=secret"]
        self._start_head = config["head_start_ray_commands"][-1]
        laptop.path("rayllm/own.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        laptop.run("(umask 077; ray get-auth-token --generate)")
        self.up()
        self.wait_for_nodes()

    @property
    def head(self) -> Host:
        """It may have been rebooted."""
        return self._hosts["head"]

    def up(self) -> str:
        """`ray up`."""
        return self._laptop.run("cd ~/rayllm; ray up --yes own.yaml", timeout=120)

    def start_head(self) -> None:
        """Start Ray on the head again, as docs/operations.md has it."""
        command = self._start_head.replace(AUTOSCALER, "")
        assert command != self._start_head
        self._laptop.run(f"ssh -o StrictHostKeyChecking=no ubuntu@{self.head.ip} 'bash -ic \"{command}\"'")

    def wait_for_nodes(self, limit: float = 120.0) -> float:
        """Return when Ray knows the head and all workers; how long that took, seconds."""
        alive = "import ray; ray.init(log_to_driver=False); print('alive', sum(n['Alive'] for n in ray.nodes()))"
        there = f"alive {1 + len(self.workers)}\n"
        return wait_for(
            lambda: there in self.head.run(f'python -c "{alive}"', check=False), "workers are missing", limit
        )

    def launch(self, options: str = "") -> float:
        """Serve, and return when all workers answer; how long that took, seconds."""
        launch = f"rayllm launch --device cpu --num-gpu-blocks-override 2000 --host 0.0.0.0 {options}"
        self._laptop.run(f"cd ~/rayllm; ray exec --tmux own.yaml '{launch} 2>&1 | tee launch.log'")
        return wait_for(
            lambda: "\nready " in self.head.run("cat launch.log", check=False), self.head.path("launch.log")
        )

    def url(self, name: str) -> str:
        """Of the server on a host."""
        return f"http://{self._hosts[name].ip}:8000"

    def engines(self) -> dict[str, list[int]]:
        """Ids of the processes of replicas, by worker."""
        return {name: engines(self._hosts[name]) for name in self.workers}


def wait_for(found: Callable[[], object], what: object, limit: float = 90.0) -> float:
    """Seconds until found() is true. Fails after the limit, with what is missing; if that is a path, with its text."""
    start = time.monotonic()
    while not found():
        if time.monotonic() - start > limit:
            raise AssertionError(what.read_text() if isinstance(what, Path) else what)
        time.sleep(0.2)
    return time.monotonic() - start
