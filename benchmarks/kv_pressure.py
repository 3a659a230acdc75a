"""What an engine does when its KV pool is too small: oversubscription by preemption mode, and chats over two tiers.

    python benchmarks/kv_pressure.py oversubscribed [--factors 1.5 2 3] [--modes recompute swap cost] [engine options]
    python benchmarks/kv_pressure.py chats [--users 32] [--turns 8] [--document 0] [--working-set 2]
        [--swap-spaces 0 16]
    python benchmarks/kv_pressure.py no-reuse [--swap-spaces 0 16]

oversubscribed: requests that all arrive at once, through pools that hold 1/factor of what they need together; output
tokens a second and latencies until the last token. chats: users take turns in order, each turn adds a message and the
answer to the history, which begins with a document of so many tokens; time to first token of the turns after the first,
with and without host memory, over pools that hold 1/working-set of all histories. no-reuse: distinct prompts only,
where the second tier can but cost.

Engine options: --model, --dtype, --device, --load-format (dummy by default), --tp.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import NamedTuple

from rayllm.api.sampling_params import SamplingParams
from rayllm.api.types import EngineStats, GenerationRequest
from rayllm.config.options import BUNDLED_MODEL, EngineConfig, make_config
from rayllm.engine.build import start_engine
from rayllm.engine.engine import EngineCore

BLOCK_SIZE = 16


class Job(NamedTuple):
    """A request: prompt and how many tokens it generates."""

    name: str
    prompt: list[int]
    max_tokens: int


class Run(NamedTuple):
    """seconds: of the whole. first, last: seconds from the start to each request's first and last token."""

    seconds: float
    first: list[float]
    last: list[float]
    outputs: list[list[int]]


def run(core: EngineCore, jobs: list[Job]) -> Run:
    """Run requests that arrive together to their end."""
    index = {job.name: i for i, job in enumerate(jobs)}
    first, last = [0.0] * len(jobs), [0.0] * len(jobs)
    outputs: list[list[int]] = [[] for _ in jobs]
    started = time.perf_counter()
    for job in jobs:
        params = SamplingParams(temperature=0.0, max_tokens=job.max_tokens, ignore_eos=True)
        core.add(GenerationRequest(request_id=job.name, prompt_token_ids=job.prompt, params=params))
    while core.has_work():
        deltas = core.step()
        now = time.perf_counter() - started
        for delta in deltas:
            i = index[delta.request_id]
            if delta.token_ids and not outputs[i]:
                first[i] = now
            outputs[i] += delta.token_ids
            last[i] = now
    return Run(time.perf_counter() - started, first, last, outputs)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def blocks_of(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


def make_core(args: argparse.Namespace, **options: object) -> EngineCore:
    given = {
        "model": args.model,
        "dtype": args.dtype,
        "device": args.device,
        "load_format": args.load_format,
        "tensor_parallel_size": args.tp,
        "skip_tokenizer_init": True,
        "block_size": BLOCK_SIZE,
    }
    return start_engine(make_config(EngineConfig, {**given, **options}))


def random_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(4000) for _ in range(count)]


def moved(stats: EngineStats) -> str:
    return (
        f"{stats.num_preemptions:>5} preemptions, {stats.num_swap_preemptions:>5} by swap, "
        f"{stats.swapped_out_blocks:>7} blocks out, {stats.swapped_in_blocks:>7} in"
    )


