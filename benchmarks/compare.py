"""The same workloads on rayllm and on other engines, one after the other on this machine, as a table with ratios.

    python benchmarks/compare.py --model configs/models/qwen3-0.6b --set load_format=dummy --set max_model_len=16384 \\
        --peer vllm=/path/to/venv/bin/python --workload nano256 --workload bs1_128_256 --http 1 64 256 [--save FILE]

A peer is KIND=WHERE. KIND is vllm, sglang or rayllm. WHERE is the Python of the environment that it is installed in;
or, for rayllm, the folder of another checkout; or the URL of a server that is running, for --http alone.

Offline, engine_driver.py runs in the Python of each engine and gets the same token ids. Over HTTP, each engine's own
server is started, and one client loads them all. Nothing of an engine is left when the next one starts. Workloads are
those of offline.py, or NUMBERxINPUTxOUTPUT, such as 64x100:1024x128. Engines have their defaults, except for what
--set says: NAME=VALUE for all, by the names that vLLM and rayllm share, KIND.NAME=VALUE for one kind. Ratios are above
1 where this rayllm is ahead. If an engine fails, the end of its log is shown, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import yaml
from http_load import RequestFailedError
from launched_server import ProcessFailedError, free_port, own_session, wait_until_healthy, with_tokenizer
from offline import TEMPERATURE, Workload, custom_workload, fit_vocabulary, make_result, named_workload
from peers import Figure, Record, add_records, gpu_driver, hardware
from serve_throughput import Case, Served, http_rate

from rayllm.config.model_folder import load_model_spec
from rayllm.errors import RayllmError

DRIVER = Path(__file__).with_name("engine_driver.py")
HERE = Path(__file__).parents[1]
DESCRIBE_LIMIT_S = 60.0


class Kind(NamedTuple):
    """How engines of one kind are started."""

    serve: list[str]  # the command of its server, after its Python; MODEL is the model's folder
    names: dict[str, str] = {}  # option as vLLM names it -> as this kind does

    def named(self, options: dict[str, Any]) -> dict[str, Any]:
        """Options by this kind's own names."""
        return {self.names.get(name, name): value for name, value in options.items()}


MODEL = "MODEL"
KINDS = {
    "rayllm": Kind(["-m", "rayllm.cli", "launch", MODEL]),
    "vllm": Kind(["-m", "vllm.entrypoints.cli.main", "serve", MODEL]),
    "sglang": Kind(
        ["-m", "sglang.launch_server", "--model-path", MODEL],
        {"model": "model_path", "tensor_parallel_size": "tp_size", "max_model_len": "context_length"},
    ),
}


class Engine(NamedTuple):
    """One engine to be measured."""

    kind: str
    where: str  # a Python, the folder of a checkout, or the URL of a running server
    versions: dict[str, str | None] = {}  # of the engine and what it runs on
    commit: str | None = None  # of a checkout; ends in "-dirty" if it was changed since

    def __str__(self) -> str:
        return " ".join(filter(None, [self.kind, self.versions.get(self.kind), self.commit]))

    @property
    def python(self) -> str:
        # Not resolved: an environment's Python is a link, and knows its environment by its own name.
        return sys.executable if Path(self.where).is_dir() else str(Path(self.where).absolute())

    @property
    def environment(self) -> dict[str, str]:
        """The variables of its processes, which must not find the modules of this one."""
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        if Path(self.where).is_dir():
            env["PYTHONPATH"] = os.pathsep.join(str(Path(self.where, each).resolve()) for each in (".", "kernels"))
        tools = str(Path(self.python).parent)  # compilers and build tools of its environment
        return env | {"PATH": os.pathsep.join([tools, env.get("PATH", "")]), "PYTHONSAFEPATH": "1"}


class Measured(NamedTuple):
    """The figures of one case on one engine."""

    values: list[float]  # of each run
    unit: str

    @property
    def median(self) -> Figure:
        return Figure(statistics.median(self.values), self.unit)

    def __str__(self) -> str:
        least, median, most = (
            f"{value:,.0f}" if value >= 100 else f"{value:,.1f}"
            for value in (min(self.values), self.median.value, max(self.values))
        )
        return median if len(self.values) == 1 else f"{median} ({least} to {most})"


