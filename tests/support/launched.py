"""`rayllm launch` as a process whose descendants can be told from all others."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUNDLED = ROOT / "rayllm" / "assets" / "tiny-pydoc"
RAYLLM = Path(sys.executable).with_name("rayllm")
MODEL = "tiny-pydoc"
START_LIMIT_S = 120  # generous: other tests may share the cores


def clean_environment():
    """The caller's, without what conftest.py and a developer's shell put there."""
    dropped = ("TRITON_INTERPRET", "RAY_ADDRESS", "OMP_NUM_THREADS")
    return {name: value for name, value in os.environ.items() if name not in dropped}


def session_processes(session_id):
    """Live processes of a session: (pid, command line)."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session_id and fields[0] != "Z":
                found.append((int(stat.parent.name), (stat.parent / "cmdline").read_text().replace("\0", " ")[:400]))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def haproxy_processes(session_id):
    """Those of `session_processes` that are HAProxy."""
    return [process for process in session_processes(session_id) if "/haproxy " in process[1]]


def private_folders(session_id):
    """Those that processes of a session have made and hold."""
    found = set()
    for pid, _ in session_processes(session_id):
        for file in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                found.add(file.readlink())
    return {path for path in found if path.name.startswith("rayllm-run-")}


class Launched:
    """A `rayllm launch` in a session of its own, so that all its descendants can be told from other processes."""

    def __init__(self, log, *args, program=(RAYLLM,), **environment):
        self.log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [*program, "launch", "--num-api-servers", "1", *args],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**clean_environment(), **environment},
                start_new_session=True,
                cwd="/",
            )
        self.session_id = self.process.pid

    def wait_for(self, text, limit=START_LIMIT_S):
        deadline = time.monotonic() + limit
        while text not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def stop(self, signal_number=signal.SIGINT):
        """Send a signal; returns the exit code. Fails if a process is left a moment later."""
        self.process.send_signal(signal_number)
        code = self.process.wait(timeout=60)
        deadline = time.monotonic() + 5
        while (left := session_processes(self.session_id)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left, left
        return code

    def kill(self):
        """End whatever is left, after a test that failed."""
        for pid, _ in session_processes(self.session_id):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def free_port():
    """A port for a server that starts seconds later; of those that no outgoing connection is given meanwhile."""
    first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(20_000, max(first_outgoing, 21_000))  # Ray's workers have those below
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
