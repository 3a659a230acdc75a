"""What an operator sees of requests: the figures of `/metrics`, the request log, and OpenTelemetry traces.

Figures: each API server counts in `FrontMetrics` of its own, one a model. Any of them answers for the whole deployment:
the others' figures come as snapshots in Prometheus' text format, which are read and added up only when `/metrics` is
asked. Names and labels are those that existing dashboards use.

Log and traces: a `RequestRecord` of each HTTP request is logged when the engine gets it and when it ends, and describes
its span. FastAPI makes the span by itself. Records never hold prompts, outputs or keys. Traces need the extra
`rayllm[otel]`.
"""

from __future__ import annotations

import itertools
import logging
import logging.handlers
import os
import re
import time
from collections import Counter as Totals
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import orjson
from fastapi.telemetry import TelemetryConfig
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from rayllm.api.types import STEP_TOKEN_BUCKETS, EngineStats, RequestOutput
from rayllm.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

logger = logging.getLogger(__name__)

# ---- figures

LABELS = ["model_name", "engine"]
# Label values are of fixed sets, so that no client can make new time series.
FINISH_REASONS = ("stop", "length", "abort", "error", "other")
REFUSALS = ("queue_full", "queue_timeout", "first_token_timeout", "request_timeout", "engine_unavailable")

_TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_REQUEST_BUCKETS = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)

HISTOGRAMS = {  # of API servers: name -> (help, buckets)
    "time_to_first_token_seconds": ("Arrival of a prompt to its first token.", _TTFT_BUCKETS),
    "inter_token_latency_seconds": ("Time between outputs of one completion, per token.", _TOKEN_BUCKETS),
    "e2e_request_latency_seconds": ("Arrival of a prompt to its last token.", _REQUEST_BUCKETS),
    "request_queue_time_seconds": ("A prompt's time in the engine before it was scheduled.", _REQUEST_BUCKETS),
    "request_prefill_time_seconds": ("First scheduled to first token of a prompt, in the engine.", _REQUEST_BUCKETS),
    "request_decode_time_seconds": ("First to last token of a prompt.", _REQUEST_BUCKETS),
}
# Of engines: name -> (help, field of EngineStats)
_GAUGES = {
    "num_requests_running": ("Sequences in the running batch.", "num_running"),
    "num_requests_waiting": ("Sequences waiting for a place.", "num_waiting"),
    "num_requests_swapped": ("Sequences swapped out to host memory.", "num_swapped"),
    "num_cpu_kv_blocks": ("KV blocks of the host pool.", "num_total_cpu_blocks"),
    "num_cpu_kv_blocks_used": ("Host blocks that swapped sequences hold.", "num_used_cpu_blocks"),
    "num_cpu_kv_blocks_cached": ("Host blocks that the prefix cache finds.", "num_cached_cpu_blocks"),
    "prefill_chunk_limit": ("Prompt tokens a step within target_itl_ms; 0 without.", "prefill_chunk_limit"),
}
_COUNTERS = {  # name, also of the field -> help
    "num_preemptions": "Preemptions, by recompute or swap.",
    "num_swap_preemptions": "Preemptions by swap.",
    "swapped_out_blocks": "KV blocks moved to host memory, by swaps and the prefix cache.",
    "swapped_in_blocks": "KV blocks moved back from host memory.",
    "prompt_tokens": "Prompt tokens computed or found in the prefix cache.",
    "generation_tokens": "Tokens generated.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache, on either tier.",
    "cpu_prefix_cache_queries": "Those that its CPU tier was asked for.",
    "cpu_prefix_cache_hits": "Those that were found there.",
}


class FrontMetrics:
    """What one API server has counted of one model since it started."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.finished = self._counters(
            "request_success", "Completions that ended, by reason.", "finished_reason", FINISH_REASONS
        )
        self.refused = self._counters(
            "request_refused", "HTTP requests without an answer, by error code.", "code", REFUSALS
        )
        self.histograms = {
            name: Histogram(f"rayllm:{name}", text, buckets=buckets, registry=self.registry)
            for name, (text, buckets) in HISTOGRAMS.items()
        }

    def _counters(self, name: str, text: str, label: str, values: Iterable[str]) -> dict[str, Counter]:
        counter = Counter(f"rayllm:{name}", text, [label], registry=self.registry)
        return {value: counter.labels(value) for value in values}

    def count_refusal(self, code: str) -> None:
        """Count an HTTP request that got no answer, if this error code is one of `REFUSALS`."""
        if code in self.refused:
            self.refused[code].inc()

    def observe(self, name: str, value: float) -> None:
        """Add a value to the histogram `name` of `HISTOGRAMS`."""
        self.histograms[name].observe(value)

    def snapshot(self) -> bytes:
        """All of it in Prometheus' text format, for the other servers' `render`."""
        return generate_latest(self.registry)


class RequestTimer:
    """Measures one prompt's request of n completions from its creation on, for `metrics` and the request's record."""

    def __init__(self, metrics: FrontMetrics, record: RequestRecord, n: int):
        self._metrics = metrics
        self._record = record
        self._running = n
        self._start = time.perf_counter()
        self._first: float | None = None
        self._last: dict[int, float] = {}

    def began(self, output: RequestOutput) -> None:
        """Take the first output after the prompt was done."""
        record = self._record
        record.cached_tokens += output.num_cached_tokens
        if record.first_token is None:
            record.first_token = time.perf_counter() - record.clock
            if output.times is not None:
                record.queued, record.prefill = output.times.queued, output.times.prefill

    def saw(self, output: RequestOutput) -> None:
        """Take one output, as it comes."""
        now = time.perf_counter()
        metrics, record = self._metrics, self._record
        if output.times is not None:
            metrics.observe("request_queue_time_seconds", output.times.queued)
            metrics.observe("request_prefill_time_seconds", output.times.prefill)
        record.completion_tokens += output.num_discarded_tokens
        for completion in output.outputs:
            if count := len(completion.token_ids):
                record.completion_tokens += count
                last = self._last.get(completion.index)
                if last is not None:
                    for _ in range(count):
                        metrics.observe("inter_token_latency_seconds", (now - last) / count)
                self._last[completion.index] = now
                if self._first is None:
                    self._first = now
                    metrics.observe("time_to_first_token_seconds", now - self._start)
            if completion.finish_reason is not None:
                self._running -= 1
                metrics.finished.get(completion.finish_reason, metrics.finished["other"]).inc()
        if output.finished:
            metrics.observe("e2e_request_latency_seconds", now - self._start)
            metrics.observe("request_decode_time_seconds", now - (self._first or now))

    def close(self) -> None:
        """The request is over; what has not finished was aborted."""
        if self._running > 0:
            self._metrics.finished["abort"].inc(self._running)
            self._running = 0


class ModelFigures(NamedTuple):
    """One moment's figures of a model."""

    name: str
    engines: Mapping[str, EngineStats]  # by their label `engine`; those that do not answer are left out
    front: FrontMetrics  # of the server that answers
    peers: Sequence[bytes]  # snapshots of the other servers
    num_replicas: int  # engines for new requests, as the server that answers sees it


