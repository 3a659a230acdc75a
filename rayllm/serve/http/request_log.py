"""The life of each HTTP request: its id, its key, and one record of it for the log and for traces.

`RequestLife` is the outermost layer of the app. Records never hold prompts, outputs or keys.
"""

from __future__ import annotations

import logging
import logging.handlers
import re
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import msgspec
import orjson
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayllm.serve.http.auth import Guard
from rayllm.serve.http.errors import ApiError

LOGGER_NAME = "rayllm.requests"
MAX_ID_CHARS = 128
MAX_PATH_CHARS = 200
LOG_FILE_BYTES = 64 * 2**20
LOG_FILES = 4

_SCOPE_KEY = "rayllm.record"
_PLAIN = re.compile(r"[\w.:/+-]+")


class RequestRecord(msgspec.Struct, omit_defaults=True):
    """What is known of one HTTP request. Times in seconds.

    request_id: from the client or made here. reply_id: in the reply. key: the name of the API key. error: the code of
    the error it was answered with, in mid-stream too. prompts, choices: how many. queued, prefill: of the engine, of
    the first prompt that had a token. first_token, total: from arrival. arrival: Unix time. clock: perf_counter() then.
    traceparent: from the client. started: the engine has it. complete: nothing of its answer is missing.
    """

    request_id: str
    method: str
    path: str
    arrival: float = 0.0
    clock: float = 0.0
    key: str | None = None
    model: str | None = None
    reply_id: str | None = None
    stream: bool = False
    status: int = 0
    error: str | None = None
    prompts: int = 0
    choices: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    queued: float | None = None
    prefill: float | None = None
    first_token: float | None = None
    total: float = 0.0
    traceparent: str | None = None
    started: bool = False
    complete: bool = False


_NOT_LOGGED = ("arrival", "clock", "traceparent", "started", "complete")


class Tracer(Protocol):
    """Makes a trace of a record (see `tracing.py`)."""

    def trace(self, record: RequestRecord) -> None: ...


def record_of(request: Request) -> RequestRecord:
    """The record of a request that came through `RequestLife`."""
    return request.scope[_SCOPE_KEY]


def log_start(record: RequestRecord) -> None:
    """The engine is about to get the request."""
    record.started = True
    _log("start", record)


class RequestLife:
    """ASGI middleware: gives a request its id, checks its key, and logs and traces its end.

    echo_id: put x-request-id into responses; Ray Serve's proxy does that itself.
    """

    def __init__(self, app: ASGIApp, guard: Guard, tracer: Tracer | None, echo_id: bool):
        self._app = app
        self._guard = guard
        self._tracer = tracer
        self._echo_id = echo_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        record = RequestRecord(
            headers.get("x-request-id", ""),
            scope["method"],
            scope["path"][:MAX_PATH_CHARS],
            arrival=time.time(),
            clock=time.perf_counter(),
            traceparent=headers.get("traceparent"),
        )
        scope[_SCOPE_KEY] = record

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                if self._echo_id:
                    MutableHeaders(scope=message)["x-request-id"] = record.request_id
            await send(message)

        app: ASGIApp = self._app
        try:
            _check_id(record)
            record.key = self._guard.check(scope["method"], scope["path"], headers.get("authorization"))
        except ApiError as error:
            record.error = error.code or error.kind
            app = Response(orjson.dumps(error.body()), error.status, error.headers(), "application/json")
        try:
            await app(scope, receive, send_with_id)
        finally:
            record.total = time.perf_counter() - record.clock
            self._end(record)

    def _end(self, record: RequestRecord) -> None:
        if not record.started and record.status < 400:
            return  # a question about the server itself, such as /health and /metrics, many times a minute
        _log("end" if record.complete or not record.started else "abort", record)
        if self._tracer is not None:
            self._tracer.trace(record)


def _check_id(record: RequestRecord) -> None:
    """Give the record an id if it has none. Raises ApiError 400 for one that logs and headers should not carry."""
    given, record.request_id = record.request_id, uuid.uuid4().hex
    if not given:
        return
    if len(given) > MAX_ID_CHARS or not _PLAIN.fullmatch(given) or not given.isascii():
        raise ApiError(
            400,
            f"the header x-request-id must have at most {MAX_ID_CHARS} characters, only letters, digits and _.:/+-",
            param="x-request-id",
        )
    record.request_id = given


def open_log(log_format: str, path: Path | None) -> None:
    """Write the records of this process to a file, or to standard error; bounded: LOG_FILES files of LOG_FILE_BYTES."""
    handler: logging.Handler
    if path is None:
        handler = logging.StreamHandler()
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.handlers.RotatingFileHandler(path, maxBytes=LOG_FILE_BYTES, backupCount=LOG_FILES - 1)
    handler.setFormatter(_JsonLines() if log_format == "json" else _TextLines())
    logger = logging.getLogger(LOGGER_NAME)
    for old in list(logger.handlers):
        logger.removeHandler(old)
        old.close()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _log(event: str, record: RequestRecord) -> None:
    fields: dict[str, Any] = {k: v for k, v in msgspec.to_builtins(record).items() if k not in _NOT_LOGGED}
    for name, value in fields.items():
        if isinstance(value, float):
            fields[name] = round(value, 6)
    logging.getLogger(LOGGER_NAME).info(event, extra={"fields": fields})


class _JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": _iso(record.created), "event": record.getMessage(), **getattr(record, "fields", {})}
        return orjson.dumps(line, default=str).decode()


class _TextLines(logging.Formatter):
    """time event name=value ...; a value that is not plain is quoted, so that nobody can forge a line or a field."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = getattr(record, "fields", {})
        parts = [_iso(record.created), record.getMessage(), *(f"{k}={_quoted(v)}" for k, v in fields.items())]
        return " ".join(parts)


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _quoted(value: Any) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) and text.isascii() else orjson.dumps(text).decode()
