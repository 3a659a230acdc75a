"""Do other streams notice when hard schemas compile? Inter-token latency before and meanwhile. CPU, bundled model.

    python benchmarks/structured.py [--streams 8] [--schemas 10]

The engine runs in a thread, as behind the HTTP API, with a core less than there are for its OpenMP threads. A schema is
hard in having many long enumerations, patterns and nested objects, all different; the time that compiling them took,
one after the other or two at a time as the engine does it, is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import statistics
import string
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from rayllm.config import EngineConfig
from rayllm.engine.core import build_engine_core
from rayllm.engine.driver import EngineDriver
from rayllm.sampling_params import SamplingParams, StructuredOutputs
from rayllm.types import GenerationRequest, TokenDelta

BASE_SECONDS = 15.0


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
        kinds = [
            {"enum": [word(rng.randrange(8, 24)) for _ in range(60)]},
            {"type": "string", "pattern": f"^({word(3)}|{word(4)})-[0-9]{{2,9}}(\\.[a-f]{{1,{number + 3}}}){{0,4}}$"},
            {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 1, "maxItems": 12},
            {"type": "string", "format": rng.choice(["date-time", "email", "uuid", "ipv6"])},
        ]  # fmt: skip
        return kinds[number % len(kinds)]

    def node(depth: int) -> dict[str, Any]:
        names = [word(8) for _ in range(8)]
        properties = {name: node(depth - 1) if depth and i < 2 else leaf(i) for i, name in enumerate(names)}
        return {"type": "object", "properties": properties, "required": names[:5], "additionalProperties": False}

    return json.dumps(node(3))


def percentiles(gaps: list[float]) -> str:
    ordered = sorted(gaps)
    return f"mean {statistics.mean(ordered) * 1e3:.2f}, p50 {ordered[len(ordered) // 2] * 1e3:.2f}, " + (
        f"p99 {ordered[int(len(ordered) * 0.99)] * 1e3:.2f} ms ({len(ordered)} tokens)"
    )


def timed(work: Callable[[], None]) -> tuple[float, float]:
    start = time.perf_counter()
    work()
    return start, time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--schemas", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(max((os.cpu_count() or 1) - 1, 1))
    driver = EngineDriver(build_engine_core(EngineConfig(device="cpu", max_num_seqs=64)))
    driver.start()
    try:
        streams = Streams(driver, args.streams)

        def ask(schemas: list[str]) -> None:
            for i, schema in enumerate(schemas):
                structure = StructuredOutputs(json=schema)
                # One token: what is measured is the compilation, not how a constrained sequence runs.
                params = SamplingParams(max_tokens=1, structured_outputs=structure)
                request = GenerationRequest(request_id=f"schema {i}", prompt_token_ids=[5, 6, 7], params=params)
                driver.add(streams, request)
            for _ in schemas:
                delta = streams.finished.get(timeout=120)
                if delta.finish_reason == "error":
                    raise SystemExit(f"a schema was refused: {delta.stop_reason}")

        ask([hard_schema(0)])  # starts the processes that try grammars
        time.sleep(3.0)
        base = timed(lambda: threading.Event().wait(BASE_SECONDS))
        compiling = timed(lambda: ask([hard_schema(1 + i) for i in range(args.schemas)]))
        after = timed(lambda: threading.Event().wait(BASE_SECONDS))
        gaps = streams.gaps.copy()
    finally:
        driver.shutdown()
    size = len(hard_schema(1))
    print(
        f"{args.streams} streams; {args.schemas} schemas of about {size} bytes in {compiling[1] - compiling[0]:.2f} s"
    )
    for name, (start, end) in (("before", base), ("compiling", compiling), ("after", after)):
        print(f"{name}: {percentiles([gap for at, gap in gaps if start <= at < end])}")


if __name__ == "__main__":
    main()
