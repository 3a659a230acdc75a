"""What an operator sees of each HTTP request: the request log, and OpenTelemetry traces.

A `RequestRecord` is logged when the engine gets the request and when it ends, and describes its span, which FastAPI
makes by itself. Records never hold prompts, outputs or keys. Traces need the extra `rayllm[otel]`.
"""

from __future__ import annotations

import logging
import logging.handlers
import os
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import orjson
from fastapi.telemetry import TelemetryConfig

from rayllm.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

# ---- the request log

LOGGER_NAME = "rayllm.requests"
LOG_FILE_BYTES = 64 * 2**20
LOG_FILES = 4

PLAIN = re.compile(r"[\w.:/+-]+", re.ASCII)  # text that needs no quotes
_NOT_LOGGED = ("arrival", "clock", "started")


class RequestRecord(msgspec.Struct, omit_defaults=True):
    """What is known of one HTTP request. Times in seconds."""

    request_id: str  # from the client or made here
    method: str
    path: str
    arrival: float = 0.0  # Unix time
    clock: float = 0.0  # time.perf_counter() at the arrival
    key: str | None = None  # the name of its API key
    model: str | None = None
    reply_id: str | None = None  # in the reply
    stream: bool = False
    status: int = 0
    error: str | None = None  # the code of the error it was answered with, in mid-stream too
    prompts: int = 0
    choices: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    queued: float | None = None  # in the engine, of the first prompt that had a token
    prefill: float | None = None  # of the same prompt
    first_token: float | None = None  # from the arrival
    total: float = 0.0  # from the arrival
    started: bool = False  # the engine has it


def log_event(event: str, record: RequestRecord) -> None:
    """Write a line. event: "start" for a request that the engine gets, "end" or "abort" for one that has ended."""
    fields = {name: value for name, value in msgspec.to_builtins(record).items() if name not in _NOT_LOGGED}
    rounded = {name: round(value, 6) if isinstance(value, float) else value for name, value in fields.items()}
    logging.getLogger(LOGGER_NAME).info(event, extra={"fields": rounded})


def open_log(log_format: str, path: Path | None) -> None:
    """Write the records of this process to a file, or to standard error; bounded: LOG_FILES files of LOG_FILE_BYTES."""
    handler: logging.Handler
    if path is None:
        handler = logging.StreamHandler()
    else:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handler = _PrivateFiles(path, maxBytes=LOG_FILE_BYTES, backupCount=LOG_FILES - 1)
    handler.setFormatter(_Lines(log_format == "json"))
    logger = logging.getLogger(LOGGER_NAME)
    for old in list(logger.handlers):
        logger.removeHandler(old)
        old.close()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


class _PrivateFiles(logging.handlers.RotatingFileHandler):
    """Files that no other user may read."""

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", opener=lambda name, flags: os.open(name, flags, 0o600))


class _Lines(logging.Formatter):
    """A line an event: a JSON object, or `time event name=value ...`.

    There, a value that is not plain is quoted, so that nobody can forge a line or a field.
    """

    def __init__(self, as_json: bool):
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        now = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        event, fields = record.getMessage(), getattr(record, "fields", {})
        if self._as_json:
            return orjson.dumps({"time": now, "event": event, **fields}, default=str).decode()
        return " ".join([now, event, *(f"{name}={_quoted(str(value))}" for name, value in fields.items())])


def _quoted(text: str) -> str:
    return text if PLAIN.fullmatch(text) else orjson.dumps(text).decode()


# ---- traces

ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
NO_TELEMETRY = TelemetryConfig(tracing=False, metrics=False, logs=False, auto_configure=False)
_NANO = 10**9
_ATTRIBUTES = {  # of a span -> field of the record
    "error.type": "error",
    "rayllm.request_id": "request_id",
    "gen_ai.request.model": "model",
    "gen_ai.response.id": "reply_id",
    "gen_ai.request.choice.count": "choices",
    "gen_ai.usage.input_tokens": "prompt_tokens",
    "gen_ai.usage.output_tokens": "completion_tokens",
    "rayllm.cached_tokens": "cached_tokens",
    "rayllm.queue_seconds": "queued",
    "rayllm.prefill_seconds": "prefill",
    "rayllm.time_to_first_token_seconds": "first_token",
}


def trace_endpoint(option: str | None, environment: Mapping[str, str]) -> str | None:
    """Where traces go: the option, else the environment's; None for nowhere.

    Raises ConfigError if they should go somewhere and the libraries are not installed, or the URL is none.
    """
    endpoint = option or environment.get(ENDPOINT_VARIABLE) or None
    if endpoint is None:
        return None
    name = "otlp_endpoint" if option else ENDPOINT_VARIABLE
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"{name}: must be an http:// or https:// URL, not {endpoint!r}")
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError:
        message = f"{name} asks for traces, but OpenTelemetry is not installed: pip install 'rayllm[otel]'"
        raise ConfigError(message) from None
    return endpoint


def make_tracer(endpoint: str | None) -> SpanTracer | None:
    """A tracer that sends in the background to an OTLP collector; None without an endpoint."""
    if endpoint is None:
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return SpanTracer(OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces"))


class SpanTracer:
    """Where spans go. A batch waits in a bounded queue for the exporter's thread; spans beyond are dropped."""

    def __init__(self, exporter: SpanExporter):
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        named = "OTEL_SERVICE_NAME" in os.environ
        resource = Resource.create({} if named else {"service.name": "rayllm"})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("rayllm")

    @property
    def telemetry(self) -> TelemetryConfig:
        """What FastAPI needs to make a span of each request, but of those that come many times a minute."""
        return NO_TELEMETRY | TelemetryConfig(
            tracing=True,
            tracer_provider=self._provider,
            operation_spans=False,
            exclude=lambda scope: scope["path"] in ("/health", "/metrics"),
        )

    def describe(self, record: RequestRecord) -> None:
        """Complete the span of a request that ends now; queue, prefill and decode come below it if they are known."""
        from opentelemetry import trace

        span = trace.get_current_span()
        values = {name: getattr(record, field) for name, field in _ATTRIBUTES.items()}
        unknown = (None,) if record.started else (None, 0)
        span.set_attributes({name: value for name, value in values.items() if value not in unknown})
        if record.error is not None:
            span.set_status(trace.StatusCode.ERROR, record.error)
        start = int(record.arrival * _NANO)
        for name, begin, end in _phases(record):
            self._tracer.start_span(name, start_time=start + int(begin * _NANO)).end(start + int(end * _NANO))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def _phases(record: RequestRecord) -> Iterator[tuple[str, float, float]]:
    """(name, begin, end) in seconds since arrival. Phases end with the first token, as that is when they are known."""
    if record.first_token is None:
        return
    if record.queued is not None and record.prefill is not None:
        started = max(record.first_token - record.prefill, 0.0)
        yield "queue", max(started - record.queued, 0.0), started
        yield "prefill", started, record.first_token
    yield "decode", record.first_token, max(record.total, record.first_token)
