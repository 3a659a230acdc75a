"""Draws what GPU and host do during steady decode steps, and prints the gap between steps and what each kernel takes.

    python benchmarks/timeline.py --model configs/models/qwen3-0.6b --batch 64 --out docs/decode_step.svg
    python benchmarks/timeline.py --model configs/models/qwen3-30b-a3b --quantization fp8 --prompts 4 --context 8192

Steps are profiled once they run steadily: kernels by name on one track, schedule / submit / collect / update of the
engine loop on the other, in one clock. A gap is the time from a step's last kernel to the next step's first one. A
kernel's own time is that in which no kernel before it runs.

With --prompts so many prompts of --context tokens are profiled instead, from the first step to the last.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
from collections import defaultdict
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from rayllm import SamplingParams
from rayllm.api.types import GenerationRequest
from rayllm.config.options import OFFLINE_BATCHED_TOKENS, EngineConfig, make_config
from rayllm.config.resolved import resolve
from rayllm.engine.build import start_resolved_engine
from rayllm.engine.engine import EngineCore
from rayllm.executor.base import Executor
from rayllm.executor.local import LocalExecutor

FIRST_KERNEL = "_decode_inputs_kernel"  # of every decode graph
KERNELS = 20  # that are printed
HOST = ("schedule", "submit", "collect", "update")
COLORS = ("#4878a8", "#e08040", "#58a068", "#c05860", "#8868a8", "#a08060", "#d888b8", "#888888")
WIDTH, TRACK, LEFT = 1400, 46, 70


class Span(NamedTuple):
    """name, and start and end in microseconds."""

    name: str
    start: float
    end: float


def named(function: Any, name: str) -> Any:
    """`function`, shown as `name` in the profile."""

    def call(*args: Any) -> Any:
        with record_function(name):
            return function(*args)

    return call


def record(core: EngineCore, executor: Executor, steps: int | None = None) -> tuple[list[Span], list[Span]]:
    """(kernels, host phases) of so many steps, or of all that there are, by start."""
    core.scheduler.schedule = named(core.scheduler.schedule, "schedule")  # type: ignore[method-assign]
    core.scheduler.update = named(core.scheduler.update, "update")  # type: ignore[method-assign]
    executor.submit = named(executor.submit, "submit")  # type: ignore[method-assign]
    executor.collect = named(executor.collect, "collect")  # type: ignore[method-assign]
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in itertools.count() if steps is None else range(steps):
            if not core.has_work():
                break
            core.step()
        torch.cuda.synchronize()
    kernels, host = [], []
    for event in profiler.profiler.kineto_results.events():
        span = Span(event.name(), event.start_ns() / 1e3, (event.start_ns() + event.duration_ns()) / 1e3)
        if event.device_type() == torch.autograd.DeviceType.CUDA and event.duration_ns() and span.name not in HOST:
            kernels.append(span)
        elif event.device_type() == torch.autograd.DeviceType.CPU and span.name in HOST:
            host.append(span)
    return sorted(kernels, key=lambda s: s.start), sorted(host, key=lambda s: s.start)


def split_steps(kernels: list[Span]) -> list[list[Span]]:
    """Kernels by step: the copies of a step's inputs come just before its first kernel and count as the gap."""
    firsts = [i for i, span in enumerate(kernels) if span.name.startswith(FIRST_KERNEL)]
    steps = [kernels[a:b] for a, b in pairwise(firsts)]
    return [[span for span in step if not span.name.startswith("Mem")] for step in steps]


def apart(kernels: list[Span]) -> list[Span]:
    """Kernels without the time in which they wait for one before them: dependent launch starts them early."""
    spans, busy_until = [], 0.0
    for span in kernels:
        if span.end > busy_until:
            spans.append(span._replace(start=max(span.start, busy_until)))
            busy_until = span.end
    return spans


def print_kernels(kernels: list[Span], count: int, unit: str) -> None:
    """What each kernel takes a unit, of which there are `count`, those that take longest first."""
    own: dict[str, float] = defaultdict(float)
    whole: dict[str, float] = defaultdict(float)
    launches: dict[str, int] = defaultdict(int)
    for span in apart(kernels):
        own[span.name] += span.end - span.start
    for span in kernels:
        whole[span.name] += span.end - span.start
        launches[span.name] += 1
    print(f"us a {unit}: own, with what overlaps, launches")
    for name in sorted(whole, key=lambda name: -own[name])[:KERNELS]:
        print(f"{own[name] / count:9.1f} {whole[name] / count:9.1f} {launches[name] / count:7.1f}  {name[:80]}")


