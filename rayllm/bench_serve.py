"""`rayllm bench serve`: load on a running server, and a report of what its clients saw.

`bench_serve_load` makes the requests, `bench_serve_client` sends them, `bench_serve_stats` turns what came back into
figures and `bench_serve_report` shows them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rayllm.bench_serve_client import run_load
from rayllm.bench_serve_load import bench_options
from rayllm.bench_serve_report import print_report, save_json, save_plot
from rayllm.bench_serve_stats import summarise
from rayllm.errors import ConfigError


def bench_server(options: dict[str, Any], api_key: str | None, out: str | None, plot: str | None) -> int:
    """Measure, print the report and save it where asked. Returns how many requests failed.

    options: as `bench_options` takes them. Raises ConfigError, and RayllmError if the server cannot be asked at all.
    """
    checked = bench_options(options)
    for path in (out, plot):
        if path is not None and not Path(path).parent.is_dir():
            raise ConfigError(f"{path} cannot be written: its folder does not exist")
    model, measured = run_load(checked, api_key)
    report = summarise(checked, model, measured)
    print_report(report)
    if out is not None:
        save_json(out, report, measured)
    if plot is not None:
        save_plot(plot, checked, report, measured)
    return report["failed"]
