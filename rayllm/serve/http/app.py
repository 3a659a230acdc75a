"""The HTTP API as a FastAPI app over a `ServerState`.

It knows nothing of Ray: the cluster hosts the app, and tests call it directly.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Header
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import Lifespan

from rayllm.api.types import EngineInfo
from rayllm.config.options import ServerConfig
from rayllm.errors import InvalidRequestError
from rayllm.serve.http import answers, protocol, request
from rayllm.serve.http.auth import ApiKey
from rayllm.serve.http.batches.routes import Batches, make_routes
from rayllm.serve.http.batches.store import BatchStore
from rayllm.serve.http.console import console_file
from rayllm.serve.http.convert import chat_job, completion_job, embedding_job, text_of, tokens_of
from rayllm.serve.http.errors import ApiError
from rayllm.serve.http.messages import protocol as messages_protocol
from rayllm.serve.http.messages.convert import count_tokens, messages_job
from rayllm.serve.http.messages.reply import MessagesReply
from rayllm.serve.http.metrics import ModelFigures, render
from rayllm.serve.http.replies import ChatReply, CompletionReply, embeddings
from rayllm.serve.http.request_log import NO_TELEMETRY, SpanTracer
from rayllm.serve.http.responses.routes import add_routes as add_response_routes
from rayllm.serve.http.served import ServedModel, ServerState
from rayllm.serve.http.unknown_fields import HEADER
from rayllm.text.tokenizer import Tokenizer
from rayllm.version import __version__

_STARTED = int(time.time())  # what /v1/models says of when a model was made

_ERRORS: dict[int | str, str] = {
    "default": "Any other error.",
    400: "The request is not valid; the message names the field and its limit.",
    401: "No API key, or one that is not valid.",
    403: "A web page of another origin sent this.",
    404: "No such model.",
    408: "A deadline was missed before the first token.",
    413: "The body is too long.",
    415: "The body's content-encoding is neither gzip nor identity.",
    429: "The queue is full; retry-after says when to try again.",
    500: "The request failed on the server.",
    503: "There is no engine to answer now; retry-after says when to try again.",
}
_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"description": meaning, "model": answers.ErrorAnswer} for status, meaning in _ERRORS.items()
}
_MESSAGES_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"description": meaning, "model": messages_protocol.MessagesError} for status, meaning in _ERRORS.items()
}
_EVENTS = {"description": "The answer, or with stream: true its parts as events.", "content": {"text/event-stream": {}}}

_KEY_REUSED = {"description": "The Idempotency-Key came before, with another body.", "model": answers.ErrorAnswer}
_GENERATION_RESPONSES = _RESPONSES | {200: _EVENTS, 422: _KEY_REUSED}
_MESSAGES_KEY_REUSED = _KEY_REUSED | {"model": messages_protocol.MessagesError}

generation_routes = APIRouter(responses=_GENERATION_RESPONSES, route_class=request.GenerationRoute)
tokenizer_routes = APIRouter(responses=_RESPONSES, route_class=request.JsonRoute)
server_routes = APIRouter(responses=_RESPONSES)


def create_app(
    state: ServerState,
    server: ServerConfig | None = None,
    keys: Sequence[ApiKey] = (),
    *,
    tracer: SpanTracer | None = None,
    echo_request_id: bool = True,
    batches: Callable[[], BatchStore] | None = None,
    lifespan: Lifespan[FastAPI] | None = None,
) -> FastAPI:
    """The app with all routes. Every error it answers has OpenAI's form.

    server: its deadlines and allowed origins; the defaults if None. keys: one of them must come with each request but
    /health; none needed if there are none. tracer: gets a span of each request. echo_request_id: false where something
    in front does that. batches: gives the store of /v1/files and /v1/batches, which there are only with it. lifespan:
    what is to be done before the first request and after the last one.
    """
    app = (FastAPI if keys else _OpenApp)(
        # As they are, those asked most often first: `include_router` would look through them twice for each request.
        routes=[*generation_routes.routes, *tokenizer_routes.routes, *server_routes.routes],
        title="rayllm",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        exception_handlers=dict.fromkeys((HTTPException, RequestValidationError), request.answer_error),
        telemetry=NO_TELEMETRY if tracer is None else tracer.telemetry,
    )
    if batches is not None:
        app.state.batches = Batches(batches)
        for routes in make_routes(_RESPONSES):
            app.router.routes.extend(routes.routes)
    app.add_middleware(
        request.RequestLife,
        state=state,
        server=server or ServerConfig(),
        keys=keys,
        tracer=tracer,
        echo_id=echo_request_id,
    )
    if server is not None and server.allowed_origins:
        # Outermost: a browser asks without a key whether it may send one.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=server.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "request-id", "retry-after", HEADER, request.NOT_ENFORCED_HEADER],
        )
    return app


class _OpenApp(FastAPI):
    """An app without keys, whose document asks for none."""

    def openapi(self) -> dict[str, Any]:
        document = super().openapi()
        for methods in document["paths"].values():
            for operation in methods.values():
                operation.pop("security", None)
        return document


@server_routes.get("/", response_class=HTMLResponse, dependencies=[request.KEYED])
async def console(if_none_match: Annotated[str | None, Header(include_in_schema=False)] = None) -> Response:
    """A console in the browser."""
    return console_file(known=if_none_match)


@server_routes.get("/console/{path:path}", include_in_schema=False, dependencies=[request.KEYED])
async def console_files(path: str, if_none_match: Annotated[str | None, Header()] = None) -> Response:
    """What the console consists of."""
    return console_file(path, if_none_match)


@server_routes.get("/health", openapi_extra={"security": [{}, {"key": []}]})
async def health(context: request.OpenContext, model: str | None = None) -> dict[str, str]:
    """Whether requests are answered: by one model, or by all. Why they are not is said only to who has a key."""
    models = context.state.models
    names = [name for each in models.values() for name in (each.name, *each.adapters)]
    if model is not None and model not in names:  # asked without a key, so it must not name the models that there are
        raise ApiError(404, "there is no such model", code="model_not_found", param="model")
    asked = [each for each in models.values() if model in (None, each.name, *each.adapters)]
    reasons = {each.name: await each.unhealthy_reason() for each in asked}
    bad = [f"{name}: {why}" if len(asked) > 1 else why for name, why in reasons.items() if why is not None]
    if bad and not context.is_trusted:
        raise ApiError(503, "the server is not healthy; a request with an API key is told why", code="unhealthy")
    if bad:
        raise ApiError(503, "; ".join(bad), code="unhealthy")
    return {"status": "ok"}


@server_routes.get("/version", dependencies=[request.KEYED])
async def version() -> dict[str, str]:
    """The version of rayllm."""
    return {"version": __version__}


@server_routes.get("/metrics", response_class=PlainTextResponse)
async def metrics(context: request.Context) -> Response:
    """Figures of the whole deployment for Prometheus."""
    figures = [
        ModelFigures(model.name, await model.stats(), model.metrics, model.peer_metrics(), model.num_replicas)
        for model in context.state.models.values()
    ]
    # In a thread, as it takes milliseconds to read what the other servers have counted.
    return Response(await asyncio.to_thread(render, figures), media_type=CONTENT_TYPE_LATEST)


@server_routes.get("/cluster", responses={200: {"content": {"text/plain": {}}}})
async def cluster(context: request.Context, format: str = "text") -> Response:
    """What `rayllm status` prints, or with format=json `rayllm status --json`."""
    if format not in ("text", "json"):
        raise ApiError(400, "format must be text or json", param="format")
    if format == "json":
        return Response(await context.state.cluster_json(), media_type="application/json")
    return PlainTextResponse("\n".join(await context.state.describe_cluster()))


@server_routes.get("/v1/models", response_model_exclude_none=True)
async def models(context: request.Context) -> answers.ModelList:
    """The models served, and their adapters."""
    found = context.state.models.values()
    return answers.ModelList(data=[_card(model, name) for model in found for name in ("", *model.adapters)])


@server_routes.get("/v1/models/{model_id:path}", response_model_exclude_none=True)
async def model(model_id: str, context: request.Context) -> answers.ModelCard:
    """One model, or adapter."""
    if not model_id:
        raise HTTPException(404)
    found = request.find_model(context.state, model_id)
    return _card(found, request.adapter_name(found, model_id))


@tokenizer_routes.post("/v1/load_lora_adapter")
async def load_lora_adapter(body: protocol.LoadAdapterBody, context: request.Context) -> answers.AdapterAnswer:
    """Load an adapter (LoRA) on all engines of a model, from its folder in PEFT's form.

    Afterwards requests ask for it by its name in place of the model's. If an engine cannot load it, none has it.
    """
    model = request.find_model(context.state, body.model)
    others = [name for each in context.state.models.values() for name in (each.name, *each.adapters)]
    if body.lora_name in others and body.lora_name not in model.adapters:
        raise InvalidRequestError(f"lora_name: {body.lora_name!r} is the name of a model or its adapter", "lora_name")
    await model.load_adapter(body.lora_name, body.lora_path)
    return answers.AdapterAnswer(id=body.lora_name, parent=model.name)


@tokenizer_routes.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(body: protocol.UnloadAdapterBody, context: request.Context) -> answers.AdapterAnswer:
    """Forget an adapter on all engines of its model. Requests that run with it go on."""
    model = request.find_model(context.state, body.lora_name if body.model is None else body.model)
    await model.unload_adapter(body.lora_name)
    return answers.AdapterAnswer(id=body.lora_name, parent=model.name, deleted=True)


@tokenizer_routes.post("/tokenize", response_model_exclude_none=True)
async def tokenize(body: protocol.TokenizeBody, context: request.Context) -> answers.Tokens:
    """Tokens of a text. This needs no engine step and holds no place in one."""
    return await context.work(tokens_of, body, *_tokenizing_engine(context, body.model))


@tokenizer_routes.post("/detokenize")
async def detokenize(body: protocol.DetokenizeBody, context: request.Context) -> answers.Detokenized:
    """Text of tokens, special ones included."""
    return await context.work(text_of, body, *_tokenizing_engine(context, body.model))


@server_routes.get("/tokenizer_info")
async def tokenizer_info(context: request.Context, model: str | None = None) -> dict[str, Any]:
    """A model's special tokens and chat template, for clients that make prompts themselves. Absent ones are null."""
    info, tokenizer = _tokenizing_engine(context, model)
    absent = dict.fromkeys(("bos_token", "eos_token", "pad_token"))
    template = tokenizer.chat_template_source() or None
    return absent | tokenizer.special_tokens | {"chat_template": template, "model_max_length": info.max_model_len}


