"""`ZmqServer`: an engine driver's socket for fronts in other processes of this machine.

It has a thread of its own: a step may take seconds (compilation, a huge prefill), and hellos, heartbeats and GetStats
must be answered meanwhile.
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
from pathlib import Path

import msgspec
import zmq

from rayllm.api.types import TokenDelta
from rayllm.engine import client as wire
from rayllm.engine.driver import EngineDriver, error_deltas
from rayllm.errors import ConfigError, EngineDeadError

logger = logging.getLogger(__name__)

_MAX_FRAMES = 8192  # waiting for one front; a front that is so far behind has stopped
_MAX_FRAME_BYTES = 64 * 2**20
_MAX_IPC_PATH = 107  # bytes of a Unix socket's address


class _ZmqFront:
    """A front behind the socket; the messages wait in the server's outbox for its thread."""

    def __init__(self, server: ZmqServer, identity: bytes):
        self._server = server
        self.identity = identity
        self.last_heard = time.monotonic()

    def deliver(self, deltas: list[TokenDelta]) -> None:
        self._server.post(self, wire.Deltas(deltas))

    def dead(self, reason: str) -> None:
        self._server.post(self, wire.Dead(reason))


class ZmqServer:
    """The socket of a driver and the thread that polls it. A front that left, or that stopped reading, is detached."""

    def __init__(self, driver: EngineDriver, path: str | None, heartbeat_s: float, silence_s: float):
        self._driver = driver
        self._heartbeat_s, self._silence_s = heartbeat_s, silence_s
        self._folder = Path(tempfile.mkdtemp(prefix="rayllm-")) if path is None else None  # mkdtemp's are 0700
        self._path = Path(path) if path is not None else Path(str(self._folder)) / "engine.sock"
        self.address = f"ipc://{self._path}"
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(wire.FrontMessage).decode
        self._fronts: dict[bytes, _ZmqFront] = {}  # server thread only, like the router
        self._outbox: deque[tuple[_ZmqFront, wire.EngineMessage]] = deque()
        self._wake_in, self._wake_out = socket.socketpair()
        self._closing = False
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        try:
            _check_private(self._path)
            self._wake_out.setblocking(False)
            self._wake_in.setblocking(False)
            self._router.set(zmq.ROUTER_MANDATORY, 1)  # a send to a front that left fails, instead of going nowhere
            self._router.set(zmq.SNDHWM, _MAX_FRAMES)
            self._router.set(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
            self._router.set(zmq.LINGER, 500)  # ms
            self._router.bind(self.address)
        except BaseException:
            self._clean_up()
            raise
        self._thread = threading.Thread(target=self._run, name="rayllm-zmq", daemon=True)
        self._thread.start()

    def post(self, front: _ZmqFront, message: wire.EngineMessage) -> None:
        """Send a message, from any thread."""
        self._outbox.append((front, message))
        self._wake()

    def close(self) -> None:
        """Send what is in the outbox, close the socket and remove its folder."""
        self._closing = True
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it wakes up anyway; closed: it has no fronts any more
            self._wake_in.send(b".")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake_out, zmq.POLLIN)
        next_beat = 0.0
        try:
            while not self._closing or self._outbox:
                events = dict(poller.poll(max(0, round((next_beat - time.monotonic()) * 1000))))
                if self._wake_out.fileno() in events:
                    self._wake_out.recv(4096)
                self._receive()
                while self._outbox:
                    front, message = self._outbox.popleft()
                    if self._fronts.get(front.identity) is front:
                        self._send(front.identity, message)
                if time.monotonic() >= next_beat:
                    self._beat()
                    next_beat = time.monotonic() + self._heartbeat_s
        except Exception:
            logger.exception("the engine's socket failed; its fronts will give the engine up")
        finally:
            for identity in list(self._fronts):
                self._forget(identity)
            self._clean_up()

    def _receive(self) -> None:
        with contextlib.suppress(zmq.Again):
            for _ in range(1000):  # then it is the outbox's turn
                identity, *frames = self._router.recv_multipart(zmq.NOBLOCK)
                try:
                    self._handle(identity, self._decode(b"".join(frames)))
                except msgspec.DecodeError as error:
                    self._forget(identity)
                    self._send(identity, wire.Dead(f"the front sent something that is no message: {error}"))

    def _handle(self, identity: bytes, message: wire.FrontMessage) -> None:
        front = self._fronts.get(identity)
        if isinstance(message, wire.Hello):
            self._welcome(identity)
            return
        if front is None:
            if not isinstance(message, wire.Bye):
                self._send(identity, wire.Dead("the engine does not know this front, or gave it up for not reading"))
            return
        front.last_heard = time.monotonic()
        match message:
            case wire.Add(request):
                try:
                    self._driver.add(front, request)
                except EngineDeadError as error:
                    front.deliver(error_deltas(request, str(error)))
            case wire.Abort(request_ids):
                self._driver.abort(front, request_ids)
            case wire.GetStats(serial):
                self._send(identity, wire.Stats(serial, self._driver.stats()))
            case wire.Bye():
                self._forget(identity)

    def _welcome(self, identity: bytes) -> None:
        if self._driver.dead is not None:
            self._send(identity, wire.Dead(self._driver.dead))
            return
        self._forget(identity)
        front = self._fronts[identity] = _ZmqFront(self, identity)
        self._send(identity, wire.Welcome(self._driver.info))
        self._driver.attach(front)

    def _beat(self) -> None:
        """Show every front that the engine is here; forget those that left or were silent for too long."""
        now = time.monotonic()
        for identity, front in list(self._fronts.items()):
            if now - front.last_heard > self._silence_s:
                logger.warning("a front has been silent for %.1f s; its requests are aborted", now - front.last_heard)
                self._forget(identity)
            else:
                self._send(identity, wire.Pong())

    def _send(self, identity: bytes, message: wire.EngineMessage) -> None:
        try:
            self._router.send_multipart([identity, self._encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # no such front any more, or _MAX_FRAMES wait for it
            if identity in self._fronts:
                logger.warning("a front cannot be reached (%s); its requests are aborted", error)
                self._forget(identity)

    def _forget(self, identity: bytes) -> None:
        front = self._fronts.pop(identity, None)
        if front is not None:
            self._driver.detach(front)

    def _clean_up(self) -> None:
        self._router.close()
        self._context.term()
        self._wake_in.close()
        self._wake_out.close()
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
