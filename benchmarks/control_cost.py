"""What the control path adds to a decode step on GPUs: steps through driver, broadcast and Ray actors, against the same
CUDA graphs replayed one after the other on the ranks without any of it.

    python benchmarks/control_cost.py [--model configs/models/llama-3.1-8b] [--tp 4] [--batches 1 8 64 256]

For each batch all sequences decode, and the median time from one result to the next is taken. When all is measured, and
the inputs of the last steps are still on the devices, every rank replays the graph of each batch size many times.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rayllm.config import EngineConfig
from rayllm.engine.core import EngineCore
from rayllm.executor.ray_gpu import RayExecutor
from rayllm.model_spec import load_model_spec
from rayllm.sampling_params import SamplingParams
from rayllm.types import GenerationRequest
from rayllm.worker.worker import Worker

PROMPT_TOKENS = 512
STEPS, WARM_STEPS, REPLAYS = 200, 40, 200


class ReplayingWorker(Worker):
    """A worker that times bare graph replays before it closes. folder: gets a file of each rank."""

    def __init__(self, *args: Any, batches: list[int], folder: str):
        super().__init__(*args)
        self._batches, self._file = batches, Path(folder) / f"{self._tp.rank}.json"

    def close(self) -> None:
        graphs = self._runner._graphs
        assert graphs is not None
        taken = []
        with self._memory.active():
            for batch in self._batches:
                graph = graphs._graphs[graphs._size_for[batch - 1]][0]
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                for _ in range(10):
                    graph.replay()
                begin.record()
                for _ in range(REPLAYS):
                    graph.replay()
                end.record()
                end.synchronize()
                taken.append(begin.elapsed_time(end) / REPLAYS)
        self._file.write_text(json.dumps(taken))
        super().close()


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
    return statistics.median(gaps[WARM_STEPS:]) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="configs/models/llama-3.1-8b")
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            model=args.model, tensor_parallel_size=args.tp, executor="ray", load_format="dummy", max_model_len=4096,
            skip_tokenizer_init=True, enable_prefix_caching=False,
        )  # fmt: skip
        spec = load_model_spec(args.model)
        executor = RayExecutor(config, spec, partial(ReplayingWorker, batches=args.batches, folder=folder))
        limits = executor.start()
        core = EngineCore(config, spec, executor, limits.num_gpu_blocks, executor.max_in_flight, None)
        try:
            rng = random.Random(0)
            steps = [step_ms(core, batch, rng) for batch in args.batches]
        finally:
            core.shutdown()
        bare = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(args.tp)]
    print("| sequences | step | graph alone, slowest rank | control path adds |\n|---|---|---|---|")
    for i, batch in enumerate(args.batches):
        alone = max(ranks[i] for ranks in bare)
        print(f"| {batch} | {steps[i]:.3f} ms | {alone:.3f} ms | {steps[i] / alone - 1:.1%} |")


if __name__ == "__main__":
    main()
