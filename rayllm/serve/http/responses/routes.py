"""The routes of /v1/responses."""

from __future__ import annotations

import asyncio
import hashlib
import time
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query
from starlette.responses import Response

from rayllm.api.types import KEY_HEADER, IdempotencyKey
from rayllm.errors import InvalidRequestError
from rayllm.serve.http import request
from rayllm.serve.http.convert import MAX_TOKENIZED
from rayllm.serve.http.errors import ApiError
from rayllm.serve.http.responses import background
from rayllm.serve.http.responses.convert import read_conversation, response_job
from rayllm.serve.http.responses.protocol import (
    DeletedResponse,
    InputTokens,
    InputTokensBody,
    ItemList,
    ResponseAnswer,
    ResponseBody,
)
from rayllm.serve.http.responses.reply import ResponseReply
from rayllm.serve.http.responses.store import StoredResponse
from rayllm.serve.http.served import Target

MAX_PAGE = 100


def add_routes(generation: APIRouter, tokenizer: APIRouter, server: APIRouter) -> None:
    """Add the routes to the routers of those that take a place, that take a body, and that do neither."""
    generation.post("/v1/responses", response_model=ResponseAnswer)(create)
    tokenizer.post("/v1/responses/input_tokens")(input_tokens)
    events: dict[int | str, dict[str, Any]] = {
        200: {"description": "The response, or its events.", "content": {"text/event-stream": {}}}
    }
    server.get("/v1/responses/{response_id}", response_model=ResponseAnswer, responses=events)(retrieve)
    server.delete("/v1/responses/{response_id}")(delete)
    server.post("/v1/responses/{response_id}/cancel", response_model=ResponseAnswer)(cancel)
    server.get("/v1/responses/{response_id}/input_items")(input_items)
    server.post("/v1/responses/compact", include_in_schema=False)(compact)


async def create(body: ResponseBody, context: request.Context) -> Response:
    """Answer a conversation, or begin to in the background."""
    store, owner = context.state.response_store, context.record.key or ""
    target = context.enter(body.model, "resp_")
    if body.background and target.key is None:  # by which it can be taken over
        digest = hashlib.sha256(body.model_dump_json().encode()).digest()
        target = target._replace(key=IdempotencyKey(target.reply_id, digest, int(time.time())))
    elif body.background and (known := await asyncio.to_thread(store.read, target.reply_id, owner)) is not None:
        if known.fingerprint != context.fingerprint:
            raise InvalidRequestError(f"this {KEY_HEADER} came before, with another body", KEY_HEADER)
        return await _background_answer(context, body, known)
    items = await asyncio.to_thread(read_conversation, body, store, owner, target.reply_id)
    job = await context.work(response_job, body, items, target)
    if body.background:
        context.note_not_enforced(job)
        made = await background.start(context, body, items, job, target)
        if target.key is not None and made.fingerprint != target.key.fingerprint:
            raise InvalidRequestError(f"this {KEY_HEADER} came before, with another body", KEY_HEADER)
        return await _background_answer(context, body, made)
    reply = ResponseReply(body, job, target, len(items))

    async def finish() -> None:
        if body.is_stored:
            await asyncio.to_thread(store.write, StoredResponse(owner, reply.response(), items))

    return await request.generate(context, job, reply, finish)


async def _background_answer(context: request.RequestContext, body: ResponseBody, stored: StoredResponse) -> Response:
    if body.stream:
        return request.event_stream(background.follow(context, stored, -1))
    return request.json_response(stored.response)


async def input_tokens(body: InputTokensBody, context: request.Context) -> InputTokens:
    """Count the tokens of a conversation, tools and instructions included. It holds no place in an engine."""
    model = request.find_model(context.state, body.model)
    engine = model.engine()
    room = max(engine.info.max_model_len, MAX_TOKENIZED)  # for what is longer than any context, to be counted too
    info = msgspec.structs.replace(engine.info, max_model_len=room, num_kv_tokens=room)
    response_id = f"resp_{'0' * 32}"
    store, owner = context.state.response_store, context.record.key or ""
    items = await asyncio.to_thread(read_conversation, body, store, owner, response_id)
    job = await context.work(response_job, body, items, Target(model, engine, info, response_id))
    return InputTokens(input_tokens=len(job.requests[0].prompt_token_ids))


async def retrieve(
    response_id: str,
    context: request.Context,
    stream: bool = False,
    starting_after: Annotated[int | None, Query(ge=0)] = None,
) -> Response:
    """A stored response; with stream: true, the events of one that was made with background and stream."""
    stored = await _find(context, response_id)
    if not stream:
        if starting_after is not None:
            raise InvalidRequestError("starting_after is only allowed with stream=true", "starting_after")
        return request.json_response((await background.take_over(context, stored)).response)
    if await asyncio.to_thread(context.state.response_store.events, response_id) is None:
        message = "stream: only responses that were made with background: true and stream: true have events"
        raise InvalidRequestError(message, "stream")
    return request.event_stream(background.follow(context, stored, -1 if starting_after is None else starting_after))


async def delete(response_id: str, context: request.Context) -> DeletedResponse:
    """Remove a stored response. If it runs in the background, it ends."""
    await _find(context, response_id)
    await asyncio.to_thread(context.state.response_store.delete, response_id)
    return DeletedResponse(id=response_id)


async def cancel(response_id: str, context: request.Context) -> Response:
    """End a response that runs in the background."""
    stored = await _find(context, response_id)
    if not stored.response["background"]:
        raise ApiError(400, "only responses that were made with background: true can be cancelled", param="response_id")
    return request.json_response((await background.cancel(context, stored)).response)


async def compact() -> Response:
    """Refused: OpenAI's models read an encrypted summary of a conversation, for which open ones have no form."""
    message = "/v1/responses/compact is not supported: no open model reads compacted items; shorten the input instead"
    raise ApiError(404, message, code="not_supported")


async def input_items(
    response_id: str,
    context: request.Context,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> ItemList:
    """The items that a response answered, those of earlier responses of its conversation included."""
    items = (await _find(context, response_id)).input
    items = items if order == "asc" else items[::-1]
    first = 0
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise InvalidRequestError(f"after: the response has no item {after[:80]!r}", "after")
        first = ids.index(after) + 1
    page = items[first : first + limit]
    ends = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return ItemList(data=page, first_id=ends[0], last_id=ends[1], has_more=first + limit < len(items))


async def _find(context: request.RequestContext, response_id: str) -> StoredResponse:
    """Raises ApiError 404."""
    stored = await asyncio.to_thread(context.state.response_store.read, response_id, context.record.key or "")
    if stored is None:
        message = f"there is no response {response_id[:80]!r}; it may have been deleted, or be too old"
        raise ApiError(404, message, code="response_not_found", param="response_id")
    return stored
