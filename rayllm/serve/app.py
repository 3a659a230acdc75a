"""The HTTP API as a FastAPI app over a `ServerState`. Knows nothing of Ray: Serve hosts it, tests call it directly."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

import orjson
from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

import rayllm
from rayllm.errors import EngineDeadError
from rayllm.serve.api_errors import ApiError, as_api_error
from rayllm.serve.convert import Job, chat_job, completion_job
from rayllm.serve.fanout import Engine, RequestGroup
from rayllm.serve.metrics import FrontMetrics, render_metrics
from rayllm.serve.protocol import ChatBody, CompletionBody, GenerationBody, parse_body
from rayllm.serve.replies import DONE, ChatReply, CompletionReply, Reply, sse
from rayllm.types import RequestOutput

MAX_BODY_BYTES = 32 * 2**20
STATS_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)
T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]


class ServerState(Protocol):
    """What the routes need to know. model_name: in the API. metrics: this server's own figures."""

    model_name: str
    metrics: FrontMetrics

    def engine(self) -> Engine:
        """The engine to use now. Raises EngineDeadError while there is none."""
        ...

    async def unhealthy_reason(self) -> str | None:
        """None if requests are being answered, else why not."""
        ...

    async def all_metrics(self) -> FrontMetrics:
        """The figures of all servers of the deployment."""
        ...


def create_app(state: ServerState) -> FastAPI:
    """The app with all routes. Every error it answers has OpenAI's form."""
    app = FastAPI(title="rayllm", version=rayllm.__version__, openapi_url=None, docs_url=None, redoc_url=None)
    routes = _Routes(state)
    for method, path, handler in (
        ("GET", "/health", routes.health),
        ("GET", "/metrics", routes.metrics),
        ("GET", "/version", routes.version),
        ("GET", "/v1/models", routes.models),
        ("GET", "/v1/models/{model_id:path}", routes.model),
        ("POST", "/v1/completions", routes.completions),
        ("POST", "/v1/chat/completions", routes.chat_completions),
    ):
        # Plain Starlette routes: bodies are parsed by `parse_body`, whose errors name the field as OpenAI does.
        app.add_route(path, _answering_errors(handler), methods=[method])
    app.add_exception_handler(HTTPException, _http_error)
    return app


class _Routes:
    """The handlers. Each may raise; `_answering_errors` turns that into a response."""

    def __init__(self, state: ServerState):
        self._state = state
        self._created = int(time.time())

    async def health(self, _: Request) -> Response:
        reason = await self._state.unhealthy_reason()
        if reason is not None:
            raise ApiError(503, reason, kind="server_error", code="unhealthy", retry_after=2)
        return _json({"status": "ok"})

    async def version(self, _: Request) -> Response:
        return _json({"version": rayllm.__version__})

    async def metrics(self, _: Request) -> Response:
        try:
            stats = await asyncio.wait_for(self._state.engine().stats(), STATS_TIMEOUT_S)
        except (EngineDeadError, TimeoutError):
            stats = None  # the front's own figures are still worth having
        text = render_metrics(self._state.model_name, stats, await self._state.all_metrics())
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def models(self, _: Request) -> Response:
        return _json({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["model_id"])
        return _json(self._model_card())

    async def completions(self, request: Request) -> Response:
        body = parse_body(CompletionBody, await read_body(request))
        self._check_model(body.model)
        engine, reply_id = self._state.engine(), f"cmpl-{uuid.uuid4().hex}"
        job = await completion_job(body, reply_id, engine.info, engine.tokenizer)
        reply = CompletionReply(body, job, reply_id, self._state.model_name, engine.tokenizer)
        return await self._answer(request, body, engine, job, reply)

    async def chat_completions(self, request: Request) -> Response:
        body = parse_body(ChatBody, await read_body(request))
        self._check_model(body.model)
        engine, reply_id = self._state.engine(), f"chatcmpl-{uuid.uuid4().hex}"
        job = await chat_job(body, reply_id, engine.info, engine.tokenizer)
        reply = ChatReply(body, job, reply_id, self._state.model_name, engine.tokenizer)
        return await self._answer(request, body, engine, job, reply)

    async def _answer(self, request: Request, body: GenerationBody, engine: Engine, job: Job, reply: Reply) -> Response:
        group = RequestGroup(engine, job, self._state.metrics)
        try:
            if not body.stream:
                return await until_disconnect(request, _collect(group, reply))
            # An error before the first token is an HTTP status; only after it, an event of the stream.
            first = await until_disconnect(request, group.next())
        except BaseException:
            group.close()
            raise
        return _EventStream(group, reply, first)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._state.model_name:
            message = f"the model {name!r} does not exist; this server has {self._state.model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _model_card(self) -> dict[str, Any]:
        card = {"id": self._state.model_name, "object": "model", "created": self._created, "owned_by": "rayllm"}
        try:
            return card | {"max_model_len": self._state.engine().info.max_model_len}
        except EngineDeadError:
            return card


class _EventStream(StreamingResponse):
    """Server-sent events of a reply; whatever ends the response also ends its requests in the engine."""

    def __init__(self, group: RequestGroup, reply: Reply, first: list[tuple[int, RequestOutput]]):
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(_events(group, reply, first), media_type="text/event-stream", headers=headers)
        self._group = group

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._group.close()


async def _events(group: RequestGroup, reply: Reply, outputs: list[tuple[int, RequestOutput]]) -> AsyncIterator[bytes]:
    try:
        while outputs:
            frames = b"".join(reply.frames(index, output) for index, output in outputs)
            if frames:
                yield frames
            outputs = await group.next()
        yield reply.last_frames()
    except Exception as error:
        yield sse(as_api_error(error).body()) + DONE


async def _collect(group: RequestGroup, reply: Reply) -> Response:
    while outputs := await group.next():
        for index, output in outputs:
            reply.collect(index, output)
    return _json(reply.whole())


async def read_body(request: Request) -> bytes:
    """The request's body. Raises ApiError 413 as soon as it is known to be longer than MAX_BODY_BYTES."""
    too_long = ApiError(413, f"the request body is longer than {MAX_BODY_BYTES} bytes", code="request_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > MAX_BODY_BYTES:
        raise too_long
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise too_long
    return bytes(body)


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client goes away first (raises ClientDisconnect then)."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        watching.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _answering_errors(handler: Handler) -> Handler:
    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it; 499 is what proxies log for this
        except Exception as error:
            return _error(as_api_error(error))

    return answer


def _error(error: ApiError) -> Response:
    return _json(error.body(), error.status, error.headers())


async def _http_error(request: Request, error: Exception) -> Response:
    """Errors of the router itself: no such path, wrong method."""
    assert isinstance(error, HTTPException)
    message = {
        404: f"no such path: {request.method} {request.url.path}",
        405: f"method {request.method} is not allowed for {request.url.path}",
    }.get(error.status_code, str(error.detail))
    return _json(ApiError(error.status_code, message).body(), error.status_code, dict(error.headers or {}))


def _json(payload: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(payload), status, headers, media_type="application/json")
