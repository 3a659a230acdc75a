"""The life of an HTTP request, from its arrival to the end of its answer.

`RequestLife` is the outermost layer of the app, and `JsonRoute` the one before a body is read: a request that must not
be served is refused before anything of its body is taken in. `generate` runs a request's prompts in an engine, side by
side, and answers with what comes.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import os
import time
import uuid
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, ParamSpec, TypeVar, get_type_hints

import msgspec
import orjson
from fastapi import Depends, Security
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic import ValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayllm.api.types import KEY_HEADER, GenerationRequest, IdempotencyKey, RequestOutput
from rayllm.batch.app_client import CALLER
from rayllm.config.options import ServerConfig
from rayllm.errors import InvalidRequestError
from rayllm.serve.http.auth import ApiKey, check_key, check_origin
from rayllm.serve.http.convert import Job
from rayllm.serve.http.errors import ApiError, as_api_error, is_anthropic, renamed
from rayllm.serve.http.limits import Bodies, Deadlines, Ticket
from rayllm.serve.http.metrics import RequestTimer
from rayllm.serve.http.protocol import LARGE_BODY, LONG_BODY, RequestBody, max_bytes, read_body
from rayllm.serve.http.replies import Reply
from rayllm.serve.http.request_log import PLAIN, RequestRecord, SpanTracer, log_event
from rayllm.serve.http.served import ServedModel, ServerState, Target
from rayllm.serve.http.unknown_fields import HEADER, FieldLog, header_value
from rayllm.text.heap import give_back_memory
from rayllm.text.outputs import accumulate

MAX_ID_CHARS = 128
MAX_KEY_CHARS = 255
MAX_PATH_CHARS = 200
UNZIPPED_BYTES = 2**20
NOT_ENFORCED_HEADER = "x-rayllm-not-enforced"
MAX_HEADER_CHARS = 1000
GIVE_BACK_S = 0.5  # after the end of a request with a large body, for all that end meanwhile

_SCOPE_KEY = "rayllm.request"

Args = ParamSpec("Args")
Result = TypeVar("Result")

# Of their own: hundreds of long bodies that come at once must not keep this server's beats from the loop's own threads.
_THREADS = ThreadPoolExecutor(min(32, (os.cpu_count() or 1) + 4), "rayllm-bodies")


async def in_thread(function: Callable[[], Result]) -> Result:
    """What a function returns that works on a long body or answer."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, function)


