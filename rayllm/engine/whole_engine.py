"""`WholeEngine`: an engine in this process for asyncio programs that want completions whole, as batches do.

Beside `AsyncEngine` it has neither a socket nor an output for each step: a request wakes the event loop once, when a
completion of it has ended, so that the loop takes little of the interpreter from the engine's thread.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator

from msgspec.structs import replace

from rayllm.api.types import Abort, EngineInfo, EngineStats, GenerationRequest, RequestOutput, TokenDelta
from rayllm.api.validation import validate_request
from rayllm.engine.delta_buffer import DeltaBuffer
from rayllm.engine.driver import Core, EngineDriver
from rayllm.errors import EngineDeadError, InvalidRequestError, OverloadedError
from rayllm.text.outputs import OutputProcessor
from rayllm.text.tokenizer import Tokenizer


class WholeEngine:
    """Runs a core, and shuts it down when it is closed. It is made and used in one event loop.

    tokenizer: None with skip_tokenizer_init; texts are "" then.
    """

    def __init__(self, core: Core, tokenizer: Tokenizer | None):
        self.tokenizer = tokenizer
        self._loop = asyncio.get_running_loop()
        self._processor = OutputProcessor(tokenizer)
        # Requests with stop strings: their text decides when they end.
        self._through: set[str] = set()
        self._buffer = DeltaBuffer(self._through)
        self._left: deque[str] = deque()  # requests that were aborted, of which the buffer may hold something
        self._outputs: dict[str, asyncio.Queue[RequestOutput | Exception]] = {}
        self._numbers = itertools.count(1)
        self._driver = EngineDriver(core)
        self._driver.attach(self)

    @property
    def info(self) -> EngineInfo:
        """The engine's limits."""
        return self._driver.info

    @property
    def stopped(self) -> str | None:
        """Why the engine stopped; None while it runs."""
        return self._driver.dead

    def stats(self) -> EngineStats:
        """The engine's figures after its last step."""
        return self._driver.stats

    async def generate(
        self, request: GenerationRequest, prompt_text: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a request: an output for each of its completions when that has ended, the last with finished=True.

        Raises as `EngineClient.generate` does, before the first output.
        """
        if self._driver.dead is not None:
            raise EngineDeadError(self._driver.dead)
        # Nobody else is there with whom its client would have to share.
        request = replace(request, client=None).numbered(next(self._numbers), self.info.seed)
        validate_request(request, self.info)
        self._processor.add(request, prompt_text)
        request_id = request.request_id
        outputs = self._outputs[request_id] = asyncio.Queue()
        if request.params.stop:
            self._through.add(request_id)
        try:
            self._driver.add(self, request)
            while True:
                item = await outputs.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.finished:
                    return
        finally:
            del self._outputs[request_id]
            self._through.discard(request_id)
            if self._processor.remove(request_id):
                self._left.append(request_id)
                self._driver.abort(self, [Abort(request_id)])

    def forget(self, key_id: str) -> None:
        """What came of a request with this key is not kept any longer."""
        self._driver.forget(key_id)

    async def close(self) -> None:
        """Stop the engine. What still runs ends with EngineDeadError."""
        await asyncio.to_thread(self._driver.shutdown)

    # ---- what the driver calls, on the engine's thread

    def deliver(self, deltas: list[TokenDelta]) -> None:
        """Keep the deltas of a step, or pass on what has ended."""
        while self._left:
            self._buffer.forget(self._left.popleft())
        ready = self._buffer.merge([delta for delta in deltas if delta.request_id in self._outputs])
        for delta in deltas:
            if delta.bad_param is not None:
                self._buffer.forget(delta.request_id)
        if ready:
            self._loop.call_soon_threadsafe(self._take, ready)

    def dead(self, reason: str) -> None:
        """The engine has stopped."""
        self._loop.call_soon_threadsafe(self._end_all, reason)

    # ---- in the event loop

    def _take(self, deltas: list[TokenDelta]) -> None:
        for refused in [delta for delta in deltas if delta.bad_param is not None]:
            if self._processor.remove(refused.request_id):
                kind = OverloadedError if refused.try_again else InvalidRequestError
                self._outputs[refused.request_id].put_nowait(kind(str(refused.stop_reason), refused.bad_param))
        outputs, aborts = self._processor.process(deltas)
        for output in outputs:
            self._outputs[output.request_id].put_nowait(output)
        if aborts:
            self._driver.abort(self, aborts)

    def _end_all(self, reason: str) -> None:
        for request_id, outputs in self._outputs.items():
            self._processor.remove(request_id)
            outputs.put_nowait(EngineDeadError(reason))
