"""`rayllm batch`: answer the requests of a file with a model in this process, or with engines on a Ray cluster."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import create_model

from rayllm.cli.options import config_flags, deployment_config
from rayllm.config.options import EngineConfig, ModelConfig, ModelServerConfig
from rayllm.errors import ConfigError

if TYPE_CHECKING:
    from rayllm.batch.inputs import FileInput
    from rayllm.batch.result_file import ResultFile
    from rayllm.batch.tables import ParquetParts, TableInput
    from rayllm.serve.cluster.batch_replicas import BatchReplicas
    from rayllm.serve.offline import LocalEngine

    Engines = LocalEngine | BatchReplicas
    Output = ResultFile | ParquetParts

# Options of a server that shape its answers; those about its clients mean nothing here.
_ANSWERS = ("served_model_name", "tool_call_parser", "reasoning_parser")
_FIELDS: dict[str, Any] = {
    name: (field.annotation, field) for name, field in ModelServerConfig.model_fields.items() if name in _ANSWERS
}
AnswerFlags = create_model("AnswerFlags", **_FIELDS)


@config_flags(AnswerFlags, EngineConfig)
def batch(
    source: Annotated[str, typer.Option("--input", "-i", metavar="PATH", help="Requests; - is standard input.")],
    output: Annotated[str, typer.Option("--output", "-o", metavar="PATH", help="Results; those in it are kept.")],
    replicas: Annotated[int, typer.Option(min=1, help="Engines; several run on the Ray cluster.")] = 1,
    **options: Any,
) -> None:
    """Answer the requests of a file in the form of OpenAI's Batch API.

    Input and output are files of JSON lines. The input may also be what Ray Data reads (Parquet, CSV, JSON, a folder of
    such files, an address as s3://...), and the output a folder of Parquet files, named *.parquet; then the engines run
    on the Ray cluster too. A run that was stopped goes on with the same command: requests whose results are in the
    output are left out.
    """
    from rayllm.batch.app_client import batch_endpoints
    from rayllm.batch.inputs import STDIN, FileInput
    from rayllm.batch.tables import TableInput, is_lines, open_results
    from rayllm.serve.http.app import generation_routes

    models, _server = deployment_config(options)
    if len(models) > 1:
        raise ConfigError("the config file lists several models; this command runs one")
    endpoints, on_ray = batch_endpoints(generation_routes.routes), replicas > 1 or not is_lines(source)
    on_ray = on_ray or not is_lines(output)
    with ExitStack() as life:
        if on_ray:
            life.enter_context(_ray())
        given: FileInput | TableInput | None = None
        if source != STDIN:
            given = FileInput(Path(source)) if is_lines(source) else TableInput(source)
        results = life.enter_context(closing(open_results(output)))
        total = None if given is None else asyncio.run(_check(given, endpoints, results))
        if total is not None and results.counts.done == total:
            print(f"rayllm: {output} has the results of all {total} requests already", file=sys.stderr)
            return
        engines = _start(models[0], replicas, on_ray)
        started, before = time.monotonic(), results.counts.done
        stopped_by = asyncio.run(_answer(engines, given, endpoints, results, total))
    counts, seconds = results.counts, time.monotonic() - started
    all_of = "" if total is None else f" of {total}"
    print(
        f"rayllm: {counts.done - before} requests and {counts.completion_tokens} output tokens in {seconds:.1f} s; "
        f"{output} has the results of {counts.done}{all_of} requests, {counts.failed} of them errors",
        file=sys.stderr,
    )
    if stopped_by is not None:
        print(f"rayllm: stopped by {stopped_by.name}; the same command goes on from here", file=sys.stderr)
        raise typer.Exit(128 + stopped_by)


@contextmanager
def _ray() -> Iterator[None]:
    """A block with a connection to Ray."""
    import ray

    from rayllm.executor.ray_cluster import connect_to_ray

    owns_ray = connect_to_ray()
    try:
        yield
    finally:
        if owns_ray:
            ray.shutdown()


def _start(model: ModelConfig, replicas: int, on_ray: bool) -> Engines:
    """Blocks until the engines are there."""
    if on_ray:
        from rayllm.serve.cluster.batch_replicas import BatchReplicas

        return BatchReplicas(model, replicas)
    from rayllm.serve.offline import LocalEngine

    return LocalEngine(model)


async def _check(given: FileInput | TableInput, endpoints: tuple[str, ...], results: Output) -> int:
    """How many requests the input has. Raises ConfigError if there are results of others."""
    from rayllm.batch.runner import check_results

    if results.answered:
        await check_results(given.lines(), endpoints, results)
    return await given.count()


async def _answer(
    engines: Engines,
    given: FileInput | TableInput | None,
    endpoints: tuple[str, ...],
    results: Output,
    total: int | None,
) -> signal.Signals | None:
    """Answer what has no result yet. Returns the signal that ended it early, if one did."""
    from rayllm.batch.inputs import stdin_lines
    from rayllm.batch.progress import Progress
    from rayllm.batch.runner import run_batch

    async def run() -> None:
        async with engines.answers() as (ask, limit):
            lines = stdin_lines() if given is None else given.lines()
            with closing(Progress(results.counts, total)) as progress:
                await run_batch(lines, endpoints, ask, results, results.counts, limit, progress.update)

    task, received = asyncio.create_task(run()), []

    def stop(number: signal.Signals) -> None:
        received.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    try:
        await task
    except asyncio.CancelledError:
        if not received:
            raise
    return received[0] if received else None
