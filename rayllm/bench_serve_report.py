"""The reports of `rayllm bench serve`: a table, a JSON file, and an SVG of latencies and of throughput over time."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import numpy as np

import rayllm
from rayllm.bench_serve_client import Measured
from rayllm.bench_serve_load import ServeBenchOptions
from rayllm.bench_serve_stats import latencies
from rayllm.errors import ConfigError

_ROWS = {
    "ttft": "time to first token",
    "ttft_from_due": "  from when it was due",
    "itl": "inter-token latency",
    "itl_of_request": "  mean of a request",
    "e2e": "whole request",
    "e2e_from_due": "  from when it was due",
    "sent_late": "sent late by",
}
_CURVES = (("ttft", "#2256c7"), ("itl", "#c2630a"), ("e2e", "#1f8a4c"))
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _PANEL = 860, 620, 70, 40, 220  # of the plot, in pixels


def print_report(report: dict[str, Any]) -> None:
    """A table on standard output, failures after it."""
    from rich.console import Console
    from rich.table import Table

    options = report["options"]
    load = f"{options['rate']:g} requests/s" if options["rate"] else f"concurrency {options['concurrency']}"
    table = Table(title=f"{report['model']}, {options['endpoint']}, {load}")
    for column in ("ms", "mean", "p50", "p90", "p99", "max"):
        table.add_column(column, justify="left" if column == "ms" else "right")
    for name, label in _ROWS.items():
        if figures := report["latency_ms"].get(name):
            table.add_row(label, *(f"{value:,.1f}" for value in figures.values()))
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(table)
    for line in _lines(report):
        console.print(line, markup=False)


def _lines(report: dict[str, Any]) -> Iterable[str]:
    done = report["requests"] - report["failed"]
    yield f"requests     {done:,} answered, {report['failed']:,} failed in {report['duration_s']:.2f} s"
    requests, output, total = (report[f"{name}_per_s"] for name in ("requests", "output_tokens", "total_tokens"))
    yield f"throughput   {requests:,.2f} requests/s, {output:,.1f} output tokens/s, {total:,.1f} tokens/s in all"
    cached, in_flight = report["cached_tokens"], report["mean_in_flight"]
    yield f"tokens       {report['prompt_tokens']:,} in, {cached:,} of them cached; {report['output_tokens']:,} out"
    yield f"in flight    {in_flight:.1f} requests on average"
    options, goodput = report["options"], report["goodput"]
    if goodput is not None:
        limits = [(options["slo_ttft_ms"], "first token due"), (options["slo_itl_ms"], "mean inter-token latency")]
        named = ", ".join(f"{name} <= {limit:g} ms" for limit, name in limits if limit is not None)
        yield f"goodput      {goodput['requests_per_s']:,.2f} requests/s, {goodput['share']:.1%} of answers ({named})"
    yield f"seed         {options['seed']}"
    for failure in report["failures"]:
        yield f"FAILED       {failure['count']:,} x {failure['kind']}: {failure['example']}"


def save_json(path: str, report: dict[str, Any], measured: Measured) -> None:
    """The report, and a list of all requests. Raises ConfigError if the file cannot be written."""
    requests = [
        {
            "due_s": sample.due,
            "sent_s": sample.sent,
            "first_token_s": sample.first,
            "ended_s": sample.ended,
            "prompt_tokens": sample.prompt_tokens,
            "cached_tokens": sample.cached_tokens,
            "output_tokens": sample.output_tokens,
            "failure": None if sample.failure is None else list(sample.failure),
        }
        for sample in measured.samples
    ]
    stamp = {"rayllm": rayllm.__version__, "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    _write(path, json.dumps(stamp | report | {"samples": requests}, indent=1) + "\n")


def save_plot(path: str, options: ServeBenchOptions, report: dict[str, Any], measured: Measured) -> None:
    """Raises ConfigError if the file cannot be written."""
    good = [sample for sample in measured.samples if sample.failure is None]
    figures = {name: np.repeat(*values) for name, values in latencies(options, good).items()}
    _write(path, draw_plot(report, {name: sorted(figures[name].tolist()) for name, _ in _CURVES}))


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def draw_plot(report: dict[str, Any], sorted_ms: dict[str, list[float]]) -> str:
    """An SVG: shares of latencies up to a time (logarithmic), below it output tokens per second over time."""
    load = report["options"]["rate"]
    title = f"{report['model']}: " + (
        f"{load:g} requests/s" if load else f"concurrency {report['options']['concurrency']}"
    )
    parts = [_text(_LEFT, 26, title, size=16, weight=600)]
    parts += _distribution_panel(sorted_ms, top=60)
    parts += _timeline_panel(report["timeline"], top=60 + _PANEL + 80)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
        f' font-family="system-ui, sans-serif"><rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _distribution_panel(sorted_ms: dict[str, list[float]], top: int) -> list[str]:
    # From the first percentile on: a few tokens that came together would stretch the axis to the left.
    values = [value for curve in sorted_ms.values() if curve for value in (curve[len(curve) // 100], curve[-1])]
    low = np.floor(np.log10(max(min(values, default=1.0), 0.01)))
    high = max(np.ceil(np.log10(max(values, default=10.0) or 1.0)), low + 1)

    def x_of(ms: float) -> float:
        return _LEFT + (np.log10(max(ms, 10**low)) - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    parts = _frame(top, "share of tokens or requests", [(f"{share:.0%}", share) for share in (0, 0.25, 0.5, 0.75, 1)])
    for power in range(int(low), int(high) + 1):
        parts.append(_line(x_of(10.0**power), top, x_of(10.0**power), top + _PANEL))
        parts.append(_text(x_of(10.0**power), top + _PANEL + 18, f"{10.0**power:,g} ms", anchor="middle"))
    for place, (name, colour) in enumerate(_CURVES):
        curve = sorted_ms[name]
        parts.append(_text(_LEFT + 170 * place, top - 10, _ROWS[name], colour=colour, weight=600))
        # 400 quantiles are as fine as the picture.
        points = [
            (x_of(curve[int(q / 400 * (len(curve) - 1))]), top + _PANEL * (1 - q / 400)) for q in range(401) if curve
        ]
        parts.append(_polyline(points, colour))
    return parts


def _timeline_panel(timeline: dict[str, Any], top: int) -> list[str]:
    rates, step = timeline["output_tokens_per_s"], timeline["step_s"]
    peak = max([*rates, 1e-9])
    span, width = step * len(rates), _WIDTH - _LEFT - _RIGHT
    parts = _frame(top, "output tokens per second", [(f"{peak * share:,.0f}", share) for share in (0, 0.5, 1)])
    tick = _round_step(span / 8)
    for place in range(int(span / tick) + 1):
        x = _LEFT + width * place * tick / span
        parts += [_line(x, top, x, top + _PANEL), _text(x, top + _PANEL + 18, f"{place * tick:g} s", anchor="middle")]
    points = []
    for place, rate in enumerate(rates):
        level = top + _PANEL * (1 - rate / peak)
        points += [(_LEFT + width * place / len(rates), level), (_LEFT + width * (place + 1) / len(rates), level)]
    return [*parts, _polyline(points, "#2256c7")]


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, ... (or tenths of them and so on) that is not below `least`."""
    power = 10.0 ** np.floor(np.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)


def _frame(top: int, label: str, levels: Sequence[tuple[str, float]]) -> list[str]:
    parts = [_text(_LEFT, top + _PANEL + 36, label)]
    for text, share in levels:
        y = top + _PANEL * (1 - share)
        parts += [_line(_LEFT, y, _WIDTH - _RIGHT, y), _text(_LEFT - 8, y + 4, text, anchor="end")]
    return parts


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", colour: str = "#444", size: int = 12, weight: int = 400
) -> str:
    style = f'text-anchor="{anchor}" fill="{colour}" font-size="{size}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str = "#e3e3de") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _polyline(points: Sequence[tuple[float, float]], colour: str) -> str:
    text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{text}" fill="none" stroke="{colour}" stroke-width="2" stroke-linejoin="round"/>'
