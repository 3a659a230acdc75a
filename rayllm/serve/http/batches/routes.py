"""The routes of /v1/files and /v1/batches. Files and batches belong to the API key that they came with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from pydantic import Field
from starlette.datastructures import UploadFile
from starlette.responses import FileResponse, Response

from rayllm.batch.app_client import batch_endpoints
from rayllm.serve.http.answers import ErrorAnswer
from rayllm.serve.http.batches.files import FileObject, Purpose
from rayllm.serve.http.batches.store import Batch, BatchStore
from rayllm.serve.http.errors import ApiError
from rayllm.serve.http.protocol import Body, NotSupported, RequestBody
from rayllm.serve.http.request import Context, JsonRoute, json_response

FORM_BYTES = 2**16  # of an upload beside its file
UPLOAD_S = 600.0
MAX_UPLOADS = 8  # at once, of an API server
MIN_TTL_S, MAX_TTL_S = 3600, 30 * 86400
_UPLOAD = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": ["batch"]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": MIN_TTL_S, "maximum": MAX_TTL_S},
    },
}
_UPLOAD_BODY = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _UPLOAD}}}}

Item = TypeVar("Item", FileObject, Batch)
After = Annotated[str | None, Query(max_length=64)]


class Batches:
    """What the routes need of an API server: the store, and how many uploads are on their way.

    find_store: gives the store, when the first request comes.
    """

    def __init__(self, find_store: Callable[[], BatchStore]):
        self._find_store = find_store
        self.uploads = asyncio.Semaphore(MAX_UPLOADS)

    @property
    def store(self) -> BatchStore:
        return self._find_store()


async def _batches(request: Request) -> Batches:  # async, or FastAPI would run it in a thread
    return request.app.state.batches


Here = Annotated[Batches, Depends(_batches)]


class ExpiresAfter(Body):
    """When results expire."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=MIN_TTL_S, le=MAX_TTL_S)


class BatchBody(RequestBody):
    """Body of POST /v1/batches."""

    model: NotSupported = None  # the file's lines say it
    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = Field(
        default=None, max_length=16
    )
    output_expires_after: ExpiresAfter | None = None


