"""Many streams for a long time, and clients that go away: is all answered, does memory stay flat? CPU, bundled model.

    python benchmarks/serve_soak.py [--streams 200] [--minutes 10]

Each client asks for one stream after the other, of random length. Memory is the sum over all processes of the server,
each shared page counted once. Then 100 clients leave in the middle of their streams, and the time is taken until the
engine has no sequence and no block in use. Exit code 1 if a request failed or something stays in use.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import orjson
from http_load import NO_LIMITS, Sample, complete
from launched_server import launched

LEAVING_CLIENTS = 100

# What is in a process's command line -> its kind. Others are Ray's.
KINDS = {
    ":engine-": "engines",
    ":ApiServer": "API servers",
    "/haproxy ": "ingress",
    "grammar_trial": "processes that try grammars",
    "ray::Directory": "directory",
    "ray::WorkerActor": "ranks and their standbys",
    "ray::IDLE": "Ray: idle workers",
    "rayllm.cli": "launch and its guards",
    "gcs_server": "Ray: GCS",
    "raylet/raylet": "Ray: raylet",
    "ray::ServeController": "Ray: Serve's controller",
}


@dataclass
class Seen:
    """What the clients saw so far."""

    requests: int = 0  # answered
    tokens: int = 0  # of the answers
    failures: Counter[str] = field(default_factory=Counter)  # by what went wrong


def memory_mib(session_id: int) -> dict[str, float]:
    """Proportional set size of a session's processes, by their kinds."""
    sizes: dict[str, float] = defaultdict(float)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[3]) != session_id:
                continue
            command = (stat.parent / "cmdline").read_text().replace("\0", " ")
            rollup = (stat.parent / "smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        match = re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)
        kind = next((kind for text, kind in KINDS.items() if text in command), "Ray: others")
        sizes[kind] += int(match.group(1)) / 1024 if match else 0.0
    return dict(sizes)


def print_memory(before: dict[str, float], after: dict[str, float]) -> None:
    """A table of two answers of `memory_mib`, the kind that has grown most first."""
    print("| memory of | before, MiB | after, MiB | |\n|---|---|---|---|")
    rows = {kind: (before.get(kind, 0.0), after.get(kind, 0.0)) for kind in before | after}
    rows = dict(sorted(rows.items(), key=lambda row: row[1][0] - row[1][1]))
    rows["all"] = sum(before.values()), sum(after.values())
    for kind, (old, new) in rows.items():
        print(f"| {kind} | {old:.0f} | {new:.0f} | {new - old:+.0f} |")


async def ask(client: httpx.AsyncClient, url: str, rng: random.Random, seen: Seen) -> None:
    """One stream, to its end."""
    prompt = [rng.randrange(4, 250) for _ in range(rng.randrange(8, 128))]
    tokens = rng.randrange(8, 128)
    body = {
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0.8,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    sample = Sample()
    await complete(client, url, orjson.dumps(body), sample, time.monotonic)
    if sample.failure is not None:
        seen.failures[sample.failure] += 1
        return
    if sample.output_tokens != tokens:
        seen.failures[f"{sample.output_tokens} of {tokens} tokens"] += 1
    seen.requests += 1
    seen.tokens += tokens


async def soak(url: str, session_id: int, streams: int, minutes: float) -> Seen:
    """Keep so many streams going; prints a line a minute."""
    seen, end = Seen(), time.monotonic() + minutes * 60
    async with httpx.AsyncClient(timeout=120, limits=NO_LIMITS) as client:

        async def go_on(number: int) -> None:
            rng = random.Random(number)
            while time.monotonic() < end:
                await ask(client, url, rng, seen)

        print("| minute | requests | tokens | failed | memory, MiB |\n|---|---|---|---|---|", flush=True)
        async with asyncio.TaskGroup() as tasks:
            for number in range(streams):
                tasks.create_task(go_on(number))
            minute = 0
            while time.monotonic() < end:
                await asyncio.sleep(min(60.0, max(0.0, end - time.monotonic())))
                minute += 1
                total = sum(memory_mib(session_id).values())
                print(
                    f"| {minute} | {seen.requests} | {seen.tokens} | {seen.failures.total()} | {total:.0f} |",
                    flush=True,
                )
    return seen


async def leave(url: str) -> tuple[float, float, float]:
    """Clients that disconnect in mid-stream: seconds until nothing is in use, and what still is after 10 of them."""
    body = {"prompt": [5] * 32, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    async with httpx.AsyncClient(timeout=120, limits=NO_LIMITS) as client:

        async def begin(arrived: asyncio.Semaphore) -> None:
            async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
                async for _ in response.aiter_bytes():
                    arrived.release()
                    await asyncio.sleep(3600)

        arrived = asyncio.Semaphore(0)
        tasks = [asyncio.create_task(begin(arrived)) for _ in range(LEAVING_CLIENTS)]
        for _ in tasks:
            await arrived.acquire()
        before = await in_use(client, url)
        assert before[0] == LEAVING_CLIENTS, f"{before[0]} run"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        left = time.monotonic()
        while True:
            running, used = await in_use(client, url)
            seconds = time.monotonic() - left
            if running == used == 0 or seconds > 10:
                return seconds, running, used
            await asyncio.sleep(0.02)


async def in_use(client: httpx.AsyncClient, url: str) -> tuple[float, float]:
    """Sequences that run or wait, and the share of the blocks in use."""
    text = (await client.get(f"{url}/metrics")).text

    def value(name: str) -> float:
        return sum(float(each) for each in re.findall(rf"^rayllm:{name}\{{.*\}} (\S+)$", text, re.MULTILINE))

    return value("num_requests_running") + value("num_requests_waiting"), value("kv_cache_usage_perc")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=10.0)
    args = parser.parse_args()
    with launched("--max-num-seqs", "128") as (url, session_id):
        asyncio.run(soak(url, session_id, 8, 0.1))
        start = memory_mib(session_id)
        seen = asyncio.run(soak(url, session_id, args.streams, args.minutes))
        end = memory_mib(session_id)
        seconds, running, used = asyncio.run(leave(url))
    print(f"failures: {dict(seen.failures) or 'none'}")
    print_memory(start, end)
    in_use_then = f"{running:g} sequences and {used:.2%} of the blocks in use"
    print(f"{LEAVING_CLIENTS} clients left: {in_use_then} after {seconds:.2f} s")
    return int(bool(seen.failures) or running > 0 or used > 0)


if __name__ == "__main__":
    sys.exit(main())