class RequestContext:
    """One HTTP request from its arrival to the end of its answer: what is known of it, and what it holds."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        state: ServerState,
        server: ServerConfig,
        bodies: Bodies,
        field_log: FieldLog,
    ):
        path = scope["path"][:MAX_PATH_CHARS]
        self.record = RequestRecord("", scope["method"], path, arrival=time.time(), clock=time.perf_counter())
        self._address = (scope.get("client") or ("",))[0]  # the client's, or that of the last proxy that is not trusted
        self.scope, self.receive = scope, receive
        self.state = state
        self.server = server
        self.bodies = bodies
        self._field_log = field_log
        self.deadlines = Deadlines(server)
        self.is_trusted = False  # a key came with it, or none is needed
        self.headers: dict[str, str] = {}  # of the answer: what of the body has no effect
        self.body_bytes = 0  # of the body, as far as it has come
        self.held_bytes = 0  # of it, that count among the server's bodies
        self.idempotency_key = ""
        self.fingerprint = b""  # of the body, with an idempotency key
        self.holds = ExitStack()  # closed when the answer has ended, however it did

    def take_place(self) -> None:
        """Count among the live requests before anybody knows for which model. Raises ApiError 429."""
        self.ticket = Ticket(self.state.door)
        self.holds.callback(self.ticket.close)

    def enter(
        self, name: str | None, prefix: str, *, request_id: str | None = None, again: IdempotencyKey | None = None
    ) -> Target:
        """Where the body wants to go; the request counts among that model's load from now on.

        prefix: of the reply's id. request_id: the rest of it, if the client chooses. again: of a request that was made
        before, whose reply has the id of its key. Raises ApiError, EngineDeadError.
        """
        model = find_model(self.state, name)
        adapter = adapter_name(model, name)
        self.record.model = model.name
        engine = model.engine()
        self.ticket.move(model.admission)
        if again is not None:
            reply_id, key = again.id, again
        elif self.idempotency_key:  # id and time are those of the first request with it
            parts = repr((self.record.key, prefix, adapter or model.name, self.idempotency_key)).encode()
            reply_id = prefix + hashlib.sha256(parts).hexdigest()[:32]
            key = IdempotencyKey(reply_id, self.fingerprint, int(time.time()))
        else:
            reply_id, key = prefix + uuid.uuid4().hex, None
        if request_id is not None:
            reply_id = prefix + request_id
        self.record.reply_id = reply_id
        client = self.record.key or self._address
        self.target = Target(model, engine, engine.info, reply_id, client, key, adapter)
        return self.target

    async def work(self, function: Callable[Args, Result], *args: Args.args, **options: Args.kwargs) -> Result:
        """What a function returns that works on the body: in a thread if that is long, so that streams go on."""
        if self.body_bytes > LONG_BODY:
            return await in_thread(partial(function, *args, **options))
        return function(*args, **options)

    def let_go_of_body(self) -> None:
        """The body is parsed, or will never be. May be called more than once."""
        self.bodies.remove(self.held_bytes)
        self.held_bytes = 0

    def detach(self) -> RequestContext:
        """The context of work that goes on without the connection. What this one holds is that one's from now on, to be
        closed by whoever does the work."""
        other = copy.copy(self)
        other.record = msgspec.structs.replace(self.record, arrival=time.time(), clock=time.perf_counter())
        other.deadlines = Deadlines(self.server)
        other.holds, other.receive = self.holds.pop_all(), _never
        return other

    def start(self, job: Job, stream: bool) -> None:
        """The engine is about to get the request. Raises ApiError 429 if it turned out to be too much."""
        record = self.record
        record.stream = stream
        record.prompts = len(job.requests)
        record.choices = sum(each.params.width for each in job.requests)
        record.prompt_tokens = sum(len(each.prompt_token_ids) for each in job.requests)
        self.ticket.admit(record.choices, record.prompt_tokens)
        record.started = True
        log_event("start", record)

    def note_unknown(self, body: RequestBody) -> None:
        """Report the fields that were ignored, if there are any: in a header, the log and a figure of the model."""
        if not body.unknown_fields:
            return
        self.headers[HEADER] = header_value(body.unknown_fields)
        self._field_log.note(body.unknown_fields, self.record.path)
        with suppress(ApiError):  # the answer will say that there is no such model
            find_model(self.state, body.model).metrics.ignored.inc()

    def note_not_enforced(self, job: Job) -> None:
        """Name in a header what of the request's schemas is not enforced, as far as it has room."""
        text = "; ".join(job.not_enforced)
        if len(text) > MAX_HEADER_CHARS:
            text = text[: MAX_HEADER_CHARS - 3] + "..."
        if text:
            self.headers[NOT_ENFORCED_HEADER] = text

    def failed(self, error: Exception) -> ApiError:
        """The answer to a request that failed, which is counted and noted."""
        record, models = self.record, self.state.models
        answer = as_api_error(error, record.method, record.path)
        error.__traceback__ = answer.__traceback__ = None  # their frames refer to the body, which would stay for long
        record.error = answer.code or answer.kind
        # A request that was refused before its model was known would have been refused by any of them.
        for model in [models[record.model]] if record.model else models.values():
            model.metrics.count_refusal(record.error)
        return answer


async def _never() -> Message:
    """What comes over no connection."""
    await asyncio.Event().wait()
    raise AssertionError("nobody sets this event")


def context_of(request: Request) -> RequestContext:
    """The context of a request that came through `RequestLife`."""
    return request.scope[_SCOPE_KEY]


class _KeyedContext(HTTPBearer):
    """The dependency that gives a route its request's context. In the document it stands for the API key.

    The key itself was checked by `RequestLife` before.
    """

    async def __call__(self, request: Request) -> RequestContext:  # type: ignore[override]
        return context_of(request)


async def _open_context(request: Request) -> RequestContext:  # async, or FastAPI would run it in a thread
    return context_of(request)


KEYED = Security(_KeyedContext(scheme_name="key"))
Context = Annotated[RequestContext, KEYED]
OpenContext = Annotated[RequestContext, Depends(_open_context)]  # of a request that needs no key


async def answer_error(request: Request, error: Exception) -> Response:
    """The exception handler of the app."""
    context = context_of(request)
    return context.failed(error).response(context.record.path, context.record.request_id)


