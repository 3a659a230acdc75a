"""Processes of the benchmarks: `rayllm launch` and other servers, each in a session of its own that is ended whole.

Beside that, a tokenizer for shapes without one.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

START_LIMIT_S = 120.0
STOP_LIMIT_S = 60.0  # for a process to end by itself once it is told to
KILL_LIMIT_S = 10.0  # for what is left of its session to vanish
LOG_LINES = 30  # of a failed process's log that its error shows

# Kinds of a server's processes, with what is in their command lines. What a server does not have is not found.
PROCESSES = {
    "rank": "ray::WorkerActor",
    "standby": "ray::WorkerActor",
    "engine": ":engine-",
    "API server": ":ApiServer",
    "ingress": "/haproxy ",
    "raylet": "raylet/raylet",
    "GCS": "gcs_server",
}


class ProcessFailedError(RuntimeError):
    """A process ended or took too long; the message has the end of its log, if it has one."""

    def __init__(self, reason: str, log: Path | None):
        lines = [] if log is None else log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        super().__init__("\n  ".join([reason, *lines]))


def free_port() -> int:
    """A port for a server that starts seconds later; of those that no outgoing connection is given meanwhile."""
    first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(20_000, max(first_outgoing, 21_000))  # Ray's workers have those below
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextmanager
def launched(*options: str) -> Iterator[tuple[str, int]]:
    """The whole stack, ready: its address, and the session that all of its processes are in."""
    port = free_port()
    command = [sys.executable, "-m", "rayllm.cli", "launch", "--port", str(port), *options]
    url = f"http://127.0.0.1:{port}"
    with own_session(command) as process:
        wait_until_healthy(process, url, START_LIMIT_S)
        yield url, process.pid


@contextmanager
def own_session(
    command: list[str], *, env: dict[str, str] | None = None, cwd: Path | None = None, log: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own; at the end nothing of this session is left.

    env, cwd: its variables and current folder; this process's if absent. log: file that gets the process's output,
    which is dropped if it is absent. Raises OSError if it cannot be started.
    """
    with open(log or os.devnull, "wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env, cwd=cwd, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # SIGINT is ignored in what a shell starts in the background
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_LIMIT_S)
        deadline = time.monotonic() + KILL_LIMIT_S
        while (left := session_processes(process.pid)) and time.monotonic() < deadline:
            for each in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
            process.poll()
            time.sleep(0.02)


def session_processes(session_id: int, text: str = "") -> list[int]:
    """Ids of a session's live processes that have `text` in their command lines."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session_id and fields[0] != "Z":
                command = (stat.parent / "cmdline").read_text().replace("\0", " ")
                if text in command:
                    found.append(int(stat.parent.name))
    return sorted(found)


def processes_of(session_id: int, kind: str) -> list[int]:
    """Ids of a session's processes of one of the kinds in PROCESSES."""
    found = session_processes(session_id, PROCESSES[kind])
    if kind not in ("rank", "standby"):
        return found
    return [each for each in found if _has_joined(each) == (kind == "rank")]  # a standby is in no process group


def _has_joined(process: int) -> bool:
    """Whether a process is in a group of torch.distributed over gloo, which has threads of this name."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return any(each.read_text().startswith("pt_gloo") for each in Path(f"/proc/{process}/task").glob("*/comm"))
    return False


class Belongings:
    """Files in temporary folders and segments of shared memory that processes of a session hold; `look` notes them.

    Ports and memory without a name end with the processes. Ray keeps its session's folder, with its logs, on purpose.
    """

    def __init__(self, session_id: int):
        self._session_id = session_id
        self._files: set[Path] = set()
        self._processes: set[int] = set()

    def __len__(self) -> int:
        return len(self._files) + len(self._processes)

    def look(self) -> None:
        for process in session_processes(self._session_id):
            self._processes.add(process)
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                names = {os.readlink(each) for each in Path(f"/proc/{process}/fd").glob("*")}
                lines = Path(f"/proc/{process}/maps").read_text().splitlines()
                names |= {line.split(maxsplit=5)[5] for line in lines if line.count("/")}
                self._files |= {Path(name) for name in names if name.startswith(("/dev/shm/", "/tmp/"))}

    def left(self) -> list[str]:
        """What is still there, once all of the processes should be gone."""
        found = [f"process {each}" for each in session_processes(self._session_id)]
        found += [str(path) for path in self._files if "/session_" not in str(path) and path.exists()]
        segments = [line.split() for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]]
        return found + [f"shared memory {each[1]}" for each in segments if int(each[4]) in self._processes]


def is_stopped(process: int) -> bool:
    """Whether a process stands still by a signal."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def wait_until_healthy(process: subprocess.Popen[bytes], url: str, limit_s: float, log: Path | None = None) -> None:
    """Wait until the server of a process answers /health with 200. Raises ProcessFailedError."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() <= deadline:
        if healthy(url):
            return
        if process.poll() is not None:
            raise ProcessFailedError(f"the server ended with exit code {process.returncode}", log)
        time.sleep(0.2)
    raise ProcessFailedError(f"the server did not come up within {limit_s:g} s", log)


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def num_replicas(url: str) -> int:
    """Replicas that the API server which answers /metrics sends requests to; 0 if none answers."""
    try:
        lines = httpx.get(f"{url}/metrics", timeout=5).text.splitlines()
    except httpx.HTTPError:
        return 0
    found = [float(line.split()[-1]) for line in lines if line.startswith("rayllm:num_replicas{")]
    return int(found[0]) if found else 0


def with_tokenizer(model: str, folder: str) -> str:
    """Make `folder` a model of the same shape with a tokenizer of made-up words: what has no text is not streamed."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import Metaspace
    from tokenizers.models import WordLevel

    config = json.loads((Path(model) / "config.json").read_text())
    words = {f"\u2581w{i}": i for i in range(config["vocab_size"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="\u2581w0"))
    tokenizer.decoder = Metaspace()
    shutil.copy(Path(model) / "config.json", folder)
    tokenizer.save(f"{folder}/tokenizer.json")
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder
