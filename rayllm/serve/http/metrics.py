"""The figures of `/metrics`.

Each API server counts in `FrontMetrics` of its own, one a model. Any of them answers for the whole deployment: it
knows the others' figures, and adds them up when `/metrics` is asked.
Names and labels are those that existing dashboards use.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter as Totals
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.samples import Sample

from rayllm.api.types import STEP_TOKEN_BUCKETS, EngineStats, RequestOutput
from rayllm.serve.http.request_log import RequestRecord

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
# Of engines: name -> (help, field of EngineStats, or what `_Deployment` computes of it)
_GAUGES = {
    "num_requests_running": ("Sequences in the running batch.", "num_running"),
    "num_requests_waiting": ("Sequences waiting for a place.", "num_waiting"),
    "num_requests_swapped": ("Sequences swapped out to host memory.", "num_swapped"),
    "kv_cache_usage_perc": ("Used share of the KV blocks, 0 to 1.", "used_share"),
    "num_cpu_kv_blocks": ("KV blocks of the host pool.", "num_total_cpu_blocks"),
    "num_cpu_kv_blocks_used": ("Host blocks that swapped sequences hold.", "num_used_cpu_blocks"),
    "num_cpu_kv_blocks_cached": ("Host blocks that the prefix cache finds.", "num_cached_cpu_blocks"),
    "prefill_chunk_limit": ("Prompt tokens a step within target_itl_ms; 0 without.", "prefill_chunk_limit"),
}
_COUNTERS = {
    "num_preemptions": ("Preemptions, by recompute or swap.", "num_preemptions"),
    "recoveries": ("Losses of workers after which new ones took over.", "num_recoveries"),
    "recovery_seconds": ("Time without workers until new ones took over.", "recovery_seconds"),
    "num_swap_preemptions": ("Preemptions by swap.", "num_swap_preemptions"),
    "swapped_out_blocks": ("KV blocks moved to host memory, by swaps and the prefix cache.", "swapped_out_blocks"),
    "swapped_in_blocks": ("KV blocks moved back from host memory.", "swapped_in_blocks"),
    "prompt_tokens": ("Prompt tokens computed or found in the prefix cache.", "prompt_tokens"),
    "generation_tokens": ("Tokens generated.", "generation_tokens"),
    "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", "prefix_cache_queries"),
    "prefix_cache_hits": ("Prompt tokens found in the prefix cache, on either tier.", "prefix_cache_hits"),
    "cpu_prefix_cache_queries": ("Those that its CPU tier was asked for.", "cpu_prefix_cache_queries"),
    "cpu_prefix_cache_hits": ("Those that were found there.", "cpu_prefix_cache_hits"),
}
_STEP_BOUNDS = [*(str(float(bound)) for bound in STEP_TOKEN_BUCKETS), "+Inf"]


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
        self.resumed = Counter(
            "rayllm:request_resumed", "Requests that lost their engine and went on on another.", registry=self.registry
        )
        self.ignored = Counter(
            "rayllm:request_ignored_fields",
            "HTTP requests with unknown fields, which were ignored.",
            registry=self.registry,
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

    def figures(self) -> dict[str, float]:
        """All of it, by `_series`, for the other servers' `render`."""
        return {_series(sample): sample.value for family in self.registry.collect() for sample in family.samples}


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
            metrics.histograms["request_queue_time_seconds"].observe(output.times.queued)
            metrics.histograms["request_prefill_time_seconds"].observe(output.times.prefill)
        record.completion_tokens += output.num_discarded_tokens
        for completion in output.outputs:
            if count := len(completion.token_ids):
                record.completion_tokens += count
                last = self._last.get(completion.index)
                if last is not None:
                    for _ in range(count):
                        metrics.histograms["inter_token_latency_seconds"].observe((now - last) / count)
                self._last[completion.index] = now
                if self._first is None:
                    self._first = now
                    metrics.histograms["time_to_first_token_seconds"].observe(now - self._start)
            if completion.finish_reason is not None:
                self._running -= 1
                metrics.finished.get(completion.finish_reason, metrics.finished["other"]).inc()
        if output.finished:
            metrics.histograms["e2e_request_latency_seconds"].observe(now - self._start)
            metrics.histograms["request_decode_time_seconds"].observe(now - (self._first or now))

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
    peers: Sequence[Mapping[str, float]]  # `FrontMetrics.figures` of the other servers
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
        steps = HistogramMetricFamily("rayllm:iteration_tokens_total", "Tokens computed in a step.", labels=LABELS)
        for labels, stats in self._engines:
            counts = itertools.accumulate(stats.step_tokens)
            steps.add_metric(labels, list(zip(_STEP_BOUNDS, counts, strict=True)), sum_value=stats.computed_tokens)
        yield steps
        for kind, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, (text, field) in table.items():
                family = kind(f"rayllm:{name}", text, labels=LABELS)
                for labels, stats in self._engines:
                    used_share = stats.num_used_blocks / max(stats.num_total_blocks, 1)
                    family.add_metric(labels, used_share if field == "used_share" else getattr(stats, field))
                yield family

    def _of_fronts(self) -> Iterator[Metric]:
        """The sums over all servers, of the figures that this one knows."""
        families: dict[str, Metric] = {}
        for model in self._models:
            peers: Totals[str] = Totals()
            for figures in model.peers:
                peers.update(figures)
            for own in model.front.registry.collect():
                family = families.setdefault(own.name, Metric(own.name, own.documentation, own.type))
                for sample in own.samples:
                    if not sample.name.endswith("_created"):
                        labels = {**sample.labels, "model_name": model.name, "engine": "all"}
                        family.add_sample(sample.name, labels, sample.value + peers[_series(sample)])
        yield from families.values()


def _series(sample: Sample) -> str:
    """The same for a sample of any server."""
    return f"{sample.name}{sample.labels}"
