"""Offline benchmarks: fixed workloads on the engine in this process, warm, median of several runs.

Prompts are token ids below 10,000 (or the vocabulary); every run of every workload has its own, so that nothing comes
from the prefix cache. End-of-sequence is ignored and the temperature is 0.6.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from rayllm.api.sampling_params import SamplingParams
from rayllm.config.options import EngineConfig
from rayllm.errors import ConfigError

MAX_ID = 10_000
TEMPERATURE = 0.6

Unit = Literal["out tok/s", "in tok/s", "ms"]


class Batch(NamedTuple):
    """One run's prompts (token ids below the vocabulary size) and how many tokens each generates."""

    prompts: list[list[int]]
    max_tokens: list[int]


class Workload(NamedTuple):
    """make(run): the batch of a run, 0 being the first measured one. unit: of the figure that counts."""

    name: str
    make: Callable[[int], Batch]
    unit: Unit


class Result(NamedTuple):
    """seconds: of each measured run. figure: of the median run, in `unit`. cached_tokens: most that a run, which should
    compute all of its prompts, found in the prefix cache.
    """

    workload: str
    num_prompts: int
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    seconds: list[float]
    figure: float
    unit: Unit


def named_workload(name: str) -> Workload:
    """One of the workloads that the published figures are for. Raises ConfigError for other names."""
    if name == "nano256":
        return Workload(name, _nano256, "out tok/s")
    if name not in _FIXED:
        raise ConfigError(f"unknown workload {name!r}; there are nano256, {', '.join(_FIXED)}")
    count, input_len, output_len, unit = _FIXED[name]
    return Workload(name, lambda run: _random_batch(name, run, count, (input_len,) * 2, (output_len,) * 2), unit)


def custom_workload(num_prompts: int, input_len: str, output_len: str) -> Workload:
    """Prompts of given lengths, each "N" or a range "A:B", uniformly drawn. Raises ConfigError."""
    if num_prompts < 1:
        raise ConfigError(f"num_prompts must be at least 1, not {num_prompts}")
    inputs, outputs = _length_range("input_len", input_len), _length_range("output_len", output_len)
    name = f"{num_prompts} x {input_len} in, {output_len} out"
    return Workload(name, lambda run: _random_batch(name, run, num_prompts, inputs, outputs), "out tok/s")


def run_benchmark(
    config: EngineConfig, workloads: list[Workload], *, warmup: int = 1, repeat: int = 3
) -> dict[str, Any]:
    """Load the model once and run the workloads. Returns what `--json` prints. Raises RayllmError."""
    if repeat < 1 or warmup < 0:
        raise ConfigError(f"repeat must be at least 1 and warmup at least 0, not {repeat} and {warmup}")
    from rayllm.config.model_spec import load_model_spec
    from rayllm.llm import LLM

    vocab_size = load_model_spec(config.model).vocab_size
    started = time.perf_counter()
    with LLM(**config.model_dump()) as llm:
        load_seconds = time.perf_counter() - started
        results = []
        for workload in workloads:
            seconds, cached = [], 0
            for run in range(-warmup, repeat):
                batch = _fit_vocabulary(workload.make(run), vocab_size)
                label = f"{workload.name}: " + (f"run {run + 1} of {repeat}" if run >= 0 else "warm-up")
                print(label, file=sys.stderr, flush=True)
                elapsed, cached_now = _run_once(llm, batch)
                cached = max(cached, cached_now)
                if run >= 0:
                    seconds.append(elapsed)
            results.append(_result(workload, seconds, cached))
    return {
        "model": config.model,
        "tensor_parallel_size": config.tensor_parallel_size,
        "load_seconds": load_seconds,
        "results": [result._asdict() for result in results],
    }


def print_results(report: dict[str, Any], as_json: bool) -> None:
    """Print a report of `run_benchmark`, as one JSON object or as a table."""
    if as_json:
        print(json.dumps(report))
        return
    from rich.console import Console
    from rich.table import Table

    title = f"{report['model']}, tp={report['tensor_parallel_size']}, loaded in {report['load_seconds']:.1f} s"
    table = Table(title=title)
    columns = (
        "workload",
        "prompts",
        "tokens in",
        "cached",
        "tokens out",
        "median s",
        "in tok/s",
        "out tok/s",
        "figure",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "workload" else "right")
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


# name -> prompts, tokens of each, tokens to generate, what counts
_FIXED: dict[str, tuple[int, int, int, Unit]] = {
    "bs1_128_256": (1, 128, 256, "out tok/s"),
    "bs32_1k_256": (32, 1024, 256, "out tok/s"),
    "bs256_1k_128": (256, 1024, 128, "out tok/s"),
    "prefill_16x8k": (16, 8192, 1, "in tok/s"),
    "prefill_1x512": (1, 512, 1, "ms"),
}


def _nano256(run: int) -> Batch:
    """The bench of nano-vllm: its lengths in every run, its ids in run 0, other ids in the others."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, MAX_ID) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    max_tokens = [rng.randint(100, 1024) for _ in range(256)]
    if run != 0:
        other = random.Random(f"nano256 {run}")
        prompts = [[other.randrange(MAX_ID) for _ in prompt] for prompt in prompts]
    return Batch(prompts, max_tokens)


def _random_batch(name: str, run: int, count: int, inputs: tuple[int, int], outputs: tuple[int, int]) -> Batch:
    """Lengths are the same in every run; ids are not, nor in two workloads of one engine."""
    lengths, ids = random.Random(0), random.Random(f"{name} {run}")
    sizes = [lengths.randint(*inputs) for _ in range(count)]
    max_tokens = [lengths.randint(*outputs) for _ in range(count)]
    return Batch([[ids.randrange(MAX_ID) for _ in range(size)] for size in sizes], max_tokens)


def _fit_vocabulary(batch: Batch, vocab_size: int) -> Batch:
    """Fold ids into a small vocabulary; lengths stay as they are."""
    if vocab_size > MAX_ID:
        return batch
    return batch._replace(prompts=[[token % vocab_size for token in prompt] for prompt in batch.prompts])


def _length_range(name: str, text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    try:
        bounds = (int(low), int(high or low))
    except ValueError:
        raise ConfigError(f"{name} must be a number or a range A:B, not {text!r}") from None
    if not 1 <= bounds[0] <= bounds[1]:
        raise ConfigError(f"{name} must be at least 1 and a range A:B ascending, not {text!r}")
    return bounds


def _run_once(llm: Any, batch: Batch) -> tuple[float, int]:
    """Seconds that a batch takes, and how many of its prompt tokens came from the prefix cache."""
    params = [SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=n) for n in batch.max_tokens]
    started = time.perf_counter()
    outputs = llm.generate(batch.prompts, params, use_tqdm=False)
    elapsed = time.perf_counter() - started
    made = [len(output.outputs[0].token_ids) for output in outputs]
    if made != batch.max_tokens:
        raise ConfigError("the model's context is too short for this workload: outputs ended early")
    return elapsed, sum(output.num_cached_tokens for output in outputs)


def _result(workload: Workload, seconds: list[float], cached: int) -> Result:
    batch = workload.make(0)
    tokens_in, tokens_out = sum(map(len, batch.prompts)), sum(batch.max_tokens)
    median = statistics.median(seconds)
    figures = {"out tok/s": tokens_out / median, "in tok/s": tokens_in / median, "ms": median * 1000}
    return Result(
        workload.name, len(batch.prompts), tokens_in, tokens_out, cached, seconds, figures[workload.unit], workload.unit
    )
