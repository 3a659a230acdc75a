"""`EngineDriver`: the thread that runs the engine, and the fronts that send it requests.

The engine thread alone touches the core. Fronts put adds and aborts into its inbox and get deltas back through
`Front.deliver`, on the engine thread, once a step and front. `serve_zmq` adds a second thread that polls the socket: a
step may take seconds (compilation, a huge prefill), and hellos, heartbeats and GetStats must be answered meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import shutil
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from rayllm.engine import client as wire
from rayllm.errors import ConfigError, EngineDeadError, InvalidRequestError
from rayllm.types import EngineInfo, EngineStats, GenerationRequest, TokenDelta

logger = logging.getLogger(__name__)

_MAX_FRAMES = 8192  # waiting for one front; a front that is so far behind has stopped
_MAX_FRAME_BYTES = 64 * 2**20
_MAX_IPC_PATH = 107  # bytes of a Unix socket's address


class Core(Protocol):
    """What the driver needs of `rayllm.engine.core.EngineCore`; all calls come from the engine thread."""

    info: EngineInfo

    def add(self, request: GenerationRequest) -> None: ...
    def abort(self, request_ids: list[str]) -> None: ...
    def has_work(self) -> bool: ...
    def step(self) -> list[TokenDelta]: ...
    def stats(self) -> EngineStats: ...
    def shutdown(self) -> None: ...


class Front(Protocol):
    """One user of the engine. Both calls must return at once; one that raises counts as gone."""

    def deliver(self, deltas: list[TokenDelta]) -> None: ...
    def dead(self, reason: str) -> None: ...


class Health(msgspec.Struct, frozen=True):
    """Whether the engine makes progress; true if ok. reason: what is wrong, "" if nothing is."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


class _Live(msgspec.Struct):
    """A request in the core. open: indices of completions that have no finish reason yet."""

    front: Front
    request: GenerationRequest
    open: set[int]


class _Add(msgspec.Struct, frozen=True):
    front: Front
    request: GenerationRequest


class _Abort(msgspec.Struct, frozen=True):
    """request_ids: None for all of the front's."""

    front: Front
    request_ids: list[str] | None


