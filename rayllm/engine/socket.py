"""`EngineSocket`: an engine's ZeroMQ sockets, for fronts on its host (ipc) and on other hosts (tcp with CURVE keys).

They have a thread of their own: a step may take seconds (compilation, a huge prefill), and hellos and beats must be
answered meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from rayllm import timeouts
from rayllm.api import wire
from rayllm.api.types import Load, TokenDelta
from rayllm.engine.driver import EngineDriver
from rayllm.engine.engine import refusal
from rayllm.engine.folder import PrivateFolder
from rayllm.errors import ConfigError, InvalidRequestError

logger = logging.getLogger(__name__)

_MAX_FRAMES = 8192  # waiting for one front; a front that is so far behind has stopped
_MAX_FRAME_BYTES = 64 * 2**20
_MAX_IPC_PATH = 107  # bytes of a Unix socket's address

Router = zmq.Socket[bytes]
Peer = tuple[Router, bytes]  # a connection: our socket, and ZeroMQ's identity of the other end


class _ZmqFront:
    """A front behind a socket; messages for it wait in the outbox for the sockets' thread."""

    def __init__(self, server: EngineSocket, peer: Peer, front_id: str):
        self._server = server
        self.peer, self.front_id = peer, front_id
        self.last_heard = self.last_told = time.monotonic()
        self.beat: wire.FrontBeat | None = None  # its last; it sends requests only after its first
        self.news: dict[str, wire.Snapshot] = {}  # of the others' metrics, what this front was not told yet

    @property
    def counts(self) -> bool:
        """Whether it matters at once if it is gone: its work is counted here, or passed on."""
        return self.beat is not None and (self.beat.total is not None or self.beat.here != Load())

    def deliver(self, deltas: list[TokenDelta]) -> None:
        self._server.post(self, wire.Deltas(deltas))

    def dead(self, reason: str) -> None:
        self._server.post(self, wire.Dead(reason))


