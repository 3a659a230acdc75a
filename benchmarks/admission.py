"""How many blocks should admission leave free? Preemptions, recomputed tokens and mean batch, in simulated steps.

    python benchmarks/admission.py [--requests 600] [--factors 1.5 2 3] [--growth 0 1 2 4] [--seed 0]

Requests arrive together and need `factor` times the pool if all that have a row run at once. There is no model: a step
is the scheduler's plan, and each sequence ends after a length drawn for it, two plans in flight. "known": requests
ignore end-of-sequence, so they get as long as max_tokens says. "unknown": max_tokens is four times the mean length, and
lengths are drawn from an exponential distribution or, half of them short and half of them long, from two peaks.
"growth" is how many blocks admission leaves free for each running sequence that may outgrow its own; with 0, a sequence
enters as soon as its prompt fits and a hundredth of the pool stays free. Seconds are what the steps would take on a
device that takes 6 ms, 26 us a prompt token and 20 us a decode; the last column is what `schedule` and `update` took
here, a step.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import deque
from typing import NamedTuple

from rayllm.api.sampling_params import SamplingParams
from rayllm.api.types import GenerationRequest, StepPlan, StepResult
from rayllm.core.memory import KVMemory
from rayllm.core.policy import POLICIES
from rayllm.core.scheduler import Scheduler
from rayllm.core.state import SchedulerState

EOS, ROWS, BLOCK_SIZE, DEPTH = 1, 256, 16, 2
MEAN_LENGTH = 300


class Job(NamedTuple):
    """A request: tokens of its prompt, and after how many generated tokens it ends."""

    prompt: int
    length: int


class Figures(NamedTuple):
    """seconds: of the simulated device. overhead: seconds of the scheduler on this machine, a step."""

    steps: int
    preemptions: int
    recomputed: int
    mean_batch: float
    seconds: float
    overhead: float


def draw_jobs(workload: str, count: int, rng: random.Random) -> list[Job]:
    """Requests of a workload."""
    jobs = []
    for i in range(count):
        if workload == "known":
            length = rng.randint(1, 2 * MEAN_LENGTH)
        elif workload == "exponential":
            length = min(4 * MEAN_LENGTH, 1 + int(rng.expovariate(1 / MEAN_LENGTH)))
        else:
            length = int(rng.gauss(*((60, 15) if i % 2 else (2 * MEAN_LENGTH, 60))))
        jobs.append(Job(rng.randint(50, 500), max(1, length)))
    return jobs


def simulate(jobs: list[Job], known: bool, num_blocks: int, growth_blocks: int) -> Figures:
    """Run all jobs to their end."""
    state = SchedulerState(
        KVMemory(num_blocks=num_blocks, block_size=BLOCK_SIZE, caching=False),
        max_num_seqs=ROWS,
        max_num_batched_tokens=8192,
        max_model_len=max(job.prompt for job in jobs) + 4 * MEAN_LENGTH,
        eos_token_ids=[EOS],
        growth_blocks=growth_blocks,
    )
    scheduler = Scheduler(state, policy=POLICIES["fcfs"])
    for i, job in enumerate(jobs):
        params = SamplingParams(max_tokens=job.length if known else 4 * MEAN_LENGTH, ignore_eos=known)
        scheduler.add(GenerationRequest(request_id=str(i), prompt_token_ids=[2] * job.prompt, params=params))
    steps = decoded = prompt_tokens = 0
    seconds = overhead = 0.0
    flying: deque[StepResult] = deque()
    while scheduler.has_work():
        started = time.perf_counter()
        plan = scheduler.schedule()
        overhead += time.perf_counter() - started
        if plan is not None:
            result = execute(scheduler, plan, jobs)
            flying.append(result)
            tokens = sum(plan.num_tokens) - plan.num_decodes
            steps, decoded, prompt_tokens = steps + 1, decoded + plan.num_sampled, prompt_tokens + tokens
            seconds += 6e-3 + 2e-5 * plan.num_decodes + 2.6e-5 * tokens
        if plan is None or len(flying) >= DEPTH:
            started = time.perf_counter()
            scheduler.update(flying.popleft())
            overhead += time.perf_counter() - started
    recomputed = prompt_tokens - sum(job.prompt for job in jobs)
    return Figures(steps, scheduler.stats().num_preemptions, recomputed, decoded / steps, seconds, overhead / steps)


def execute(scheduler: Scheduler, plan: StepPlan, jobs: list[Job]) -> StepResult:
    """Sample end-of-sequence for those that end in this step, which the plan knows nothing of."""
    ids = []
    for seq in scheduler.in_flight[-1].sampled:
        job = jobs[int(seq.request_id)]
        ids.append(EOS if len(seq.token_ids) + seq.num_pending - job.prompt >= job.length else 2)
    return StepResult(plan.step_id, ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--factors", type=float, nargs="+", default=[1.5, 2.0, 3.0])
    parser.add_argument("--growth", type=int, nargs="+", default=[0, 1, 2, 4], help="blocks left free for each")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print("workload    factor growth  preemptions  recomputed  mean batch   steps  simulated s  us a step")
    for workload in ("known", "exponential", "two peaks"):
        jobs = draw_jobs(workload, args.requests, random.Random(args.seed))
        needed = ROWS * sum(-(-(job.prompt + job.length) // BLOCK_SIZE) for job in jobs) / len(jobs)
        for factor in args.factors:
            for growth in args.growth:
                figures = simulate(jobs, workload == "known", int(needed / factor), growth)
                print(
                    f"{workload:<11} {factor:>5g}x {growth:>6} {figures.preemptions:>11} {figures.recomputed:>11} "
                    f"{figures.mean_batch:>11.1f} {figures.steps:>7} {figures.seconds:>12.1f} "
                    f"{figures.overhead * 1e6:>10.0f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
