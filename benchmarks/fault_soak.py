"""Streams beside every fault and every hostile input, in random order: what is lost, what stays in memory? CPU.

    python benchmarks/fault_soak.py [--minutes 20] [--streams 64] [--seed 0]

The server has two replicas of the bundled model and two API servers. Every few seconds one of `FAULTS` (a process is
killed, or stands still for a while) or of `INPUTS` (what no well-meant client sends) happens; all of them, then all
again in another order. A canary asks the same question all the time, and must get the same answer. Clients try again
after 429 and 503, as clients do. A stream is lost if it breaks off after its beginning. That is expected only of one
whose connection ended with the API server or the ingress that was just killed; those of a killed engine go on. Then the
raylet and the GCS are killed: `rayllm launch` has to exit, to leave nothing, and to serve on the same port again.

Exit code 1 if anything else was lost, the canary had no answer, or memory stays 10% above that of the beginning.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
import orjson
from hostile import BODIES, ask, make_body, silent
from http_load import NO_LIMITS, Sample, complete
from launched_server import free_port, healthy
from serve_soak import memory_mib, print_memory

MIB = 2**20
SIZES = (31 * MIB, MIB)  # of hostile bodies
OPTIONS = ("--device", "cpu", "--num-replicas", "2", "--num-api-servers", "2", "--max-num-seqs", "64")
START_LIMIT_S = 180.0
CANARY_LIMIT_S = 30.0  # with all of its retries
RETRY_S = 0.5
ATTRIBUTION_S = 3.0  # a stream that breaks off so soon after a death was its victim
EXIT_LIMIT_S = 10.0  # of a launch that cannot go on

# A process of the server -> what is in its command line.
PROCESSES = {"engine": ":engine-", "API server": ":ApiServer", "ingress": "/haproxy "}
LOSES = {"API server": "connection", "ingress": "connection"}  # streams of an engine go on elsewhere


def processes(session_id: int, text: str) -> list[int]:
    """Ids of a session's processes that have `text` in their command line."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = stat.read_text().rpartition(")")[2].split()
            command = (stat.parent / "cmdline").read_text().replace("\0", " ")
            if int(fields[3]) == session_id and fields[0] != "Z" and text in command:
                found.append(int(stat.parent.name))
    return found


@dataclass
class Seen:
    """What has happened so far."""

    streams: int = 0  # complete
    refused: Counter[int] = field(default_factory=Counter)  # answers that clients try again after, by status
    victims: Counter[str] = field(default_factory=Counter)  # streams that broke off with their process, by its kind
    lost: list[str] = field(default_factory=list)  # other streams
    canaries: int = 0  # answered
    slowest_canary: float = 0.0  # seconds
    dead_canaries: list[str] = field(default_factory=list)
    deaths: list[tuple[str, float]] = field(default_factory=list)  # what was killed, and when
    events: Counter[str] = field(default_factory=Counter)


