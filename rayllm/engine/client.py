"""How a front talks to an engine: `EngineClient`, within the process or over a socket, and the messages of the latter.

Messages are msgspec structs in msgpack, one a frame; nothing that comes over the socket is ever unpickled. An engine
sends one `Deltas` a step and front. Both sides send something at least every HEARTBEAT_S, so silence means trouble.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import zmq
import zmq.asyncio

from rayllm.api.types import EngineInfo, EngineStats, GenerationRequest, TokenDelta
from rayllm.errors import EngineDeadError, InvalidRequestError

if TYPE_CHECKING:
    from rayllm.engine.driver import EngineDriver

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
SILENCE_S = 30.0  # a side that was silent for so long is taken for dead
_CONNECT_S = 10.0

OnDeltas = Callable[[list[TokenDelta]], None]
OnDead = Callable[[str], None]


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Front to engine, first of all; the answer is Welcome or Dead."""


class Add(msgspec.Struct, frozen=True, tag=True):
    """Front to engine: run this request."""

    request: GenerationRequest


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Front to engine: stop these requests; nothing more is sent for them."""

    request_ids: list[str]


class GetStats(msgspec.Struct, frozen=True, tag=True):
    """Front to engine: send Stats with this serial number."""

    serial: int


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Front to engine: still here."""


class Bye(msgspec.Struct, frozen=True, tag=True):
    """Front to engine: leaving; all its requests are aborted."""


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Engine to front: the answer to Hello."""

    info: EngineInfo


class Deltas(msgspec.Struct, frozen=True, tag=True):
    """Engine to front: all that a step brought for this front's requests."""

    deltas: list[TokenDelta]


class Stats(msgspec.Struct, frozen=True, tag=True):
    """Engine to front: the answer to GetStats."""

    serial: int
    stats: EngineStats


class Pong(msgspec.Struct, frozen=True, tag=True):
    """Engine to front: still here."""


class Dead(msgspec.Struct, frozen=True, tag=True):
    """Engine to front: it does not serve this front any more; all the front's requests are over."""

    reason: str


FrontMessage = Hello | Add | Abort | GetStats | Ping | Bye
EngineMessage = Welcome | Deltas | Stats | Pong | Dead


class EngineClient(Protocol):
    """A front's connection to one engine.

    `on_deltas` and `on_dead` may be called from any thread and must return at once. After `on_dead(reason)` all
    requests of the front are over and new ones are refused; error deltas for live requests may follow it. Every
    request gets finish reasons for all its completions, or is ended by on_dead, unless the front aborted it.
    """

    async def start(self, on_deltas: OnDeltas, on_dead: OnDead) -> None:
        """Connect. Raises EngineDeadError if no engine answers."""

    def info(self) -> EngineInfo:
        """The engine's limits, known once started."""

    def add(self, request: GenerationRequest) -> None:
        """Hand over a request, without waiting for the engine. Raises EngineDeadError."""

    def abort(self, request_ids: list[str]) -> None:
        """Stop requests; unknown ids are no error. Deltas on their way may still arrive."""

    async def stats(self) -> EngineStats:
        """Figures at most one step old. Raises EngineDeadError."""

    async def close(self) -> None:
        """Disconnect; requests that still run are aborted."""


class InProcessClient:
    """A client of a driver in this process.

    owns_driver: `close` shuts the driver down too.
    """

    def __init__(self, driver: EngineDriver, owns_driver: bool = True):
        self._driver = driver
        self._owns_driver = owns_driver
        self._on_deltas: OnDeltas | None = None
        self._on_dead: OnDead | None = None

    async def start(self, on_deltas: OnDeltas, on_dead: OnDead) -> None:
        self._on_deltas, self._on_dead = on_deltas, on_dead
        self._driver.start()
        self._driver.attach(self)

    def info(self) -> EngineInfo:
        return self._driver.info

    def add(self, request: GenerationRequest) -> None:
        self._driver.add(self, request)

    def abort(self, request_ids: list[str]) -> None:
        self._driver.abort(self, request_ids)

    async def stats(self) -> EngineStats:
        return self._driver.stats()

    async def close(self) -> None:
        self._driver.detach(self)
        if self._owns_driver:
            await asyncio.to_thread(self._driver.shutdown)

    def deliver(self, deltas: list[TokenDelta]) -> None:
        """For the driver: deltas of a step, on the driver's thread."""
        if self._on_deltas is not None:
            self._on_deltas(deltas)

    def dead(self, reason: str) -> None:
        """For the driver: the engine is dead."""
        if self._on_dead is not None:
            self._on_dead(reason)


