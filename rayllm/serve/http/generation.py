"""The engine requests of one HTTP request, run side by side and read as one stream, and the answers made of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing

import msgspec
import orjson
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse

from rayllm.api.types import GenerationRequest, RequestOutput
from rayllm.serve.http.convert import Job
from rayllm.serve.http.errors import deadline_missed, renamed, request_failed
from rayllm.serve.http.life import RequestContext
from rayllm.serve.http.metrics import RequestTimer
from rayllm.serve.http.replies import DONE, Reply, sse
from rayllm.serve.http.served import Target
from rayllm.text.outputs import accumulate

LONG_ANSWER = 4096  # tokens; longer answers are put together in a thread, so that other streams go on

Outputs = list[tuple[int, RequestOutput]]  # what is new, each with the index of its prompt


async def generate(context: RequestContext, target: Target, job: Job, reply: Reply) -> Response:
    """Run a job and answer with it.

    An error before the first token is an HTTP status; after it, an event in the stream. Raises what the engine raises,
    and ApiError: 408 for a missed deadline, 429 for too much work, 499 when the client has left.
    """
    if not reply.stream:
        outputs = await run(context, target, job)
        if context.record.prompt_tokens + context.record.completion_tokens > LONG_ANSWER:
            return await asyncio.to_thread(lambda: json_response(reply.whole(outputs)))
        return json_response(reply.whole(outputs))
    context.start(job, stream=True)
    group = RequestGroup(context, target, job)
    first = await group.next()
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(_events(context, group, reply, first), headers=headers, media_type="text/event-stream")


async def run(context: RequestContext, target: Target, job: Job) -> list[RequestOutput]:
    """The whole output of each of a job's requests. Raises as `generate` does."""
    context.start(job, stream=False)
    group = RequestGroup(context, target, job)
    totals: list[RequestOutput | None] = [None] * len(job.requests)
    while outputs := await group.next():
        for index, output in outputs:
            totals[index] = accumulate(totals[index], output)
    return [total for total in totals if total is not None]


def json_response(payload: object) -> Response:
    return Response(orjson.dumps(payload), media_type="application/json")


async def _events(context: RequestContext, group: RequestGroup, reply: Reply, outputs: Outputs) -> AsyncIterator[bytes]:
    """Server-sent events."""
    try:
        while outputs:
            if frames := b"".join(reply.frames(index, output) for index, output in outputs):
                yield frames
            outputs = await group.next()
        yield reply.last_frames()
    except Exception as error:
        yield sse(context.failed(error).body()) + DONE


class RequestGroup:
    """Runs one task a prompt, and one that waits for the client to leave. It ends with the context.

    The tasks are our own, not the web framework's: a client's disconnect cancels the framework's scope, in which no
    further await works, whereas a cancelled task of ours still leaves `engine.generate` in good order, which aborts
    the request in the engine.
    """

    def __init__(self, context: RequestContext, target: Target, job: Job):
        self._context = context
        self._target = target
        self._names = job.names
        self._queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue()
        self._running = len(job.requests)
        self._tasks = [
            asyncio.create_task(self._run(index, request, text))
            for index, (request, text) in enumerate(zip(job.requests, job.prompts, strict=True))
        ]
        self._tasks.append(asyncio.create_task(self._watch_client()))
        context.holds.callback(self._close)

    async def next(self) -> Outputs:
        """Outputs that are new; [] when all have ended. Raises what the engine raised, ApiError, ClientDisconnect."""
        outputs: Outputs = []
        while self._running and (not outputs or not self._queue.empty()):
            index, item = await self._queue.get()
            if item is None:
                self._running -= 1
            elif isinstance(item, Exception):
                self._close()
                with renamed(self._names):  # a grammar that only the engine could find wrong
                    raise item
            else:
                outputs.append((index, item))
        return outputs

    def _close(self) -> None:
        """Stop what still runs."""
        for task in self._tasks:
            task.cancel()

    async def _watch_client(self) -> None:
        while (await self._context.receive())["type"] != "http.disconnect":
            pass
        self._queue.put_nowait((0, ClientDisconnect()))

    async def _run(self, index: int, request: GenerationRequest, text: str | None) -> None:
        record, deadlines, ticket = self._context.record, self._context.deadlines, self._context.ticket
        timer = RequestTimer(self._target.model.metrics, request.params.n)
        if deadlines.queue_s:
            request = msgspec.structs.replace(request, report_start=True)
        waiting = len(request.prompt_token_ids)
        queue, first_token = deadlines.timeout(deadlines.queue_s), deadlines.timeout(deadlines.first_token_s)
        whole = deadlines.timeout(deadlines.request_s)
        item: Exception | None = None
        try:
            async with whole, first_token, queue, aclosing(self._target.engine.generate(request, text)) as outputs:
                async for output in outputs:
                    timer.saw(output)
                    for completion in output.outputs:
                        if completion.finish_reason == "error":
                            raise request_failed(completion.stop_reason)
                    queue.reschedule(None)
                    if not output.has_begun:
                        continue  # the engine only says that it has started
                    if waiting:
                        first_token.reschedule(None)
                        ticket.release(tokens=waiting)
                        waiting = 0
                        self._note_first_token(output)
                    record.completion_tokens += sum(len(each.token_ids) for each in output.outputs)
                    record.completion_tokens += output.num_discarded_tokens
                    self._queue.put_nowait((index, output))
        except Exception as error:
            item = error
            if queue.expired():
                item = deadline_missed("queue_timeout", deadlines.queue_s)
            elif first_token.expired():
                item = deadline_missed("first_token_timeout", deadlines.first_token_s)
            elif whole.expired():
                item = deadline_missed("request_timeout", deadlines.request_s)
        finally:
            self._queue.put_nowait((index, item))
            timer.close()
            ticket.release(request.params.width, waiting)

    def _note_first_token(self, output: RequestOutput) -> None:
        """A prompt has its first token."""
        record = self._context.record
        record.cached_tokens += output.num_cached_tokens
        if record.first_token is None:
            record.first_token = time.perf_counter() - record.clock
            if output.times is not None:
                record.queued, record.prefill = output.times.queued, output.times.prefill
