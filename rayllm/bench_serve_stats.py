"""What `rayllm bench serve` makes of its samples: throughput, latency distributions, goodput, failures.

Figures are of the requests that had a complete answer; failed ones are only counted. Latencies are in milliseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayllm.bench_serve_client import TICK_S, Measured, Sample
from rayllm.bench_serve_load import ServeBenchOptions
from rayllm.errors import EngineDeadError

MAX_TIMELINE = 120  # points of the throughput over time

Floats = NDArray[np.float64]


def summarise(options: ServeBenchOptions, model: str, measured: Measured) -> dict[str, Any]:
    """The report, ready for JSON. Raises EngineDeadError if there is no sample at all."""
    samples = measured.samples
    if not samples:
        raise EngineDeadError("nothing was measured")
    good = [sample for sample in samples if sample.failure is None]
    duration = max(sample.ended for sample in samples) - min(sample.due for sample in samples)
    totals = {
        "prompt_tokens": sum(sample.prompt_tokens for sample in good),
        "cached_tokens": sum(sample.cached_tokens for sample in good),
        "output_tokens": sum(sample.output_tokens for sample in good),
    }
    return {
        "model": model,
        "options": options.model_dump(),
        "requests": len(samples),
        "failed": len(samples) - len(good),
        "failures": _failures(samples),
        "duration_s": duration,
        **totals,
        "requests_per_s": len(good) / duration,
        "output_tokens_per_s": totals["output_tokens"] / duration,
        "total_tokens_per_s": (totals["prompt_tokens"] + totals["output_tokens"]) / duration,
        "mean_in_flight": sum(sample.ended - sample.sent for sample in samples) / duration,
        "goodput": _goodput(options, good, duration) if options.has_slo else None,
        "latency_ms": {name: _distribution(*values) for name, values in latencies(options, good).items()},
        "timeline": _timeline(measured, duration),
    }


def latencies(options: ServeBenchOptions, good: Sequence[Sample]) -> dict[str, tuple[Floats, NDArray[np.int64]]]:
    """Name -> (values in ms, how often each counts). itl has one value a token after the first, spread evenly over
    those of one chunk; itl_of_request one a request, its mean. *_from_due start when a request was due.
    """
    figures: dict[str, list[float]] = {
        "ttft": [_ttft(sample) for sample in good],
        "itl_of_request": [itl for sample in good if (itl := mean_itl(sample)) is not None],
        "e2e": [sample.ended - sample.sent for sample in good],
    }
    if options.rate is not None:
        figures["ttft_from_due"] = [_ttft(sample) + sample.sent - sample.due for sample in good]
        figures["e2e_from_due"] = [sample.ended - sample.due for sample in good]
        figures["sent_late"] = [sample.sent - sample.due for sample in good]
    gaps = np.concatenate([np.zeros(0), *(np.asarray(sample.gaps) for sample in good)])
    counts = np.concatenate([np.zeros(0, np.int64), *(np.asarray(sample.gap_tokens, np.int64) for sample in good)])
    weighted = {name: (np.asarray(values) * 1000, np.ones(len(values), np.int64)) for name, values in figures.items()}
    return weighted | {"itl": (gaps * 1000, counts)}


def mean_itl(sample: Sample) -> float | None:
    """Seconds a token after the first; None if there was only one."""
    if sample.first is None or sample.output_tokens < 2 or not sample.gaps:
        return None
    return (sample.last - sample.first) / sum(sample.gap_tokens)


def _ttft(sample: Sample) -> float:
    assert sample.first is not None, "a complete answer has a first token"
    return sample.first - sample.sent


def _distribution(values: Floats, counts: NDArray[np.int64]) -> dict[str, float] | None:
    """Weighted mean, percentiles (linear between neighbours) and maximum; None without values."""
    if not len(values):
        return None
    every = np.repeat(values, counts)
    p50, p90, p99 = np.percentile(every, [50, 90, 99])
    return {
        "mean": float(every.mean()),
        "p50": float(p50),
        "p90": float(p90),
        "p99": float(p99),
        "max": float(every.max()),
    }


def _goodput(options: ServeBenchOptions, good: Sequence[Sample], duration: float) -> dict[str, float]:
    """Requests whose first token, counted from when they were due, and mean inter-token latency are within the limits.

    share: of all complete answers.
    """

    def keeps(sample: Sample) -> bool:
        ttft_ms, itl = (_ttft(sample) + sample.sent - sample.due) * 1000, mean_itl(sample)
        return (options.slo_ttft_ms is None or ttft_ms <= options.slo_ttft_ms) and (
            options.slo_itl_ms is None or itl is None or itl * 1000 <= options.slo_itl_ms
        )

    kept = sum(map(keeps, good))
    return {"requests_per_s": kept / duration, "share": kept / len(good) if good else 0.0}


def _failures(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """One entry a kind, the most frequent first, with the message of the first failure of that kind."""
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for sample in samples:
        if sample.failure is not None:
            kind, message = sample.failure
            counts[kind] += 1
            examples.setdefault(kind, message)
    return [{"kind": kind, "count": count, "example": examples[kind]} for kind, count in counts.most_common()]


def _timeline(measured: Measured, duration: float) -> dict[str, Any]:
    """Output tokens per second in steps of step_s from the start; tokens of failed requests are in it."""
    ticks = int(duration / TICK_S) + 1
    width = -(-ticks // MAX_TIMELINE)
    rates = [0.0] * -(-ticks // width)
    for tick, tokens in measured.ticks.items():
        rates[min(tick // width, len(rates) - 1)] += tokens / (width * TICK_S)
    return {"step_s": width * TICK_S, "output_tokens_per_s": rates}
