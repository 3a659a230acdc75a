"""The life of an HTTP request: its id, its key, what it holds while it runs, its record, and the answer if it fails.

`RequestLife` is the outermost layer of the app, and `JsonRoute` the one before a body is read: a request that must not
be served is refused before anything of its body is taken in.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayllm.config.options import ServerConfig
from rayllm.serve.http.auth import Guard
from rayllm.serve.http.convert import Job
from rayllm.serve.http.errors import ApiError, as_api_error, body_late, body_too_large
from rayllm.serve.http.limits import Deadlines, Ticket
from rayllm.serve.http.request_log import PLAIN, RequestRecord, log_event
from rayllm.serve.http.served import ServerState, Target, find_model, require_engine
from rayllm.serve.http.tracing import SpanTracer

MAX_BODY_BYTES = 32 * 2**20
MAX_ID_CHARS = 128
MAX_PATH_CHARS = 200

_SCOPE_KEY = "rayllm.request"


class RequestContext:
    """One HTTP request from its arrival to the end of its answer: what is known of it, and what it holds."""

    def __init__(self, scope: Scope, receive: Receive, state: ServerState, server: ServerConfig):
        path = scope["path"][:MAX_PATH_CHARS]
        self.record = RequestRecord("", scope["method"], path, arrival=time.time(), clock=time.perf_counter())
        self.receive = receive
        self.state = state
        self.deadlines = Deadlines(server)
        self.holds = ExitStack()  # closed when the answer has ended, however it did

    def take_place(self) -> None:
        """Count among the live requests before anybody knows for which model. Raises ApiError 429."""
        self.ticket: Ticket = self.state.door.enter()
        self.holds.callback(self.ticket.close)

    def enter(self, name: str | None, kind: str) -> Target:
        """Where the body wants to go; the request counts among that model's load from now on.

        kind: what the reply's id begins with. Raises ApiError, EngineDeadError.
        """
        model = find_model(self.state, name)
        self.record.model = model.name
        engine = model.engine()
        self.ticket.move(model.admission)
        self.record.reply_id = f"{kind}-{uuid.uuid4().hex}"
        return Target(model, engine, self.record.reply_id)

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


def context_of(request: Request) -> RequestContext:
    """The context of a request that came through `RequestLife`."""
    return request.scope[_SCOPE_KEY]


async def answer_error(request: Request, error: Exception) -> Response:
    """The exception handler of the app."""
    return context_of(request).failed(error).response()


@dataclass
class RequestLife:
    """ASGI middleware: gives a request its id and its context, checks its key, and logs and traces its end."""

    app: ASGIApp
    state: ServerState
    server: ServerConfig  # its deadlines
    guard: Guard
    tracer: SpanTracer | None
    echo_id: bool  # put x-request-id into responses; Ray Serve's proxy does that itself

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        context = RequestContext(scope, receive, self.state, self.server)
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
            elif not message.get("more_body", False):
                ended = True
                self._end(record)
            await send(message)

        try:
            with context.holds:
                self._check(record, Headers(scope=scope))
                await self.app(scope, receive, send_and_note)
        except Exception as error:
            answer = context.failed(error)
            if not record.status:
                await answer.response()(scope, receive, send_and_note)
            elif not isinstance(error, ClientDisconnect):
                raise
        finally:
            if not ended:
                record.error = record.error or "client_disconnected"
                self._end(record)

    def _check(self, record: RequestRecord, headers: Headers) -> None:
        """Raises ApiError 400 for an id that logs and headers should not carry, 401 for a key that is not valid."""
        given, record.request_id = headers.get("x-request-id", ""), uuid.uuid4().hex
        if given and (len(given) > MAX_ID_CHARS or not PLAIN.fullmatch(given)):
            message = f"must have at most {MAX_ID_CHARS} characters, only letters, digits and _.:/+-"
            raise ApiError(400, f"the header x-request-id {message}", param="x-request-id")
        record.request_id = given or record.request_id
        record.key = self.guard.check(record.method, record.path, headers.get("authorization"))

    def _end(self, record: RequestRecord) -> None:
        record.total = time.perf_counter() - record.clock
        if record.started or record.status >= 400:  # else a question about the server itself, many times a minute
            log_event("abort" if record.started and record.error else "end", record)
        if self.tracer is not None:
            self.tracer.describe(record)


class JsonRoute(APIRoute):
    """A route that takes a JSON body for an engine. Without an engine it is refused before its body is read."""

    takes_place = False

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            context = context_of(request)
            require_engine(context.state)
            if self.takes_place:
                context.take_place()
            MutableHeaders(scope=request.scope)["content-type"] = "application/json"  # whatever the client says it is
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json


class GenerationRoute(JsonRoute):
    """A route whose requests take a place among the live ones, also before their body is read."""

    takes_place = True


class JsonRequest(Request):
    """A request whose body is read with a limit and a deadline, and parsed more strictly than Python's json does."""

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Raises ApiError 413."""
        size = 0
        async for chunk in super().stream():
            size += len(chunk)
            if size > MAX_BODY_BYTES:
                raise body_too_large(MAX_BODY_BYTES)
            yield chunk

    async def body(self) -> bytes:
        """Raises ApiError 413 as soon as it is known that the body is longer than MAX_BODY_BYTES, 408 and 499."""
        context, declared = context_of(self), self.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > MAX_BODY_BYTES:
            raise body_too_large(MAX_BODY_BYTES)
        try:
            async with asyncio.timeout(context.deadlines.body_s):
                return await super().body()
        except TimeoutError:
            raise body_late(context.deadlines.body_s) from None
        except ClientDisconnect as error:
            raise context.failed(error) from None

    async def json(self) -> Any:
        """Raises ApiError 400."""
        try:
            return from_json(await self.body())
        except ValueError as error:
            raise ApiError(400, f"the request body is not valid JSON: {error}") from None