class EngineDriver:
    """Runs a core in a thread of its own. Public methods may be called from any thread.

    Each request of a front gets finish reasons for all its completions, unless the front aborted it. A core that
    raises in `step` is dead for good: every front gets `dead(reason)`, then error deltas for its live requests.
    """

    def __init__(self, core: Core):
        self.info = core.info
        self._core = core
        self._inbox: queue.SimpleQueue[_Add | _Abort | None] = queue.SimpleQueue()  # None: stop
        self._live: dict[str, _Live] = {}  # engine thread only, like the core
        self._lock = threading.Lock()  # of the fields down to _dead
        self._fronts: list[Front] = []
        self._thread: threading.Thread | None = None
        self._server: _ZmqServer | None = None
        self._shut_down = False
        self._dead: str | None = None
        self._stats = core.stats()
        self._idle = True
        self._last_progress = time.monotonic()
        self.last_step_time: float | None = None  # time.monotonic() at the end of the last step

    def start(self) -> None:
        """Start the engine thread, if it does not run yet."""
        with self._lock:
            if self._thread is None and self._dead is None:
                self._thread = threading.Thread(target=self._run, name="rayllm-engine", daemon=True)
                self._thread.start()

    def attach(self, front: Front) -> None:
        """Let a front send requests. A dead engine tells it so at once."""
        with self._lock:
            self._fronts.append(front)
            dead = self._dead
        if dead is not None:
            front.dead(dead)

    def detach(self, front: Front) -> None:
        """Forget a front and abort its requests; nothing is delivered to it any more."""
        with self._lock:
            if front in self._fronts:
                self._fronts.remove(front)
                self._inbox.put(_Abort(front, None))

    def add(self, front: Front, request: GenerationRequest) -> None:
        """Queue a request. Raises EngineDeadError; a request that the core refuses gets error deltas instead."""
        with self._lock:  # so that no request slips in behind _die, which answers all that are in the inbox
            if self._dead is not None:
                raise EngineDeadError(self._dead)
            self._inbox.put(_Add(front, request))

    def abort(self, front: Front, request_ids: list[str]) -> None:
        """Stop requests of this front; unknown ids are no error."""
        self._inbox.put(_Abort(front, request_ids))

    def stats(self) -> EngineStats:
        """The engine's figures after its last step."""
        return self._stats

    @property
    def dead(self) -> str | None:
        """Why the engine stopped; None while it runs."""
        return self._dead

    def healthy(self, deadline: float) -> Health:
        """Not ok if the engine is dead, or has work and finished no step for `deadline` seconds."""
        if self._dead is not None:
            return Health(False, self._dead)
        waited = time.monotonic() - self._last_progress
        if self._idle or waited <= deadline:
            return Health(True)
        return Health(False, f"work is queued and no step has finished for {waited:.1f} s (limit {deadline:g} s)")

    def serve_zmq(
        self,
        path: str | None = None,
        heartbeat_s: float = wire.HEARTBEAT_S,
        silence_s: float = wire.SILENCE_S,
    ) -> str:
        """Serve fronts on a Unix socket and return its address (ipc://...), for `ZmqClient`.

        path: of the socket; its folder must be private to this user. None makes a private folder. Raises ConfigError
        for a path that is too long or in a folder that others can enter.
        """
        with self._lock:
            if self._server is not None:
                raise ConfigError(f"this engine is served already, at {self._server.address}")
            self._server = _ZmqServer(self, path, heartbeat_s, silence_s)
            return self._server.address

    def shutdown(self, timeout: float = 30.0) -> None:
        """Stop the loop after the step that runs, answer all live requests, shut the core down, remove the socket.

        timeout: seconds to wait for the step. Safe to call twice. Raises what core.shutdown() raises.
        """
        with self._lock:
            if self._shut_down:
                return
            self._shut_down = True
            thread, server = self._thread, self._server
        self._inbox.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)
        self._die("the engine was shut down")
        try:
            self._core.shutdown()
        finally:
            if server is not None:
                server.close()

    def _run(self) -> None:
        """The engine loop: take what fronts sent, step while there is work, sleep on the inbox when there is none."""
        try:
            while self._dead is None and self._take_inbox():
                if self._core.has_work():
                    deltas = self._core.step()
                    self.last_step_time = self._last_progress = time.monotonic()
                    self._route(deltas)
                self._stats = self._core.stats()
        except BaseException as error:
            logger.exception("the engine died")
            self._die(f"the engine died: {type(error).__name__}: {error}")

    def _take_inbox(self) -> bool:
        """Handle all that is in the inbox, waiting for something if the core has no work. False: stop."""
        wait = not self._core.has_work()
        while True:
            try:
                if wait:
                    self._idle = True
                    item = self._inbox.get()
                    self._last_progress, self._idle = time.monotonic(), False
                    wait = False
                else:
                    item = self._inbox.get_nowait()
            except queue.Empty:
                return True
            match item:
                case None:
                    return False
                case _Add():
                    self._admit(item.front, item.request)
                case _Abort():
                    self._drop(item.front, item.request_ids)

    def _admit(self, front: Front, request: GenerationRequest) -> None:
        if front not in self._fronts:  # gone since; its abort of all requests came first
            return
        try:
            self._core.add(request)
        except Exception as error:  # a poisonous request fails alone
            message = str(error)
            if not isinstance(error, InvalidRequestError):
                logger.exception("request %s could not be added", request.request_id)
                message = f"internal error while adding the request: {error}"
            self._deliver(front, _errors(request, message))
        else:
            self._live[request.request_id] = _Live(front, request, set(range(request.params.n)))

    def _drop(self, front: Front, request_ids: list[str] | None) -> None:
        wanted = self._live if request_ids is None else request_ids
        own = [i for i in wanted if (live := self._live.get(i)) is not None and live.front is front]
        for request_id in own:
            del self._live[request_id]
        if own:
            self._core.abort(own)

    def _route(self, deltas: list[TokenDelta]) -> None:
        """Deliver the deltas of a step, one call a front."""
        by_front: dict[int, tuple[Front, list[TokenDelta]]] = {}
        for delta in deltas:
            live = self._live.get(delta.request_id)
            if live is None:
                continue
            by_front.setdefault(id(live.front), (live.front, []))[1].append(delta)
            if delta.finish_reason is not None:
                live.open.discard(delta.index)
                if not live.open:
                    del self._live[delta.request_id]
        for front, own in by_front.values():
            self._deliver(front, own)

    def _deliver(self, front: Front, deltas: list[TokenDelta]) -> None:
        try:
            front.deliver(deltas)
        except Exception as error:
            logger.warning("a front is gone (%s); its requests are aborted", error)
            self.detach(front)

    def _die(self, reason: str) -> None:
        """End everything: refuse new requests, tell every front, answer every request. Later calls do nothing."""
        with self._lock:
            if self._dead is not None:
                return
            self._dead = reason
            fronts = list(self._fronts)
        ends = [(live.front, _errors(live.request, reason, live.open)) for live in self._live.values()]
        self._live = {}
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._inbox.get_nowait()
                if isinstance(item, _Add):
                    ends.append((item.front, _errors(item.request, reason)))
        self._inbox.put(None)
        for front in fronts:  # before the deltas, so that fronts can tell a dead engine from a failed request
            with contextlib.suppress(Exception):
                front.dead(reason)
            own = [delta for other, deltas in ends if other is front for delta in deltas]
            if own:
                with contextlib.suppress(Exception):
                    front.deliver(own)


def _errors(request: GenerationRequest, message: str, indices: Iterable[int] | None = None) -> list[TokenDelta]:
    """Terminal deltas for completions of a request, by default for all."""
    return [
        TokenDelta(request.request_id, index, [], finish_reason="error", stop_reason=message)
        for index in (range(request.params.n) if indices is None else sorted(indices))
    ]


class _ZmqFront:
    """A front behind the socket; the messages wait in the server's outbox for its thread."""

    def __init__(self, server: _ZmqServer, identity: bytes):
        self._server = server
        self.identity = identity
        self.last_heard = time.monotonic()

    def deliver(self, deltas: list[TokenDelta]) -> None:
        self._server.post(self, wire.Deltas(deltas))

    def dead(self, reason: str) -> None:
        self._server.post(self, wire.Dead(reason))


class _ZmqServer:
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
                    front.deliver(_errors(request, str(error)))
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