class Soak:
    """The server at `url`, whose processes are those of a session, its clients and its enemies."""

    def __init__(self, url: str, session_id: int, seed: int):
        self.url, self.session_id = url, session_id
        self.host = url.removeprefix("http://")
        self.rng = random.Random(seed)
        self.seen = Seen()
        self.stop = asyncio.Event()

    # ---- clients

    async def stream(self, number: int) -> None:
        """One stream after the other."""
        rng = random.Random(number)
        async with httpx.AsyncClient(timeout=120, limits=NO_LIMITS) as client:
            while not self.stop.is_set():
                tokens = rng.randrange(8, 256)
                body = {
                    "prompt": [rng.randrange(4, 250) for _ in range(rng.randrange(8, 128))],
                    "max_tokens": tokens,
                    "ignore_eos": True,
                    "stream": True,
                    "temperature": 0.8,
                    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
                }
                sample = Sample()
                await complete(client, self.url, orjson.dumps(body), sample, time.monotonic)
                await self._note(sample, tokens)

    async def _note(self, sample: Sample, tokens: int) -> None:
        failure = sample.failure
        if failure is None and sample.output_tokens != tokens:
            failure = f"{sample.output_tokens} of {tokens} tokens"
        if failure is None:
            self.seen.streams += 1
            return
        if failure.startswith(("status 503", "status 429")):
            self.seen.refused[int(failure[7:10])] += 1
            await asyncio.sleep(RETRY_S)
            return
        broken = "error in the stream" if failure.startswith("error in the stream") else "connection"
        for kind, when in reversed(self.seen.deaths):
            if LOSES.get(kind) == broken and sample.sent - 1 <= when <= sample.ended <= when + ATTRIBUTION_S:
                self.seen.victims[kind] += 1
                return
        self.seen.lost.append(f"{sample.ended:.1f} after {sample.ended - sample.sent:.1f} s: {failure}")

    async def canary(self) -> None:
        """The same question again and again."""
        body = {"prompt": "The for statement", "max_tokens": 16, "temperature": 0}
        expected = None
        async with httpx.AsyncClient(limits=NO_LIMITS) as client:
            while not self.stop.is_set():
                start, said = time.monotonic(), ""
                while time.monotonic() < start + CANARY_LIMIT_S:
                    try:
                        answer = await client.post(f"{self.url}/v1/completions", json=body, timeout=CANARY_LIMIT_S)
                        said = answer.text
                        if answer.status_code == 200:
                            break
                        json.loads(said)["error"]["message"]  # every error has OpenAI's form
                        if answer.status_code not in (429, 503):
                            break
                    except httpx.TransportError as error:
                        said = repr(error)
                    except (ValueError, KeyError, TypeError):
                        break
                    await asyncio.sleep(RETRY_S)
                took = time.monotonic() - start
                self.seen.slowest_canary = max(self.seen.slowest_canary, took)
                try:
                    text = json.loads(said)["choices"][0]["text"]
                except (ValueError, KeyError, TypeError):
                    self.seen.dead_canaries.append(f"{start:.1f} after {took:.1f} s: {said[:200]}")
                else:
                    expected = expected or text
                    self.seen.canaries += 1
                    if text != expected:
                        self.seen.dead_canaries.append(f"another answer: {text!r}")
                await asyncio.sleep(0.5)

    # ---- enemies

    async def enemies(self) -> None:
        """All faults and inputs in random order, then all again."""
        everything: dict[str, Callable[[], Awaitable[object]]] = {
            **{f"{kind} killed": partial(self.kill, kind) for kind in PROCESSES},
            **{f"{kind} stands still": partial(self.freeze, kind) for kind in ("engine", "API server")},
            "silent connections": partial(asyncio.to_thread, silent, self.host, b""),
            "half headers": partial(asyncio.to_thread, silent, self.host, b"POST /v1/completions HTTP/1.1\r\nhost:"),
            "half bodies": partial(asyncio.to_thread, silent, self.host, HALF_BODY),
            "no HTTP": partial(asyncio.to_thread, silent, self.host, bytes(range(256))),
            "clients that leave": self.leave,
            "requests that leave the queue": partial(self.leave, 600),
            **{name: partial(self.post, *request) for name, request in REQUESTS.items()},
            "bad schemas": self.bad_schemas,
        }
        for size in SIZES:
            everything |= {f"{name}, {size / MIB:.0f} MiB": partial(self.body, name, size) for name in BODIES}
        while True:
            deck = list(everything)
            self.rng.shuffle(deck)
            for name in deck:
                if self.stop.is_set():
                    return
                self.seen.events[name] += 1
                print(f"  {time.monotonic():.1f} {name}", flush=True)
                await everything[name]()
                await asyncio.sleep(self.rng.uniform(0.5, 2.0))

    async def kill(self, kind: str) -> None:
        """SIGKILL of one of the processes of a kind, once all of them are there; returns when all are there again."""
        await self.complete_server()
        victim = self.rng.choice(processes(self.session_id, PROCESSES[kind]))
        self.seen.deaths.append((kind, time.monotonic()))
        os.kill(victim, signal.SIGKILL)
        await asyncio.sleep(1)
        await self.complete_server()

    async def freeze(self, kind: str) -> None:
        """One of the processes of a kind stands still for 3 s."""
        victim = self.rng.choice(processes(self.session_id, PROCESSES[kind]))
        os.kill(victim, signal.SIGSTOP)
        await asyncio.sleep(3)
        os.kill(victim, signal.SIGCONT)

    async def complete_server(self) -> None:
        """Wait until two replicas are used by two API servers."""
        deadline = time.monotonic() + START_LIMIT_S
        async with httpx.AsyncClient() as client:
            while time.monotonic() < deadline:
                with contextlib.suppress(httpx.HTTPError):
                    text = (await client.get(f"{self.url}/metrics", timeout=5)).text
                    lines = [line for line in text.splitlines() if line.startswith("rayllm:num_replicas{")]
                    servers = len(processes(self.session_id, PROCESSES["API server"]))
                    if any(float(line.split()[-1]) == 2 for line in lines) and servers >= 2:
                        return
                await asyncio.sleep(0.5)
        raise RuntimeError("the server is not complete again")

    async def body(self, name: str, size: int) -> None:
        await asyncio.to_thread(lambda: ask(self.host, "POST", BODIES[name][0], make_body(name, size)))

    async def post(self, path: str, body: object, headers: dict[str, str]) -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            with contextlib.suppress(httpx.HTTPError):
                await client.post(self.url + path, content=orjson.dumps(body), headers=headers)

    async def bad_schemas(self) -> None:
        nested: object = {"type": "string"}
        for _ in range(200):
            nested = {"type": "object", "properties": {"a": nested, "b": nested}}
        schemas = [{"type": "string", "pattern": "(a+)+" * 12 + f"b{{1,{500 + i}}}"} for i in range(5)] + [
            {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(600)}}
        ]
        await asyncio.gather(*(self.post("/v1/completions", schema_request(schema), {}) for schema in schemas))

    async def leave(self, count: int = 100) -> None:
        """Clients that ask for long streams, and go."""
        body = orjson.dumps({"prompt": [7] * 32, "max_tokens": 1500, "ignore_eos": True, "stream": True})
        connections = []
        for _ in range(count):
            connection = http.client.HTTPConnection(self.host, timeout=10)
            with contextlib.suppress(OSError, http.client.HTTPException):
                await asyncio.to_thread(connection.request, "POST", "/v1/completions", body)
                connections.append(connection)
        await asyncio.sleep(1)
        for connection in connections:
            connection.close()

    async def run(self, streams: int, minutes: float, *, with_enemies: bool) -> None:
        """Keep it up so long; prints a line a minute."""
        self.stop.clear()
        async with asyncio.TaskGroup() as tasks:
            for number in range(streams):
                tasks.create_task(self.stream(number))
            tasks.create_task(self.canary())
            if with_enemies:
                tasks.create_task(self.enemies())
            for minute in range(1, max(round(minutes), 1) + 1):
                await asyncio.sleep(60 * min(minutes, 1.0))
                seen = self.seen
                figures = f"{seen.streams} streams, {seen.victims.total()} broken with their process"
                memory = sum(memory_mib(self.session_id).values())
                print(
                    f"minute {minute}: {figures}, {len(seen.lost)} lost, {seen.canaries} canaries, {memory:.0f} MiB",
                    flush=True,
                )
            self.stop.set()