def render(models: Sequence[ModelFigures]) -> bytes:
    """The Prometheus text. What API servers measure has the label engine="all"."""
    return generate_latest(_Deployment(models))


class _Deployment:
    """A collector of prometheus_client over one moment's figures of all models."""

    def __init__(self, models: Sequence[ModelFigures]):
        self._models = models
        self._engines = [([model.name, name], stats) for model in models for name, stats in model.engines.items()]

    def collect(self) -> Iterator[Metric]:
        replicas = GaugeMetricFamily("rayllm:num_replicas", "Engines that new requests can go to.", labels=LABELS)
        for model in self._models:
            replicas.add_metric([model.name, "all"], model.num_replicas)
        yield replicas
        if self._engines:
            yield from self._of_engines()
        yield from self._of_fronts()

    def _of_engines(self) -> Iterator[Metric]:
        usage = GaugeMetricFamily("rayllm:kv_cache_usage_perc", "Used share of the KV blocks, 0 to 1.", labels=LABELS)
        steps = HistogramMetricFamily("rayllm:iteration_tokens_total", "Tokens computed in a step.", labels=LABELS)
        bounds = [*(str(float(bound)) for bound in STEP_TOKEN_BUCKETS), "+Inf"]
        gauges = {name: GaugeMetricFamily(f"rayllm:{name}", text, labels=LABELS) for name, (text, _) in _GAUGES.items()}
        counters = {
            name: CounterMetricFamily(f"rayllm:{name}", text, labels=LABELS) for name, text in _COUNTERS.items()
        }
        for labels, stats in self._engines:
            usage.add_metric(labels, stats.num_used_blocks / max(stats.num_total_blocks, 1))
            counts = itertools.accumulate(stats.step_tokens or [0] * len(bounds))
            steps.add_metric(labels, list(zip(bounds, counts, strict=True)), sum_value=stats.computed_tokens)
            for name, gauge in gauges.items():
                gauge.add_metric(labels, getattr(stats, _GAUGES[name][1]))
            for name, counter in counters.items():
                counter.add_metric(labels, getattr(stats, name))
        yield from (*gauges.values(), *counters.values(), usage, steps)

    def _of_fronts(self) -> Iterator[Metric]:
        """The sums over all servers, of the figures that this one knows."""
        families: dict[str, Metric] = {}
        for model in self._models:
            peers: Totals[_Series] = Totals()
            for snapshot in model.peers:
                peers.update(_read(snapshot))
            for own in model.front.registry.collect():
                family = families.setdefault(own.name, Metric(own.name, own.documentation, own.type))
                for sample in own.samples:
                    if not sample.name.endswith("_created"):
                        labels = {**sample.labels, "model_name": model.name, "engine": "all"}
                        family.add_sample(sample.name, labels, sample.value + peers[_series(sample)])
        yield from families.values()


_Series = tuple[str, frozenset[tuple[str, str]]]


def _series(sample: Sample) -> _Series:
    return sample.name, frozenset(sample.labels.items())


def _read(snapshot: bytes) -> dict[_Series, float]:
    """The samples of a snapshot; none if it is malformed, for which nobody shall lose the other figures."""
    try:
        families = list(text_string_to_metric_families(snapshot.decode()))
    except Exception as error:
        logger.warning("the metrics of another API server cannot be read: %s", error)
        return {}
    return {_series(sample): sample.value for family in families for sample in family.samples}


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
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.handlers.RotatingFileHandler(path, maxBytes=LOG_FILE_BYTES, backupCount=LOG_FILES - 1)
    handler.setFormatter(_Lines(log_format == "json"))
    logger = logging.getLogger(LOGGER_NAME)
    for old in list(logger.handlers):
        logger.removeHandler(old)
        old.close()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


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
