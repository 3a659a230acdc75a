"""Offline benchmarks: fixed workloads on an engine in this process, warm; the figure is that of the median run.

    python benchmarks/offline.py --model FOLDER --workload nano256 [--workload ...] [--json]
    rayllm bench offline ...                                          # the same from an installed package

Prompts are token ids below 10,000 (or below the vocabulary's size). Every run of every workload has prompts of its
own, so nothing comes from the prefix cache. The end-of-sequence token is ignored and the temperature is 0.6.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import typer

from rayllm.api.sampling_params import SamplingParams
from rayllm.cli.main import main, make_app
from rayllm.cli.options import config_flags, engine_config, length_range
from rayllm.config.options import OFFLINE_BATCHED_TOKENS, EngineConfig
from rayllm.errors import ConfigError

MAX_ID = 10_000
TEMPERATURE = 0.6

Unit = Literal["out tok/s", "in tok/s", "ms"]

app = make_app()


class Batch(NamedTuple):
    """The work of one run."""

    prompts: list[list[int]]  # token ids
    max_tokens: list[int]  # tokens that each prompt generates


class Workload(NamedTuple):
    """Work that can be repeated with other prompts of the same lengths."""

    name: str
    make: Callable[[int], Batch]  # the batch of a run by its number; 0 is the first measured one, warm-ups are negative
    unit: Unit  # of the figure that counts


class Result(NamedTuple):
    """What the measured runs of one workload gave."""

    workload: str
    num_prompts: int
    input_tokens: int  # of all prompts of a run
    output_tokens: int
    cached_tokens: int  # the most prompt tokens that a run found in the prefix cache; it should compute all of them
    seconds: list[float]  # of each measured run
    figure: float  # of the median run, in `unit`
    unit: Unit


class FixedShape(NamedTuple):
    """A workload whose prompts are all alike."""

    num_prompts: int
    input_len: int
    output_len: int
    unit: Unit


# The workloads of the published figures, beside nano256.
FIXED_SHAPES = {
    "bs1_128_256": FixedShape(1, 128, 256, "out tok/s"),
    "bs32_1k_256": FixedShape(32, 1024, 256, "out tok/s"),
    "bs256_1k_128": FixedShape(256, 1024, 128, "out tok/s"),
    "prefill_16x8k": FixedShape(16, 8192, 1, "in tok/s"),
    "prefill_1x512": FixedShape(1, 512, 1, "ms"),
}


def named_workload(name: str) -> Workload:
    """One of the workloads of the published figures. Raises ConfigError for other names."""
    if name == "nano256":
        return Workload(name, nano256, "out tok/s")
    if name not in FIXED_SHAPES:
        raise ConfigError(f"unknown workload {name!r}; there are nano256, {', '.join(FIXED_SHAPES)}")
    shape = FIXED_SHAPES[name]
    inputs, outputs = (shape.input_len, shape.input_len), (shape.output_len, shape.output_len)
    return Workload(name, lambda run: random_batch(name, run, shape.num_prompts, inputs, outputs), shape.unit)


def custom_workload(num_prompts: int, input_len: str, output_len: str) -> Workload:
    """Prompts of given lengths, each "N" or a range "A:B" to draw from uniformly. Raises ConfigError."""
    if num_prompts < 1:
        raise ConfigError(f"num_prompts must be at least 1, not {num_prompts}")
    inputs, outputs = length_range("input_len", input_len), length_range("output_len", output_len)
    name = f"{num_prompts} x {input_len} in, {output_len} out"
    return Workload(name, lambda run: random_batch(name, run, num_prompts, inputs, outputs), "out tok/s")


def nano256(run: int) -> Batch:
    """The benchmark of nano-vllm: its lengths in every run, its token ids in run 0, other ids in the other runs."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, MAX_ID) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    max_tokens = [rng.randint(100, 1024) for _ in range(256)]
    if run != 0:
        other = random.Random(f"nano256 {run}")
        prompts = [[other.randrange(MAX_ID) for _ in prompt] for prompt in prompts]
    return Batch(prompts, max_tokens)


def random_batch(name: str, run: int, count: int, inputs: tuple[int, int], outputs: tuple[int, int]) -> Batch:
    """Random prompts. Lengths are the same in every run; ids differ between runs, and between names."""
    lengths, ids = random.Random(0), random.Random(f"{name} {run}")
    sizes = [lengths.randint(*inputs) for _ in range(count)]
    max_tokens = [lengths.randint(*outputs) for _ in range(count)]
    return Batch([[ids.randrange(MAX_ID) for _ in range(size)] for size in sizes], max_tokens)


def fit_vocabulary(batch: Batch, vocab_size: int) -> Batch:
    """Fold token ids into a small vocabulary; lengths stay as they are."""
    if vocab_size > MAX_ID:
        return batch
    return batch._replace(prompts=[[token % vocab_size for token in prompt] for prompt in batch.prompts])


