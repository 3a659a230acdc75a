"""Traces: a span a request with what only we know, the phases below it, and where they go."""

import sys
from types import SimpleNamespace

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.app import Api, StagedEngine

from rayllm.config.options import ServerConfig
from rayllm.errors import ConfigError
from rayllm.serve.http.request_log import SpanTracer, make_tracer, trace_endpoint

PROMPT = "confidential words"


@pytest.fixture
def traced():
    exporter = InMemorySpanExporter()
    tracer = SpanTracer(exporter)

    def spans():
        tracer.close()
        return {span.name: span for span in exporter.get_finished_spans()}

    return SimpleNamespace(tracer=tracer, spans=spans)


def test_a_request_is_a_span_with_its_phases_below(traced):
    api = Api(ServerConfig(request_timeout=0.05), tracer=traced.tracer)
    api.state.fake = StagedEngine()
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01", "x-request-id": "r7"}
    api.request("POST", "/v1/completions", json={"prompt": PROMPT}, headers=headers)
    api.request("POST", "/v1/completions", json={"prompt": "st"}, headers=headers)
    for path in ("/health", "/metrics"):
        api.get(path)
    spans = traced.spans()
    assert set(spans) == {"POST /v1/completions", "queue", "prefill", "decode"}
    top = spans["POST /v1/completions"]
    assert f"{top.context.trace_id:032x}" == trace_id
    assert top.resource.attributes["service.name"] == "rayllm"
    assert top.attributes["rayllm.request_id"] == "r7"
    assert top.attributes["gen_ai.usage.input_tokens"] == 2
    assert top.attributes["gen_ai.usage.output_tokens"] == 1
    assert top.attributes["http.response.status_code"] == 408
    assert (top.attributes["rayllm.queue_seconds"], top.attributes["rayllm.prefill_seconds"]) == (0.25, 0.5)
    assert not top.status.is_ok
    for name in ("queue", "prefill", "decode"):
        assert spans[name].parent.span_id == top.context.span_id
    assert spans["queue"].end_time == spans["prefill"].start_time
    assert spans["prefill"].end_time == spans["decode"].start_time
    assert not any(PROMPT in str(span.attributes) for span in spans.values())


def test_a_broken_traceparent_starts_a_new_trace(traced):
    api = Api(tracer=traced.tracer)
    body = {"prompt": "hi", "max_tokens": 1}
    api.request("POST", "/v1/completions", json=body, headers={"traceparent": "nonsense" * 100})
    assert traced.spans()["POST /v1/completions"].parent is None


def test_where_traces_go():
    assert trace_endpoint(None, {}) is None
    assert make_tracer(None) is None
    assert trace_endpoint(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4318"}) == "http://a:4318"
    assert trace_endpoint("https://b", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4318"}) == "https://b"
    with pytest.raises(ConfigError, match="otlp_endpoint: must be an http"):
        trace_endpoint("b:4317", {})


def test_a_missing_library_is_a_clear_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'rayllm\[otel\]'"):
        trace_endpoint("http://a:4318", {})
    assert trace_endpoint(None, {}) is None
