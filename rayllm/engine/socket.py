"""`EngineSocket`: an engine's ZeroMQ sockets, for fronts on its host (ipc) and on other hosts (tcp with CURVE keys).

They have a thread of their own: a step may take seconds (compilation, a huge prefill), and hellos and beats must be
answered meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from rayllm import timeouts
from rayllm.api import wire
from rayllm.api.types import Load, TokenDelta
from rayllm.engine.driver import EngineDriver
from rayllm.engine.engine import refusal
from rayllm.errors import ConfigError, EngineDeadError, InvalidRequestError

logger = logging.getLogger(__name__)

_MAX_FRAMES = 8192  # waiting for one front; a front that is so far behind has stopped
_MAX_FRAME_BYTES = 64 * 2**20
_MAX_IPC_PATH = 107  # bytes of a Unix socket's address
_MAX_FRONTS_KEPT = 256  # fronts whose figures are kept, those that are gone included

Router = zmq.Socket[bytes]


class _ZmqFront:
    """A front behind a socket; messages for it wait in the outbox for the sockets' thread."""

    def __init__(self, server: EngineSocket, router: Router, identity: bytes, front_id: str):
        self._server = server
        self.router, self.identity, self.front_id = router, identity, front_id
        self.last_heard = time.monotonic()
        self.beat = wire.FrontBeat()
        self._told: dict[str, int] = {}  # front id -> number of the metrics that this front knows

    def news(self, metrics: dict[str, wire.Snapshot]) -> dict[str, wire.Snapshot]:
        """What this front does not know of the others' metrics."""
        before, self._told = self._told, {key: snapshot.number for key, snapshot in metrics.items()}
        fresh = {key: snapshot for key, snapshot in metrics.items() if before.get(key) != snapshot.number}
        fresh.pop(self.front_id, None)
        return fresh

    def deliver(self, deltas: list[TokenDelta]) -> None:
        self._server.post(self, wire.Deltas(deltas))

    def dead(self, reason: str) -> None:
        self._server.post(self, wire.Dead(reason))