@dataclass
class RequestLife:
    """ASGI middleware: gives a request its id and its context, checks its key, and logs and traces its end."""

    app: ASGIApp
    state: ServerState
    server: ServerConfig  # its deadlines and allowed origins
    keys: Sequence[ApiKey]
    tracer: SpanTracer | None
    echo_id: bool  # put x-request-id into responses; Ray Serve's proxy does that itself
    bodies: Bodies = field(default_factory=Bodies)
    field_log: FieldLog = field(default_factory=FieldLog)
    will_give_back: bool = False  # memory, soon

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        context = RequestContext(scope, receive, self.state, self.server, self.bodies, self.field_log)
        record = context.record
        # A HEAD request is answered as a GET; the HTTP server leaves the body out.
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        scope = {**scope, "method": method, _SCOPE_KEY: context}
        ended = False

        async def send_and_note(message: Message) -> None:
            nonlocal ended
            if message["type"] == "http.response.start":
                record.status = message["status"]
                if self.echo_id:
                    MutableHeaders(scope=message)["x-request-id"] = record.request_id
                if is_anthropic(record.path):
                    MutableHeaders(scope=message)["request-id"] = record.request_id
                MutableHeaders(scope=message).update(context.headers)
            elif not message.get("more_body", False):
                ended = True
                self._end(record)
            await send(message)

        try:
            with context.holds:
                self._check(context, Headers(scope=scope))
                await self.app(scope, receive, send_and_note)
        except Exception as error:
            answer = context.failed(error)
            if not record.status:
                await answer.response(record.path, record.request_id)(scope, receive, send_and_note)
            elif not isinstance(error, ClientDisconnect):
                raise
        finally:
            if not ended:
                record.error = record.error or "client_disconnected"
                self._end(record)
            if context.body_bytes > LARGE_BODY and not self.will_give_back:  # nothing refers to what was made of it
                self.will_give_back = True
                asyncio.get_running_loop().call_later(GIVE_BACK_S, self._give_back)

    def _give_back(self) -> None:
        self.will_give_back = False
        asyncio.get_running_loop().run_in_executor(None, give_back_memory)

    def _check(self, context: RequestContext, headers: Headers) -> None:
        """Raises ApiError 400 for an id that logs and headers should not carry and for an idempotency key that is too
        long, 401 for an API key that is not valid, and 403 for a web page that may not send this."""
        record = context.record
        given, record.request_id = headers.get("x-request-id", ""), uuid.uuid4().hex
        if given and (len(given) > MAX_ID_CHARS or not PLAIN.fullmatch(given)):
            message = f"must have at most {MAX_ID_CHARS} characters, only letters, digits and _.:/+-"
            raise ApiError(400, f"the header x-request-id {message}", param="x-request-id")
        record.request_id = given or record.request_id
        if (key := headers.get(KEY_HEADER)) is not None:
            if not 1 <= len(key) <= MAX_KEY_CHARS:
                message = f"must have 1 to {MAX_KEY_CHARS} characters, not {len(key)}"
                raise ApiError(400, f"the header {KEY_HEADER} {message}", param=KEY_HEADER)
            context.idempotency_key = key
        if CALLER in context.scope:  # the server itself asks, for who had a key
            record.key, context.is_trusted = context.scope[CALLER], True
            return
        check_origin(self.server.allowed_origins, record.method, headers)
        credentials = headers.get("authorization"), headers.get("x-api-key")
        record.key = check_key(self.keys, record.method, record.path, *credentials)
        context.is_trusted = record.key is not None or not self.keys

    def _end(self, record: RequestRecord) -> None:
        record.total = time.perf_counter() - record.clock
        if record.started or record.status >= 400:  # else a question about the server itself, many times a minute
            log_event("abort" if record.started and record.error else "end", record)
        if self.tracer is not None:
            self.tracer.describe(record)


def find_model(state: ServerState, name: str | None) -> ServedModel:
    """The model that a request asks for, or whose adapter; it may leave the name out if there is only one.

    Raises ApiError.
    """
    models = state.models
    if name is None and len(models) == 1:
        return next(iter(models.values()))
    if name is not None and name not in models:
        for model in models.values():
            if name in model.adapters:
                return model
    known = ", ".join(repr(each) for model in models.values() for each in (model.name, *model.adapters))
    if name is None:
        raise ApiError(400, f"model is missing; this server has {known}", param="model")
    if name not in models:
        message = f"the model {name!r} does not exist; this server has {known}"
        raise ApiError(404, message, code="model_not_found", param="model")
    return models[name]


def adapter_name(model: ServedModel, name: str | None) -> str:
    """The adapter that a request asks for whose model was found by this name; empty for none."""
    return "" if name is None or name == model.name else name


# ---- before the body is read


