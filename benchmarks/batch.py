"""`rayllm batch` beside the engine alone, and a batch that is killed and goes on.

    python benchmarks/batch.py [--model FOLDER] [--count 512] [--runs 3]          # throughput of both
    python benchmarks/batch.py --kills 2 --count 10000 [--replicas 2]             # each request answered once

The first prints the output tokens a second of `LLM.generate` and of a batch file with the same prompts. They are two
processes that take turns, each run with prompts of its own, the engines warm. The second ends `rayllm batch` with
SIGKILL at equal parts of the way, starts it again each time, and then counts the results of each request.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import typer

from rayllm.api.sampling_params import SamplingParams
from rayllm.batch.app_client import ENDPOINTS
from rayllm.batch.inputs import FileInput
from rayllm.batch.result_file import ResultFile
from rayllm.batch.runner import Ask, run_batch
from rayllm.cli.main import main, make_app
from rayllm.cli.options import config_flags, engine_config
from rayllm.config.options import EngineConfig, ModelConfig, ServerConfig
from rayllm.errors import RayllmError
from rayllm.llm import LLM
from rayllm.serve.offline import LocalEngine

WORDS = ("the", "a", "list", "of", "for", "statement", "in", "returns", "an", "object", "class", "when", "function")
LOOK_S = 0.1

app = make_app()


@app.command()
@config_flags(EngineConfig, positional_model=False)
def batch(
    count: Annotated[int, typer.Option(help="Requests of a run.")] = 512,
    input_words: Annotated[int, typer.Option(help="Words of a prompt.")] = 40,
    output_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 32,
    runs: Annotated[int, typer.Option(help="Measured runs of each; the median counts.")] = 3,
    replicas: Annotated[int, typer.Option(help="With --kills: engines of the batch.")] = 1,
    kills: Annotated[int, typer.Option(help="Times that the batch is killed; 0 measures the throughput.")] = 0,
    **options: Any,
) -> None:
    """Measure a batch, or kill one."""
    config = engine_config(options)
    with tempfile.TemporaryDirectory() as folder:
        if kills:
            file = write_requests(Path(folder, "requests.jsonl"), make_prompts(0, count, input_words), output_tokens)
            kill_and_resume(config, file, count, replicas, kills)
            return
        alone, of_batch = throughputs(config, Path(folder), count, input_words, output_tokens, runs)
    figures = statistics.median(alone), statistics.median(of_batch)
    for name, figure, each in zip(("LLM.generate", "rayllm batch"), figures, (alone, of_batch), strict=True):
        print(f"{name:14}{figure:9.0f} out tok/s  (runs: {', '.join(f'{each:.0f}' for each in each)})")
    print(f"{'ratio':14}{figures[1] / figures[0]:9.2f}")


def make_prompts(run: int, count: int, words: int) -> list[str]:
    """The prompts of a run; no two begin alike."""
    draw = random.Random(run)
    return [" ".join([f"{run} {number}:", *draw.choices(WORDS, k=words)]) for number in range(count)]


def write_requests(path: Path, prompts: list[str], output_tokens: int) -> Path:
    """A batch file of completions."""
    with path.open("w") as file:
        for number, prompt in enumerate(prompts):
            body = {"prompt": prompt, "max_tokens": output_tokens, "ignore_eos": True}
            line = {"custom_id": f"request-{number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    return path


def throughputs(
    config: EngineConfig, folder: Path, count: int, input_words: int, output_tokens: int, runs: int
) -> tuple[list[float], list[float]]:
    """Output tokens a second of the engine alone, and of a batch file from the first line read to the last result
    written, of each run but the first, which warms up. They take turns, with the same prompts, each in its process."""
    figures: tuple[list[float], list[float]] = ([], [])
    context = multiprocessing.get_context("spawn")
    with ExitStack() as life:
        ends = []
        for measure in (engine_figures, batch_figures):
            own, end = context.Pipe()
            process = context.Process(target=measure, args=(config, end, output_tokens))
            process.start()
            end.close()  # so that `own` sees its end
            life.callback(process.join)
            life.enter_context(own)
            ends.append(own)
        for own in ends:
            own.recv()  # it is up
        for run in range(runs + 1):
            file = write_requests(folder / f"{run}.jsonl", make_prompts(run, count, input_words), output_tokens)
            for own, found in zip(ends, figures, strict=True):
                own.send(file)
                found.append(own.recv())
    return figures[0][1:], figures[1][1:]


def engine_figures(config: EngineConfig, end: Connection, output_tokens: int) -> None:
    """Measure `LLM.generate` for each file that comes through a pipe, until it is closed."""
    params = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
    with LLM(**config.model_dump(exclude_unset=True)) as llm, suppress(EOFError):
        end.send(None)
        while True:
            prompts = [json.loads(line)["body"]["prompt"] for line in end.recv().open()]
            started = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            end.send(len(prompts) * output_tokens / (time.perf_counter() - started))


def batch_figures(config: EngineConfig, end: Connection, output_tokens: int) -> None:
    """The same for batch files, as `rayllm batch` runs them."""

    async def measure(file: Path, ask: Ask, limit: int) -> float:
        results = ResultFile(file.with_suffix(".out"))
        started = time.perf_counter()
        await run_batch(FileInput(file).lines(), ENDPOINTS, ask, results, results.counts, limit)
        results.close()
        if results.counts.failed or results.counts.completion_tokens != results.counts.completed * output_tokens:
            raise RayllmError(f"{results.counts} is not what was asked for")
        return results.counts.completion_tokens / (time.perf_counter() - started)

    async def run() -> None:
        async with LocalEngine(ModelConfig(config, ServerConfig())).answers() as (ask, limit):
            end.send(None)
            with suppress(EOFError):
                while True:
                    end.send(await measure(await asyncio.to_thread(end.recv), ask, limit))

    asyncio.run(run())


def kill_and_resume(config: EngineConfig, file: Path, count: int, replicas: int, kills: int) -> None:
    """Run a batch file that is killed so many times, and look at what came of it."""
    output = file.with_suffix(".out")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in config.model_dump(exclude_unset=True).items()]
    command = [sys.executable, "-m", "rayllm.cli", "batch", "-i", str(file), "-o", str(output), *flags]
    command += ["--replicas", str(replicas)] * (replicas > 1)
    started = time.perf_counter()
    for kill in range(1, kills + 1):
        process = subprocess.Popen(command, start_new_session=True)
        while process.poll() is None and num_lines(output) < count * kill // (kills + 1):
            time.sleep(LOOK_S)
        if process.poll() is not None:
            raise RayllmError(f"the batch ended by itself, with exit code {process.returncode}")
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        print(f"killed at {num_lines(output)} of {count}, {time.perf_counter() - started:.0f} s", flush=True)
    subprocess.run(command, check=True)
    answers = Counter(json.loads(line)["custom_id"] for line in output.open())
    statuses = Counter(json.loads(line)["response"]["status_code"] for line in output.open())
    once = sum(answers[f"request-{number}"] == 1 for number in range(count))
    seconds = time.perf_counter() - started
    print(f"{count} requests, {kills} kills, {replicas} replicas: {once} answered once, statuses {dict(statuses)}")
    print(f"{seconds:.0f} s in all, starts included")
    if once != count or len(answers) != count:
        raise RayllmError(f"only {once} of {count} requests have one result")


def num_lines(path: Path) -> int:
    """Whole lines of a file that need not be there."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


if __name__ == "__main__":
    main(app)
