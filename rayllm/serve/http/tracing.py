"""OpenTelemetry traces. FastAPI makes a request's span by itself; here it gets what only we know.

This needs the extra `rayllm[otel]`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from fastapi.telemetry import TelemetryConfig

from rayllm.errors import ConfigError
from rayllm.serve.http.request_log import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
NO_TELEMETRY = TelemetryConfig(tracing=False, metrics=False, logs=False, auto_configure=False)
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
        span.set_attributes(_attributes(record))
        if record.error is not None:
            span.set_status(trace.StatusCode.ERROR, record.error)
        start = int(record.arrival * _NANO)
        for name, begin, end in _phases(record):
            self._tracer.start_span(name, start_time=start + int(begin * _NANO)).end(start + int(end * _NANO))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def _attributes(record: RequestRecord) -> dict[str, str | int | float]:
    found: dict[str, str | int | float | None] = {
        "error.type": record.error,
        "rayllm.request_id": record.request_id,
        "gen_ai.request.model": record.model,
        "gen_ai.response.id": record.reply_id,
    }
    if record.started:
        found |= {
            "gen_ai.request.choice.count": record.choices,
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.output_tokens": record.completion_tokens,
            "rayllm.cached_tokens": record.cached_tokens,
            "rayllm.queue_seconds": record.queued,
            "rayllm.prefill_seconds": record.prefill,
            "rayllm.time_to_first_token_seconds": record.first_token,
        }
    return {name: value for name, value in found.items() if value is not None}


def _phases(record: RequestRecord) -> Iterator[tuple[str, float, float]]:
    """(name, begin, end) in seconds since arrival. Phases end with the first token, as that is when they are known."""
    if record.first_token is None:
        return
    if record.queued is not None and record.prefill is not None:
        started = max(record.first_token - record.prefill, 0.0)
        yield "queue", max(started - record.queued, 0.0), started
        yield "prefill", started, record.first_token
    yield "decode", record.first_token, max(record.total, record.first_token)