def oversubscribed(args: argparse.Namespace) -> None:
    """Throughput and latency by factor and mode."""
    rng = random.Random(0)
    low, high = args.input_len // 2, args.input_len
    jobs = [
        Job(str(i), random_ids(rng, rng.randint(low, high)), rng.randint(args.output_len // 2, args.output_len))
        for i in range(args.requests)
    ]
    needed = sum(blocks_of(len(job.prompt) + job.max_tokens) for job in jobs)
    longest = max(len(job.prompt) + job.max_tokens for job in jobs)
    for factor in args.factors:
        for mode in args.modes:
            core = make_core(
                args,
                preemption_mode=mode,
                num_gpu_blocks_override=max(blocks_of(longest), int(needed / factor)),
                max_model_len=longest,
                max_num_seqs=args.requests,
                swap_space=args.swap_space,
                enable_prefix_caching=not args.no_prefix_caching,
            )
            run(core, [Job("warm", random_ids(rng, low), 8)])
            result = run(core, jobs)
            core.check_integrity()
            tokens = sum(map(len, result.outputs))
            print(
                f"{factor:>4}x {mode:<9} {tokens / result.seconds:>9.1f} tok/s, latency mean "
                f"{sum(result.last) / len(jobs):>7.2f} s, p99 {percentile(result.last, 0.99):>7.2f} s; "
                f"{moved(core.stats())}",
                flush=True,
            )
            core.shutdown()


def chats(args: argparse.Namespace) -> None:
    """Time to first token of later turns, by host memory."""
    length = args.document + args.turns * (args.input_len + args.output_len)
    blocks = int(args.users * blocks_of(length) / args.working_set)
    for swap_space in args.swap_spaces:
        core = make_core(
            args, num_gpu_blocks_override=blocks, max_model_len=length, max_num_seqs=args.users, swap_space=swap_space
        )
        rng = random.Random(0)
        run(core, [Job("warm", random_ids(rng, args.input_len), 8)])
        histories = [random_ids(rng, args.document) for _ in range(args.users)]
        turns: list[list[float]] = [[] for _ in range(args.turns)]
        for turn, first in enumerate(turns):
            for user, history in enumerate(histories):
                history += random_ids(rng, args.input_len)
                result = run(core, [Job(f"{user}/{turn}", list(history), args.output_len)])
                history += result.outputs[0]
                first += result.first
        stats = core.stats()
        core.check_integrity()
        core.shutdown()
        later = [value for first in turns[1:] for value in first]
        by_turn = " ".join(f"{sum(first) / len(first) * 1e3:.1f}" for first in turns[1:])
        print(
            f"swap_space {swap_space:g} GiB: time to first token mean {sum(later) / len(later) * 1e3:.1f} ms, p99 "
            f"{percentile(later, 0.99) * 1e3:.1f} ms, by turn {by_turn}; "
            f"of {stats.prefix_cache_queries} tokens looked up "
            f"{stats.prefix_cache_hits - stats.cpu_prefix_cache_hits} were on the device, "
            f"{stats.cpu_prefix_cache_hits} on the host",
            flush=True,
        )


def no_reuse(args: argparse.Namespace) -> None:
    """Throughput of prompts that have nothing in common, by host memory."""
    length = args.input_len + args.output_len
    for swap_space in args.swap_spaces:
        core = make_core(
            args,
            num_gpu_blocks_override=blocks_of(length) * max(2, args.users // 2),
            max_model_len=length,
            max_num_seqs=args.users,
            swap_space=swap_space,
        )
        rng = random.Random(0)
        rates = []
        for turn in range(args.turns):
            jobs = [Job(f"{turn}/{i}", random_ids(rng, args.input_len), args.output_len) for i in range(args.users)]
            result = run(core, jobs)
            rates.append(args.users * length / result.seconds)
        print(
            f"swap_space {swap_space:g} GiB: {percentile(rates[1:] or rates, 0.5):.1f} tok/s in and out, median of "
            f"{max(1, len(rates) - 1)} runs; {moved(core.stats())}",
            flush=True,
        )
        core.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=["oversubscribed", "chats", "no-reuse"])
    parser.add_argument("--model", default=BUNDLED_MODEL)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--input-len", type=int, default=256, help="of a prompt, at most, or of a chat message")
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--factors", type=float, nargs="+", default=[1.5, 2.0, 3.0])
    parser.add_argument("--modes", nargs="+", default=["recompute", "swap", "cost"])
    parser.add_argument("--swap-space", type=float, default=4.0)
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument("--users", type=int, default=32)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--document", type=int, default=0, help="tokens that each chat begins with")
    parser.add_argument("--working-set", type=float, default=2.0, help="all histories, in device pools")
    parser.add_argument("--swap-spaces", type=float, nargs="+", default=[0.0, 4.0])
    args = parser.parse_args()
    {"oversubscribed": oversubscribed, "chats": chats, "no-reuse": no_reuse}[args.workload](args)


if __name__ == "__main__":
    main()
