"""Streams beside every fault and every hostile input, in random order: what is lost, what stays in memory? CPU.

    python benchmarks/fault_soak.py [--minutes 20] [--streams 64] [--seed 0]
    python benchmarks/fault_soak.py --count 10000 [--every 30] [--minutes 20] [--streams 64] [--seed 0]

The server has two replicas of the bundled model, each with a rank of its own process, and two API servers. Every few
seconds a process is killed, or stands still for a while, or something of `REQUESTS` and `BODIES` comes, which no
well-meant client sends; all of them, then all again in another order. With --count there are only deaths, one every
so many seconds, until so many streams are complete.

Streams ask questions that the undisturbed server has answered. With --count the server is in its deterministic mode,
and they must get the same answers, to the bit; else as many tokens with the same end, since that mode takes CPUs
minutes for some of the long inputs. What has come is never contradicted by the next try. A canary asks the same
question all the time. Clients try again after 429 and 503, and when a connection breaks off, as clients do. That may
happen to those of an API server or an ingress that was just killed; all other streams go on. In the end the server is
stopped: the engines' records have to agree, and nothing may be left. Without --count, the raylet and the GCS are killed
then: `rayllm launch` has to exit, to leave nothing, and to serve on the same port again.

Exit code 1 if anything was lost or different, the canary had no answer, something is left, or memory stays 10% above
that of the beginning.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import hostile
import httpx
import orjson
from every_kind import Answer, Request, Result, ask, difference, new_client
from hostile import BODIES, make_body, silent
from http_load import NO_LIMITS
from launched_server import (
    STOP_LIMIT_S,
    Belongings,
    free_port,
    num_replicas,
    own_session,
    processes_of,
    session_processes,
    wait_until_healthy,
)
from serve_soak import memory_mib, print_memory

MIB = 2**20
SIZES = (31 * MIB, MIB)  # of hostile bodies
OPTIONS = (
    *("--device", "cpu", "--num-replicas", "2", "--num-api-servers", "2", "--max-num-seqs", "64"),
    *("--executor", "ray"),  # so that there are ranks to kill
    *("--num-gpu-blocks-override", "1536"),  # a pool that is in use as a whole before memory is looked at
)
START_LIMIT_S = 180.0
LEARN_LIMIT_S = 180.0
STREAM_LIMIT_S = 180.0  # of one stream, with all of its retries
CANARY_LIMIT_S = 30.0  # with all of its retries
RETRY_S = 0.5
ATTRIBUTION_S = 3.0  # a stream that breaks off so soon after a death was its victim
EXIT_LIMIT_S = 10.0  # of a launch that cannot go on

KILLED = ("engine", "rank", "API server", "ingress")
FROZEN = ("engine", "API server")
BREAKS = ("API server", "ingress")  # whose connections break off with them; all else goes on
NUM_QUESTIONS = 100


@dataclass
class Seen:
    """What has happened so far."""

    streams: int = 0  # complete, with the answer of the undisturbed server
    refused: Counter[int] = field(default_factory=Counter)  # answers that clients try again after, by status
    victims: Counter[str] = field(default_factory=Counter)  # connections that ended with their process, by its kind
    lost: list[str] = field(default_factory=list)  # streams that failed, or had another answer
    canaries: int = 0  # answered
    slowest_canary: float = 0.0  # seconds
    dead_canaries: list[str] = field(default_factory=list)
    deaths: list[tuple[str, float]] = field(default_factory=list)  # what was killed, and when
    events: Counter[str] = field(default_factory=Counter)


class Soak:
    """The server at `url`, whose processes are those of a session, its clients and its enemies."""

    def __init__(self, url: str, session_id: int, seed: int, most_tokens: int, count: float = math.inf):
        """count: of streams; if it is given, the server is in its deterministic mode."""
        self.url, self.session_id = url, session_id
        self.questions = make_questions(most_tokens, repeats=count < math.inf)
        self.answers: list[Answer] = []
        self.to_come = count  # streams
        self.belongings = Belongings(session_id)
        self.host = url.removeprefix("http://")
        self.rng = random.Random(seed)
        self.seen = Seen()
        self.stop = asyncio.Event()

    # ---- clients

    async def learn(self) -> None:
        """Ask each question once, while nothing disturbs the server. Raises RuntimeError."""
        async with new_client() as client:
            asked = [ask(client, self.url, question, Result()) for question in self.questions]
            await self.post("/v1/completions", schema_request({"type": "boolean"}), JSON)  # starts what tries grammars
            results = await asyncio.wait_for(asyncio.gather(*asked), LEARN_LIMIT_S)
        if failures := [result.failure for result in results if result.failure]:
            raise RuntimeError(f"undisturbed questions failed: {failures}")
        self.answers = [result.answer for result in results]

    async def stream(self, number: int) -> None:
        """One stream after the other."""
        rng = random.Random(number)
        async with new_client() as client:
            while not self.stop.is_set() and self.to_come > 0:
                self.to_come -= 1
                which, result = rng.randrange(NUM_QUESTIONS), Result()
                try:
                    async with asyncio.timeout(STREAM_LIMIT_S):
                        await ask(client, self.url, self.questions[which], result)
                except TimeoutError:
                    result.failure = f"no answer within {STREAM_LIMIT_S:g} s"
                if result.failure is not None and result.failure.startswith(("status 503", "status 429")):
                    self.seen.refused[int(result.failure[7:10])] += 1
                    self.to_come += 1
                    await asyncio.sleep(RETRY_S)
                else:
                    self._note(which, result)

    def _note(self, which: int, result: Result) -> None:
        seen, wrong = self.seen, result.failure or difference(self.questions[which], result, self.answers[which])
        for broken in result.broke:
            killers = [kind for kind, when in seen.deaths if when <= broken <= when + ATTRIBUTION_S and kind in BREAKS]
            if killers:
                seen.victims[killers[-1]] += 1
            else:
                since = [
                    f"{broken - when:.1f} s after the {kind}'s death" for kind, when in seen.deaths if when <= broken
                ]
                wrong = wrong or f"its connection broke off {(since or ['without a death'])[-1]}"
        if wrong is None:
            seen.streams += 1
        else:
            seen.lost.append(f"{time.monotonic():.1f}: {wrong}")

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
            **{f"{kind} killed": partial(self.kill, kind) for kind in KILLED},
            **{f"{kind} stands still": partial(self.freeze, kind) for kind in FROZEN},
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

    async def deaths(self, every: float) -> None:
        """A random death every so many seconds, as soon as the server has got over the one before."""
        due = time.monotonic()
        while True:
            due += every
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if self.stop.is_set():
                return
            kind = self.rng.choice(KILLED)
            print(f"  {time.monotonic():.1f} {kind} killed", flush=True)
            await self.kill(kind)

    async def kill(self, kind: str) -> None:
        """SIGKILL of one of the processes of a kind, once all of them are there; returns when all are there again."""
        await self.complete_server()
        victim = self.rng.choice(processes_of(self.session_id, kind))
        self.seen.deaths.append((kind, time.monotonic()))
        os.kill(victim, signal.SIGKILL)
        await asyncio.sleep(1)
        await self.complete_server()

    async def freeze(self, kind: str) -> None:
        """One of the processes of a kind stands still for 3 s."""
        victim = self.rng.choice(processes_of(self.session_id, kind))
        os.kill(victim, signal.SIGSTOP)
        await asyncio.sleep(3)
        os.kill(victim, signal.SIGCONT)

    async def complete_server(self) -> None:
        """Wait until two replicas are used by two API servers."""
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            seen = await asyncio.to_thread(num_replicas, self.url)
            if seen == 2 and [len(processes_of(self.session_id, kind)) for kind in KILLED] == [2, 2, 2, 1]:
                return
            await asyncio.sleep(0.5)
        raise RuntimeError("the server is not complete again")

    async def body(self, name: str, size: int) -> None:
        await asyncio.to_thread(lambda: hostile.ask(self.host, "POST", BODIES[name][0], make_body(name, size)))

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

    async def run(
        self, streams: int, minutes: float, enemies: Callable[[], Coroutine[None, None, None]] | None = None
    ) -> None:
        """Keep it up so long, or until no stream is to come; prints a line a minute."""
        self.stop.clear()
        async with asyncio.TaskGroup() as tasks:
            clients = [tasks.create_task(self.stream(number)) for number in range(streams)]
            tasks.create_task(self.canary())
            if enemies is not None:
                tasks.create_task(enemies())
            for minute in range(1, max(round(minutes), 1) + 1):
                await asyncio.wait(clients, timeout=60 * min(minutes, 1.0))
                self.belongings.look()
                seen = self.seen
                figures = f"{seen.streams} streams, {seen.victims.total()} broken with their process"
                memory = sum(memory_mib(self.session_id).values())
                print(
                    f"minute {minute}: {figures}, {len(seen.lost)} lost, {seen.canaries} canaries, {memory:.0f} MiB",
                    flush=True,
                )
                if all(client.done() for client in clients):
                    break
            self.stop.set()


def make_questions(most_tokens: int, repeats: bool) -> list[Request]:
    """Streams of 8 to `most_tokens` tokens, with noise. repeats: each has one answer, whatever runs beside it."""
    rng, questions = random.Random(0), []
    for seed in range(NUM_QUESTIONS):
        body = {
            "prompt": [rng.randrange(4, 250) for _ in range(rng.randrange(8, 128))],
            "max_tokens": rng.randrange(8, most_tokens),
            "ignore_eos": True,
            "stream": True,
            "temperature": 0.8,
            "seed": seed,
            "stream_options": {"include_usage": True},
        }
        questions.append(Request(f"question {seed}", "/v1/completions", body, repeats=repeats))
    return questions


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
def launch(port: int, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """The server, ready, as a process in a session of its own; all of it is gone afterwards."""
    command = [sys.executable, "-m", "rayllm.cli", "launch", "--port", str(port), *OPTIONS, *options]
    with own_session(command) as process:
        wait_until_healthy(process, f"http://127.0.0.1:{port}", START_LIMIT_S)
        yield process


def kill_ray(port: int, name: str) -> str | None:
    """What was wrong with the end of a launch whose raylet or GCS was killed; None if nothing was."""
    with launch(port) as process:
        (victim,) = session_processes(process.pid, name)
        os.kill(victim, signal.SIGKILL)
        start = time.monotonic()
        try:
            code = process.wait(EXIT_LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"it runs {EXIT_LIMIT_S:g} s later"
        left = session_processes(process.pid)
        print(f"{name} killed: launch exited with {code} after {time.monotonic() - start:.1f} s; left: {len(left)}")
        return None if code != 0 and not left else f"exit status {code}, {len(left)} processes left"


def end(soak: Soak, process: subprocess.Popen[bytes]) -> list[str]:
    """Stop the server; returns what is wrong with its end, and with the engines' records then."""
    (engine, _) = processes_of(process.pid, "engine")
    logs = Path(os.readlink(f"/proc/{engine}/fd/2")).parent / "serve"  # Ray's, which it keeps
    soak.belongings.look()
    process.send_signal(signal.SIGINT)
    code = process.wait(STOP_LIMIT_S)
    wrong = [] if code == 0 else [f"exit code {code}"]
    said = "".join(path.read_text() for path in logs.glob("replica_*engine-*.log"))
    good, bad = said.count("its records agree with each other"), said.count("its records contradict each other")
    print(f"engines that ended in good order: {good} with records that agree, {bad} with others")
    if good != 2 or bad:
        wrong.append("the engines' records")
    left = soak.belongings.left()
    print(f"left of {len(soak.belongings)} files and processes: {left or 'nothing'}")
    return wrong + left