class EngineSocket:
    """The sockets of a driver and the thread that polls them. A front that left, or that stopped reading, is detached.

    The Unix socket is in a new folder that only this user can enter. ConfigError if its path gets too long.

    endpoint: where it listens. beat_s: how often it looks for fronts that are gone, and at its health, of which
    all fronts are told when it has changed. silence_s: a front silent for so long is gone.
    """

    def __init__(self, driver: EngineDriver, *, beat_s: float = timeouts.BEAT_S, silence_s: float = timeouts.SILENCE_S):
        self._driver = driver
        self._beat_s, self._silence_s = beat_s, silence_s
        self._folder = PrivateFolder()
        path = str(self._folder.path / "engine.sock")
        if len(os.fsencode(path)) > _MAX_IPC_PATH:
            self._folder.remove()
            raise ConfigError(
                f"the engine's socket path {path} has over {_MAX_IPC_PATH} bytes; set TMPDIR to a shorter one"
            )
        self.endpoint = wire.Endpoint(f"ipc://{path}")
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(wire.FrontMessage).decode
        self._draining = self._closing = False
        self._opened: deque[Router] = deque()  # bound, for the sockets' thread to poll
        self._outbox: deque[tuple[_ZmqFront, wire.EngineMessage]] = deque()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._context = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        self._front_keys: frozenset[str] = frozenset()
        # The sockets' thread alone uses what follows.
        self._fronts: dict[Peer, _ZmqFront] = {}
        self._metrics: dict[str, wire.Snapshot] = {}  # front id -> its latest figures, least recently changed first
        self._next_beat = 0.0
        self._state: tuple[str | None, bool] = None, False  # (why it is unhealthy, whether it drains) as fronts know it
        self._open(self.endpoint.ipc)
        self._thread = threading.Thread(target=self._run, name="rayllm-zmq", daemon=True)
        self._thread.start()

    def open_tcp(self, host: str) -> None:
        """Listen on a free port of `host` too, for fronts that `allow` names; `endpoint` has the address then."""
        public, secret = zmq.curve_keypair()
        if self._authenticator is None:  # first: nobody must get in unasked
            self._authenticator = ThreadAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback("*", credentials_provider=self)
        name = f"[{host}]" if ":" in host else host
        router = self._open(f"tcp://{name}:0", secret)
        self.endpoint = wire.Endpoint(self.endpoint.ipc, router.get_string(zmq.LAST_ENDPOINT), public.decode())
        self._wake()

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

    @property
    def is_alive(self) -> bool:
        """Whether fronts are answered; False after `close`, and after an error that the log has."""
        return self._thread.is_alive()

    def load(self) -> Load:
        """The work that all fronts have here, as they last said."""
        beats = [front.beat for front in list(self._fronts.values()) if front.beat is not None]
        return sum((beat.here for beat in beats), Load())

    def front_ids(self) -> set[str]:
        """The fronts that know that they are connected."""
        return {front.front_id for front in list(self._fronts.values()) if front.beat is not None}

    def post(self, front: _ZmqFront, message: wire.EngineMessage) -> None:
        """Send a message, from any thread."""
        self._outbox.append((front, message))
        self._wake()

    def close(self) -> None:
        """Send what is in the outbox, close the sockets and remove the folder."""
        self._closing = True
        self._wake()
        self._thread.join(timeouts.CLOSE_S)
        if self._thread.is_alive():
            logger.warning("ZeroMQ has not closed the engine's sockets; a thread is left behind")

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it wakes up anyway; closed: it has no fronts any more
            self._wake_in.send(b".")

    def _open(self, address: str, curve_secret: bytes | None = None) -> Router:
        """A bound socket; from here on it is the sockets' thread's."""
        router = self._context.socket(zmq.ROUTER)
        router.set(zmq.ROUTER_MANDATORY, 1)  # a send to a front that left fails, instead of going nowhere
        router.set(zmq.SNDHWM, _MAX_FRAMES)
        router.set(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
        if curve_secret is not None:
            router.curve_server = True
            router.curve_secretkey = curve_secret
            router.set(zmq.IPV6, ":" in address.removeprefix("tcp:").rpartition(":")[0])
        router.bind(address)
        self._opened.append(router)
        return router

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_out, zmq.POLLIN)
        try:
            while not self._closing or self._outbox:
                while self._opened:
                    poller.register(self._opened.popleft(), zmq.POLLIN)
                for ready, _event in poller.poll(max(0, round((self._next_beat - time.monotonic()) * 1000))):
                    if isinstance(ready, zmq.Socket):
                        self._receive(ready)
                    else:
                        self._wake_out.recv(4096)
                while self._outbox:
                    front, message = self._outbox.popleft()
                    if self._fronts.get(front.peer) is front:
                        self._send(front.peer, message)
                if time.monotonic() >= self._next_beat:
                    self._next_beat = time.monotonic() + self._beat_s
                    self._beat()
        except Exception:
            logger.exception("the engine's socket failed; its fronts will give the engine up")
        finally:
            for peer in list(self._fronts):
                self._forget(peer)
            if self._authenticator is not None:
                self._authenticator.stop()
            self._wake_in.close()
            self._wake_out.close()
            self._folder.remove()
            self._context.destroy(linger=round(timeouts.DISCONNECT_S * 1000))  # which may hang, so it comes last

    def _receive(self, router: Router) -> None:
        """Take in what has come, until there is something to send: tokens do not wait for a thousand requests."""
        with contextlib.suppress(zmq.Again):
            for number in range(1000):  # then it is the other socket's turn
                if number and self._outbox:
                    return
                identity, *frames = router.recv_multipart(zmq.NOBLOCK)
                peer = router, identity
                try:
                    message = self._decode(b"".join(frames))
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    logger.warning("a front sent something that is no message: %s", error)
                    continue
                if isinstance(message, wire.Hello):
                    self._welcome(peer, message)
                elif (front := self._fronts.get(peer)) is not None:
                    front.last_heard = time.monotonic()
                    self._handle(front, message)
                elif not isinstance(message, wire.Bye):
                    self._send(peer, wire.Dead("the engine does not know this front, or gave it up for not reading"))

    def _welcome(self, peer: Peer, hello: wire.Hello) -> None:
        reason, front_id = self._driver.dead, hello.front_id
        if hello.version != wire.VERSION:
            reason = f"the engine speaks version {wire.VERSION} of the protocol, and the API server {hello.version}"
        if reason is not None:
            self._send(peer, wire.Dead(reason))
            return
        # A front that comes again has given its last connection up, and sends what it had there again: the end of that
        # connection may not have come through yet, if the network between the two was gone.
        for other in [key for key, front in self._fronts.items() if key == peer or front.front_id == front_id]:
            self._forget(other)
        front = self._fronts[peer] = _ZmqFront(self, peer, front_id)
        front.news = {key: metrics for key, metrics in self._metrics.items() if key != front_id}
        self._driver.attach(front)  # first: if it is gone already, the next call detaches it
        self._send(peer, wire.Welcome(self._driver.info))
        self._answer(front)

    def _handle(self, front: _ZmqFront, message: wire.FrontMessage) -> None:
        match message:
            case wire.Add(request_id):
                self._add(front, request_id, message)
            case wire.Find(key_id):
                self._send(front.peer, wire.Found(key_id, self._driver.knows(key_id)))
            case wire.Forget(key_id):
                self._driver.forget(key_id)
            case wire.Aborts(aborts):
                self._driver.abort(front, aborts)
            case wire.FrontBeat(metrics=metrics):
                front.beat = message
                self._answer(front)
                for key, snapshot in wire.take_newer(self._metrics, metrics).items():
                    for other in self._fronts.values():
                        if other is not front and other.front_id != key:
                            other.news[key] = snapshot
            case wire.Bye():
                self._forget(front.peer)

    def _add(self, front: _ZmqFront, request_id: str, message: wire.Add) -> None:
        try:
            self._driver.add(front, wire.unpack_request(message))
        except msgspec.DecodeError as error:
            refused = InvalidRequestError(f"the request has a value of a wrong type: {error}")
            front.deliver([refusal(request_id, refused)])

    def _beat(self) -> None:
        """Forget fronts that were silent for too long or whose connections have ended; tell the others what is new."""
        now = time.monotonic()
        before, self._state = self._state, (self._driver.unhealthy(timeouts.STALL_S), self._draining)
        for peer, front in list(self._fronts.items()):
            if now - front.last_heard > self._silence_s:
                logger.warning("a front has been silent for %.1f s and is given up", now - front.last_heard)
                self._forget(peer)
            elif self._state != before or (front.counts and now - front.last_told >= self._beat_s):
                self._answer(front)  # which fails at once if the connection has ended

    def _answer(self, front: _ZmqFront) -> None:
        """Tell a front all that it may want to know."""
        others = [other.beat for other in self._fronts.values() if other is not front and other.beat is not None]
        orphans = Load(self._driver.num_orphans)
        news, front.news = front.news, {}
        beat = wire.EngineBeat(
            stats=self._driver.stats,
            unhealthy=self._state[0],
            draining=self._state[1],
            others_total=sum((beat.total for beat in others if beat.total is not None), orphans),
            others_here=sum((beat.here for beat in others), orphans),
            metrics=news,
        )
        self._send(front.peer, beat)

    def _send(self, peer: Peer, message: wire.EngineMessage) -> None:
        router, identity = peer
        try:
            router.send_multipart([identity, self._encode(message)], zmq.NOBLOCK)
            if (front := self._fronts.get(peer)) is not None:
                front.last_told = time.monotonic()
        except zmq.ZMQError as error:  # no such front any more, or _MAX_FRAMES wait for it
            if peer in self._fronts:
                logger.warning("a front cannot be reached (%s) and is given up", error)
                self._forget(peer)

    def _forget(self, peer: Peer) -> None:
        front = self._fronts.pop(peer, None)
        if front is not None:
            self._driver.detach(front)
