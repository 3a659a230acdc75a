"""Measures a running server with guidellm, as its clients see it. Needs the extra: pip install 'rayllm[bench]'.

    python benchmarks/serve.py --url http://127.0.0.1:8000 --tokenizer FOLDER --concurrency 16 [--out report.json]
    rayllm bench serve ...                                            # the same from an installed package

The flags cover what most measurements of one model need. guidellm itself has more (`guidellm run --help`): sweeps over
rates, the search for the highest load that keeps a latency, images, traces.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import typer
from pydantic import ValidationError

from rayllm.cli.main import main, make_app
from rayllm.cli.options import LOCAL_SERVER, ApiKey, ServedModel, ServerUrl, length_range
from rayllm.errors import ConfigError, EngineDeadError

NUM_PROMPTS = 100  # where neither a number nor a time is given
ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
REPORTS = {".json": "json", ".yaml": "yaml", ".csv": "csv", ".html": "html", ".svg": "plot", ".png": "plot"}
# A dataset's columns in guidellm's terms -> the names that the lines of the file use.
COLUMNS = {"text_column": "prompt", "raw_messages_column": "messages", "output_tokens_count_column": "max_tokens"}

app = make_app()


@app.command()
def serve(
    url: ServerUrl = LOCAL_SERVER,
    model: ServedModel = None,
    api_key: ApiKey = None,
    tokenizer: Annotated[str | None, typer.Option(help="Folder or name of its tokenizer; the model if absent.")] = None,
    endpoint: Annotated[Literal["completions", "chat"], typer.Option(help="API to ask.")] = "completions",
    rate: Annotated[float | None, typer.Option(help="Requests a second on average, at random (Poisson) times.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Requests in flight, instead of a rate.")] = None,
    num_prompts: Annotated[int | None, typer.Option(help="Requests to send; 100 without --seconds.")] = None,
    seconds: Annotated[float | None, typer.Option(help="Time after which the run ends.")] = None,
    input_len: Annotated[str, typer.Option(help="Tokens of a random prompt, or a range A:B.")] = "512",
    output_len: Annotated[str, typer.Option(help="Tokens to generate, or a range A:B.")] = "128",
    dataset: Annotated[
        str | None, typer.Option(help="JSONL file of prompt or messages, and max_tokens; instead of random prompts.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="Temperature of sampling.")] = 0.6,
    seed: Annotated[int | None, typer.Option(help="Of random prompts and times; each run has a new one.")] = None,
    warmup: Annotated[float, typer.Option(help="Share of the run at its beginning that does not count.")] = 0.0,
    timeout: Annotated[float, typer.Option(help="Seconds that the server may keep a request waiting.")] = 600.0,
    slo_ttft_ms: Annotated[float | None, typer.Option(help="Goodput: the longest time to first token.")] = None,
    slo_itl_ms: Annotated[float | None, typer.Option(help="Goodput: the longest mean time between tokens.")] = None,
    out: Annotated[
        list[Path] | None, typer.Option(help=f"Report, one of {' '.join(REPORTS)}; may be repeated.")
    ] = None,
) -> None:
    """Measure throughput and latency of a running server with guidellm. Exit code 1 if a request failed."""
    if (rate is None) == (concurrency is None):
        raise ConfigError("give exactly one of --rate and --concurrency")
    for path in out or []:
        if path.suffix not in REPORTS or not path.parent.is_dir():
            raise ConfigError(f"out must end in {', '.join(REPORTS)} and be in a folder that exists, not {path}")
    if num_prompts is None and seconds is None:
        num_prompts = NUM_PROMPTS
    profile = {"kind": "poisson", "rate": rate} if rate is not None else {"kind": "concurrent", "streams": concurrency}
    constraints: list[dict[str, Any]] = []
    if num_prompts is not None:
        constraints.append({"kind": "max_requests", "count": num_prompts})
    if seconds is not None:
        constraints.append({"kind": "max_duration", "seconds": seconds})
    slo = {"ttft_ms": slo_ttft_ms, "tpot_ms": slo_itl_ms}
    spec: dict[str, Any] = {
        "backend": {
            "kind": "openai_http",
            "target": url,
            "model": model or "",
            "api_key": api_key,
            "request_format": ENDPOINTS[endpoint],
            "timeout": timeout,
            "extras": {"body": {"temperature": temperature}},
        },
        "profile": profile | {"warmup": warmup},
        "constraints": constraints,
        "tokenizer": {"kind": "huggingface_auto", "model": tokenizer},
        "data": [random_prompts(input_len, output_len)],
        "seed": {"kind": "static", "value": secrets.randbelow(2**31) if seed is None else seed},
        "outputs": [{"kind": REPORTS[path.suffix], "path": str(path)} for path in out or []],
        "metrics": {"kind": "generative", "slo": slo if any(slo.values()) else None},
    }
    if dataset is not None:
        spec["data"] = [{"kind": "json_file", "path": dataset}]
        spec["data_column_mapper"] = {"kind": "generative_column_mapper", "column_mappings": COLUMNS}
        spec["backend"]["max_tokens"] = length_range("output_len", output_len)[1]  # for lines without max_tokens
        spec["backend"]["extras"]["body"]["ignore_eos"] = False
    failures = run_guidellm(spec)
    for failure, count in Counter(failures).most_common():
        print(f"failed: {count} x {failure}", file=sys.stderr)
    if failures:
        raise typer.Exit(1)


def random_prompts(input_len: str, output_len: str) -> dict[str, Any]:
    """guidellm's synthetic prompts, with lengths drawn uniformly from the ranges. Raises ConfigError."""
    data: dict[str, Any] = {"kind": "synthetic_text"}
    for kind, option, text in (("prompt_tokens", "input_len", input_len), ("output_tokens", "output_len", output_len)):
        least, most = length_range(option, text)
        data |= {kind: (least + most) // 2, f"{kind}_min": least, f"{kind}_max": most}
    return data


def run_guidellm(spec: dict[str, Any]) -> list[str]:
    """Run a benchmark and print its report; returns what went wrong with each request that failed.

    spec: the part of that name of a config file of guidellm. Raises ConfigError for what guidellm does not take, or if
    guidellm is absent, and EngineDeadError if the server does not answer.
    """
    try:
        from guidellm.benchmark import BenchmarkScenario, benchmark_generative_text
        from guidellm.utils.console import Console
    except ModuleNotFoundError:
        raise ConfigError("rayllm bench serve needs guidellm: pip install 'rayllm[bench]'") from None
    try:
        scenario = BenchmarkScenario.create(None, spec=spec)
        run = benchmark_generative_text(scenario, progress=sys.stdout.isatty(), console=Console())
        report, _ = asyncio.run(run)
    except ValidationError as error:
        raise ConfigError("; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())) from None
    except OSError as error:
        raise ConfigError(f"guidellm: {error}") from None
    except (RuntimeError, httpx.HTTPError) as error:
        raise EngineDeadError(f"guidellm: {error}") from None
    return [str(request.info.error) for benchmark in report.benchmarks for request in benchmark.requests.errored]


if __name__ == "__main__":
    main(app)