HALF_BODY = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n{"
JSON = {"content-type": "application/json"}


def schema_request(schema: object) -> dict[str, object]:
    return {"prompt": "a", "max_tokens": 4, "structured_outputs": {"json": schema}}


# name -> (path, body, headers)
REQUESTS: dict[str, tuple[str, object, dict[str, str]]] = {
    "a billion choices": ("/v1/completions", {"prompt": "a", "n": 10**9}, JSON),
    "a page of another origin": (
        "/v1/completions",
        {"prompt": "a"},
        {"content-type": "text/plain", "origin": "http://evil.example", "sec-fetch-site": "cross-site"},
    ),
    "an unknown model": ("/v1/completions", {"prompt": "a", "model": "x" * 10_000}, JSON),
    "a regex that explodes": ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "(a+)+b" * 40}}, JSON),
}


@contextlib.contextmanager
def launch(port: int):  # type: ignore[no-untyped-def]
    """The server, ready, as a process in a session of its own; all of it is gone afterwards."""
    command = [sys.executable, "-m", "rayllm.cli", "launch", "--port", str(port), *OPTIONS]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while not healthy(f"http://127.0.0.1:{port}"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not come up (exit status {process.poll()})")
            time.sleep(0.2)
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(60)


def kill_ray(port: int, name: str) -> str | None:
    """What was wrong with the end of a launch whose raylet or GCS was killed; None if nothing was."""
    with launch(port) as process:
        (victim,) = processes(process.pid, name)
        os.kill(victim, signal.SIGKILL)
        start = time.monotonic()
        try:
            code = process.wait(EXIT_LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"it runs {EXIT_LIMIT_S:g} s later"
        left = processes(process.pid, "")
        print(f"{name} killed: launch exited with {code} after {time.monotonic() - start:.1f} s; left: {len(left)}")
        return None if code != 0 and not left else f"exit status {code}, {len(left)} processes left"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    port, faults = free_port(), []
    with launch(port) as process:
        soak = Soak(f"http://127.0.0.1:{port}", process.pid, args.seed)

        async def all_of_it() -> tuple[dict[str, float], dict[str, float]]:
            await soak.complete_server()
            await soak.run(args.streams, 1.0, with_enemies=False)
            await asyncio.sleep(10)
            before = memory_mib(process.pid)
            await soak.run(args.streams, args.minutes, with_enemies=True)
            await soak.complete_server()
            await soak.run(args.streams, 1.0, with_enemies=False)  # processes that were replaced have done work too
            await asyncio.sleep(10)
            return before, memory_mib(process.pid)

        kinds_before, kinds_after = asyncio.run(all_of_it())
        before, after = sum(kinds_before.values()), sum(kinds_after.values())
        seen = soak.seen
    print(f"events: {seen.events.total()} of {len(seen.events)} kinds; deaths: {Counter(k for k, _ in seen.deaths)}")
    print(f"streams: {seen.streams} complete; broken with their process: {dict(seen.victims)}; lost: {len(seen.lost)}")
    print(f"refused and tried again: {dict(seen.refused)}")
    print(f"canaries: {seen.canaries} answered, the slowest after {seen.slowest_canary:.1f} s with its retries")
    print_memory(kinds_before, kinds_after)
    print(f"memory: {before:.0f} -> {after:.0f} MiB ({after / before - 1:+.1%})")
    for text in (*seen.lost, *seen.dead_canaries):
        print(f"  {text}")
    for name in ("raylet/raylet", "gcs_server"):
        if (wrong := kill_ray(port, name)) is not None:
            faults.append(f"{name} killed: {wrong}")
    with launch(port):
        print("served again on the same port")
    print("\n".join(faults))
    return int(bool(faults or seen.lost or seen.dead_canaries or after > 1.1 * before))


if __name__ == "__main__":
    sys.exit(main())
