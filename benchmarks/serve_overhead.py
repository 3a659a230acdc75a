"""What HTTP adds to the engine, beside what a bare Ray Serve stream of the same events takes. By default the bundled
model on the CPU.

    python benchmarks/serve_overhead.py [--clients 1 16 64] [--config FILE] [--ingress auto]

One after the other on one machine, with so many requests in flight: the engine alone, in this process, with as many
OpenMP threads as a served one has (a core is left to the fronts); the whole stack, `rayllm launch` and its API; a Serve
deployment that sends events recorded from that API, as far apart as the engine makes tokens at that load. "added" is
the stack's time to the first token less the engine's and the bare stream's.

FILE holds options of `rayllm launch`, those of the engine alone: configs/llama-3.1-8b-dummy.yaml, say; a model without
weights gets a tokenizer of made-up words, so that there is text to stream.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import secrets
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import torch
import yaml
from http_load import completion_bodies, first_model, run_load, warm_up
from launched_server import free_port, launched, with_tokenizer
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from rayllm import LLM, SamplingParams
from rayllm.api.types import GenerationRequest

PROMPT_TOKENS, TOKENS, VOCAB_SIZE = 32, 64, 250
MAX_NUM_SEQS = 64


class Times(NamedTuple):
    """Median milliseconds: until the first token (or event), and from one to the next; how many requests failed."""

    first: float
    gap: float
    failed: int = 0


def num_requests(clients: int) -> int:
    return max(50, 4 * clients)


def engine_times(core: Any, clients: int) -> Times:
    """The engine's own, with the next request added when one ends."""
    rng = random.Random(clients)
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.6)
    left = num_requests(clients)
    started: dict[str, float] = {}
    last: dict[str, float] = {}
    firsts: list[float] = []
    gaps: list[float] = []

    def add() -> None:
        nonlocal left
        name = f"{clients} {left}"
        left -= 1
        prompt = [rng.randrange(4, 250) for _ in range(PROMPT_TOKENS)]
        started[name] = time.perf_counter()
        core.add(GenerationRequest(request_id=name, prompt_token_ids=prompt, params=params))

    for _ in range(clients):
        add()
    while core.has_work():
        deltas, now = core.step(), time.perf_counter()
        for delta in deltas:
            if not delta.token_ids:
                continue
            name = delta.request_id
            if name in last:
                gaps.append(now - last[name])
            else:
                firsts.append(now - started[name])
            last[name] = now
            if delta.finish_reason is not None and left:
                add()
    return Times(statistics.median(firsts) * 1e3, statistics.median(gaps) * 1e3)


def http_times(url: str, clients: int) -> Times:
    """As a client sees them."""
    model, run = first_model(url), secrets.randbelow(2**31)  # new prompts, so that none is in the prefix cache

    def bodies(count: int, run: int) -> list[dict[str, Any]]:
        return completion_bodies(model, count, PROMPT_TOKENS, TOKENS, run=run, vocab_size=VOCAB_SIZE)

    warm_up(url, bodies(min(clients, 8), -1 - run))
    samples = run_load(url, bodies(num_requests(clients), run), concurrency=clients)
    good = [sample for sample in samples if sample.failure is None]
    firsts = [sample.first - sample.sent for sample in good if sample.first is not None]
    gaps = [gap for sample in good for gap in sample.gaps]
    return Times(statistics.median(firsts) * 1e3, statistics.median(gaps) * 1e3, len(samples) - len(good))


def record_events(url: str) -> list[bytes]:
    """The events of one stream of TOKENS tokens."""
    (body,) = completion_bodies(first_model(url), 1, PROMPT_TOKENS, TOKENS, run=0, vocab_size=VOCAB_SIZE)
    text = httpx.post(f"{url}/v1/completions", json=body, timeout=60).content
    return [event + b"\n\n" for event in text.split(b"\n\n") if event.strip()]


@contextmanager
def served(options: dict[str, Any]) -> Iterator[str]:
    """The address of the whole stack, with an engine of these options."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(options, file)
        file.flush()
        with launched("--config", file.name) as (url, _):
            yield url


def bare_times(events: list[bytes], gaps: dict[int, float]) -> dict[int, Times]:
    """A Serve deployment that sends `events`; gaps: clients -> milliseconds between two."""
    import ray
    from ray import serve
    from ray.serve.config import HTTPOptions

    @serve.deployment(max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0})
    class Bare:
        def __init__(self, events: list[bytes]):
            self.events, self.gap = events, 0.0

        async def __call__(self, request: Request) -> Response:
            if request.method == "GET":
                return JSONResponse({"object": "list", "data": [{"id": "bare", "object": "model"}]})
            body = await request.json()
            if request.url.path == "/gap":
                self.gap = float(body)
                return JSONResponse(self.gap)
            return StreamingResponse(self.send(), media_type="text/event-stream")

        async def send(self) -> AsyncIterator[bytes]:
            due = time.monotonic()
            for event in self.events:
                yield event
                due += self.gap
                await asyncio.sleep(max(0.0, due - time.monotonic()))

    port = free_port()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port))
        serve.run(Bare.bind(events), name="bare", route_prefix="/")  # type: ignore[attr-defined]
        url, found = f"http://127.0.0.1:{port}", {}
        for clients, gap in gaps.items():
            httpx.post(f"{url}/gap", json=gap / 1e3).raise_for_status()
            found[clients] = http_times(url, clients)
        return found
    finally:
        serve.shutdown()
        ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--config", help="YAML file of engine options")
    parser.add_argument("--ingress", default="auto", help="of the whole stack, as `rayllm launch` takes it")
    args = parser.parse_args()
    clients = args.clients
    options = {"device": "cpu"} if args.config is None else yaml.safe_load(Path(args.config).read_text())
    options["max_num_seqs"] = MAX_NUM_SEQS
    torch.set_num_threads(max((os.cpu_count() or 1) - 1, 1))
    with tempfile.TemporaryDirectory() as folder:
        if options.get("load_format") == "dummy":
            options |= {"model": with_tokenizer(options["model"], folder), "skip_tokenizer_init": False}
        with LLM(**options) as llm:
            core = llm.engine
            engine_times(core, 4)  # warm
            engine = {count: engine_times(core, count) for count in clients}
        with served(options | {"ingress": args.ingress}) as url:
            http_times(url, 4)
            stack = {count: http_times(url, count) for count in clients}
            events = record_events(url)
    bare = bare_times(events, {count: engine[count].gap for count in clients})
    print("| clients | engine: first, gap | bare Serve | whole stack | added to first | failed |")
    print("|---|---|---|---|---|---|")
    for count in clients:
        added = stack[count].first - engine[count].first - bare[count].first
        cells = [f"{each[count].first:.1f}, {each[count].gap:.2f} ms" for each in (engine, bare, stack)]
        print(f"| {count} | {' | '.join(cells)} | {added:.1f} ms | {stack[count].failed + bare[count].failed} |")


if __name__ == "__main__":
    main()