def print_streams(seen: Seen) -> None:
    print(f"deaths: {dict(Counter(kind for kind, _ in seen.deaths))}")
    print(
        f"streams: {seen.streams} complete and as undisturbed; connections broken with their process and tried again: "
        f"{dict(seen.victims)}; lost or different: {len(seen.lost)}"
    )
    print(f"refused and tried again: {dict(seen.refused)}")
    print(f"canaries: {seen.canaries} answered, the slowest after {seen.slowest_canary:.1f} s with its retries")
    for text in (*seen.lost, *seen.dead_canaries):
        print(f"  {text}")


def run_deaths(count: int, every: float, streams: int, minutes: float, seed: int) -> int:
    """So many streams, of which as many at once as `streams` says, with a death every so many seconds."""
    port = free_port()
    with launch(port, "--deterministic") as process:
        soak = Soak(f"http://127.0.0.1:{port}", process.pid, seed, 48, count)

        async def all_of_it() -> None:
            await soak.complete_server()
            await soak.learn()
            await soak.run(streams, minutes, partial(soak.deaths, every))
            await soak.complete_server()

        asyncio.run(all_of_it())
        wrong = end(soak, process)
    seen = soak.seen
    print_streams(seen)
    print("\n".join(wrong))
    return int(bool(wrong or seen.lost or seen.dead_canaries or seen.streams < count))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64, help="at once")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, help="of streams, with nothing but deaths beside them")
    parser.add_argument("--every", type=float, default=30.0, help="seconds between these deaths")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and end what was started
    if args.count is not None:
        return run_deaths(args.count, args.every, args.streams, args.minutes, args.seed)
    port, faults = free_port(), []
    with launch(port) as process:
        soak = Soak(f"http://127.0.0.1:{port}", process.pid, args.seed, 256)

        async def all_of_it() -> tuple[dict[str, float], dict[str, float]]:
            await soak.complete_server()
            await soak.learn()
            await soak.run(args.streams, 1.0)
            await asyncio.sleep(10)
            before = memory_mib(process.pid)
            await soak.run(args.streams, args.minutes, soak.enemies)
            await soak.complete_server()
            await soak.run(args.streams, 1.0)  # processes that were replaced have done work too
            await asyncio.sleep(10)
            return before, memory_mib(process.pid)

        kinds_before, kinds_after = asyncio.run(all_of_it())
        before, after = sum(kinds_before.values()), sum(kinds_after.values())
        faults += end(soak, process)
    seen = soak.seen
    print(f"events: {seen.events.total()} of {len(seen.events)} kinds")
    print_streams(seen)
    print_memory(kinds_before, kinds_after)
    print(f"memory: {before:.0f} -> {after:.0f} MiB ({after / before - 1:+.1%})")
    for name in ("raylet/raylet", "gcs_server"):
        if (wrong := kill_ray(port, name)) is not None:
            faults.append(f"{name} killed: {wrong}")
    with launch(port):
        print("served again on the same port")
    print("\n".join(faults))
    return int(bool(faults or seen.lost or seen.dead_canaries or after > 1.1 * before))


if __name__ == "__main__":
    sys.exit(main())
