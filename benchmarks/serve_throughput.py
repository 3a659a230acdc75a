"""Output tokens a second over HTTP, against the engine alone on the same requests.

    python benchmarks/serve_throughput.py --config FILE [--concurrency 1 64 256] [--rate 20] [--clients 8]
        [--ingress serve haproxy] [--num-api-servers 4]

FILE holds options of `rayllm launch`, those of the engine alone: configs/llama-3.1-8b-dummy.yaml, say. One after the
other on one machine, with so many requests in flight, and with requests that come at random times, `rate` a second on
average: the engine alone, in this process; the whole stack, by each ingress. Requests have --input-len and --output-len
tokens. The load over HTTP comes from several processes, since one that reads all streams would be what is measured.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from launched_server import launched

from rayllm import LLM, SamplingParams
from rayllm.bench_serve_client import run_load
from rayllm.bench_serve_load import arrival_times, bench_options
from rayllm.types import GenerationRequest

WARM_UP = 8


class Case(NamedTuple):
    """So many requests: `concurrency` in flight or, if that is None, `rate` a second."""

    num_requests: int
    concurrency: int | None
    rate: float | None

    def __str__(self) -> str:
        return f"{self.concurrency} in flight" if self.concurrency is not None else f"{self.rate:g} a second"


def engine_rate(core: Any, case: Case, args: argparse.Namespace) -> float:
    """Output tokens a second of the engine alone."""
    rng = random.Random(case.num_requests)
    prompts = [[rng.randrange(4096) for _ in range(args.input_len)] for _ in range(case.num_requests)]
    params = SamplingParams(max_tokens=args.output_len, ignore_eos=True, temperature=0.6)
    due = [0.0] * len(prompts) if case.rate is None else arrival_times(case.rate, len(prompts), 0)
    sent = ended = tokens = 0
    started = time.perf_counter()
    while ended < len(prompts):
        now = time.perf_counter() - started
        while sent < len(prompts) and due[sent] <= now and sent - ended < (case.concurrency or len(prompts)):
            core.add(GenerationRequest(request_id=f"{case} {sent}", prompt_token_ids=prompts[sent], params=params))
            sent += 1
        for delta in core.step() if core.has_work() else ():
            tokens += len(delta.token_ids)
            ended += delta.finish_reason is not None
    return tokens / (time.perf_counter() - started)


class Share(NamedTuple):
    """What one client process saw: seconds since the epoch at its start and end, output tokens, failed requests."""

    start: float
    end: float
    tokens: int
    failed: int


def one_client(options: dict[str, Any], barrier: Any, shares: Any) -> None:
    """A process with a part of the load."""
    run_load(bench_options(options | {"num_prompts": 1, "concurrency": 1, "rate": None, "warmup": WARM_UP}))
    barrier.wait()
    _, measured = run_load(bench_options(options | {"warmup": 0}))
    end = time.time()
    start = end - max(sample.ended for sample in measured.samples)
    failed = sum(sample.failure is not None for sample in measured.samples)
    shares.put(Share(start, end, sum(sample.output_tokens for sample in measured.samples), failed))


def http_rate(url: str, case: Case, args: argparse.Namespace) -> tuple[float, int]:
    """(output tokens a second, failed requests) over HTTP, by as many processes as there is work for."""
    count = min(args.clients, case.concurrency or args.clients)
    context = multiprocessing.get_context("spawn")
    barrier, shares = context.Barrier(count), context.Queue()
    options: dict[str, Any] = {"url": url, "input_len": str(args.input_len), "output_len": str(args.output_len)}
    clients = []
    for i in range(count):
        part = {"num_prompts": case.num_requests // count, "seed": i}
        part |= {"rate": case.rate / count} if case.rate else {"concurrency": (case.concurrency or 0) // count}
        clients.append(context.Process(target=one_client, args=(options | part, barrier, shares)))
        clients[-1].start()
    seen = [shares.get() for _ in clients]
    for client in clients:
        client.join()
    seconds = max(share.end for share in seen) - min(share.start for share in seen)
    return sum(share.tokens for share in seen) / seconds, sum(share.failed for share in seen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="YAML file of engine options")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--rate", type=float, default=20.0)
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--clients", type=int, default=8, help="processes that send")
    parser.add_argument("--ingress", nargs="+", default=["haproxy"])
    parser.add_argument("--num-api-servers", type=int, default=4)
    args = parser.parse_args()
    cases = [Case(max(24, 4 * count), count, None) for count in args.concurrency]
    cases.append(Case(int(10 * args.rate), None, args.rate))
    options = yaml.safe_load(Path(args.config).read_text())
    options["max_num_seqs"] = max(args.concurrency)
    with LLM(**options) as llm:
        core = llm._engine()
        engine_rate(core, Case(2 * max(args.concurrency), max(args.concurrency), None), args)  # warm
        alone = [engine_rate(core, case, args) for case in cases]
    for ingress in args.ingress:
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            yaml.safe_dump(options | {"ingress": ingress, "num_api_servers": args.num_api_servers}, file)
            file.flush()
            with launched("--config", file.name) as (url, _):
                http_rate(url, cases[-2], args)  # warm
                served = [http_rate(url, case, args) for case in cases]
        print(f"\ningress {ingress}, {args.num_api_servers} API servers, {args.clients} client processes\n")
        print("| requests | engine alone | over HTTP | ratio | failed |\n|---|---|---|---|---|")
        for case, engine, (rate, failed) in zip(cases, alone, served, strict=True):
            print(f"| {case} | {engine:,.0f} tokens/s | {rate:,.0f} | {rate / engine:.2f} | {failed} |", flush=True)


if __name__ == "__main__":
    main()
