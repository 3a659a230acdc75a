"""The figures of `/metrics`: gauges and counters of the engine, and latencies as the front measures them.

`FrontMetrics` is plain numbers that add up, so that any API server can answer for all of them: each one hands its own
to the engine's replica and gets the others' (see `deployment.py`). Names and labels are those existing dashboards use.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from rayllm.api.types import STEP_TOKEN_BUCKETS, EngineStats, RequestOutput

LABELS = ["model_name", "engine"]
# Label values are of fixed sets, so that no client can make new time series.
FINISH_REASONS = ("stop", "length", "abort", "error")
REFUSALS = ("queue_full", "queue_timeout", "first_token_timeout", "request_timeout", "engine_unavailable")

_TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_REQUEST_BUCKETS = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)

# name -> (help, buckets)
HISTOGRAMS = {
    "time_to_first_token_seconds": ("Arrival of a prompt to its first token.", _TTFT_BUCKETS),
    "inter_token_latency_seconds": ("Time between outputs of one completion, per token.", _TOKEN_BUCKETS),
    "e2e_request_latency_seconds": ("Arrival of a prompt to its last token.", _REQUEST_BUCKETS),
    "request_queue_time_seconds": ("A prompt's time in the engine before it was scheduled.", _REQUEST_BUCKETS),
    "request_prefill_time_seconds": ("First scheduled to first token of a prompt, in the engine.", _REQUEST_BUCKETS),
    "request_decode_time_seconds": ("First to last token of a prompt.", _REQUEST_BUCKETS),
}

# (name, help, field of EngineStats)
_GAUGES = (
    ("num_requests_running", "Sequences in the running batch.", "num_running"),
    ("num_requests_waiting", "Sequences waiting for a place.", "num_waiting"),
    ("num_requests_swapped", "Sequences swapped out to host memory.", "num_swapped"),
    ("num_cpu_kv_blocks", "KV blocks of the host pool.", "num_total_cpu_blocks"),
    ("num_cpu_kv_blocks_used", "Host blocks that swapped sequences hold.", "num_used_cpu_blocks"),
    ("prefill_chunk_limit", "Prompt tokens a step within target_itl_ms; 0 without.", "prefill_chunk_limit"),
    ("num_cpu_kv_blocks_cached", "Host blocks that the prefix cache finds.", "num_cached_cpu_blocks"),
)
_COUNTERS = (
    ("num_preemptions", "Preemptions, by recompute or swap.", "num_preemptions"),
    ("num_swap_preemptions", "Preemptions by swap.", "num_swap_preemptions"),
    ("swapped_out_blocks", "KV blocks moved to host memory, by swaps and the prefix cache.", "swapped_out_blocks"),
    ("swapped_in_blocks", "KV blocks moved back from host memory.", "swapped_in_blocks"),
    ("prompt_tokens", "Prompt tokens computed or found in the prefix cache.", "prompt_tokens"),
    ("generation_tokens", "Tokens generated.", "generation_tokens"),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_cache_queries"),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache, on either tier.", "prefix_cache_hits"),
    ("cpu_prefix_cache_queries", "Those that its CPU tier was asked for.", "cpu_prefix_cache_queries"),
    ("cpu_prefix_cache_hits", "Those that were found there.", "cpu_prefix_cache_hits"),
)


class Histogram(msgspec.Struct):
    """counts[i]: observations in bucket i, the last one beyond all bounds. total: their sum."""

    counts: list[int]
    total: float = 0.0


class FrontMetrics(msgspec.Struct):
    """What one API server counted since it started.

    finished: finish reason -> prompts' completions. refused: error code -> HTTP requests that got no answer for it.
    """

    finished: dict[str, int] = {}
    histograms: dict[str, Histogram] = {}
    refused: dict[str, int] = {}

    def observe(self, name: str, value: float, count: int = 1) -> None:
        """Add `count` observations of `value` to the histogram `name` of `HISTOGRAMS`."""
        bounds = HISTOGRAMS[name][1]
        histogram = self.histograms.get(name)
        if histogram is None:
            histogram = self.histograms[name] = Histogram([0] * (len(bounds) + 1))
        histogram.counts[bisect.bisect_left(bounds, value)] += count
        histogram.total += value * count

    def add(self, other: FrontMetrics) -> None:
        """Add another server's figures to these."""
        for reason, count in other.finished.items():
            self.finished[reason] = self.finished.get(reason, 0) + count
        for code, count in other.refused.items():
            self.refused[code] = self.refused.get(code, 0) + count
        for name, theirs in other.histograms.items():
            ours = self.histograms.setdefault(name, Histogram([0] * len(theirs.counts)))
            ours.counts = [a + b for a, b in zip(ours.counts, theirs.counts, strict=True)]
            ours.total += theirs.total


