"""`RequestGroup`: the engine requests of one HTTP request, run side by side and read as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from rayllm.serve.convert import Job, Tokenizer
from rayllm.serve.metrics import FrontMetrics, RequestTimer
from rayllm.types import EngineInfo, EngineStats, GenerationRequest, RequestOutput


class Engine(Protocol):
    """What the front uses of `rayllm.engine.async_engine.AsyncEngine`."""

    @property
    def info(self) -> EngineInfo: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    def generate(
        self, request: GenerationRequest, prompt_text: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]: ...
    async def stats(self) -> EngineStats: ...


class RequestGroup:
    """Runs one task a prompt. `close` may be called from anywhere, also while the caller itself is being cancelled.

    The tasks are our own, not the web framework's: a client's disconnect cancels the framework's scope, in which no
    further await works, whereas a cancelled task of ours still leaves `engine.generate` in good order, which aborts
    the request in the engine.
    """

    def __init__(self, engine: Engine, job: Job, metrics: FrontMetrics):
        self._queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue()
        self._running = len(job.requests)
        self._tasks = [
            asyncio.create_task(self._pump(index, engine, request, text, RequestTimer(metrics)))
            for index, (request, text) in enumerate(zip(job.requests, job.prompts, strict=True))
        ]

    async def next(self) -> list[tuple[int, RequestOutput]]:
        """Outputs that are new, each with the index of its prompt; [] when all have ended.

        Raises what the engine raised; the other requests are aborted then.
        """
        outputs: list[tuple[int, RequestOutput]] = []
        while self._running and (not outputs or not self._queue.empty()):
            index, item = await self._queue.get()
            if item is None:
                self._running -= 1
            elif isinstance(item, Exception):
                self.close()
                raise item
            else:
                outputs.append((index, item))
        return outputs

    def close(self) -> None:
        """Stop what still runs. Never blocks; calling it again does nothing."""
        for task in self._tasks:
            task.cancel()

    async def _pump(
        self, index: int, engine: Engine, request: GenerationRequest, text: str | None, timer: RequestTimer
    ) -> None:
        try:
            async with aclosing(engine.generate(request, text)) as outputs:
                async for output in outputs:
                    timer.saw(output)
                    self._queue.put_nowait((index, output))
        except Exception as error:
            self._queue.put_nowait((index, error))
        else:
            self._queue.put_nowait((index, None))
