"""What tests ask of test hosts that run Ray."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import yaml
from support import cluster_file
from support.host_provider import Supervisor
from support.hosts import Host, Hosts
from support.stream_client import Options, Result

AUTOSCALER = "--autoscaling-config=~/ray_bootstrap_config.yaml"
LIMIT_S = 200  # of a client, beginning to end
LAUNCH = "python -m half_cores launch"
# Replicas and API servers ask for half a core each instead of a tenth.
HALF_CORES = """
from rayllm.serve.cluster import application
application.NUM_CPUS = 0.5
from rayllm.cli.main import main
main()
"""


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
    """Streams that a client on a host asks for. wait: the constructor returns when all have begun."""

    def __init__(self, host: Host, wait: bool = True, **options):
        command = f"timeout {LIMIT_S} python -m stream_client '{json.dumps(asdict(Options(**options)))}'"
        pipe = subprocess.PIPE
        self._process = host.start(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)
        self._said: list[dict[str, Any]] = []
        while wait and not any("begun" in each for each in self._said):  # some may have ended before others begin
            line = self._process.stdout.readline()
            assert line, "the client ended before all streams had begun"
            self._said.append(json.loads(line))

    def results(self) -> list[Result]:
        """Of all, when the last has ended. None is repeated any more."""
        self._process.stdin.close()
        self._said += [json.loads(line) for line in self._process.stdout]
        return [Result(**each) for each in self._said if "begun" not in each]


class Texts:
    """What streams said, by number. Whatever happens meanwhile, all of the same number have to say the same."""

    def __init__(self) -> None:
        self._texts: dict[int, dict[int, str]] = {}  # number -> tokens -> text

    def check(self, results: list[Result], num_tokens: int) -> float:
        """No stream failed, and each has so many tokens, none lost, twice or another one.

        Returns the longest pause of any, seconds.
        """
        failed = [(each.url, each.num_tokens, each.error) for each in results if each.error]
        assert not failed, failed
        assert {each.num_tokens for each in results} == {num_tokens}
        for each in results:
            text = each.text.rstrip("\ufffd")  # half a character, at the end of what was asked for
            texts = self._texts.setdefault(each.number, {})
            for count, other in texts.items():
                assert text == other if count == num_tokens else text[: len(other)] == other[: len(text)], each
            texts[num_tokens] = text
        return max(each.longest_gap for each in results)


class Resumed:
    """Counts the requests that go on on another replica, while the block runs.

    The server at an URL is asked from a host, and says how many all API servers have counted. One that ends takes its
    counts along, so that it is the increases between two answers that count.
    """

    INTERVAL_S = 2.0

    def __init__(self, host: Host, url: str):
        self.count = 0.0
        self._host, self._url = host, url
        self._last = self._ask()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Resumed:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._ended.wait(self.INTERVAL_S):
            self._look()

    def _look(self) -> None:
        now = self._ask()
        self.count += max(0.0, now - self._last)
        self._last = now

    def _ask(self) -> float:
        figures = self._host.run(f"curl --silent --fail --max-time 10 {self._url}/metrics")
        return sum(float(n) for n in re.findall(r"^rayllm:request_resumed_total.* (\S+)$", figures, re.MULTILINE))


class OwnCluster:
    """A cluster of own machines, the bundled model with a replica on each worker: `head`, and `workers` by name.

    Made by `ray up` with cluster.yaml, from a laptop. redis: where the head's GCS keeps what it knows, "HOST:PORT",
    with the password "secret".
    """

    def __init__(self, hosts: Hosts, laptop: Host, redis: str, num_workers: int = 3):
        self._hosts, self._laptop = hosts, laptop
        hosts.start("head", 1)
        self.workers = [f"w{number}" for number in range(2, 2 + num_workers)]
        for number, name in enumerate(self.workers, 2):
            hosts.start(name, number)
        config = cluster_file.own_machines()
        cluster_file.use_clone(config)
        config["provider"]["worker_ips"] = [hosts[name].ip for name in self.workers]
        config["min_workers"] = config["max_workers"] = num_workers
        cluster_file.look_often(config)
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

        def all_are_there() -> bool:
            # To ask Ray takes a core for seconds, which hosts that are starting have better use for.
            started = all("raylet" in processes(self._hosts[name]) for name in self.workers)
            return started and there in self.head.run(f'python -c "{alive}"', check=False)

        return wait_for(all_are_there, "workers are missing", limit)

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


class Status(NamedTuple):
    """What `rayllm status` prints."""

    text: str
    # (host, or the address of one that is gone; process id) of each that has come up, and has not left.
    engines: list[tuple[str, int]]
    # (host, address) of each API server.
    servers: list[tuple[str, str]]


class GrowingCluster:
    """A cluster whose hosts Ray's autoscaler makes, by a `supervisor`: `head`, and two workers of one type or more.

    A worker has room for two of what Ray Serve starts: API servers, replicas of one rank, or ranks. Made by `ray up`
    with cluster.yaml, from a laptop.
    """

    TYPE: ClassVar[dict[str, str]] = {"ray-user-node-type": "gpu-1"}

    def __init__(self, hosts: Hosts, laptop: Host, supervisor: Supervisor):
        self._hosts, self._laptop, self._supervisor = hosts, laptop, supervisor
        (hosts.modules / "half_cores.py").write_text(HALF_CORES)
        config = cluster_file.for_test_hosts(supervisor.address, cpus=1, idle_timeout_minutes=0.15)
        del config["available_node_types"]["gpu-4"]
        config["available_node_types"]["gpu-1"] |= {"min_workers": 2, "max_workers": 6}
        config["max_workers"] = 6  # hosts that drain count until they are gone
        cluster_file.use_clone(config)
        cluster_file.look_often(config)
        laptop.path("rayllm/cluster.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        laptop.run("(umask 077; ray get-auth-token --generate)")
        laptop.run("cd ~/rayllm; ray up --yes cluster.yaml", timeout=120)
        self.head = hosts["n1"]
        wait_for(lambda: len(self.workers) == 2, "the workers of min_workers are missing")

    @property
    def workers(self) -> list[str]:
        """Names of those that are up."""
        return self._supervisor.nodes({**self.TYPE, "ray-node-status": "up-to-date"})

    def configure(self, **options: Any) -> None:
        """Write the file of the launch."""
        self.head.path("service.yaml").write_text(yaml.safe_dump(options))

    def launch(self) -> float:
        """Serve, and return when the launch says that all is ready; how long that took, seconds."""
        launch = f"{LAUNCH} --config ~/service.yaml 2>&1 | tee launch.log"
        self._laptop.run(f"cd ~/rayllm; ray exec --tmux cluster.yaml '{launch}'")
        return wait_for(lambda: "\nready " in self.said(), self.head.path("launch.log"))

    def update(self) -> None:
        """Have the launch read its file again, and return."""
        self.head.run(f"kill -USR1 $(pgrep -of '^{LAUNCH}')")

    def said(self) -> str:
        """What the launch has said."""
        log = self.head.path("launch.log")
        return log.read_text() if log.exists() else ""

    def url(self, name: str) -> str:
        """Of the ingress on a host."""
        return f"http://{self._hosts[name].ip}:8000"

    def status(self) -> Status:
        """What the cluster says of itself, over the head's ingress."""
        text = self.head.run("curl --silent --fail http://127.0.0.1:8000/cluster")
        names = {self._hosts[name].ip: name for name in self._hosts.names()}
        engines = re.findall(r"^  \S+ replica \d+  (\S+)  process (\d+)", text, re.MULTILINE)
        servers = re.findall(r"^  API server ((\S+):\d+)  ", text, re.MULTILINE)
        return Status(
            text,
            sorted((names.get(ip, ip), int(pid)) for ip, pid in engines),
            sorted((names.get(ip, ip), address) for address, ip in servers),
        )


def wait_for(found: Callable[[], object], what: object, limit: float = 180.0) -> float:
    """Seconds until found() is true. Fails after the limit, with what is missing; if that is a path, with its text."""
    start = time.monotonic()
    while not found():
        if time.monotonic() - start > limit:
            raise AssertionError(what.read_text() if isinstance(what, Path) else what)
        time.sleep(0.2)
    return time.monotonic() - start
