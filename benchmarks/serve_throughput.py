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
import math
import multiprocessing
import random
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from http_load import arrival_times, completion_bodies, first_model, run_load, warm_up
from launched_server import launched, with_tokenizer

from rayllm import SamplingParams
from rayllm.api.types import GenerationRequest

WARM_UP = 8  # requests of each client process before the measurement
START_LIMIT_S = 300.0  # until all client processes have started and warmed up


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


class Part(NamedTuple):
    """The part of a load that one client process sends."""

    url: str
    num_requests: int
    concurrency: int | None
    rate: float | None
    input_len: int
    output_len: int
    seed: int  # of its prompts and times


class Share(NamedTuple):
    """What one client process saw."""

    start: float  # seconds since the epoch, as `end`
    end: float
    tokens: int  # of all answers
    chunks: int  # of all streams, with tokens in them
    first_tokens: list[float]  # seconds from each request to its first token
    failures: list[str]  # what went wrong with each request that failed


def one_client(part: Part, barrier: Any) -> Share:
    """Send a part of the load, together with the processes that send the other ones."""
    model = first_model(part.url)

    def bodies(count: int, run: int) -> list[dict[str, Any]]:
        return completion_bodies(model, count, part.input_len, part.output_len, run=run)

    warm_up(part.url, bodies(WARM_UP, -1 - part.seed))
    load = bodies(part.num_requests, part.seed)
    due = None if part.rate is None else arrival_times(part.rate, len(load), part.seed)
    barrier.wait(START_LIMIT_S)
    samples = run_load(part.url, load, concurrency=part.concurrency, due=due)
    end = time.time()
    start = end - max(sample.ended for sample in samples)
    failures = [
        sample.failure or f"the answer has {sample.output_tokens} of {part.output_len} tokens"
        for sample in samples
        if sample.failure is not None or sample.output_tokens != part.output_len
    ]
    first_tokens = [sample.first - sample.sent for sample in samples if sample.first is not None]
    chunks = sum(len(sample.gaps) + 1 for sample in samples)
    return Share(start, end, sum(sample.output_tokens for sample in samples), chunks, first_tokens, failures)


class Served(NamedTuple):
    """What all clients together saw of one load."""

    rate: float  # output tokens a second
    chunks: float  # chunks of the streams a token
    first_tokens: list[float]  # seconds from each request to its first token, ascending
    failures: list[str]  # what went wrong with each request that failed


def quantile(ascending: list[float], share: float) -> float:
    return ascending[int(share * (len(ascending) - 1))] if ascending else math.nan


def http_rate(url: str, case: Case, args: argparse.Namespace, run: int) -> Served:
    """What clients see over HTTP; one process sends what comes at random times. run: makes prompts of its own.

    args: `clients`, the most processes that send; `input_len` and `output_len` of a request in tokens.
    """
    in_flight = case.concurrency or 1
    count = max(each for each in range(1, args.clients + 1) if in_flight % each == 0)
    parts = [
        Part(
            url,
            case.num_requests // count,
            None if case.concurrency is None else case.concurrency // count,
            None if case.rate is None else case.rate / count,
            args.input_len,
            args.output_len,
            seed_of(run) + i,
        )
        for i in range(count)
    ]
    if count == 1:
        seen = [one_client(parts[0], threading.Barrier(1))]
    else:
        context = multiprocessing.get_context("spawn")
        with context.Manager() as manager, ProcessPoolExecutor(count, mp_context=context) as pool:
            barrier = manager.Barrier(count)
            seen = list(pool.map(one_client, parts, [barrier] * count))
    seconds = max(share.end for share in seen) - min(share.start for share in seen)
    tokens = sum(share.tokens for share in seen)
    chunks = sum(share.chunks for share in seen)
    first_tokens = sorted(second for share in seen for second in share.first_tokens)
    failures = [failure for share in seen for failure in share.failures]
    return Served(tokens / seconds, chunks / max(tokens, 1), first_tokens, failures)


def main() -> None:
    from rayllm import LLM  # with torch, which the processes that send need not import

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
            core = llm.engine
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
                "| requests | engine alone | over HTTP | ratio | first token p50, p99 | chunks a token | failed |\n"
                "|---|---|---|---|---|---|---|"
            )
            for case, engine, http in zip(cases, alone, served, strict=True):
                p50, p99 = (1000 * quantile(http.first_tokens, share) for share in (0.5, 0.99))
                print(
                    f"| {case} | {engine:,.0f} tokens/s | {http.rate:,.0f} | {http.rate / engine:.2f} | "
                    f"{p50:.1f}, {p99:.1f} ms | {http.chunks:.2f} | {len(http.failures)} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