class _Upload(Request):
    """A request whose body is a form with a file, and has a limit."""

    def __init__(self, request: Request, limit: int):
        super().__init__(request.scope, request.receive)
        self._limit = limit

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Raises ApiError 413 as soon as it is known that the body is too long."""
        declared, size = self.headers.get("content-length", ""), 0
        self._check(int(declared) if declared.isdigit() else 0)
        async for chunk in super().stream():
            size += len(chunk)
            self._check(size)
            yield chunk

    def _check(self, size: int) -> None:
        if size > self._limit:
            message = f"file: the upload has more than {self._limit} bytes (max_file_mib)"
            raise ApiError(413, message, code="file_too_large", param="file")


def make_routes(responses: dict[int | str, dict[str, Any]]) -> list[APIRouter]:
    """All routes. responses: what the API's document says of errors."""
    conflict: dict[int | str, dict[str, Any]] = {409: {"description": "The batch has ended.", "model": ErrorAnswer}}
    routes, json_routes = (
        APIRouter(responses=responses | conflict),
        APIRouter(responses=responses, route_class=JsonRoute),
    )

    @routes.post("/v1/files", openapi_extra=_UPLOAD_BODY)
    async def upload(request: Request, context: Context, here: Here) -> Response:
        """Upload a file of requests for a batch: a form with `file` and `purpose`."""
        files = here.store.files
        if here.uploads.locked():
            raise ApiError(429, f"the server takes {MAX_UPLOADS} uploads at once", code="too_many_uploads")
        form_request = _Upload(request, files.limits.file_bytes + FORM_BYTES)
        try:
            async with here.uploads, asyncio.timeout(UPLOAD_S), form_request.form(max_files=1, max_fields=8) as form:
                purpose, ttl, file = form.get("purpose"), _seconds(form), form.get("file")
                if purpose != "batch":
                    raise ApiError(400, "purpose must be batch", param="purpose")
                if not isinstance(file, UploadFile):
                    raise ApiError(400, "file is required, as a file of the form", param="file")
                name = file.filename or "requests.jsonl"
                stored = await asyncio.to_thread(files.add, file.file, name, "batch", context.record.key or "", ttl)
        except TimeoutError:
            raise ApiError(408, f"the file did not arrive within {UPLOAD_S:g} s", code="body_timeout") from None
        return _answer(stored)

    @routes.get("/v1/files")
    async def list_files(
        context: Context,
        here: Here,
        after: After = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        order: Literal["asc", "desc"] = "desc",
        purpose: Purpose | None = None,
    ) -> Response:
        """The files of this API key, those with results of batches too."""
        found = await asyncio.to_thread(here.store.files.owned_by, context.record.key or "")
        chosen = [file for file in found if purpose in (None, file.purpose)]
        return _page(chosen if order == "desc" else chosen[::-1], after, limit)

    @routes.get("/v1/files/{file_id}")
    async def get_file(file_id: str, context: Context, here: Here) -> Response:
        """What is known of a file."""
        return _answer(await asyncio.to_thread(here.store.files.get, file_id, context.record.key or ""))

    @routes.get("/v1/files/{file_id}/content")
    async def get_content(file_id: str, context: Context, here: Here) -> Response:
        """The content of a file."""
        path = await asyncio.to_thread(here.store.files.content, file_id, context.record.key or "")
        return FileResponse(path, media_type="application/octet-stream")

    @routes.delete("/v1/files/{file_id}")
    async def delete_file(file_id: str, context: Context, here: Here) -> Response:
        """Remove a file."""
        await asyncio.to_thread(here.store.files.delete, file_id, context.record.key or "")
        return json_response({"id": file_id, "object": "file", "deleted": True})

    @json_routes.post("/v1/batches")
    async def create_batch(body: BatchBody, request: Request, context: Context, here: Here) -> Response:
        """Have the requests of a file answered while there is time beside other requests."""
        known = batch_endpoints(request.app.routes)
        if body.endpoint not in known:
            message = f"endpoint must be one of {', '.join(known)}, not {body.endpoint[:200]!r}"
            raise ApiError(400, message, param="endpoint")
        ttl = None if body.output_expires_after is None else body.output_expires_after.seconds
        owner, file_id = context.record.key or "", body.input_file_id
        window, metadata = body.completion_window, body.metadata
        create = here.store.create
        return _answer(await asyncio.to_thread(create, owner, body.endpoint, file_id, window, metadata, ttl))

    @routes.get("/v1/batches")
    async def list_batches(
        context: Context, here: Here, after: After = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
    ) -> Response:
        """The batches of this API key, the newest first."""
        return _page(await asyncio.to_thread(here.store.owned_by, context.record.key or ""), after, limit)

    @routes.get("/v1/batches/{batch_id}")
    async def get_batch(batch_id: str, context: Context, here: Here) -> Response:
        """How a batch is going."""
        return _answer(await asyncio.to_thread(here.store.get, batch_id, context.record.key or ""))

    @routes.post("/v1/batches/{batch_id}/cancel")
    async def cancel_batch(batch_id: str, context: Context, here: Here) -> Response:
        """End a batch; what is answered by then is kept."""
        return _answer(await asyncio.to_thread(here.store.cancel, batch_id, context.record.key or ""))

    return [json_routes, routes]


def _seconds(form: Any) -> float | None:
    """How long the file is to stay, by `expires_after`. Raises ApiError 400."""
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise ApiError(400, "expires_after[anchor] must be created_at", param="expires_after")
    if not (isinstance(seconds, str) and seconds.isdecimal() and MIN_TTL_S <= int(seconds) <= MAX_TTL_S):
        message = f"expires_after[seconds] must be {MIN_TTL_S} to {MAX_TTL_S}"
        raise ApiError(400, message, param="expires_after")
    return float(seconds)


def _answer(item: FileObject | Batch) -> Response:
    return json_response(msgspec.to_builtins(item))


def _page(items: Sequence[Item], after: str | None, limit: int) -> Response:
    """The items behind the one with the id `after`. Raises ApiError 400 if that is none of them."""
    ids = [item.id for item in items]
    if after is not None and after not in ids:
        raise ApiError(400, f"after: there is no {after!r} in this list", param="after")
    start = 0 if after is None else ids.index(after) + 1
    page = items[start : start + limit]
    return json_response(
        {
            "object": "list",
            "data": msgspec.to_builtins(list(page)),
            "first_id": page[0].id if page else None,
            "last_id": page[-1].id if page else None,
            "has_more": start + limit < len(items),
        }
    )