class JsonRoute(APIRoute):
    """A route that takes a JSON body for an engine. Without an engine it is refused before its body is read."""

    takes_place = False

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handle, kind = super().get_route_handler(), get_type_hints(self.endpoint)["body"]
        if not issubclass(kind, RequestBody):
            raise TypeError(f"{self.path}: {kind.__name__} is no RequestBody")

        async def handle_json(request: Request) -> Response:
            context = context_of(request)
            models = list(context.state.models.values())
            # If there is no engine at all, the first one says why.
            engines = [model.engine() for model in models if model.num_replicas] or [models[0].engine()]
            if self.takes_place:
                context.take_place()
            MutableHeaders(scope=request.scope)["content-type"] = "application/json"  # whatever the client says it is
            return await handle(JsonRequest(request, kind, max(engine.info.max_model_len for engine in engines)))

        return handle_json


class GenerationRoute(JsonRoute):
    """A route whose requests take a place among the live ones, also before their body is read."""

    takes_place = True


class JsonRequest(Request):
    """A request whose body is read with limits and a deadline.

    kind: of the body. max_model_len: the longest of the models that the body may be for.
    """

    def __init__(self, request: Request, kind: type[RequestBody], max_model_len: int):
        super().__init__(request.scope, request.receive)
        self._kind, self._max_model_len = kind, max_model_len
        context = context_of(self)
        context.holds.callback(context.let_go_of_body)  # a body that breaks off, or is refused, is never parsed

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The body, decompressed. Raises ApiError 413 as soon as it is known that it is too long, 415 and 400."""
        context, declared, size = context_of(self), self.headers.get("content-length", ""), 0
        self._check_size(int(declared) if declared.isdigit() else 0)
        chunks = super().stream()
        encoding = self.headers.get("content-encoding", "identity").lower()
        if encoding not in ("identity", "gzip", "x-gzip"):
            message = f"the content-encoding {encoding[:80]!r} is not supported; send the body as it is, or as gzip"
            raise ApiError(415, message, param="content-encoding", headers={"accept-encoding": "gzip"})
        async for chunk in chunks if encoding == "identity" else _unzipped(chunks):
            size += len(chunk)
            self._check_size(size)
            context.bodies.add(len(chunk), context.body_bytes)
            context.body_bytes = context.held_bytes = size
            yield chunk

    def _check_size(self, size: int) -> None:
        if size > (limit := max_bytes(self._kind, self._max_model_len)):
            raise ApiError(413, f"the request body is longer than {limit} bytes", code="request_too_large")

    async def body(self) -> bytes:
        """Raises ApiError 413, 408 and 499."""
        context = context_of(self)
        try:
            async with asyncio.timeout(context.deadlines.body_s):
                return await super().body()
        except TimeoutError:
            message = f"the request body did not arrive within {context.deadlines.body_s:g} s"
            raise ApiError(408, message, code="body_timeout") from None
        except ClientDisconnect as error:
            raise context.failed(error) from None

    async def json(self) -> RequestBody:
        """Checked already, which FastAPI would do in the event loop. Raises ApiError 400, 413 and 429."""
        context = context_of(self)
        try:
            text = await self.body()
            if context.idempotency_key:
                context.fingerprint = (await context.work(hashlib.sha256, text)).digest()
            strict = context.server.strict_fields
            body = await context.work(read_body, self._kind, text, self._max_model_len, strict)
            context.note_unknown(body)
            return body
        except (InvalidRequestError, ValidationError) as error:
            raise as_api_error(error, self.method, self.url.path) from None
        finally:
            context.let_go_of_body()


async def _unzipped(chunks: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """What was compressed by gzip, in pieces of UNZIPPED_BYTES at most, each as it is asked for.

    Raises ApiError 400.
    """
    unzip = zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        async for chunk in chunks:
            piece = b""
            while (chunk or len(piece) == UNZIPPED_BYTES) and not unzip.eof:
                yield (piece := unzip.decompress(chunk, UNZIPPED_BYTES))
                chunk = unzip.unconsumed_tail
                await asyncio.sleep(0)  # a piece takes milliseconds
        is_whole = unzip.eof and not unzip.unused_data
    except zlib.error:
        is_whole = False
    if not is_whole:
        raise ApiError(400, "the request body is not what gzip makes, or not all of it", param="content-encoding")


# ---- in the engine

LONG_ANSWER = 4096  # tokens; longer answers are put together in a thread, so that other streams go on

Outputs = list[tuple[int, RequestOutput]]  # what is new, each with the index of its prompt


async def generate(
    context: RequestContext, job: Job, reply: Reply, finish: Callable[[], Awaitable[None]] | None = None
) -> Response:
    """Run a job and answer with it.

    finish: is waited for when the reply is complete, before the last of it is sent. An error before the first token is
    an HTTP status; after it, an event in the stream. Raises what the engine raises, and ApiError: 408 for a missed
    deadline, 429 for too much work, 499 when the client has left.
    """
    context.note_not_enforced(job)
    if not reply.stream:
        outputs = await run(context, job)
        if context.record.prompt_tokens + context.record.completion_tokens > LONG_ANSWER:
            answer = await in_thread(lambda: json_response(reply.whole(outputs)))
        else:
            answer = json_response(reply.whole(outputs))
        if finish is not None:
            await finish()
        return answer
    context.start(job, stream=True)
    group = RequestGroup(context, job)
    first = await group.next()
    return event_stream(_events(context, group, reply, first, finish))


async def run(context: RequestContext, job: Job) -> list[RequestOutput]:
    """The whole output of each of a job's requests. Raises as `generate` does."""
    context.start(job, stream=False)
    group = RequestGroup(context, job)
    totals: list[RequestOutput | None] = [None] * len(job.requests)
    while outputs := await group.next():
        for index, output in outputs:
            totals[index] = accumulate(totals[index], output)
    return [total for total in totals if total is not None]


