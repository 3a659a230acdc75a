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

import ray
import torch

from rayllm.api.sampling_params import SamplingParams
from rayllm.api.types import GenerationRequest
from rayllm.config.options import EngineConfig, make_config
from rayllm.config.resolved import ResolvedConfig, resolve
from rayllm.engine.build import start_resolved_engine
from rayllm.engine.engine import EngineCore
from rayllm.executor.ray import RayExecutor
from rayllm.executor.ray_cluster import connect_to_ray
from rayllm.parallel.shared_weights import SharedWeights
from rayllm.parallel.tp_group import TPGroup
from rayllm.worker.worker import RankModel

PROMPT_TOKENS = 512
STEPS, WARM_STEPS = 300, 40


def load_timed(
    config: ResolvedConfig, tp: TPGroup, device: torch.device, weights: SharedWeights | None = None, *, folder: str
) -> RankModel:
    """A rank that notes how long replays of its CUDA graphs take on the device.

    The first graph that is replayed STEPS / 2 times is that of the first batch's decodes, and so on. Each such graph
    writes its median to a file of `folder`, named after the rank and the batch's number.
    """
    events: dict[torch.cuda.CUDAGraph, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {}
    numbers = itertools.count()
    replay = torch.cuda.CUDAGraph.replay

    def timed_replay(graph: torch.cuda.CUDAGraph) -> None:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        replay(graph)
        end.record()
        taken = events.setdefault(graph, [])
        taken.append((begin, end))
        if len(taken) == STEPS // 2:
            end.synchronize()
            median = statistics.median(first.elapsed_time(last) for first, last in taken[WARM_STEPS:])
            Path(folder, f"{tp.rank} {next(numbers)}").write_text(str(median))

    torch.cuda.CUDAGraph.replay = timed_replay  # type: ignore[method-assign, assignment]
    return RankModel(config, tp, device, weights)


def step_ms(core: EngineCore, batch: int, rng: random.Random) -> float:
    """Median milliseconds from one result to the next while `batch` sequences decode."""
    params = SamplingParams(max_tokens=STEPS + batch, ignore_eos=True, temperature=0.6)
    for i in range(batch):
        prompt = [rng.randrange(10_000) for _ in range(PROMPT_TOKENS)]
        core.add(GenerationRequest(request_id=f"{batch} {i}", prompt_token_ids=prompt, params=params))
    state, times = core.scheduler.state, []
    while core.has_work():
        decoding = len(state.running) == batch and not state.waiting
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
        options = {
            "model": args.model,
            "tensor_parallel_size": args.tp,
            "executor": "ray",
            "load_format": "dummy",
            "max_model_len": 4096,
            "skip_tokenizer_init": True,
            "enable_prefix_caching": False,
        }
        owns_ray = connect_to_ray()
        config = resolve(make_config(EngineConfig, options), ray.cluster_resources().get("GPU", 0))
        executor = RayExecutor(config, partial(load_timed, folder=folder), owns_ray=owns_ray)
        core = start_resolved_engine(config, executor)
        try:
            rng = random.Random(0)
            steps = [step_ms(core, batch, rng) for batch in args.batches]
        finally:
            core.shutdown()
        alone = [
            max(float(Path(folder, f"{rank} {number}").read_text()) for rank in range(args.tp))
            for number in range(len(args.batches))
        ]
    print("| sequences | step | graph, slowest rank | control path adds |\n|---|---|---|---|")
    for batch, step, graph in zip(args.batches, steps, alone, strict=True):
        print(f"| {batch} | {step:.3f} ms | {graph:.3f} ms | {step / graph - 1:.1%} |")


if __name__ == "__main__":
    main()
