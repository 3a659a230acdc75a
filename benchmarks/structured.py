"""Do other streams notice when hard schemas compile? Inter-token latency before and meanwhile, of the bundled model.

    python benchmarks/structured.py [--streams 8] [--schemas 10] [--rounds 12] [--device cpu]

The engine runs in a thread, as behind the HTTP API, with a core less than there are for its OpenMP threads. A schema is
hard in having many long enumerations, patterns and nested objects, all different. In every round new ones come, all at
once, between a time without and one with as many requests without schemas, so that what changes slowly, like the
lengths of the contexts or the machine's speed, is in all three alike. A change is that of the mean against the time
without in the same round: the median over the rounds, and its quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import statistics
import string
import time
from collections.abc import Sequence
from typing import Any

import torch

from rayllm.api.sampling_params import SamplingParams, StructuredOutputs
from rayllm.api.types import GenerationRequest, TokenDelta
from rayllm.config.options import EngineConfig
from rayllm.engine.build import start_engine
from rayllm.engine.driver import EngineDriver

BASE_SECONDS = 2.0


class Streams:
    """A front whose completions go on for ever. gaps: seconds between two tokens of a completion, with their times."""

    def __init__(self, driver: EngineDriver, count: int):
        self.gaps: list[tuple[float, float]] = []
        self.finished: queue.SimpleQueue[TokenDelta] = queue.SimpleQueue()
        self._driver = driver
        self._last: dict[str, float] = {}
        self._serial = 0
        driver.attach(self)
        for _ in range(count):
            self._begin()

    def _begin(self) -> None:
        self._serial += 1
        params = SamplingParams(max_tokens=1500, ignore_eos=True, temperature=0.6)
        prompt = [4 + (self._serial * 7 + i) % 240 for i in range(32)]
        self._driver.add(
            self, GenerationRequest(request_id=f"stream {self._serial}", prompt_token_ids=prompt, params=params)
        )

    def deliver(self, deltas: list[TokenDelta]) -> None:
        now = time.perf_counter()
        for delta in deltas:
            if not delta.request_id.startswith("stream"):
                if delta.finish_reason is not None:
                    self.finished.put(delta)
                continue
            if (last := self._last.get(delta.request_id)) is not None:
                self.gaps.append((now, now - last))
            self._last[delta.request_id] = now
            if delta.finish_reason is not None:
                del self._last[delta.request_id]
                self._begin()

    def dead(self, reason: str) -> None:
        print(f"the engine ended: {reason}")


def hard_schema(seed: int) -> str:
    """An object of objects with enumerations, patterns and bounded lists."""
    rng = random.Random(seed)

    def word(length: int) -> str:
        return "".join(rng.choices(string.ascii_lowercase, k=length))

    def leaf(number: int) -> dict[str, Any]:
        kinds: list[dict[str, Any]] = [
            {"enum": [word(rng.randrange(8, 24)) for _ in range(60)]},
            {"type": "string", "pattern": f"^({word(3)}|{word(4)})-[0-9]{{2,9}}(\\.[a-f]{{1,{number + 3}}}){{0,4}}$"},
            {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 1, "maxItems": 12},
            {"type": "string", "format": rng.choice(["date-time", "email", "uuid", "ipv6"])},
        ]
        return kinds[number % len(kinds)]

    def node(depth: int) -> dict[str, Any]:
        names = [word(8) for _ in range(8)]
        properties = {name: node(depth - 1) if depth and i < 2 else leaf(i) for i, name in enumerate(names)}
        return {"type": "object", "properties": properties, "required": names[:5], "additionalProperties": False}

    return json.dumps(node(3))


def row(name: str, rounds: list[list[float]], base: list[float]) -> str:
    """rounds: gaps in seconds. base: each round's mean without anything else."""
    ordered = sorted(gap for gaps in rounds for gap in gaps)
    mean, p50, p99 = (
        value * 1e3
        for value in (statistics.mean(ordered), ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)])
    )
    changes = [statistics.mean(gaps) / alone - 1 for gaps, alone in zip(rounds, base, strict=True)]
    low, median, high = statistics.quantiles(changes, n=4)
    change = f"{median:+.0%} ({low:+.0%} to {high:+.0%})"
    return f"| {name} | {change} | {mean:.2f} ms | {p50:.2f} ms | {p99:.2f} ms | {len(ordered)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--schemas", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    args = parser.parse_args()
    torch.set_num_threads(max((os.cpu_count() or 1) - 1, 1))
    seeds = iter(range(1 + args.rounds * args.schemas))
    rounds = [[hard_schema(next(seeds)) for _ in range(args.schemas)] for _ in range(args.rounds)]
    driver = EngineDriver(start_engine(EngineConfig(device=args.device, max_num_seqs=64)))
    try:
        streams = Streams(driver, args.streams)

        def ask(schemas: Sequence[str | None]) -> None:
            for i, schema in enumerate(schemas):
                structure = None if schema is None else StructuredOutputs(json=schema)
                # One token: what is measured is the compilation, not how a constrained sequence runs.
                params = SamplingParams(max_tokens=1, structured_outputs=structure)
                request = GenerationRequest(request_id=f"schema {i}", prompt_token_ids=[5, 6, 7], params=params)
                driver.add(streams, request)
            for _ in schemas:
                delta = streams.finished.get(timeout=120)
                if delta.finish_reason == "error":
                    raise SystemExit(f"a schema was refused: {delta.stop_reason}")

        ask([hard_schema(next(seeds))])  # starts the processes that try grammars
        time.sleep(3.0)
        periods: dict[str, list[tuple[float, float]]] = {"nothing else": [], "schemas compile": [], "no schemas": []}
        for schemas in rounds:
            time.sleep(0.5)
            start = time.perf_counter()
            time.sleep(BASE_SECONDS)
            periods["nothing else"].append((start, time.perf_counter()))
            start = time.perf_counter()
            ask(schemas)
            periods["schemas compile"].append((start, time.perf_counter()))
            time.sleep(0.5)
            start = time.perf_counter()
            ask([None] * args.schemas)
            time.sleep(BASE_SECONDS)
            periods["no schemas"].append((start, time.perf_counter()))
        gaps = streams.gaps.copy()
    finally:
        driver.shutdown()
    compiling = statistics.mean(end - start for start, end in periods["schemas compile"])
    print(
        f"{args.streams} streams; {args.rounds} times {args.schemas} schemas of about {len(rounds[0][0])} bytes, "
        f"{compiling:.2f} s each time on average"
    )
    within = {
        name: [[gap for at, gap in gaps if start <= at < end] for start, end in times]
        for name, times in periods.items()
    }
    base = [statistics.mean(alone) for alone in within["nothing else"]]
    print("| meanwhile | change | mean | p50 | p99 | tokens |\n|---|---|---|---|---|---|")
    for name, values in within.items():
        print(row(name, values, base))


if __name__ == "__main__":
    main()
