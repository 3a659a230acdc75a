"""How long streams stand still when a rank dies or stops: gaps between tokens, the phases of the recovery, memory.

    python benchmarks/recovery.py [--model configs/models/llama-3.1-8b] [--tp 2] [--streams 64] [--signal KILL STOP]
                                  [--device cpu] [--deterministic] [--standby-ranks none]

One engine on Ray actors. All streams run once undisturbed, and once for each signal, which the last rank gets when half
of the tokens are there; between two signals the script waits for new standbys. A gap is the time between two deltas
with tokens of one stream, seen where the engine's loop runs. With --deterministic every output must be that of the
undisturbed run. Weights are random if the model's folder has none. Ends after --limit seconds whatever happens.

Exit code 1 if a stream did not end as it should, or the limit was reached.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import re
import signal
import statistics
import sys
import threading
import time
from pathlib import Path

import psutil
import ray

from rayllm.api.sampling_params import SamplingParams
from rayllm.api.types import GenerationRequest
from rayllm.config.options import EngineConfig, make_config
from rayllm.config.resolved import resolve
from rayllm.engine.build import start_resolved_engine
from rayllm.engine.engine import EngineCore
from rayllm.executor.ray import RayExecutor
from rayllm.executor.ray_cluster import connect_to_ray

STANDBYS_S = 60.0  # for new standbys
STOP_S = 20.0  # for a good end after the limit
MIB = 2**20


def end_after(seconds: float) -> None:
    """End this process and all that it started, after SIGALRM if that does not do."""

    def end() -> None:
        time.sleep(seconds)
        print(f"the limit of {seconds:g} s was reached", flush=True)
        os.kill(os.getpid(), signal.SIGALRM)  # raises in the main thread, which shuts the engine down
        time.sleep(STOP_S)
        for child in psutil.Process().children(recursive=True):
            child.kill()
        os._exit(1)

    def stop(_number: int, _frame: object) -> None:
        raise TimeoutError("the limit was reached")

    signal.signal(signal.SIGALRM, stop)
    threading.Thread(target=end, daemon=True).start()


class Run:
    """All streams once. number: of the run, for ids. fault: the signal that the last rank gets, if any."""

    def __init__(self, core: EngineCore, args: argparse.Namespace, number: int, fault: signal.Signals | None):
        rng = random.Random(0)
        vocab = core.info.vocab_size
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, str | None] = {}
        self.times: dict[str, list[float]] = {}
        self.steps: list[float] = []  # when each ended
        self.sent = 0.0
        for stream in range(args.streams):
            length = rng.randint(args.prompt_tokens // 2, args.prompt_tokens)
            params = SamplingParams(temperature=1.0, seed=stream, max_tokens=args.output_tokens, ignore_eos=True)
            prompt = [rng.randrange(vocab) for _ in range(length)]
            name = f"{number}-{stream}"
            core.add(GenerationRequest(request_id=name, prompt_token_ids=prompt, params=params))
            self.tokens[name], self.times[name] = [], []
        half = args.streams * args.output_tokens // 2
        so_far = 0
        while core.has_work():
            if fault is not None and not self.sent and so_far >= half:
                self.sent = time.monotonic()
                os.kill(pid_of(core.info.start.placement[-1]), fault)
            deltas, now = core.step(), time.monotonic()
            self.steps.append(now)
            for delta in deltas:
                if delta.token_ids:
                    self.tokens[delta.request_id] += delta.token_ids
                    self.times[delta.request_id].append(now)
                    so_far += len(delta.token_ids)
                if delta.finish_reason is not None:
                    self.ended[delta.request_id] = delta.finish_reason

    def failed(self) -> list[str]:
        return [name for name in self.tokens if self.ended.get(name) != "length"]

    def gaps(self) -> list[float]:
        """The longest of each stream, ascending."""
        return sorted(max(b - a for a, b in itertools.pairwise(t)) for t in self.times.values())

    def rate(self, begin: float, end: float) -> float:
        """Steps a second then."""
        return sum(begin <= step < end for step in self.steps) / (end - begin)


def pid_of(place: str) -> int:
    found = re.search(r"process (\d+)", place)
    assert found is not None
    return int(found[1])


def describe(name: str, run: Run) -> str:
    gaps = run.gaps()
    p99 = gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))]
    return f"{name:12} longest gap of a stream: p50 {statistics.median(gaps):.3f} p99 {p99:.3f} max {gaps[-1]:.3f} s"


def phases(core: EngineCore) -> str:
    return ", ".join(f"{name} {seconds:.2f}" for name, seconds in core.info.start.phases)


def wait_for_standbys(core: EngineCore, executor: RayExecutor) -> float:
    """Seconds until there are standbys, as an engine without work would wait."""
    began = time.monotonic()
    while executor.standbys is not None and not executor.standbys.places and time.monotonic() < began + STANDBYS_S:
        core.watch()
        time.sleep(0.1)
    return time.monotonic() - began


def measure(core: EngineCore, executor: RayExecutor, args: argparse.Namespace) -> bool:
    """Whether all streams ended as they should."""
    report, good = core.info.start, True
    print(f"start: {phases(core)} s")
    for rank, ready in enumerate(report.ready):
        memory = ready.memory
        sizes = [f"{value / MIB:,.0f}" for value in (memory.weights, memory.kv_cache, memory.in_use)]
        print(f"rank {rank}: weights {sizes[0]}, KV cache {sizes[1]}, device in use {sizes[2]} MiB")
    print("standbys:", ", ".join(f"{taken / MIB:,.0f} MiB" for taken in report.standbys) or "none", flush=True)
    Run(core, args, 0, None)  # warms up what is left
    undisturbed = Run(core, args, 1, None)
    print(describe("undisturbed", undisturbed), flush=True)
    for number, name in enumerate(args.signal, 2):
        run = Run(core, args, number, signal.Signals[f"SIG{name}"])
        recovered = core.stats().recovery_seconds
        back = min((times for times in run.steps if times > run.sent), default=run.sent)
        print(describe(name, run))
        print(f"{'':12} phases: {phases(core)} s; all recoveries {recovered:.2f} s")
        print(
            f"{'':12} the step with the recovery ended {back - run.sent:.3f} s after the signal; steps/s in the second "
            f"before {run.rate(run.sent - 1, run.sent):.0f}, in the next three after "
            + ", ".join(f"{run.rate(back + i, back + i + 1):.0f}" for i in range(3))
        )
        same = [tokens == other for tokens, other in zip(run.tokens.values(), undisturbed.tokens.values(), strict=True)]
        print(f"{'':12} {len(run.failed())} failed; {sum(same)} of {len(same)} outputs as without the signal")
        good = good and not run.failed() and (all(same) or not args.deterministic)
        print(f"{'':12} new standbys {wait_for_standbys(core, executor):.1f} s later", flush=True)
    core.check_integrity()
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="configs/models/llama-3.1-8b")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=512)
    parser.add_argument("--signal", nargs="+", choices=["KILL", "STOP"], default=["KILL", "STOP"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--standby-ranks", default="auto")
    parser.add_argument("--limit", type=float, default=150.0)
    args = parser.parse_args()
    end_after(args.limit)
    options = {
        "model": args.model,
        "tensor_parallel_size": args.tp,
        "executor": "ray",
        "device": args.device,
        "deterministic": args.deterministic,
        "standby_ranks": args.standby_ranks,
        "skip_tokenizer_init": True,
        "load_format": "auto" if list(Path(args.model).glob("*.safetensors")) else "dummy",
    }
    owns_ray = connect_to_ray()
    config = resolve(make_config(EngineConfig, options), ray.cluster_resources().get("GPU", 0))
    executor = RayExecutor(config, owns_ray=owns_ray)
    core = start_resolved_engine(config, executor)
    try:
        good = measure(core, executor, args)
    finally:
        core.shutdown()
    sys.exit(not good)


if __name__ == "__main__":
    main()