class ZmqClient:
    """A client of a driver behind `EngineDriver.serve_zmq`. All calls come from one event loop.

    heartbeat_s, silence_s: how often to send a sign of life, and after how long a silence the engine is
    given up; a closed connection is noticed at once.
    """

    def __init__(self, address: str, heartbeat_s: float = HEARTBEAT_S, silence_s: float = SILENCE_S):
        self._address = address
        self._heartbeat_s = heartbeat_s
        self._silence_s = silence_s
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(EngineMessage).decode
        self._decode_add = msgspec.msgpack.Decoder(Add).decode
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._info: EngineInfo | None = None
        self._dead: str | None = None
        self._on_deltas: OnDeltas | None = None
        self._on_dead: OnDead | None = None
        self._stats: dict[int, asyncio.Future[EngineStats]] = {}
        self._serials = itertools.count()
        self._last_heard = 0.0

    async def start(self, on_deltas: OnDeltas, on_dead: OnDead) -> None:
        self._on_deltas, self._on_dead, self._dead = on_deltas, on_dead, None
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 200  # ms, for Bye
        monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(self._address)
        self._send(Hello())
        try:
            answer = self._decode(await asyncio.wait_for(self._socket.recv(), min(_CONNECT_S, self._silence_s)))
        except TimeoutError:
            await self.close()
            raise EngineDeadError(f"no engine answers at {self._address}") from None
        if not isinstance(answer, Welcome):
            await self.close()
            raise EngineDeadError(answer.reason if isinstance(answer, Dead) else f"unexpected answer: {answer}")
        self._info = answer.info
        self._last_heard = time.monotonic()
        works = (self._read(self._socket), self._beat(), self._watch(monitor))
        self._tasks = [asyncio.create_task(work) for work in works]

    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineDeadError("the engine's client has not been started")
        return self._info

    def add(self, request: GenerationRequest) -> None:
        self._check_alive()
        message = Add(request)
        try:
            self._decode_add(self._encode(message))
        except msgspec.ValidationError as error:
            # The engine gives a front up that sends what it cannot read, and with it all of the front's requests.
            raise InvalidRequestError(f"the request has a value of a wrong type: {error}") from None
        self._send(message)

    def abort(self, request_ids: list[str]) -> None:
        if self._dead is None:
            self._send(Abort(request_ids))

    async def stats(self) -> EngineStats:
        self._check_alive()
        serial = next(self._serials)
        future = self._stats[serial] = asyncio.get_running_loop().create_future()
        try:
            self._send(GetStats(serial))
            return await asyncio.wait_for(future, self._silence_s)
        except TimeoutError:
            raise EngineDeadError(f"the engine at {self._address} does not answer") from None
        finally:
            self._stats.pop(serial, None)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._die("the engine's client was closed", tell=False)
        if self._socket is not None and self._context is not None:
            self._send(Bye())
            self._socket.disable_monitor()
            self._socket.close()
            self._context.destroy(linger=200)
            self._socket = self._context = None

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(self._dead)

    def _send(self, message: FrontMessage) -> None:
        """Send at once, or in order as soon as the socket takes it."""
        if self._socket is None:
            raise EngineDeadError("the engine's client is not connected")
        sent = self._socket.send(self._encode(message))
        asyncio.ensure_future(sent).add_done_callback(_ignore_result)

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        try:
            while True:
                frame = await socket.recv()
                self._last_heard = time.monotonic()
                self._handle(self._decode(frame))
        except Exception as error:  # without a reader no request would ever end
            logger.exception("reading from the engine at %s failed", self._address)
            self._die(f"reading from the engine at {self._address} failed: {error}")

    def _handle(self, message: EngineMessage) -> None:
        match message:
            case Deltas(deltas) if self._on_deltas is not None:
                self._on_deltas(deltas)
            case Stats(serial, stats):
                future = self._stats.get(serial)
                if future is not None and not future.done():
                    future.set_result(stats)
            case Dead(reason):
                self._die(reason)

    async def _beat(self) -> None:
        while True:
            before = time.monotonic()
            self._send(Ping())
            await asyncio.sleep(self._heartbeat_s)
            now = time.monotonic()
            if now - before > self._heartbeat_s + self._silence_s / 2:
                self._last_heard = now  # this process stood still itself; what was sent meanwhile is still to be read
            elif now - self._last_heard > self._silence_s:
                self._die(f"the engine at {self._address} has been silent for {now - self._last_heard:.1f} s")

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        await monitor.recv_multipart()
        # What the engine said last may still be on its way up from the socket, and says more than "gone".
        await asyncio.sleep(min(0.1, self._heartbeat_s))
        self._die(f"the engine at {self._address} closed the connection")

    def _die(self, reason: str, tell: bool = True) -> None:
        if self._dead is not None:
            return
        self._dead = reason
        for future in self._stats.values():
            if not future.done():
                future.set_exception(EngineDeadError(reason))
        if tell and self._on_dead is not None:
            logger.error("%s", reason)
            self._on_dead(reason)


def _ignore_result(future: asyncio.Future[Any]) -> None:
    with contextlib.suppress(asyncio.CancelledError, zmq.ZMQError):
        future.result()
