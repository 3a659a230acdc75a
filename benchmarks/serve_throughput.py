"""Output tokens a second over HTTP, against the engine alone on the same requests.

    python benchmarks/serve_throughput.py --config FILE [--concurrency 1 64 256] [--rate 20] [--clients 8]
        [--ingress auto serve] [--num-api-servers 6]

FILE holds options of `rayllm launch`, those of the engine alone: configs/llama-3.1-8b-dummy.yaml, say; a model without
weights gets a tokenizer of made-up words, so that there is text to stream. One after the
other on one machine, with so many requests in flight, and with requests that come at random times, `rate` a second on
average: the engine alone, in this process; the whole stack, by each ingress. Requests have --input-len and --output-len
tokens; no prompt comes twice. A fixed number in flight is sent by several processes, since one that reads all streams
would be what is measured.
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
from launched_server import launched, with_tokenizer

from rayllm import LLM, SamplingParams
from rayllm.api.types import GenerationRequest
from rayllm.bench_serve_client import run_load
from rayllm.bench_serve_load import arrival_times, bench_options

WARM_UP = 8


class Case(NamedTuple):
    """So many requests: `concurrency` in flight or, if that is None, `rate` a second."""

    num_requests: int
    concurrency: int | None
    rate: float | None

    def __str__(self) -> str:
        return f"{self.concurrency} in flight" if self.concurrency is not None else f"{self.rate:g} a second"


def seed_of(run: int) -> int:
    """Of a run's prompts and times; client processes have the next ones."""
    return 1000 * run


def engine_rate(core: Any, case: Case, args: argparse.Namespace, run: int) -> float:
    """Output tokens a second of the engine alone."""
    rng = random.Random(seed_of(run))
    prompts = [[rng.randrange(4096) for _ in range(args.input_len)] for _ in range(case.num_requests)]
    params = SamplingParams(max_tokens=args.output_len, ignore_eos=True, temperature=0.6)
    due = [0.0] * len(prompts) if case.rate is None else arrival_times(case.rate, len(prompts), seed_of(run))
    sent = ended = tokens = 0
    started = time.perf_counter()
    while ended < len(prompts):
        now = time.perf_counter() - started
        while sent < len(prompts) and due[sent] <= now and sent - ended < (case.concurrency or len(prompts)):
            core.add(GenerationRequest(request_id=f"{run} {sent}", prompt_token_ids=prompts[sent], params=params))
            sent += 1
        for delta in core.step() if core.has_work() else ():
            tokens += len(delta.token_ids)
            ended += delta.finish_reason is not None
    return tokens / (time.perf_counter() - started)


class Share(NamedTuple):
    """What one client process saw: seconds since the epoch at its start and end, output tokens, and so on."""

    start: float
    end: float
    tokens: int
    chunks: int
    failed: int


def one_client(options: dict[str, Any], barrier: Any, shares: Any) -> None:
    """A process with a part of the load."""
    run_load(bench_options(options | {"num_prompts": 1, "concurrency": 1, "rate": None, "warmup": WARM_UP}))
    barrier.wait()
    _, measured = run_load(bench_options(options | {"warmup": 0}))
    end = time.time()
    start = end - max(sample.ended for sample in measured.samples)
    failed = sum(sample.failure is not None for sample in measured.samples)
    chunks = sum(len(sample.gaps) + 1 for sample in measured.samples)
    shares.put(Share(start, end, sum(sample.output_tokens for sample in measured.samples), chunks, failed))


class Served(NamedTuple):
    """Of a whole load: output tokens a second, chunks of a stream for each of its tokens, failed requests."""

    rate: float
    chunks: float
    failed: int


def http_rate(url: str, case: Case, args: argparse.Namespace, run: int) -> Served:
    """What clients see over HTTP; one process sends what comes at random times. run: makes prompts of its own."""
    count = min(args.clients, case.concurrency or 1)
    context = multiprocessing.get_context("spawn")
    barrier, shares = context.Barrier(count), context.Queue()
    options: dict[str, Any] = {"url": url, "input_len": str(args.input_len), "output_len": str(args.output_len)}
    clients = []
    for i in range(count):
        part = {"num_prompts": case.num_requests // count, "seed": seed_of(run) + i}
        part |= {"rate": case.rate / count} if case.rate else {"concurrency": (case.concurrency or 0) // count}
        clients.append(context.Process(target=one_client, args=(options | part, barrier, shares)))
        clients[-1].start()
    seen = [shares.get() for _ in clients]
    for client in clients:
        client.join()
    seconds = max(share.end for share in seen) - min(share.start for share in seen)
    tokens = sum(share.tokens for share in seen)
    chunks = sum(share.chunks for share in seen)
    return Served(tokens / seconds, chunks / max(tokens, 1), sum(share.failed for share in seen))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="YAML file of engine options")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--rate", type=float, default=20.0)
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--clients", type=int, default=8, help="processes that send")
    parser.add_argument("--ingress", nargs="+", default=["auto"])
    parser.add_argument("--num-api-servers", type=int, default=6)
    args = parser.parse_args()
    cases = [Case(max(24, 4 * count), count, None) for count in args.concurrency]
    cases.append(Case(int(10 * args.rate), None, args.rate))
    options = yaml.safe_load(Path(args.config).read_text())
    options["max_num_seqs"] = max(args.concurrency)
    with tempfile.TemporaryDirectory() as folder:
        if options.get("load_format") == "dummy":
            options |= {"model": with_tokenizer(options["model"], folder), "skip_tokenizer_init": False}
        with LLM(**options) as llm:
            core = llm._engine()
            engine_rate(core, cases[-2], args, len(cases))  # warm
            alone = [engine_rate(core, case, args, run) for run, case in enumerate(cases)]
        for ingress in args.ingress:
            config = Path(folder) / f"{ingress}.yaml"
            config.write_text(yaml.safe_dump(options | {"ingress": ingress, "num_api_servers": args.num_api_servers}))
            with launched("--config", str(config)) as (url, _):
                http_rate(url, cases[-2], args, len(cases))  # warm
                served = [http_rate(url, case, args, run) for run, case in enumerate(cases)]
            print(f"\ningress {ingress}, {args.num_api_servers} API servers, {args.clients} client processes\n")
            print(
                "| requests | engine alone | over HTTP | ratio | chunks a token | failed |\n|---|---|---|---|---|---|"
            )
            for case, engine, http in zip(cases, alone, served, strict=True):
                print(
                    f"| {case} | {engine:,.0f} tokens/s | {http.rate:,.0f} | {http.rate / engine:.2f} | "
                    f"{http.chunks:.2f} | {http.failed} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