@generation_routes.post("/v1/completions", response_model=answers.Completion)
async def completions(body: protocol.CompletionBody, context: request.Context) -> Response:
    """Complete prompts."""
    target = context.enter(body.model, "cmpl-", request_id=body.request_id)
    job = await context.work(completion_job, body, target)
    return await request.generate(context, job, CompletionReply(body, job, target))


@generation_routes.post("/v1/chat/completions", response_model=answers.ChatCompletion)
async def chat_completions(body: protocol.ChatBody, context: request.Context) -> Response:
    """Answer a conversation."""
    target = context.enter(body.model, "chatcmpl-", request_id=body.request_id)
    job = await context.work(chat_job, body, target)
    return await request.generate(context, job, ChatReply(body, job, target))


@generation_routes.post(
    "/v1/messages",
    response_model=messages_protocol.MessageAnswer,
    responses=_MESSAGES_RESPONSES | {422: _MESSAGES_KEY_REUSED},
)
async def messages(body: messages_protocol.MessagesBody, context: request.Context) -> Response:
    """Answer a conversation, as Anthropic's API does."""
    target = context.enter(body.model, "msg_")
    job = await context.work(messages_job, body, target)
    return await request.generate(context, job, MessagesReply(body, job, target, context.record.request_id))


@tokenizer_routes.post("/v1/messages/count_tokens", responses=_MESSAGES_RESPONSES)
async def count_message_tokens(
    body: messages_protocol.PromptBody, context: request.Context
) -> messages_protocol.TokenCount:
    """Tokens of the prompt that /v1/messages would make. This needs no engine step and holds no place in one."""
    number = await context.work(count_tokens, body, *_tokenizing_engine(context, body.model))
    return messages_protocol.TokenCount(input_tokens=number)


@generation_routes.post("/v1/embeddings", response_model=answers.Embeddings)
async def embed(body: protocol.EmbeddingBody, context: request.Context) -> Response:
    """Embed texts: by the last token's hidden state after the model's final norm, or the mean of all tokens'."""
    target = context.enter(body.model, "embd-", request_id=body.request_id)
    outputs = await request.run(context, await context.work(embedding_job, body, target))
    return request.json_response(embeddings(body, target.name, outputs))


add_response_routes(generation_routes, tokenizer_routes, server_routes)


def _card(model: ServedModel, adapter: str = "") -> answers.ModelCard:
    max_model_len = model.engine().info.max_model_len if model.num_replicas else None
    name, parent = (adapter, model.name) if adapter else (model.name, None)
    return answers.ModelCard(id=name, created=_STARTED, max_model_len=max_model_len, parent=parent)


def _tokenizing_engine(context: request.RequestContext, name: str | None) -> tuple[EngineInfo, Tokenizer]:
    engine = request.find_model(context.state, name).engine()
    if engine.tokenizer is None:
        raise InvalidRequestError("this server runs without a tokenizer")
    return engine.info, engine.tokenizer
