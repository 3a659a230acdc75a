"""`RequestGroup`: the engine requests of one HTTP request, run side by side and read as one stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple, Protocol

import msgspec

from rayllm.api.types import EngineInfo, GenerationRequest, RequestOutput
from rayllm.errors import InvalidRequestError
from rayllm.serve.http.convert import Job, Tokenizer
from rayllm.serve.http.limits import Deadlines, Ticket
from rayllm.serve.http.metrics import FrontMetrics, RequestTimer
from rayllm.serve.http.protocol_parts import as_sent
from rayllm.serve.http.request_log import RequestRecord


class Engine(Protocol):
    """What the routes use of a model's engines: `rayllm.engine.async_engine.AsyncEngine` has it, and `ModelFront`."""

    @property
    def info(self) -> EngineInfo: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    def generate(
        self, request: GenerationRequest, prompt_text: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]: ...


class Watch(NamedTuple):
    """Who follows the requests of a group: figures, admission, deadlines, and the HTTP request's record."""

    metrics: FrontMetrics
    ticket: Ticket
    deadlines: Deadlines
    record: RequestRecord


class RequestGroup:
    """Runs one task a prompt. `close` may be called from anywhere, also while the caller itself is being cancelled.

    The tasks are our own, not the web framework's: a client's disconnect cancels the framework's scope, in which no
    further await works, whereas a cancelled task of ours still leaves `engine.generate` in good order, which aborts
    the request in the engine.
    """

    def __init__(self, engine: Engine, job: Job, watch: Watch):
        self._watch = watch
        self._job = job
        self._queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue()
        self._running = len(job.requests)
        self._tasks = [
            asyncio.create_task(self._pump(index, engine, request, text))
            for index, (request, text) in enumerate(zip(job.requests, job.prompts, strict=True))
        ]

    async def next(self) -> list[tuple[int, RequestOutput]]:
        """Outputs that are new, each with the index of its prompt; [] when all have ended.

        Raises what the engine raised, or ApiError 408 for a missed deadline; the other requests are aborted then.
        """
        outputs: list[tuple[int, RequestOutput]] = []
        while self._running and (not outputs or not self._queue.empty()):
            index, item = await self._queue.get()
            if item is None:
                self._running -= 1
            elif isinstance(item, Exception):
                self.close()
                if isinstance(item, InvalidRequestError):  # a grammar that only the engine could find wrong
                    raise as_sent(item, self._job.constraint_field)
                raise item
            else:
                outputs.append((index, item))
        return outputs

    def close(self) -> None:
        """Stop what still runs. Never blocks; calling it again does nothing."""
        for task in self._tasks:
            task.cancel()
        self._watch.ticket.close()

    async def _pump(self, index: int, engine: Engine, request: GenerationRequest, text: str | None) -> None:
        metrics, ticket, deadlines, record = self._watch
        timer = RequestTimer(metrics, request.params.n)
        if deadlines.watches_queue:
            request = msgspec.structs.replace(request, report_start=True)
        waiting = len(request.prompt_token_ids)
        started = has_token = False
        when, name = deadlines.next(started=False, has_token=False)
        timeout = asyncio.timeout_at(when)
        try:
            async with timeout, aclosing(engine.generate(request, text)) as outputs:
                async for output in outputs:
                    timer.saw(output)
                    is_news = has_begun(output)
                    if not started or (is_news and not has_token):
                        started, has_token = True, is_news
                        when, name = deadlines.next(started=started, has_token=has_token)
                        timeout.reschedule(when)
                        if has_token:
                            ticket.release(tokens=waiting)
                            waiting = 0
                            _note_first(record, output)
                    if is_news:  # else the engine only says that it has started
                        record.completion_tokens += sum(len(c.token_ids) for c in output.outputs)
                        record.completion_tokens += output.num_discarded_tokens
                        self._queue.put_nowait((index, output))
        except Exception as error:
            missed = isinstance(error, TimeoutError) and timeout.expired()
            self._queue.put_nowait((index, deadlines.missed(name) if missed else error))
        else:
            self._queue.put_nowait((index, None))
        finally:
            timer.close()
            ticket.release(request.params.width, waiting)


def has_begun(output: RequestOutput) -> bool:
    """Whether an output says that the prompt is done, with a first token or, if the best are still to be found, not."""
    return output.times is not None or any(each.token_ids or each.finish_reason for each in output.outputs)


def _note_first(record: RequestRecord, output: RequestOutput) -> None:
    """A prompt has its first token."""
    record.cached_tokens += output.num_cached_tokens
    if record.first_token is None:
        record.first_token = time.perf_counter() - record.clock
        if output.times is not None:
            record.queued, record.prefill = output.times.queued, output.times.prefill