def is_url(where: str) -> bool:
    return where.startswith(("http://", "https://"))


def find_engine(kind: str, where: str) -> Engine:
    """An engine with its versions. Raises ProcessFailedError or httpx.HTTPError if it is not there."""
    engine = Engine(kind, where.rstrip("/"))
    if is_url(engine.where):
        answer = httpx.get(f"{engine.where}/version", timeout=DESCRIBE_LIMIT_S)
        told = answer.json() if answer.is_success else {}
        return engine._replace(versions={kind: told.get("version", "of unknown version")})
    with tempfile.TemporaryDirectory() as folder:
        described = run_driver(engine, Path(folder), None, DESCRIBE_LIMIT_S)
    commit = git_commit(described["folder"]) if kind == "rayllm" else None
    return engine._replace(versions=described["versions"], commit=commit)


def git_commit(folder: str) -> str | None:
    """The commit that is checked out in a folder; None if it is no checkout."""
    if not Path(folder, ".git").exists():
        return None
    command = ["git", "-C", folder, "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def run_driver(engine: Engine, folder: Path, work: dict[str, Any] | None, limit_s: float) -> dict[str, Any]:
    """What engine_driver.py writes. folder: an empty one to run it in. Raises ProcessFailedError."""
    log, result = folder / "log", folder / "result"
    command = [engine.python, str(DRIVER), engine.kind, str(result)]
    if work is not None:
        (folder / "work").write_text(json.dumps(work))
        command.append(str(folder / "work"))
    with own_session(command, env=engine.environment, cwd=folder, log=log) as process:
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise ProcessFailedError(f"it did not end within {limit_s:g} s", log) from None
    if code != 0:
        raise ProcessFailedError(f"it ended with exit code {code}", log)
    return json.loads(result.read_text())


def offline(engine: Engine, args: argparse.Namespace) -> dict[str, Measured]:
    """Workload -> figures of the engine in a process without HTTP. Raises ProcessFailedError."""
    vocab_size = load_model_spec(args.model).vocab_size
    workloads = [any_workload(name) for name in args.workload]
    runs = range(-args.warmup, args.repeat)
    options = {"model": args.model, "skip_tokenizer_init": True} | engine_options(engine.kind, args.set)
    work = {
        "options": KINDS[engine.kind].named(options),
        "temperature": TEMPERATURE,
        "warmup": args.warmup,
        "workloads": [
            [fit_vocabulary(workload.make(run), vocab_size)._asdict() for run in runs] for workload in workloads
        ],
    }
    with tempfile.TemporaryDirectory() as folder:
        report = run_driver(engine, Path(folder), work, args.limit)
    figures = {"engine start": Measured([report["load_seconds"]], "s")}
    for workload, seen in zip(workloads, report["workloads"], strict=True):
        results = [make_result(workload, [seconds], 0) for seconds in seen["seconds"]]
        figures[workload.name] = Measured([result.figure for result in results], workload.unit)
        if seen["cached_tokens"]:
            cached = f"{seen['cached_tokens']:,} of {results[0].input_tokens:,} prompt tokens"
            print(f"warning: {engine}: {workload.name}: {cached} came from its prefix cache", file=sys.stderr)
    return figures


def over_http(engine: Engine, args: argparse.Namespace) -> dict[str, Measured]:
    """Load -> figures of the engine's server, as its clients see it. Raises ProcessFailedError."""
    figures: dict[str, Measured] = {}
    cases = [Case(max(24, 4 * count), count, None) for count in args.http]
    with tempfile.TemporaryDirectory() as folder, served(engine, args, Path(folder), figures) as (url, log):

        def load(case: Case, run: int) -> Served:
            try:
                seen = http_rate(url, case, args, run)
            except (RequestFailedError, httpx.HTTPError, threading.BrokenBarrierError) as error:
                raise ProcessFailedError(f"{case}: {str(error) or type(error).__name__}", log) from None
            if seen.failures:
                what = f"{len(seen.failures)} of {case.num_requests} requests failed"
                raise ProcessFailedError(f"{case}: {what}, the first with: {seen.failures[0]}", log)
            return seen

        # No two runs have the same prompts, nor has a server that goes on running seen them before.
        run = itertools.count(args.first_run)
        for case in cases:
            for _ in range(args.warmup):
                load(case, next(run))
            seen = [load(case, next(run)) for _ in range(args.repeat)]
            name = f"http, {case}, {args.input_len} in, {args.output_len} out"
            figures[name] = Measured([each.rate for each in seen], "out tok/s")
            first_tokens = [1000 * statistics.median(each.first_tokens) for each in seen]
            figures[f"{name}, first token p50"] = Measured(first_tokens, "ms")
    return figures


@contextmanager
def served(
    engine: Engine, args: argparse.Namespace, folder: Path, figures: dict[str, Measured]
) -> Iterator[tuple[str, Path | None]]:
    """The engine's server: its URL, and its log if it was started here. Adds to `figures` how long its start took.

    folder: an empty one to run it in. Ray's workers look for modules in the current folder first, so in this checkout
    they would find this rayllm instead of the one to be measured.
    """
    if is_url(engine.where):
        yield engine.where, None
        return
    model = args.model
    if Path(model, "config.json").exists() and not any(Path(model).glob("tokenizer*")):
        model = with_tokenizer(model, str(folder))
    port, log, kind = free_port(), folder / "log", KINDS[engine.kind]
    command = [engine.python, *(model if word == MODEL else word for word in kind.serve)]
    options = {"host": "127.0.0.1", "port": port} | kind.named(engine_options(engine.kind, args.set))
    for name, value in options.items():
        flag = name.replace("_", "-")
        command += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    started = time.perf_counter()
    with own_session(command, env=engine.environment, cwd=folder, log=log) as process:
        wait_until_healthy(process, f"http://127.0.0.1:{port}", args.limit, log)
        figures["server start"] = Measured([time.perf_counter() - started], "s")
        yield f"http://127.0.0.1:{port}", log


def any_workload(name: str) -> Workload:
    """A workload of offline.py, or NUMBERxINPUTxOUTPUT. Raises ConfigError."""
    shape = re.fullmatch(r"(\d+)x([\d:]+)x([\d:]+)", name)
    return named_workload(name) if shape is None else custom_workload(int(shape[1]), shape[2], shape[3])


def engine_options(kind: str, settings: list[str]) -> dict[str, Any]:
    """The options that --set gives to engines of a kind."""
    options = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        owner, _, own_name = name.rpartition(".")
        if owner in ("", kind):
            options[own_name] = yaml.safe_load(value)
    return options


def table(engines: list[Engine], figures: list[dict[str, Measured]]) -> list[str]:
    """Lines of a Markdown table: a case a line; the first engine, each other one, and its ratio to it."""
    heads = ["case", str(engines[0])]
    for other in engines[1:]:
        heads += [str(other), "ratio"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for case in dict.fromkeys(case for each in figures for case in each):
        seen = [each.get(case) for each in figures]
        unit = next(each.unit for each in seen if each is not None)
        cells = [f"{case}, {unit}", str(seen[0] or "")]
        for other in seen[1:]:
            cells += [str(other or ""), f"{seen[0].median.ratio(other.median):.2f}" if seen[0] and other else ""]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def record(engine: Engine, figures: dict[str, Measured], others: list[Engine], args: argparse.Namespace) -> Record:
    """What peers.yaml keeps of one engine."""
    beside = f", one after the other with {', '.join(map(str, others))}" if others else ""
    software = {name: version for name, version in engine.versions.items() if name != engine.kind and version}
    return Record(
        engine=engine.kind,
        version=" ".join(filter(None, [engine.versions[engine.kind], engine.commit])),
        software=software | gpu_driver(),
        hardware=hardware(),
        date=datetime.date.today().isoformat(),
        how=f"compare.py, medians of {args.repeat} runs after {args.warmup}{beside}",
        model=Path(args.model).name,
        options=engine_options(engine.kind, args.set),
        figures={case: str(measured.median) for case, measured in figures.items()},
    )


def read_arguments(words: list[str] | None) -> argparse.Namespace:
    """The options on the command line, or in `words`. Ends the process if they are wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a checkpoint, or of its config.json alone")
    parser.add_argument("--peer", action="append", default=[], metavar="KIND=WHERE", help="may be repeated")
    parser.add_argument("--workload", action="append", default=[], help="offline; may be repeated")
    parser.add_argument("--http", type=int, nargs="+", default=[], metavar="N", help="requests in flight")
    parser.add_argument("--input-len", type=int, default=512, help="tokens of each request over HTTP")
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--clients", type=int, default=8, help="most processes that send")
    parser.add_argument("--set", action="append", default=[], metavar="[KIND.]NAME=VALUE", help="may be repeated")
    parser.add_argument("--warmup", type=int, default=1, help="runs of each case that are not measured")
    parser.add_argument("--repeat", type=int, default=3, help="runs that are measured")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for all offline runs, or a server's start")
    parser.add_argument("--save", type=Path, help="file to add the figures to, such as benchmarks/peers.yaml")
    args = parser.parse_args(words)
    if Path(args.model).exists():
        args.model = str(Path(args.model).resolve())  # engines run in other folders
    for peer in args.peer:
        kind, _, where = peer.partition("=")
        if kind not in KINDS or not where:
            parser.error(f"--peer must be KIND=WHERE with one of {', '.join(KINDS)}, not {peer!r}")
        if is_url(where) and args.workload:
            parser.error(f"--workload needs the engine in this machine's Python, and {peer} is a running server")
    args.first_run = int(time.time()) if any("://" in peer for peer in args.peer) else 0
    for setting in args.set:
        if not re.fullmatch(rf"(({'|'.join(KINDS)})\.)?\w+=.*", setting):
            parser.error(f"--set must be NAME=VALUE or KIND.NAME=VALUE with one of {', '.join(KINDS)}, not {setting!r}")
    if not args.workload and not args.http:
        parser.error("there is nothing to measure without --workload and --http")
    if min([args.repeat, *args.http]) < 1 or args.warmup < 0:
        parser.error("--repeat and --http must be at least 1, and --warmup at least 0")
    return args


def main(words: list[str] | None = None) -> int:
    args = read_arguments(words)
    failed = False
    try:
        load_model_spec(args.model)
        list(map(any_workload, args.workload))
        engines = [find_engine(*each.split("=", 1)) for each in [f"rayllm={HERE}", *args.peer]]
    except (RayllmError, ProcessFailedError, httpx.HTTPError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    figures: list[dict[str, Measured]] = [{} for _ in engines]
    for engine, found in zip(engines, figures, strict=True):
        for part, wanted in ((offline, args.workload), (over_http, args.http)):
            if wanted:
                state = f"{part.__name__.replace('_', ' ')}, load average {os.getloadavg()[0]:.1f}"
                print(f"{engine}: {state}", file=sys.stderr, flush=True)
                try:
                    found |= part(engine, args)
                except (ProcessFailedError, httpx.HTTPError, OSError) as error:
                    print(f"error: {engine}: {error}", file=sys.stderr)
                    failed = True
    records = [
        record(engine, found, [each for each in engines if each is not engine], args)
        for engine, found in zip(engines, figures, strict=True)
    ]
    for each in records:
        software = ", ".join(f"{name} {version}" for name, version in each.software.items())
        print(f"- {each.engine} {each.version}: {software}; {each.options or 'its defaults'}")
    print(f"- {records[0].model} on {records[0].hardware}, {records[0].date}, {records[0].how}\n")
    print("\n".join(table(engines, figures)))
    if args.save is not None:
        add_records(args.save, [each for each in records if each.figures])
    return int(failed)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # an engine does not outlive this
    sys.exit(main())
