"""Inter-token latency of running streams while a long prompt arrives: chunks of fixed length against target_itl_ms.

    python benchmarks/long_prompt.py --model configs/models/llama-3.1-8b [--targets 0 30] [--chunk 8192] [--streams 32]
        [--prompt-len 32000] [--prompts 3]

For each target (0: none, so that chunks have max_num_batched_tokens) the streams run until they are steady, then long
prompts come one after the other. Printed are percentiles of the time between two results of the streams while a prompt
is computed, and the prompts' mean time to first token.
"""

from __future__ import annotations

import argparse
import random
import time

from rayllm.api.sampling_params import SamplingParams
from rayllm.api.types import Abort, GenerationRequest
from rayllm.config.options import EngineConfig, make_config
from rayllm.engine.build import start_engine
from rayllm.engine.engine import EngineCore

STREAM_PROMPT = 64
WARM_STEPS = 100


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def add(core: EngineCore, name: str, length: int, max_tokens: int, rng: random.Random) -> None:
    ids = [rng.randrange(3, core.info.vocab_size) for _ in range(length)]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    core.add(GenerationRequest(request_id=name, prompt_token_ids=ids, params=params))


def latencies(core: EngineCore, args: argparse.Namespace) -> tuple[list[float], list[float]]:
    """(seconds between results of the streams while a long prompt is computed, each prompt's time to first token)."""
    rng = random.Random(0)
    between: list[float] = []
    first_tokens = []
    for i in range(args.streams):
        add(core, f"stream {i}", STREAM_PROMPT, args.stream_len, rng)
    for _ in range(WARM_STEPS):
        core.step()
    for i in range(args.prompts):
        add(core, f"long {i}", args.prompt_len, 1, rng)
        started = last = time.perf_counter()
        done = False
        while not done:
            deltas = core.step()
            if deltas:
                now = time.perf_counter()
                between.append(now - last)
                last = now
            done = any(delta.request_id == f"long {i}" for delta in deltas)
        first_tokens.append(time.perf_counter() - started)
        if core.stats().num_running < args.streams:
            raise SystemExit(f"streams ended before the prompts; --stream-len {args.stream_len} is too short")
    core.abort([Abort(f"stream {i}") for i in range(args.streams)])
    while core.has_work():
        core.step()
    return between, first_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--targets", type=float, nargs="+", default=[0.0, 30.0], help="target_itl_ms; 0 for none")
    parser.add_argument("--chunk", type=int, default=8192, help="max_num_batched_tokens")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--stream-len", type=int, default=2000, help="tokens that a stream generates at most")
    parser.add_argument("--prompt-len", type=int, default=32000)
    parser.add_argument("--prompts", type=int, default=3)
    args = parser.parse_args()
    for target in args.targets:
        core = start_engine(
            make_config(
                EngineConfig,
                {
                    "model": args.model,
                    "load_format": args.load_format,
                    "device": args.device,
                    "dtype": args.dtype,
                    "tensor_parallel_size": args.tp,
                    "max_num_batched_tokens": args.chunk,
                    "max_num_seqs": args.streams + 1,
                    "target_itl_ms": target or None,
                    "skip_tokenizer_init": True,
                    "enable_prefix_caching": False,
                },
            )
        )
        between, first_tokens = latencies(core, args)
        core.shutdown()
        print(
            f"target {target or 'none':>5} ms: between tokens p50 {percentile(between, 0.5) * 1e3:.1f} ms, p99 "
            f"{percentile(between, 0.99) * 1e3:.1f} ms, most {max(between) * 1e3:.1f} ms in {len(between)} steps; "
            f"time to first token of a prompt {sum(first_tokens) / len(first_tokens):.2f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
