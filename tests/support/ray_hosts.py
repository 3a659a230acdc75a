"""What tests ask of test hosts that run Ray."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import asdict

from support.hosts import Host
from support.stream_client import Options, Result

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
