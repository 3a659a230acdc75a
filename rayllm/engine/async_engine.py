"""`AsyncEngine`: an engine as fronts use it, with text in and out; requests are async iterators of RequestOutput.

Detokenisation, stop strings and log-probability dicts are made here, on the front's event loop, away from the engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator
from typing import NamedTuple

from rayllm.api.types import EngineInfo, EngineStats, GenerationRequest, RequestOutput, TokenDelta
from rayllm.api.validation import validate_request
from rayllm.config.options import EngineConfig
from rayllm.engine.client import EngineClient, InProcessClient
from rayllm.errors import EngineDeadError, InvalidRequestError
from rayllm.text.outputs import OutputProcessor, accumulate
from rayllm.text.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)


class _Death(NamedTuple):
    """In the inbox: the engine is dead."""

    reason: str


class _Aborted(Exception):
    """Ends a stream whose request was aborted by its id."""


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
        """Raise this from `next` when what is pending has been taken."""
        if self._end is None:
            self._end = reason
            self._event.set()

    async def next(self) -> RequestOutput:
        while self._pending is None:
            if self._end is not None:
                raise self._end
            self._event.clear()
            await self._event.wait()
        output, self._pending = self._pending, None
        return output


class AsyncEngine:
    """Runs requests on an engine. All methods are called from one event loop.

    tokenizer: None with skip_tokenizer_init; texts are "" then.
    """

    def __init__(self, client: EngineClient, tokenizer: Tokenizer | None):
        self._client = client
        self._tokenizer = tokenizer
        self._processor = OutputProcessor(tokenizer)
        self._streams: dict[str, _Stream] = {}
        self._inbox: deque[list[TokenDelta] | _Death] = deque()  # in the engine's order, filled by the client's thread
        self._wake_pending = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._start_lock = asyncio.Lock()
        self._started = False
        self._dead: str | None = None

    @classmethod
    def from_config(cls, config: EngineConfig) -> AsyncEngine:
        """An engine in this process. Blocks while the model loads; raises ConfigError, ModelError, StartupError."""
        from rayllm.engine.driver import EngineDriver
        from rayllm.engine.engine import build_engine_core

        tokenizer = None if config.skip_tokenizer_init else load_tokenizer(config.model)
        return cls(InProcessClient(EngineDriver(build_engine_core(config))), tokenizer)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, if there is one."""
        return self._tokenizer

    @property
    def info(self) -> EngineInfo:
        """The engine's limits. Raises EngineDeadError before `start` if the engine is in another process."""
        return self._client.info()

    @property
    def dead(self) -> str | None:
        """Why the engine can't be used any more; None while it can."""
        return self._dead

    async def start(self) -> None:
        """Connect to the engine; `generate` does it where it was not done. Raises EngineDeadError."""
        async with self._start_lock:
            if self._started:
                return
            self._loop = asyncio.get_running_loop()
            await self._client.start(self._on_deltas, self._on_dead)
            self._started = True

    def generate(
        self, request: GenerationRequest, prompt_text: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a request: an iterator of what is new, the last output with finished=True.

        A consumer that is slower than the engine gets several steps in one output. Leaving the iterator (aclose, a
        cancelled task) aborts the request. prompt_text goes into the outputs. An output with finish_reason "error"
        means that the engine failed on this request alone.

        Raises InvalidRequestError, at once when the engine has been started, or before the first output if only the
        engine can tell, as with grammars; EngineDeadError, also in mid-stream.
        """
        if self._started:
            self._check(request)
        return self._run(request, prompt_text)

    async def abort(self, request_id: str) -> None:
        """End a request, its iterator too, without a last output. Unknown ids are no error."""
        stream = self._streams.pop(request_id, None)
        self._processor.remove(request_id)
        if stream is not None:
            stream.end(_Aborted())
            self._client.abort([request_id])

    async def stats(self) -> EngineStats:
        """The engine's figures, at most a step old. Raises EngineDeadError."""
        await self.start()
        return await self._client.stats()

    async def close(self) -> None:
        """Disconnect, and stop the engine if it is in this process. Streams end with EngineDeadError."""
        self._die("the engine was closed")
        await self._client.close()

    async def _run(self, request: GenerationRequest, prompt_text: str | None) -> AsyncGenerator[RequestOutput, None]:
        if not self._started:
            await self.start()
            self._check(request)
        request_id = request.request_id
        self._processor.add(request, prompt_text)
        stream = self._streams[request_id] = _Stream()
        try:
            self._client.add(request)
            finished = False
            while not finished:
                try:
                    output = await stream.next()
                except _Aborted:
                    return
                finished = output.finished
                yield output
        finally:
            # The id may be another stream's by now, if this one has finished or was aborted.
            if self._streams.get(request_id) is stream:
                del self._streams[request_id]
                if self._processor.remove(request_id) and self._dead is None:
                    self._client.abort([request_id])

    def _check(self, request: GenerationRequest) -> None:
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        validate_request(request, self._client.info())
        self._processor.check(request)

    def _on_deltas(self, deltas: list[TokenDelta]) -> None:
        self._post(deltas)

    def _on_dead(self, reason: str) -> None:
        self._post(_Death(reason))

    def _post(self, item: list[TokenDelta] | _Death) -> None:
        """From the client, on any thread: one wake-up of the loop, however many steps it is behind."""
        self._inbox.append(item)
        if not self._wake_pending:
            self._wake_pending = True
            assert self._loop is not None  # the client calls only after `start`
            self._loop.call_soon_threadsafe(self._take_inbox)

    def _take_inbox(self) -> None:
        self._wake_pending = False  # before the inbox is emptied, so that nothing put in now is overlooked
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, _Death):
                self._die(item.reason)
            elif item and item[0].bad_param is not None:
                self._refuse(item[0])
            else:  # after a death only error deltas come, for requests that were removed with it
                outputs, aborts = self._processor.process(item)
                for output in outputs:
                    self._streams[output.request_id].put(output)
                if aborts:
                    self._client.abort(aborts)

    def _refuse(self, delta: TokenDelta) -> None:
        """End a request that the engine does not take."""
        stream = self._streams.get(delta.request_id)
        if self._processor.remove(delta.request_id) and stream is not None:
            stream.end(InvalidRequestError(str(delta.stop_reason), delta.bad_param))

    def _die(self, reason: str) -> None:
        if self._dead is not None:
            return
        self._dead = reason
        for request_id, stream in self._streams.items():
            self._processor.remove(request_id)
            stream.end(EngineDeadError(reason))
