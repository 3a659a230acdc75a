"""`rayllm batch`: answer the requests of a file with a model in this process."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import BaseModel, create_model

from rayllm.cli.options import config_flags, deployment_config
from rayllm.config.options import EngineConfig, ModelServerConfig
from rayllm.errors import ConfigError

if TYPE_CHECKING:
    from rayllm.batch.inputs import FileInput
    from rayllm.batch.result_file import ResultFile
    from rayllm.serve.offline import LocalEngine

# Options of a server that shape its answers; those about its clients mean nothing here.
_ANSWERS = ("served_model_name", "tool_call_parser", "reasoning_parser")
_FIELDS: dict[str, Any] = {name: ModelServerConfig.model_fields[name] for name in _ANSWERS}
AnswerFlags: type[BaseModel] = create_model("AnswerFlags", **{name: (f.annotation, f) for name, f in _FIELDS.items()})


@config_flags(AnswerFlags, EngineConfig)
def batch(
    source: Annotated[str, typer.Option("--input", "-i", metavar="FILE", help="Requests; - is standard input.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Results; those in it are kept.")],
    **options: Any,
) -> None:
    """Answer the requests of a file in the form of OpenAI's Batch API.

    A run that was stopped goes on with the same command: requests whose results are in the output are left out.
    """
    from rayllm.batch.app_client import batch_endpoints
    from rayllm.batch.inputs import STDIN, FileInput
    from rayllm.batch.result_file import ResultFile
    from rayllm.serve.http.app import generation_routes
    from rayllm.serve.offline import LocalEngine

    models, _server = deployment_config(options)
    if len(models) > 1:
        raise ConfigError("the config file lists several models; this command runs one")
    endpoints = batch_endpoints(generation_routes.routes)
    file = None if source == STDIN else FileInput(Path(source))
    with closing(ResultFile(output)) as results:
        total = None if file is None else asyncio.run(_check(file, endpoints, results))
        if total is not None and results.counts.done == total:
            print(f"rayllm: all {total} requests have results in {output}", file=sys.stderr)
            return
        started, before = time.monotonic(), results.counts.done
        stopped_by = asyncio.run(_answer(LocalEngine(models[0]), file, endpoints, results, total))
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


async def _check(file: FileInput, endpoints: tuple[str, ...], results: ResultFile) -> int:
    """How many requests the input has. Raises ConfigError if there are results of others."""
    from rayllm.batch.runner import check_results

    if results.answered:
        await check_results(file.lines(), endpoints, results)
    return await file.count()


async def _answer(
    engine: LocalEngine, file: FileInput | None, endpoints: tuple[str, ...], results: ResultFile, total: int | None
) -> signal.Signals | None:
    """Answer what has no result yet. Returns the signal that ended it early, if one did."""
    from rayllm.batch.inputs import stdin_lines
    from rayllm.batch.progress import Progress
    from rayllm.batch.runner import run_batch

    async def run() -> None:
        async with engine.answers() as (ask, limit):
            lines = stdin_lines() if file is None else file.lines()
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
