"""The HTTP API as a FastAPI app over a `ServerState`. Knows nothing of Ray: Serve hosts it, tests call it directly."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import orjson
from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

import rayllm
from rayllm.api.types import RequestOutput
from rayllm.config.options import ServerConfig
from rayllm.errors import EngineDeadError
from rayllm.serve.http.auth import ApiKey, Guard
from rayllm.serve.http.chat_format import chat_format
from rayllm.serve.http.convert import Job, chat_job, completion_job
from rayllm.serve.http.embeddings import EmbeddingBody, EmbeddingReply, embedding_job
from rayllm.serve.http.errors import ApiError, as_api_error
from rayllm.serve.http.fanout import Engine, RequestGroup, Watch
from rayllm.serve.http.limits import Deadlines, Ticket
from rayllm.serve.http.metrics import REFUSALS, ModelFigures, render_models
from rayllm.serve.http.openapi import openapi_document
from rayllm.serve.http.protocol import ChatBody, CompletionBody, GenerationBody, parse_body
from rayllm.serve.http.replies import DONE, ChatReply, CompletionReply, Reply, sse
from rayllm.serve.http.request_log import MAX_PATH_CHARS, RequestLife, RequestRecord, Tracer, log_start, record_of
from rayllm.serve.http.served import ServedModel, ServerState, find_model, require_engine
from rayllm.serve.http.tokenize import detokenize, tokenize

MAX_BODY_BYTES = 32 * 2**20

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]
AnyReply = Reply | EmbeddingReply
_Prepared = tuple[ServedModel, Engine, GenerationBody | EmbeddingBody, Job, AnyReply]
_Prepare = Callable[[bytes, RequestRecord, Ticket], Awaitable[_Prepared]]


def create_app(
    state: ServerState,
    server: ServerConfig | None = None,
    keys: Sequence[ApiKey] = (),
    *,
    tracer: Tracer | None = None,
    echo_request_id: bool = True,
) -> FastAPI:
    """The app with all routes. Every error it answers has OpenAI's form.

    server: its deadlines; the defaults if None. keys: one of them must come with each request but /health; none needed
    if there are none. tracer: gets every request. echo_request_id: false where something in front does that.
    """
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    routes = _Routes(state, server or ServerConfig())
    for method, path, handler in (
        ("GET", "/", routes.console),
        ("GET", "/health", routes.health),
        ("GET", "/metrics", routes.metrics),
        ("GET", "/openapi.json", routes.openapi),
        ("GET", "/version", routes.version),
        ("GET", "/v1/models", routes.models),
        ("GET", "/v1/models/{model_id:path}", routes.model),
        ("POST", "/v1/completions", routes.completions),
        ("POST", "/v1/chat/completions", routes.chat_completions),
        ("POST", "/v1/embeddings", routes.embeddings),
        ("POST", "/tokenize", routes.tokenize),
        ("POST", "/detokenize", routes.detokenize),
    ):
        # Plain Starlette routes: bodies are parsed by `parse_body`, whose errors name the field as OpenAI does.
        app.add_route(path, routes.answering_errors(handler), methods=[method])
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(RequestLife, guard=Guard(keys), tracer=tracer, echo_id=echo_request_id)
    return app


class _Routes:
    """The handlers. Each may raise; `answering_errors` turns that into a response."""

    def __init__(self, state: ServerState, server: ServerConfig):
        self._state = state
        self._server = server
        self._created = int(time.time())

    def answering_errors(self, handler: Handler) -> Handler:
        async def answer(request: Request) -> Response:
            try:
                return await handler(request)
            except ClientDisconnect:
                return Response(status_code=499)  # nobody reads it; 499 is what proxies log for this
            except Exception as error:
                refused = self._refused(record_of(request), error)
                return _json(refused.body(), refused.status, refused.headers())

        return answer

    async def console(self, _: Request) -> Response:
        from rayllm.serve.http.console import console_page

        return console_page()

    async def openapi(self, _: Request) -> Response:
        return _json(openapi_document())

    async def health(self, request: Request) -> Response:
        name = request.query_params.get("model")
        if name is not None and name not in self._state.models:  # who asks may have no key, and learns no names
            raise ApiError(404, "there is no such model", param="model", code="model_not_found")
        models = [model for model in self._state.models.values() if name in (None, model.name)]
        reasons = {model.name: await model.unhealthy_reason() for model in models}
        bad = [f"{name}: {why}" if len(models) > 1 else why for name, why in reasons.items() if why is not None]
        if bad:
            raise ApiError(503, "; ".join(bad), kind="server_error", code="unhealthy", retry_after=2)
        return _json({"status": "ok"})

    async def version(self, _: Request) -> Response:
        return _json({"version": rayllm.__version__})

    async def metrics(self, _: Request) -> Response:
        figures = [
            ModelFigures(model.name, await model.stats(), await model.all_metrics(), model.num_replicas)
            for model in self._state.models.values()
        ]
        return Response(render_models(figures), media_type=CONTENT_TYPE_LATEST)

    async def models(self, _: Request) -> Response:
        return _json({"object": "list", "data": [self._model_card(model) for model in self._state.models.values()]})

    async def model(self, request: Request) -> Response:
        return _json(self._model_card(find_model(self._state, request.path_params["model_id"])))

    async def tokenize(self, request: Request) -> Response:
        require_engine(self._state)
        return _json(await tokenize(await self._read_body(request, Deadlines(self._server)), self._engine))

    async def detokenize(self, request: Request) -> Response:
        require_engine(self._state)
        return _json(await detokenize(await self._read_body(request, Deadlines(self._server)), self._engine))

    async def completions(self, request: Request) -> Response:
        async def prepare(raw: bytes, record: RequestRecord, ticket: Ticket) -> _Prepared:
            body = parse_body(CompletionBody, raw)
            model, engine = self._enter(body.model, record, ticket)
            reply_id = record.reply_id = f"cmpl-{uuid.uuid4().hex}"
            job = await completion_job(body, reply_id, engine.info, engine.tokenizer)
            return model, engine, body, job, CompletionReply(body, job, reply_id, model.name, engine.tokenizer)

        return await self._generate(request, prepare)

    async def chat_completions(self, request: Request) -> Response:
        async def prepare(raw: bytes, record: RequestRecord, ticket: Ticket) -> _Prepared:
            body = parse_body(ChatBody, raw)
            model, engine = self._enter(body.model, record, ticket)
            reply_id = record.reply_id = f"chatcmpl-{uuid.uuid4().hex}"
            form = chat_format(model.server, engine.tokenizer)
            job = await chat_job(body, reply_id, engine.info, engine.tokenizer, form)
            return model, engine, body, job, ChatReply(body, job, reply_id, model.name, engine.tokenizer)

        return await self._generate(request, prepare)

    async def embeddings(self, request: Request) -> Response:
        async def prepare(raw: bytes, record: RequestRecord, ticket: Ticket) -> _Prepared:
            body = parse_body(EmbeddingBody, raw)
            model, engine = self._enter(body.model, record, ticket)
            reply_id = record.reply_id = f"embd-{uuid.uuid4().hex}"
            job = await embedding_job(body, reply_id, engine.info, engine.tokenizer)
            return model, engine, body, job, EmbeddingReply(body, job, model.name)

        return await self._generate(request, prepare)

    async def _generate(self, request: Request, prepare: _Prepare) -> Response:
        """Admit a request, run it, answer it. What is refused is refused before the engine has seen it."""
        record, deadlines = record_of(request), Deadlines(self._server)
        require_engine(self._state)  # first of all: without an engine nothing is worth reading
        ticket = self._state.door.enter()
        try:
            model, engine, body, job, reply = await prepare(await self._read_body(request, deadlines), record, ticket)
            choices = sum(each.params.width for each in job.requests)
            prompt_tokens = sum(len(each.prompt_token_ids) for each in job.requests)
            record.stream = bool(body.stream)
            record.prompts, record.choices, record.prompt_tokens = len(job.requests), choices, prompt_tokens
            ticket.admit(choices, prompt_tokens)
            log_start(record)
        except BaseException:
            ticket.close()
            raise
        return await self._answer(request, engine, job, reply, Watch(model.metrics, ticket, deadlines, record))

    async def _answer(self, request: Request, engine: Engine, job: Job, reply: AnyReply, watch: Watch) -> Response:
        group = RequestGroup(engine, job, watch)
        try:
            if not watch.record.stream or isinstance(reply, EmbeddingReply):
                answer = await until_disconnect(request, _collect(group, reply))
                watch.record.complete = True
                return answer
            # An error before the first token is an HTTP status; only after it, an event of the stream.
            first = await until_disconnect(request, group.next())
        except BaseException:
            group.close()
            raise
        return _EventStream(group, self._events(group, reply, first, watch.record))

    async def _events(
        self, group: RequestGroup, reply: Reply, outputs: list[tuple[int, RequestOutput]], record: RequestRecord
    ) -> AsyncIterator[bytes]:
        try:
            while outputs:
                frames = b"".join(reply.frames(index, output) for index, output in outputs)
                if frames:
                    yield frames
                outputs = await group.next()
            yield reply.last_frames()
            record.complete = True
        except Exception as error:
            yield sse(self._refused(record, error).body()) + DONE

    def _refused(self, record: RequestRecord, error: Exception) -> ApiError:
        """The answer to a request that failed, which is counted and noted."""
        answer = as_api_error(error)
        answer.__traceback__ = None  # its frames refer to it and to the body, which would stay until it is collected
        record.error = answer.code or answer.kind
        if answer.code in REFUSALS:
            models = self._state.models
            # One that was refused before its model was known would have been refused by any of them.
            known = models.get(record.model or "")
            for model in models.values() if known is None else [known]:
                model.metrics.refused[answer.code] = model.metrics.refused.get(answer.code, 0) + 1
        return answer

    async def _read_body(self, request: Request, deadlines: Deadlines) -> bytes:
        """Raises ApiError 413 or 408."""
        try:
            async with asyncio.timeout(deadlines.body):
                return await read_body(request)
        except TimeoutError:
            raise deadlines.body_missed() from None

    def _engine(self, name: str | None) -> Engine:
        """The engine of the model that a request asks for. Raises ApiError, EngineDeadError."""
        return find_model(self._state, name).engine()

    def _enter(self, name: str | None, record: RequestRecord, ticket: Ticket) -> tuple[ServedModel, Engine]:
        """The model that a request asks for, which counts among its load from now on. Raises as `_engine` does."""
        model = find_model(self._state, name)
        record.model = model.name
        engine = model.engine()
        ticket.move(model.admission)
        return model, engine

    def _model_card(self, model: ServedModel) -> dict[str, Any]:
        card = {"id": model.name, "object": "model", "created": self._created, "owned_by": "rayllm"}
        try:
            return card | {"max_model_len": model.engine().info.max_model_len}
        except EngineDeadError:
            return card


class _EventStream(StreamingResponse):
    """Server-sent events of a reply; whatever ends the response also ends its requests in the engine."""

    def __init__(self, group: RequestGroup, events: AsyncIterator[bytes]):
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._group = group

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._group.close()


async def _collect(group: RequestGroup, reply: AnyReply) -> Response:
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
    chunks, size = [], 0
    async for chunk in request.stream():
        chunks.append(chunk)
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise too_long
    return b"".join(chunks)


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


async def _http_error(request: Request, error: Exception) -> Response:
    """Errors of the router itself: no such path, wrong method."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:MAX_PATH_CHARS]
    message = {
        404: f"no such path: {request.method} {path}",
        405: f"method {request.method} is not allowed for {path}",
    }.get(error.status_code, str(error.detail))
    return _json(ApiError(error.status_code, message).body(), error.status_code, dict(error.headers or {}))


def _json(payload: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(payload), status, headers, media_type="application/json")
