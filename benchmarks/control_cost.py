"""What the control path adds to a decode step on GPUs: driver, broadcast and Ray actors, beside the step's CUDA graph.

    python benchmarks/control_cost.py [--model configs/models/llama-3.1-8b] [--tp 4] [--batches 1 8 64 256]

For each batch all sequences decode. Compared are the median time from one result to the next, as the driver sees it,
and what the steps' CUDA graphs take on the device of the slowest rank, from a replay's first kernel to its last. The
difference is time in which the devices wait: for a plan, for its inputs, or for a result to be handled.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rayllm.api.sampling_params import SamplingParams
from rayllm.api.types import GenerationRequest, RankReady
from rayllm.config.model_spec import load_model_spec
from rayllm.config.options import EngineConfig
from rayllm.engine.engine import EngineCore
from rayllm.executor.ray import RayExecutor
from rayllm.worker.worker import Worker

PROMPT_TOKENS = 512
STEPS, WARM_STEPS = 300, 40


class TimedGraph:
    """A captured step that notes how long its replays take on the device; after STEPS / 2 of them, it writes that."""

    def __init__(self, graph: torch.cuda.CUDAGraph, file: Path):
        self._graph, self._file = graph, file
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def replay(self) -> None:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        self._graph.replay()
        end.record()
        self._events.append((begin, end))
        if len(self._events) == STEPS // 2:
            end.synchronize()
            taken = statistics.median(begin.elapsed_time(end) for begin, end in self._events[WARM_STEPS:])
            self._file.write_text(str(taken))


class TimingWorker(Worker):
    """A worker that times its decode graphs. folder: gets a file of each rank and batch."""

    def __init__(self, *args: Any, batches: list[int], folder: str):
        super().__init__(*args)
        self._batches, self._folder = batches, Path(folder)

    def warm_up(self) -> RankReady:
        ready = super().warm_up()
        graphs: Any = self._runner._graphs
        for batch in self._batches:
            graph, *rest = graphs._graphs[batch]
            file = self._folder / f"{self._tp.rank} {batch}"
            timed = TimedGraph(graph, file)
            graphs._graphs[batch] = (timed, *rest)
        return ready


def step_ms(core: EngineCore, batch: int, rng: random.Random) -> float:
    """Median milliseconds from one result to the next while `batch` sequences decode."""
    params = SamplingParams(max_tokens=STEPS + batch, ignore_eos=True, temperature=0.6)
    for i in range(batch):
        prompt = [rng.randrange(10_000) for _ in range(PROMPT_TOKENS)]
        core.add(GenerationRequest(request_id=f"{batch} {i}", prompt_token_ids=prompt, params=params))
    times = []
    while core.has_work():
        decoding = len(core.scheduler.running) == batch and not core.scheduler.waiting
        core.step()
        times.append(time.perf_counter() if decoding else None)
    gaps = [b - a for a, b in itertools.pairwise(times) if a is not None and b is not None]
    return statistics.median(gaps[WARM_STEPS : STEPS // 2]) * 1e3  # while the graphs are timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="configs/models/llama-3.1-8b")
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            model=args.model,
            tensor_parallel_size=args.tp,
            executor="ray",
            load_format="dummy",
            max_model_len=4096,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
        )
        spec = load_model_spec(args.model)
        executor = RayExecutor(config, spec, partial(TimingWorker, batches=args.batches, folder=folder))
        limits = executor.start()
        core = EngineCore(config, spec, executor, limits.num_gpu_blocks, executor.max_in_flight, None)
        try:
            rng = random.Random(0)
            steps = [step_ms(core, batch, rng) for batch in args.batches]
        finally:
            core.shutdown()
        alone = [
            max(float((Path(folder) / f"{rank} {batch}").read_text()) for rank in range(args.tp))
            for batch in args.batches
        ]
    print("| sequences | step | graph, slowest rank | control path adds |\n|---|---|---|---|")
    for batch, step, graph in zip(args.batches, steps, alone, strict=True):
        print(f"| {batch} | {step:.3f} ms | {graph:.3f} ms | {step / graph - 1:.1%} |")


if __name__ == "__main__":
    main()