def event_stream(frames: AsyncIterator[bytes]) -> Response:
    """An answer in server-sent events."""
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(frames, headers=headers, media_type="text/event-stream")


def json_response(payload: object) -> Response:
    return Response(orjson.dumps(payload), media_type="application/json")


async def _events(
    context: RequestContext,
    group: RequestGroup,
    reply: Reply,
    outputs: Outputs,
    finish: Callable[[], Awaitable[None]] | None,
) -> AsyncIterator[bytes]:
    """Server-sent events."""
    try:
        while outputs:
            if frames := b"".join(reply.frames(index, output) for index, output in outputs):
                yield frames
            outputs = await group.next()
        last = reply.last_frames()
        if finish is not None:
            await finish()
        yield last
    except Exception as error:
        yield reply.error_frames(context.failed(error))


class RequestGroup:
    """Runs one task a prompt, and one that waits for the client to leave. It ends with the context.

    The first prompt is begun at once, the others one after the other, so that a thousand do not hold up other requests.

    The tasks are our own, not the web framework's: a client's disconnect cancels the framework's scope, in which no
    further await works, whereas a cancelled task of ours still leaves `engine.generate` in good order, which aborts
    the request in the engine.
    """

    def __init__(self, context: RequestContext, job: Job):
        self._context = context
        self._names, self._requests = job.names, job.requests
        self._queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue()
        self._running = len(job.requests)
        self._tasks = [asyncio.create_task(each) for each in (self._start(job), self._watch_client())]
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
                if isinstance(item, ApiError) and item.status_code == 408:
                    self._forget()
                with renamed(self._names):  # a grammar that only the engine could find wrong
                    raise item
            else:
                outputs.append((index, item))
        return outputs

    def _close(self) -> None:
        """Stop what still runs."""
        for task in self._tasks:
            task.cancel()

    def _forget(self) -> None:
        """A deadline was missed: the engine is not to go on for who may send it again."""
        for request in self._requests:
            if request.key is not None:
                self._context.target.engine.forget(request.key.id)

    async def _start(self, job: Job) -> None:
        for index, (request, text) in enumerate(zip(job.requests, job.prompts, strict=True)):
            self._tasks.append(asyncio.create_task(self._run(index, request, text)))
            await asyncio.sleep(0)

    async def _watch_client(self) -> None:
        while (await self._context.receive())["type"] != "http.disconnect":
            pass
        self._queue.put_nowait((0, ClientDisconnect()))

    async def _run(self, index: int, request: GenerationRequest, text: str | None) -> None:
        context, ticket, target = self._context, self._context.ticket, self._context.target
        timer = RequestTimer(target.model.metrics, context.record, request.params.n)
        if context.server.queue_timeout:
            request = msgspec.structs.replace(request, report_start=True)
        waiting = len(request.prompt_token_ids)
        item: Exception | None = None
        try:
            async with context.deadlines.watch() as met, aclosing(target.engine.generate(request, text)) as outputs:
                async for output in outputs:
                    timer.saw(output)
                    for completion in output.outputs:
                        if completion.finish_reason == "error":
                            reason = completion.stop_reason or "no reason given"
                            message = f"the engine failed on this request: {reason}"
                            raise ApiError(500, message, code="request_failed")
                    if waiting:
                        met("queue_timeout")
                        if not output.has_begun:
                            continue  # the engine only says that it has started
                        met("first_token_timeout")
                        timer.began(output)
                        ticket.release(tokens=waiting)
                        waiting = 0
                    self._queue.put_nowait((index, output))
        except Exception as error:
            item = error
        finally:
            self._queue.put_nowait((index, item))
            timer.close()
            ticket.release(request.params.width, waiting)
