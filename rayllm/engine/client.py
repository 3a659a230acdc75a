"""`EngineClient`: a front's connection to one engine, with text in and out; requests are async iterators of outputs.

Detokenisation, stop strings and log-probability dicts are made here, on the front's event loop, away from the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from rayllm import timeouts
from rayllm.api import wire
from rayllm.api.types import Abort, EngineInfo, GenerationRequest, RequestOutput, TokenDelta
from rayllm.api.validation import validate_request
from rayllm.errors import EngineDeadError, InvalidRequestError, OverloadedError
from rayllm.text.outputs import OutputProcessor, RequestState, accumulate
from rayllm.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class _Stream:
    """What the engine has for one consumer and the consumer has not taken yet, merged into one output."""

    def __init__(self) -> None:
        self._pending: RequestOutput | None = None
        self._end: Exception | None = None
        self._event = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        self._pending = output if self._pending is None else accumulate(self._pending, output)
        self._event.set()

    def end(self, reason: Exception) -> None:
        """Raise this in the consumer when it has taken what is pending."""
        self._end = self._end or reason
        self._event.set()

    def __aiter__(self) -> _Stream:
        return self

    async def __anext__(self) -> RequestOutput:
        while self._pending is None:
            if self._end is not None:
                raise self._end
            self._event.clear()
            await self._event.wait()
        output, self._pending = self._pending, None
        return output


class Beats:
    """Which of a front's beats are worth a message: those with something new, and one every idle_s.

    One that tells of all of the front's work always is: its answer tells of the other fronts.
    """

    def __init__(self, make: Callable[[], wire.FrontBeat], idle_s: float):
        self._make, self._idle_s = make, idle_s
        self._sent: wire.FrontBeat | None = None
        self.sent_at = -math.inf

    def due(self, now: float) -> wire.FrontBeat | None:
        """The beat to send now, in seconds of a clock; None if there is none."""
        beat = self._make()
        if beat == self._sent and beat.total is None and now - self.sent_at < self._idle_s:
            return None
        self._sent, self.sent_at = beat, now
        return beat


class EngineClient:
    """Runs requests on an engine that listens at `address`. All calls come from one event loop.

    tokenizer: None with skip_tokenizer_init; texts are "" then.
    front_id: unique for each start of the front.
    beat: what to tell the engine of this front; called every beat_s, and sent as `Beats` says.
    on_change: called when the engine dies, drains, or gets healthy or unhealthy.
    server_key, keys: the engine's public key and this front's own keys; required for tcp addresses.
    silence_s: the engine is given up when it was silent for so long; a closed connection is noticed at once, one whose
    other end is stopped or cannot be reached after CONNECTION_SILENCE_S. idle_s: of `Beats`.

    dead: why the engine can't be used any more; None while it can. engine_beat: the engine's last. peer_metrics: those
    of the engine's other fronts, by their ids.
    """

    def __init__(
        self,
        address: str,
        tokenizer: Tokenizer | None,
        *,
        front_id: str | None = None,
        beat: Callable[[], wire.FrontBeat] = wire.FrontBeat,
        on_change: Callable[[], None] = lambda: None,
        server_key: str = "",
        keys: wire.CurveKeys | None = None,
        beat_s: float = timeouts.BEAT_S,
        idle_s: float = timeouts.IDLE_BEAT_S,
        silence_s: float = timeouts.SILENCE_S,
    ):
        self.tokenizer = tokenizer
        self.dead: str | None = None
        self.engine_beat = wire.EngineBeat()
        self.peer_metrics: dict[str, wire.Snapshot] = {}
        self._address = address
        self._front_id = front_id or uuid.uuid4().hex
        self._make_beat, self._beats = beat, Beats(beat, idle_s)
        self._on_change = on_change
        self._server_key, self._keys = server_key, keys
        self._beat_s, self._silence_s = beat_s, silence_s
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(wire.EngineMessage).decode
        self._processor = OutputProcessor(tokenizer)
        self._streams: dict[str, _Stream] = {}
        self._searches: dict[str, asyncio.Future[bool]] = {}  # by key id
        self._next_beat: asyncio.Future[None] | None = None  # of the engine, for which somebody waits
        self._socket: zmq.asyncio.Socket | None = None
        self._monitor: zmq.asyncio.Socket
        self._tasks: list[asyncio.Task[None]] = []
        self._info: EngineInfo | None = None
        self._last_heard = 0.0

    @property
    def info(self) -> EngineInfo:
        """The engine's limits. Raises EngineDeadError before `connect`."""
        if self._info is None:
            raise EngineDeadError("the engine's client is not connected")
        return self._info

    async def connect(self) -> None:
        """Raises EngineDeadError if no engine answers."""
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        socket = self._socket = _context().socket(zmq.DEALER)
        socket.linger = round(timeouts.DISCONNECT_S * 1000)
        # A thread of ZeroMQ's answers these in the engine, whatever keeps its interpreter busy.
        socket.heartbeat_ivl = round(timeouts.CONNECTION_PING_S * 1000)
        socket.heartbeat_timeout = round(timeouts.CONNECTION_SILENCE_S * 1000)
        if self._keys is not None and self._server_key:
            socket.curve_publickey, socket.curve_secretkey = self._keys.public.encode(), self._keys.secret.encode()
            socket.curve_serverkey = self._server_key.encode()
        socket.ipv6 = "[" in self._address
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED, f"inproc://{uuid.uuid4().hex}")
        self._monitor = monitor
        socket.connect(self._address)
        self._send(wire.Hello(self._front_id))
        try:
            answer = self._decode(await asyncio.wait_for(socket.recv(), min(timeouts.CONNECT_S, self._silence_s)))
        except TimeoutError:
            await self.close()
            raise EngineDeadError(f"no engine answers at {self._address}") from None
        except asyncio.CancelledError:
            if self.dead is None:
                await self.close()
                raise
            raise EngineDeadError(self.dead) from None  # `close` took the socket away
        if isinstance(answer, wire.Welcome) and answer.version != wire.VERSION:
            answer = wire.Dead(f"the engine speaks version {answer.version} of the protocol, not {wire.VERSION}")
        if not isinstance(answer, wire.Welcome):
            await self.close()
            raise EngineDeadError(answer.reason if isinstance(answer, wire.Dead) else f"unexpected answer: {answer}")
        self._info = answer.info
        self._last_heard = time.monotonic()
        works = (self._read(socket), self._beat(), self._watch(monitor))
        self._tasks = [asyncio.create_task(work) for work in works]

    def generate(
        self, request: GenerationRequest, prompt_text: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a request: an iterator of what is new, the last output with finished=True.

        A consumer that is slower than the engine gets several steps in one output. Leaving the iterator (aclose, a
        cancelled task) aborts the request; one with a key goes on. prompt_text goes into the outputs. An output with
        finish_reason "error" means that the engine failed on this request alone.

        Raises InvalidRequestError, at once or, if only the engine can tell, as with grammars, before the first output,
        or in mid-stream if its grammar cannot go on; EngineDeadError, also in mid-stream.
        """
        return self.run(RequestState(self.tokenizer, request, prompt_text))

    def run(self, state: RequestState) -> AsyncGenerator[RequestOutput, None]:
        """`generate` for a request that may have begun on another engine, and goes on where it is."""
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        validate_request(state.request, self.info)
        self._processor.check(state.request)
        return self._run(state)

    async def abort(self, request_id: str) -> None:
        """As leaving its iterator does, which ends without a last output. Unknown ids are no error."""
        stream = self._streams.pop(request_id, None)
        self._processor.remove(request_id)
        if stream is not None:
            stream.end(StopAsyncIteration())
            self._abort([Abort(request_id)])

    async def knows(self, key_id: str) -> bool:
        """Whether the engine has a request with this key. False if it does not answer."""
        if self.dead is not None:
            return False
        if (search := self._searches.get(key_id)) is None:
            search = self._searches[key_id] = asyncio.get_running_loop().create_future()
            self._send(wire.Find(key_id))
        await asyncio.wait([search], timeout=timeouts.ASK_S)
        return search.done() and search.result()

    def forget(self, key_id: str) -> None:
        """Nobody will send the request with this key again: it ends when its streams here and elsewhere are left."""
        if self.dead is None and self._socket is not None:
            self._send(wire.Forget(key_id))

    def tell(self) -> None:
        """Send what is new now, if the last beat was beat_s ago: the answer says what others have done meanwhile."""
        now = time.monotonic()
        if self.dead is None and now - self._beats.sent_at >= self._beat_s:
            self._send_beat(now)

    async def ask(self) -> None:
        """Bring engine_beat and peer_metrics up to date, as far as the engine answers."""
        if self.dead is None:
            if self._next_beat is None:
                self._next_beat = asyncio.get_running_loop().create_future()
                self._send(self._make_beat())
            await asyncio.wait([self._next_beat], timeout=timeouts.ASK_S)

    async def close(self) -> None:
        """Disconnect; requests without a key that still run are aborted, and streams end with EngineDeadError."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._die("the engine's client was closed")
        if self._socket is not None:
            self._send(wire.Bye())
            self._socket.disable_monitor()
            self._monitor.close()
            self._socket.close()
            self._socket = None

    async def _run(self, state: RequestState) -> AsyncGenerator[RequestOutput, None]:
        if self.dead is not None:  # since `run` was called
            raise EngineDeadError(self.dead)
        request_id = state.request.request_id
        self._processor.follow(state)
        stream = self._streams[request_id] = _Stream()
        try:
            self._send(wire.pack_request(state.to_send()))
            async for output in stream:
                yield output
                if output.finished:
                    return
        finally:
            # The id may be another stream's by now, if this one has finished or was aborted.
            if self._streams.get(request_id) is stream:
                del self._streams[request_id]
                if self._processor.remove(request_id):
                    self._abort([Abort(request_id)])

    def _abort(self, aborts: list[Abort]) -> None:
        if self.dead is None:
            self._send(wire.Aborts(aborts))

    def _send(self, message: wire.FrontMessage) -> None:
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
                message = self._decode(frame)
                match message:
                    case wire.Deltas(deltas):
                        self._take(deltas)
                    case wire.EngineBeat():
                        self._take_beat(message)
                    case wire.Found(key_id, known):
                        if (search := self._searches.pop(key_id, None)) is not None:
                            search.set_result(known)
                    case wire.Dead(reason):
                        self._die(reason)
        except Exception as error:  # without a reader no request would ever end
            logger.exception("reading from the engine at %s failed", self._address)
            self._die(f"reading from the engine at {self._address} failed: {error}")

    def _take_beat(self, beat: wire.EngineBeat) -> None:
        before, self.engine_beat = self.engine_beat, beat
        self.peer_metrics |= beat.metrics
        if self._next_beat is not None:
            self._next_beat.set_result(None)
            self._next_beat = None
        if (beat.draining, beat.unhealthy) != (before.draining, before.unhealthy):
            self._on_change()

    def _take(self, deltas: list[TokenDelta]) -> None:
        """Turn a step's deltas into outputs for their streams."""
        while deltas and deltas[0].bad_param is not None:  # refusals come before all else of a step
            refused = deltas.pop(0)
            stream = self._streams.get(refused.request_id)
            if self._processor.remove(refused.request_id) and stream is not None:
                kind = OverloadedError if refused.try_again else InvalidRequestError
                stream.end(kind(str(refused.stop_reason), refused.bad_param))
        outputs, aborts = self._processor.process(deltas)
        for output in outputs:
            self._streams[output.request_id].put(output)
        if aborts:
            self._abort(aborts)

    async def _beat(self) -> None:
        while True:
            before = time.monotonic()
            self._send_beat(before)
            await asyncio.sleep(self._beat_s)
            now = time.monotonic()
            if now - before > self._beat_s + self._silence_s / 2:
                self._last_heard = now  # this process stood still itself; what was sent meanwhile is still to be read
            elif now - self._last_heard > self._silence_s:
                self._die(f"the engine at {self._address} has been silent for {now - self._last_heard:.1f} s")

    def _send_beat(self, now: float) -> None:
        if (beat := self._beats.due(now)) is not None:
            self._send(beat)

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        await monitor.recv_multipart()
        # What the engine said last may still be on its way up from the socket, and says more than "gone".
        await asyncio.sleep(min(0.1, self._beat_s))
        self._die(f"the connection to the engine at {self._address} was closed, or is silent")

    def _die(self, reason: str) -> None:
        if self.dead is not None:
            return
        self.dead = reason
        self._on_change()
        while self._searches:
            self._searches.popitem()[1].set_result(False)
        if self._next_beat is not None:
            self._next_beat.set_result(None)
        for request_id, stream in self._streams.items():
            self._processor.remove(request_id)
            stream.end(EngineDeadError(reason))


def _context() -> zmq.asyncio.Context:
    """Of all connections of this process. It never ends, since ZeroMQ may wait for ever for closed connections then."""
    context = zmq.asyncio.Context.instance()
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
    return context


def _ignore_result(future: asyncio.Future[Any]) -> None:
    with contextlib.suppress(asyncio.CancelledError, zmq.ZMQError):
        future.result()