def draw(kernels: list[Span], host: list[Span], begin: float, end: float, title: str) -> str:
    """An SVG of the spans between two times."""
    scale = (WIDTH - LEFT - 20) / (end - begin)
    kernels, host = ([s for s in spans if s.end > begin and s.start < end] for spans in (apart(kernels), host))
    time_of: dict[str, float] = defaultdict(float)
    for span in kernels:
        time_of[span.name] += min(span.end, end) - max(span.start, begin)
    names = sorted(time_of, key=lambda name: -time_of[name])
    color = {name: COLORS[min(i, len(COLORS) - 1)] for i, name in enumerate(names)}
    color |= dict(zip(HOST, COLORS, strict=False))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="250" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="250" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for label, y, spans in (("GPU", 40, kernels), ("host", 40 + TRACK, host)):
        lines.append(f'<text x="10" y="{y + 24}">{label}</text>')
        for span in spans:
            x, right = LEFT + (max(span.start, begin) - begin) * scale, LEFT + (min(span.end, end) - begin) * scale
            tip = f"<title>{escape(span.name[:80])}: {span.end - span.start:.1f} us</title>"
            lines.append(
                f'<rect x="{x:.2f}" y="{y}" width="{max(right - x, 0.1):.2f}" height="36" '
                f'fill="{color[span.name]}">{tip}</rect>'
            )
    axis = 40 + 2 * TRACK + 12
    for i in range(11):
        x = LEFT + (WIDTH - LEFT - 20) * i / 10
        lines.append(f'<text x="{x:.0f}" y="{axis}" text-anchor="middle">{(end - begin) * i / 10:.0f} us</text>')
    legend = [f"{name[:36]} {time_of[name] / (end - begin):.0%}" for name in names[: len(COLORS) - 1]]
    for i, (text, fill) in enumerate([*zip(legend, COLORS, strict=False), ("other kernels", COLORS[-1])]):
        x, y = LEFT + 330 * (i % 4), axis + 24 + 20 * (i // 4)
        lines.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{fill}"/>')
        lines.append(f'<text x="{x + 18}" y="{y}">{escape(text)}</text>')
    for i, name in enumerate(HOST):
        x, y = LEFT + 330 * i, axis + 72
        lines.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{color[name]}"/>')
        lines.append(f'<text x="{x + 18}" y="{y}">{name} (host)</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="configs/models/qwen3-0.6b")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--prompts", type=int, default=0)
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--out", type=Path, help="where to write the picture of two steps (SVG)")
    options = parser.parse_args()
    rng = random.Random(0)
    engine_options = {"model": options.model, "load_format": "dummy", "skip_tokenizer_init": True}
    engine_options |= {
        "quantization": options.quantization,
        "max_model_len": 16384,
        "max_num_batched_tokens": OFFLINE_BATCHED_TOKENS,
    }
    config = resolve(make_config(EngineConfig, engine_options), torch.cuda.device_count())
    executor = LocalExecutor(config)
    core = start_resolved_engine(config, executor)

    def add(count: int, max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.6)
        for _ in range(count):
            prompt = [rng.randrange(10_000) for _ in range(options.context)]
            core.add(GenerationRequest(request_id=str(next(numbers)), prompt_token_ids=prompt, params=params))

    numbers = itertools.count()
    try:
        if options.prompts:
            add(options.prompts, 1)
            while core.has_work():
                core.step()
            add(options.prompts, 1)
            kernels, host = record(core, executor)
        else:
            add(options.batch, 1000)
            for _ in range(100):
                core.step()
            kernels, host = record(core, executor, 40)
    finally:
        core.shutdown()
    if options.prompts:
        print(f"{Path(options.model).name}, {options.prompts} prompts of {options.context} tokens, profiled:")
        print_kernels(kernels, options.prompts, "prompt")
        return
    steps = split_steps(kernels)
    gaps = [after[0].start - before[-1].end for before, after in pairwise(steps)]
    lengths = [after[0].start - before[0].start for before, after in pairwise(steps)]
    busy = [sum(span.end - span.start for span in step) for step in steps]
    loop = sum(span.end - span.start for span in host if span.name != "collect") / 40
    title = f"{Path(options.model).name}, {options.batch} sequences of about {options.context + 100} tokens"
    print(f"{title}, profiled:")
    print(f"step                   {statistics.median(lengths):7.0f} us (median)")
    print(f"kernels in it          {statistics.median(busy):7.0f} us; with dependent launch they overlap")
    print(f"gap between steps, GPU {statistics.median(gaps):7.1f} us (median), {max(gaps):.1f} us (longest)")
    print(f"host without waiting   {loop:7.0f} us a step")
    print_kernels([span for step in steps for span in step], len(steps), "step")
    if options.out:
        middle = len(steps) // 2
        begin, end = steps[middle][0].start - 20, steps[middle + 1][-1].end + 20
        options.out.write_text(draw(kernels, host, begin, end, title))


if __name__ == "__main__":
    main()