class RequestTimer:
    """Measures one prompt's request of n completions from its creation on; its figures go to `metrics`."""

    def __init__(self, metrics: FrontMetrics, n: int):
        self._metrics = metrics
        self._running = n
        self._start = time.perf_counter()
        self._first: float | None = None
        self._last: dict[int, float] = {}

    def saw(self, output: RequestOutput) -> None:
        """Take the time of one output."""
        now = time.perf_counter()
        metrics = self._metrics
        if output.times is not None:
            metrics.observe("request_queue_time_seconds", output.times.queued)
            metrics.observe("request_prefill_time_seconds", output.times.prefill)
        for completion in output.outputs:
            count = len(completion.token_ids)
            if count:
                last = self._last.get(completion.index)
                if last is not None:
                    metrics.observe("inter_token_latency_seconds", (now - last) / count, count)
                self._last[completion.index] = now
                if self._first is None:
                    self._first = now
                    metrics.observe("time_to_first_token_seconds", now - self._start)
            if completion.finish_reason is not None:
                self._running -= 1
                self._finish(completion.finish_reason, 1)
        if output.finished:
            metrics.observe("e2e_request_latency_seconds", now - self._start)
            metrics.observe("request_decode_time_seconds", now - (self._first or now))

    def close(self) -> None:
        """The request is over; what has not finished was aborted."""
        if self._running > 0:
            self._finish("abort", self._running)
            self._running = 0

    def _finish(self, reason: str, count: int) -> None:
        finished = self._metrics.finished
        reason = reason if reason in FINISH_REASONS else "other"
        finished[reason] = finished.get(reason, 0) + count


class ModelFigures(NamedTuple):
    """One moment's figures of a model. engines: label `engine` -> figures; those that do not answer are left out.

    front: of all API servers. num_replicas: engines for new requests, as the server that answers sees it.
    """

    name: str
    engines: Mapping[str, EngineStats]
    front: FrontMetrics
    num_replicas: int


def render_models(models: Sequence[ModelFigures]) -> bytes:
    """The Prometheus text. What API servers measure has the label engine="all"."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(models))
    return generate_latest(registry)


class _Snapshot:
    """A prometheus_client collector over one moment's figures."""

    def __init__(self, models: Sequence[ModelFigures]):
        self._models = models
        self._engines = [([model.name, name], stats) for model in models for name, stats in model.engines.items()]
        self._fronts = [([model.name, "all"], model.front) for model in models]

    def collect(self) -> Iterator[Metric]:
        replicas = GaugeMetricFamily("rayllm:num_replicas", "Engines that new requests can go to.", labels=LABELS)
        for labels, model in zip((labels for labels, _ in self._fronts), self._models, strict=True):
            replicas.add_metric(labels, model.num_replicas)
        yield replicas
        if self._engines:
            yield from self._of_engines()
        finished = CounterMetricFamily(
            "rayllm:request_success", "Completions that ended, by reason.", labels=[*LABELS, "finished_reason"]
        )
        refused = CounterMetricFamily(
            "rayllm:request_refused", "HTTP requests without an answer, by error code.", labels=[*LABELS, "code"]
        )
        for labels, front in self._fronts:
            for reason in sorted({*FINISH_REASONS, *front.finished}):
                finished.add_metric([*labels, reason], front.finished.get(reason, 0))
            for code in REFUSALS:
                refused.add_metric([*labels, code], front.refused.get(code, 0))
        yield finished
        yield refused
        for name, (text, bounds) in HISTOGRAMS.items():
            none = Histogram([0] * (len(bounds) + 1))
            yield _histogram(
                name, text, bounds, [(labels, front.histograms.get(name) or none) for labels, front in self._fronts]
            )

    def _of_engines(self) -> Iterator[Metric]:
        for name, text, field in _GAUGES:
            gauge = GaugeMetricFamily(f"rayllm:{name}", text, labels=LABELS)
            for labels, stats in self._engines:
                gauge.add_metric(labels, getattr(stats, field))
            yield gauge
        usage = GaugeMetricFamily("rayllm:kv_cache_usage_perc", "Used share of the KV blocks, 0 to 1.", labels=LABELS)
        for labels, stats in self._engines:
            usage.add_metric(labels, stats.num_used_blocks / max(stats.num_total_blocks, 1))
        yield usage
        for name, text, field in _COUNTERS:
            counter = CounterMetricFamily(f"rayllm:{name}", text, labels=LABELS)
            for labels, stats in self._engines:
                counter.add_metric(labels, getattr(stats, field))
            yield counter
        none = [0] * (len(STEP_TOKEN_BUCKETS) + 1)
        steps = [(labels, Histogram(each.step_tokens or none, each.computed_tokens)) for labels, each in self._engines]
        yield _histogram("iteration_tokens_total", "Tokens computed in a step.", STEP_TOKEN_BUCKETS, steps)


def _histogram(
    name: str, text: str, bounds: tuple[float, ...], figures: list[tuple[list[str], Histogram]]
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(f"rayllm:{name}", text, labels=LABELS)
    for labels, histogram in figures:
        cumulative, buckets = 0, []
        for bound, count in zip((*map(str, map(float, bounds)), "+Inf"), histogram.counts, strict=True):
            cumulative += count
            buckets.append((bound, cumulative))
        family.add_metric(labels, buckets, sum_value=histogram.total)
    return family
