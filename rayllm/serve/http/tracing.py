"""OpenTelemetry traces: a span a request, with the engine's phases as children. Needs the extra `rayllm[otel]`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rayllm.errors import ConfigError
from rayllm.serve.http.request_log import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
_MODULES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")
_NANO = 10**9


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
    if not all(map(_installed, _MODULES)):
        raise ConfigError(f"{name} asks for traces, but OpenTelemetry is not installed: pip install 'rayllm[otel]'")
    return endpoint


def make_tracer(endpoint: str | None) -> SpanTracer | None:
    """A tracer that sends in the background to an OTLP collector; None without an endpoint."""
    if endpoint is None:
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return SpanTracer(OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces"))


class SpanTracer:
    """Makes spans of records. A batch waits in a bounded queue for the exporter's thread; spans beyond are dropped."""

    def __init__(self, exporter: SpanExporter):
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        named = "OTEL_SERVICE_NAME" in os.environ
        resource = Resource.create({} if named else {"service.name": "rayllm"})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("rayllm")

    def trace(self, record: RequestRecord) -> None:
        """Spans of a request that has ended: it, and below it queue, prefill and decode where they are known."""
        from opentelemetry import trace
        from opentelemetry.trace import Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {} if record.traceparent is None else {"traceparent": record.traceparent}
        start = int(record.arrival * _NANO)
        span = self._tracer.start_span(
            f"{record.method} {record.path}" if record.started else record.method,  # few names, whatever comes in
            context=TraceContextTextMapPropagator().extract(carrier),
            kind=trace.SpanKind.SERVER,
            attributes=dict(_attributes(record)),
            start_time=start,
        )
        below = trace.set_span_in_context(span)
        for name, begin, end in _phases(record):
            child = self._tracer.start_span(name, context=below, start_time=start + int(begin * _NANO))
            child.end(start + int(end * _NANO))
        if record.status >= 500 or record.error is not None:
            span.set_status(Status(StatusCode.ERROR, record.error))
        span.end(start + int(record.total * _NANO))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def _attributes(record: RequestRecord) -> Iterator[tuple[str, Any]]:
    for name, value in (
        ("http.request.method", record.method),
        ("url.path", record.path),
        ("http.response.status_code", record.status),
        ("error.type", record.error),
        ("rayllm.request_id", record.request_id),
        ("gen_ai.request.model", record.model),
        ("gen_ai.response.id", record.reply_id),
        ("gen_ai.request.choice.count", record.choices or None),
        ("gen_ai.usage.input_tokens", record.prompt_tokens if record.started else None),
        ("gen_ai.usage.output_tokens", record.completion_tokens if record.started else None),
        ("rayllm.cached_tokens", record.cached_tokens if record.started else None),
        ("rayllm.queue_seconds", record.queued),
        ("rayllm.prefill_seconds", record.prefill),
        ("rayllm.time_to_first_token_seconds", record.first_token),
    ):
        if value is not None:
            yield name, value


def _phases(record: RequestRecord) -> Iterator[tuple[str, float, float]]:
    """(name, begin, end) in seconds since arrival. Phases end with the first token, as that is when they are known."""
    if record.first_token is None:
        return
    if record.queued is not None and record.prefill is not None:
        started = max(record.first_token - record.prefill, 0.0)
        yield "queue", max(started - record.queued, 0.0), started
        yield "prefill", started, record.first_token
    yield "decode", record.first_token, max(record.total, record.first_token)


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
