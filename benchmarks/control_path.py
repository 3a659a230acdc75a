"""What the control path adds to a step: scheduler, broadcast of plans, results, over real Ray actors without a model.

    python benchmarks/control_path.py [--tp 1 2 4] [--sequences 1 64 256] [--step-ms 1 2 4]

Workers compute nothing, but take their time: a step's result is there `step-ms` after the step before it or after its
plan has come, whichever is later, as on a device that computes plans in order. Handing a plan to the device keeps a
worker's thread busy for `submit-us`. So a step that takes longer than step-ms has waited for its plan.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import logging
import statistics
import time
from collections import deque

import ray
import torch

from rayllm.api.sampling_params import SamplingParams
from rayllm.api.types import GenerationRequest, KVBlocks, RankReady, StepPlan, StepResult
from rayllm.config.options import EngineConfig, make_config
from rayllm.config.resolved import ResolvedConfig, resolve
from rayllm.engine.build import start_resolved_engine
from rayllm.executor.ray import RayExecutor
from rayllm.parallel.tp_group import TPGroup

STEPS = 400


class TimedRank:
    """A rank, loaded and ready, whose device takes step_s seconds a step, one after the other."""

    ready = RankReady()

    def __init__(self, config: ResolvedConfig, _tp: TPGroup, _device: torch.device, *, step_s: float, submit_s: float):
        self._step_s, self._submit_s = step_s, submit_s
        self._max_num_seqs = config.num_seqs_choices[-1]
        self._free_at = 0.0
        self._pending: deque[tuple[float, StepResult]] = deque()

    def count_blocks(self) -> KVBlocks:
        return KVBlocks(50_000, 0, self._max_num_seqs)

    def build(self, _blocks: KVBlocks) -> TimedRank:
        return self

    def submit(self, plan: StepPlan) -> None:
        end = time.perf_counter() + self._submit_s
        while time.perf_counter() < end:
            pass
        self._free_at = max(self._free_at, end) + self._step_s
        self._pending.append((self._free_at, StepResult(plan.step_id, [7] * plan.num_sampled)))

    def collect(self) -> StepResult:
        due, result = self._pending.popleft()
        while (left := due - time.perf_counter()) > 0:
            time.sleep(left)
        return result

    def close(self) -> None:
        pass


def measure(tp: int, sequences: int, step_s: float, submit_s: float) -> float:
    """Median seconds from one result to the next, while all sequences decode."""
    options = {"device": "cpu", "executor": "ray", "tensor_parallel_size": tp, "max_num_seqs": sequences}
    config = resolve(make_config(EngineConfig, {**options, "skip_tokenizer_init": True}), 0)
    load = functools.partial(TimedRank, step_s=step_s, submit_s=submit_s)
    core = start_resolved_engine(config, RayExecutor(config, load))
    try:
        params = SamplingParams(max_tokens=STEPS + 50, ignore_eos=True)
        for i in range(sequences):
            prompt = [3 + (i + j) % 200 for j in range(16)]
            core.add(GenerationRequest(request_id=str(i), prompt_token_ids=prompt, params=params))
        times = []
        while core.has_work():
            if any(delta.token_ids for delta in core.step()):
                times.append(time.perf_counter())
        gaps = [b - a for a, b in itertools.pairwise(times)]
        return statistics.median(gaps[20:STEPS])
    finally:
        core.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--step-ms", type=float, nargs="+", default=[1.0, 2.0, 4.0])
    parser.add_argument("--submit-us", type=float, default=200.0)
    args = parser.parse_args()
    ray.init(num_cpus=max(args.tp), include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    print("| ranks | sequences | " + " | ".join(f"{ms:g} ms" for ms in args.step_ms) + " |")
    print("|---|---|" + "---|" * len(args.step_ms))
    for tp in args.tp:
        for sequences in args.sequences:
            cells = []
            for ms in args.step_ms:
                got = measure(tp, sequences, ms / 1e3, args.submit_us / 1e6) * 1e3
                cells.append(f"{got:.2f} ms, +{got / ms - 1:.0%}")
            print(f"| {tp} | {sequences} | " + " | ".join(cells) + " |", flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