def run_once(llm: Any, batch: Batch) -> tuple[float, int]:
    """Seconds that a batch takes, and how many of its prompt tokens came from the prefix cache."""
    params = [SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=n) for n in batch.max_tokens]
    started = time.perf_counter()
    outputs = llm.generate(batch.prompts, params, use_tqdm=False)
    elapsed = time.perf_counter() - started
    made = [len(output.outputs[0].token_ids) for output in outputs]
    if made != batch.max_tokens:
        raise ConfigError("the model's context is too short for this workload: outputs ended early")
    return elapsed, sum(output.num_cached_tokens for output in outputs)


def make_result(workload: Workload, seconds: list[float], cached: int) -> Result:
    """The figures of the measured runs."""
    batch = workload.make(0)
    tokens_in, tokens_out = sum(map(len, batch.prompts)), sum(batch.max_tokens)
    median = statistics.median(seconds)
    figures = {"out tok/s": tokens_out / median, "in tok/s": tokens_in / median, "ms": median * 1000}
    figure = figures[workload.unit]
    return Result(workload.name, len(batch.prompts), tokens_in, tokens_out, cached, seconds, figure, workload.unit)


def run_benchmark(
    config: EngineConfig, workloads: list[Workload], *, warmup: int = 1, repeat: int = 3
) -> dict[str, Any]:
    """Load the model once and run the workloads. Returns what `--json` prints. Raises RayllmError."""
    if repeat < 1 or warmup < 0:
        raise ConfigError(f"repeat must be at least 1 and warmup at least 0, not {repeat} and {warmup}")
    from rayllm.config.model_folder import load_model_spec
    from rayllm.hub import local_engine
    from rayllm.llm import LLM

    local = local_engine(config)  # a download is no part of the load
    vocab_size = load_model_spec(local.model).vocab_size
    started = time.perf_counter()
    with LLM(**local.model_dump()) as llm:
        load_seconds = time.perf_counter() - started
        results = []
        for workload in workloads:
            seconds, cached = [], 0
            for run in range(-warmup, repeat):
                batch = fit_vocabulary(workload.make(run), vocab_size)
                label = f"{workload.name}: " + (f"run {run + 1} of {repeat}" if run >= 0 else "warm-up")
                print(label, file=sys.stderr, flush=True)
                elapsed, cached_now = run_once(llm, batch)
                cached = max(cached, cached_now)
                if run >= 0:
                    seconds.append(elapsed)
            results.append(make_result(workload, seconds, cached))
    return {
        "model": config.model,
        "tensor_parallel_size": config.tensor_parallel_size,
        "load_seconds": load_seconds,
        "results": [result._asdict() for result in results],
    }


def print_table(report: dict[str, Any]) -> None:
    """Print a report of `run_benchmark` as a table."""
    from rich.console import Console
    from rich.table import Table

    title = f"{report['model']}, tp={report['tensor_parallel_size']}, loaded in {report['load_seconds']:.1f} s"
    table = Table(title=title)
    table.add_column("workload")
    for column in ("prompts", "tokens in", "cached", "tokens out", "median s", "in tok/s", "out tok/s", "figure"):
        table.add_column(column, justify="right")
    for result in report["results"]:
        median = statistics.median(result["seconds"])
        table.add_row(
            result["workload"],
            str(result["num_prompts"]),
            f"{result['input_tokens']:,}",
            f"{result['cached_tokens']:,}",
            f"{result['output_tokens']:,}",
            f"{median:.3f}",
            f"{result['input_tokens'] / median:,.0f}",
            f"{result['output_tokens'] / median:,.0f}",
            f"{result['figure']:,.1f} {result['unit']}",
        )
    Console(width=None if sys.stdout.isatty() else 140).print(table)


@app.command()
@config_flags(EngineConfig)
def offline(
    workload: Annotated[list[str] | None, typer.Option(help="Name of a workload; may be repeated.")] = None,
    num_prompts: Annotated[int | None, typer.Option(help="Number of prompts, instead of a named workload.")] = None,
    input_len: Annotated[str | None, typer.Option(help="Tokens of a prompt, or a range A:B [default: 512].")] = None,
    output_len: Annotated[str | None, typer.Option(help="Tokens to generate, or a range A:B [default: 128].")] = None,
    warmup: Annotated[int, typer.Option(help="Runs that are not measured.")] = 1,
    repeat: Annotated[int, typer.Option(help="Runs that are measured; the median counts.")] = 3,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    **options: Any,
) -> None:
    """Measure throughput and latency of the engine in this process, without HTTP and tokenizer.

    Output is a table; progress goes to standard error.
    """
    if workload and num_prompts is not None:
        raise ConfigError("give --workload or --num-prompts, not both")
    if num_prompts is not None:
        workloads = [custom_workload(num_prompts, input_len or "512", output_len or "128")]
    elif input_len is not None or output_len is not None:
        raise ConfigError("--input-len and --output-len need --num-prompts; named workloads have their own lengths")
    else:
        workloads = [named_workload(name) for name in workload or ["bs1_128_256"]]
    config = engine_config(options, skip_tokenizer_init=True, max_num_batched_tokens=OFFLINE_BATCHED_TOKENS)
    report = run_benchmark(config, workloads, warmup=warmup, repeat=repeat)
    if json_output:
        print(json.dumps(report))
    else:
        print_table(report)


if __name__ == "__main__":
    main(app)