class EngineSocket:
    """The sockets of a driver and the thread that polls them. A front that left, or that stopped reading, is detached.

    path: of the Unix socket; its folder must be private to this user. None makes a private folder.
    beat_s: how often fronts are shown that the engine is here. silence_s: a front silent for so long is gone.
    Raises ConfigError for a path that is too long or in a folder that others can enter.
    """

    def __init__(
        self,
        driver: EngineDriver,
        path: str | None = None,
        *,
        beat_s: float = timeouts.BEAT_S,
        silence_s: float = timeouts.SILENCE_S,
    ):
        self._driver = driver
        self._beat_s, self._silence_s = beat_s, silence_s
        self._folder = tempfile.mkdtemp(prefix="rayllm-") if path is None else None  # readable by this user alone
        self._path = Path(self._folder or "", path or "engine.sock")
        self.endpoint = wire.Endpoint(f"ipc://{self._path}")
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(wire.FrontMessage).decode
        self._draining = self._closing = False
        self._outbox: deque[tuple[_ZmqFront, wire.EngineMessage]] = deque()
        self._commands: deque[Callable[[], None]] = deque()
        self._wake_in, self._wake_out = socket.socketpair()
        # The sockets' thread alone uses what follows.
        self._context = zmq.Context()
        self._routers: list[Router] = []
        self._authenticator: ThreadAuthenticator | None = None
        self._front_keys: frozenset[str] = frozenset()
        self._fronts: dict[tuple[Router, bytes], _ZmqFront] = {}
        self._metrics: dict[str, wire.Snapshot] = {}  # front id -> its latest figures, least recently changed first
        self._next_beat = 0.0
        try:
            _check_private(self._path)
            self._wake_out.setblocking(False)
            self._wake_in.setblocking(False)
            self._open(self.endpoint.ipc)
        except BaseException:
            self._clean_up()
            raise
        self._thread = threading.Thread(target=self._run, name="rayllm-zmq", daemon=True)
        self._thread.start()

    def open_tcp(self, host: str) -> None:
        """Listen on a free port of `host` too, for fronts that `allow` names; `endpoint` has the address then."""

        def open_it() -> None:
            public, secret = zmq.curve_keypair()
            self._authenticator = ThreadAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback("*", credentials_provider=self)
            name = f"[{host}]" if ":" in host else host
            router = self._open(f"tcp://{name}:0", secret)
            address = router.get_string(zmq.LAST_ENDPOINT)
            self.endpoint = wire.Endpoint(self.endpoint.ipc, address, public.decode())

        self._on_thread(open_it)

    def allow(self, front_keys: Iterable[str]) -> None:
        """The public keys (Z85) of the fronts that may connect over tcp."""
        self._front_keys = frozenset(front_keys)

    def callback(self, _domain: str, key: bytes) -> bool:
        """For the authenticator: whether a front with this public key may connect."""
        return key.decode() in self._front_keys

    def drain(self) -> None:
        """Tell all fronts to send nothing new, now and to those that connect later."""
        self._draining = True
        self._next_beat = 0.0
        self._wake()

    def load(self) -> Load:
        """The work that all fronts have here, as they last said."""
        return sum((front.beat.here for front in list(self._fronts.values())), Load())

    def post(self, front: _ZmqFront, message: wire.EngineMessage) -> None:
        """Send a message, from any thread."""
        self._outbox.append((front, message))
        self._wake()

    def close(self) -> None:
        """Send what is in the outbox, close the sockets and remove the folder."""
        self._closing = True
        self._wake()
        self._thread.join()

    def _on_thread(self, command: Callable[[], None]) -> None:
        """Run a command on the sockets' thread, and raise what it raises."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                command()
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

        self._commands.append(run)
        self._wake()
        done.result(timeouts.CONNECT_S)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it wakes up anyway; closed: it has no fronts any more
            self._wake_in.send(b".")

    def _open(self, address: str, curve_secret: bytes | None = None) -> Router:
        router = self._context.socket(zmq.ROUTER)
        self._routers.append(router)
        router.set(zmq.ROUTER_MANDATORY, 1)  # a send to a front that left fails, instead of going nowhere
        router.set(zmq.SNDHWM, _MAX_FRAMES)
        router.set(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
        router.set(zmq.LINGER, round(timeouts.DISCONNECT_S * 1000))
        if curve_secret is not None:
            router.curve_server = True
            router.curve_secretkey = curve_secret
            router.set(zmq.IPV6, ":" in address.removeprefix("tcp:").rpartition(":")[0])
        router.bind(address)
        return router

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_out, zmq.POLLIN)
        registered = 0
        try:
            while not self._closing or self._outbox:
                while registered < len(self._routers):
                    poller.register(self._routers[registered], zmq.POLLIN)
                    registered += 1
                events = dict(poller.poll(max(0, round((self._next_beat - time.monotonic()) * 1000))))
                if self._wake_out.fileno() in events:
                    self._wake_out.recv(4096)
                while self._commands:
                    self._commands.popleft()()
                for router in self._routers:
                    self._receive(router)
                while self._outbox:
                    front, message = self._outbox.popleft()
                    if self._fronts.get((front.router, front.identity)) is front:
                        self._send(front.router, front.identity, message)
                if time.monotonic() >= self._next_beat:
                    self._next_beat = time.monotonic() + self._beat_s
                    self._beat()
        except Exception:
            logger.exception("the engine's socket failed; its fronts will give the engine up")
        finally:
            for key in list(self._fronts):
                self._forget(key)
            self._clean_up()

    def _receive(self, router: Router) -> None:
        with contextlib.suppress(zmq.Again):
            for _ in range(1000):  # then it is the outbox's turn
                identity, *frames = router.recv_multipart(zmq.NOBLOCK)
                try:
                    message = self._decode(b"".join(frames))
                except msgspec.DecodeError as error:
                    logger.warning("a front sent something that is no message: %s", error)
                    continue
                if isinstance(message, wire.Hello):
                    self._welcome(router, identity, message.front_id)
                elif (front := self._fronts.get((router, identity))) is not None:
                    front.last_heard = time.monotonic()
                    self._handle(front, message)
                elif not isinstance(message, wire.Bye):
                    reason = "the engine does not know this front, or gave it up for not reading"
                    self._send(router, identity, wire.Dead(reason))

    def _welcome(self, router: Router, identity: bytes, front_id: str) -> None:
        if self._driver.dead is not None:
            self._send(router, identity, wire.Dead(self._driver.dead))
            return
        self._forget((router, identity))
        front = self._fronts[router, identity] = _ZmqFront(self, router, identity, front_id)
        self._send(router, identity, wire.Welcome(self._driver.info))
        self._send(router, identity, self._beat_for(front, self._driver.unhealthy(timeouts.STALL_S)))
        self._driver.attach(front)

    def _handle(self, front: _ZmqFront, message: wire.FrontMessage) -> None:
        match message:
            case wire.Add(request_id):
                self._add(front, request_id, message)
            case wire.Abort(request_ids):
                self._driver.abort(front, request_ids)
            case wire.FrontBeat(metrics=metrics):
                front.beat = message
                known = self._metrics.get(front.front_id, wire.Snapshot())
                if metrics.number > known.number:
                    self._metrics.pop(front.front_id, None)
                    self._metrics[front.front_id] = metrics
                    while len(self._metrics) > _MAX_FRONTS_KEPT:
                        del self._metrics[next(iter(self._metrics))]
            case wire.Bye():
                self._forget((front.router, front.identity))

    def _add(self, front: _ZmqFront, request_id: str, message: wire.Add) -> None:
        try:
            self._driver.add(front, wire.unpack_request(message))
        except msgspec.DecodeError as error:
            refused = InvalidRequestError(f"the request has a value of a wrong type: {error}")
            front.deliver([refusal(request_id, refused)])
        except EngineDeadError as error:
            front.dead(str(error))

    def _beat(self) -> None:
        """Show every front that the engine is here; forget those that were silent for too long."""
        now = time.monotonic()
        unhealthy = self._driver.unhealthy(timeouts.STALL_S) if self._fronts else None
        for key, front in list(self._fronts.items()):
            if now - front.last_heard > self._silence_s:
                logger.warning("a front has been silent for %.1f s; its requests are aborted", now - front.last_heard)
                self._forget(key)
            else:
                self._send(front.router, front.identity, self._beat_for(front, unhealthy))

    def _beat_for(self, front: _ZmqFront, unhealthy: str | None) -> wire.EngineBeat:
        others = [other.beat for other in self._fronts.values() if other is not front]
        return wire.EngineBeat(
            stats=self._driver.stats(),
            unhealthy=unhealthy,
            draining=self._draining,
            others_total=sum((beat.total for beat in others), Load()),
            others_here=sum((beat.here for beat in others), Load()),
            metrics=front.news(self._metrics),
        )

    def _send(self, router: Router, identity: bytes, message: wire.EngineMessage) -> None:
        try:
            router.send_multipart([identity, self._encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # no such front any more, or _MAX_FRAMES wait for it
            if (router, identity) in self._fronts:
                logger.warning("a front cannot be reached (%s); its requests are aborted", error)
                self._forget((router, identity))

    def _forget(self, key: tuple[Router, bytes]) -> None:
        front = self._fronts.pop(key, None)
        if front is not None:
            self._driver.detach(front)

    def _clean_up(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        for router in self._routers:
            router.close()
        self._context.term()
        self._wake_in.close()
        self._wake_out.close()
        if self._routers:  # else the file, if there is one, is somebody else's
            with contextlib.suppress(OSError):
                self._path.unlink()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _check_private(path: Path) -> None:
    """Raise ConfigError unless a socket at this path can be made and only this user can reach it."""
    if len(os.fsencode(path)) > _MAX_IPC_PATH:
        raise ConfigError(
            f"the engine's socket path {path} has over {_MAX_IPC_PATH} bytes; set TMPDIR to a shorter one"
        )
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.parent.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(f"the folder of the engine's socket, {path.parent}, must belong to this user with mode 0700")
