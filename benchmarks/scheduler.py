"""Microseconds of `schedule()` + `update()` a step, on one core, without workers.

    python benchmarks/scheduler.py [--sequences 256] [--steps 400]

Steady decode: all sequences run, none starts or ends; every block_size steps each needs a block.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from rayllm.api.sampling_params import SamplingParams
from rayllm.api.types import GenerationRequest, StepResult
from rayllm.core.memory import KVMemory
from rayllm.core.policy import POLICIES
from rayllm.core.scheduler import Scheduler
from rayllm.core.state import SchedulerState


def measure(num_sequences: int, num_steps: int) -> tuple[float, float]:
    """Median microseconds of (schedule, update) over num_steps decode steps."""
    state = SchedulerState(
        KVMemory(num_blocks=num_sequences * 160, block_size=16),
        max_num_seqs=num_sequences,
        max_num_batched_tokens=8192,
        max_model_len=2048,
        eos_token_ids=[1],
        clock=time.monotonic,
    )
    scheduler = Scheduler(state, policy=POLICIES["fcfs"])
    rng = random.Random(0)
    for i in range(num_sequences):
        prompt = [rng.randrange(2, 10000) for _ in range(rng.randint(100, 1024))]
        params = SamplingParams(max_tokens=1000, temperature=0.6, ignore_eos=True)
        scheduler.add(GenerationRequest(request_id=str(i), prompt_token_ids=prompt, params=params))
    schedules: list[float] = []
    updates: list[float] = []
    while len(schedules) < num_steps:
        start = time.perf_counter()
        plan = scheduler.schedule()
        middle = time.perf_counter()
        assert plan is not None
        result = StepResult(plan.step_id, [rng.randrange(2, 10000) for _ in range(plan.num_sampled)])
        before_update = time.perf_counter()
        scheduler.update(result)
        end = time.perf_counter()
        if plan.num_decodes == num_sequences:
            schedules.append((middle - start) * 1e6)
            updates.append((end - before_update) * 1e6)
    return statistics.median(schedules), statistics.median(updates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    schedule, update = measure(args.sequences, args.steps)
    print(f"{args.sequences} running: schedule {schedule:.0f} us + update {update:.0f} us = {schedule + update:.0f} us")


if __name__ == "__main__":
    main()
