"""32 API servers and 1,000 stand-in replicas in one process: what choices cost, and how good they are. CPU, no model.

    python benchmarks/routing_scale.py [--fronts 32] [--replicas 1000] [--seconds 20] ...

The servers' `ModelFront`s, with their routers, admission and rules for beats, are the real ones; replicas stand in: a
prefix cache of the engine's own kind, prompts computed at a fixed rate one after the other, and completions that live
for a fixed time, all in simulated seconds. Each request goes to a server at random, as connections do behind HAProxy.
Traffic is as in `routing.py`: beginnings are shared, with Zipf's weights, and a share of the requests are the next turn
of an earlier one.

Three phases: steady traffic; then a tenth of the replicas is replaced at once; then a server in eight starts again.
Printed for each: hit rate (share of prompt tokens that were cached), waits for the first token, imbalance (completions
of the busiest replica over the mean, averaged over each half second), messages a second both ways, and wall time of a
choice and of an admission. Hit rates after a change are those of its first two seconds; "restarted" counts only
requests to servers that did.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import heapq
import itertools
import logging
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.routing import Cache, make_requests
from rayllm import timeouts
from rayllm.api.sampling_params import SamplingParams
from rayllm.api.types import EngineInfo, GenerationRequest, Load
from rayllm.api.wire import CurveKeys, Endpoint, EngineBeat, FrontBeat
from rayllm.engine.client import Beats
from rayllm.serve.cluster.directory import EngineMember
from rayllm.serve.cluster.front import FrontModel, ModelFront

PARAMS = SamplingParams(max_tokens=1)
EARLY_S = 2.0  # after a change


class Engine:
    """A stand-in replica: what it has cached, when it is done with its prompts, and what servers have told it."""

    def __init__(self, number: int, options: argparse.Namespace):
        self.member = EngineMember(f"replica{number}", "m", number, "here", Endpoint(f"ipc://replica{number}"))
        self.cache = Cache(options.kv_tokens // 16)
        self.ready_at = 0.0
        self.live = 0  # completions
        self.is_alive = True
        self.beats: dict[str, FrontBeat] = {}
        self.here = self.total = Load()  # the sums over all beats

    def hear(self, front_id: str, beat: FrontBeat | None) -> None:
        """Take a server's beat, or that it is gone."""
        for sign, each in ((-1, self.beats.pop(front_id, None)), (1, beat)):
            if each is not None:
                self.here += times(sign, each.here)
                self.total += times(sign, each.total or Load())
        if beat is not None:
            self.beats[front_id] = beat

    def answer(self, front_id: str) -> EngineBeat:
        """What a server is told of the others."""
        own = self.beats[front_id]
        total, here = self.total + times(-1, own.total or Load()), self.here + times(-1, own.here)
        return EngineBeat(others_total=total, others_here=here)


def times(factor: int, load: Load) -> Load:
    return Load(factor * load.completions, factor * load.queued_tokens)


class Client:
    """Stands in for `EngineClient`: a connection to a stand-in replica, over which only beats go."""

    def __init__(self, engine: Engine, info: EngineInfo, front_id: str, beat: Callable[[], FrontBeat], changed: Any):
        self.engine, self.info, self.changed = engine, info, changed
        self.engine_beat, self.peer_metrics, self.dead = EngineBeat(), {}, None
        self._front_id, self._beats = front_id, Beats(beat, timeouts.IDLE_BEAT_S)

    async def connect(self) -> None:
        self.beat(0.0)

    async def close(self) -> None:
        pass

    def tell(self, now: float) -> int:
        """What happens with a request; returns the messages."""
        return self.beat(now) if now - self._beats.sent_at >= timeouts.BEAT_S else 0

    def beat(self, now: float) -> int:
        """What happens every BEAT_S; returns the messages."""
        if (beat := self._beats.due(now)) is None:
            return 0
        self.engine.hear(self._front_id, beat)
        self.engine_beat = self.engine.answer(self._front_id)
        return 2


class Server:
    """An API server: its front, and its connections."""

    def __init__(self, number: int, world: World):
        self.front_id = f"server{number}"
        self.clients: list[Client] = []
        self._world = world
        self.front = ModelFront(FrontModel(name="m", folder=""), None, self.front_id, "here", number, self._connect)

    def _connect(self, address: str, _tokenizer: None, *, beat: Any, on_change: Any, **_: Any) -> Any:
        engine = self._world.engines[address.removeprefix("ipc://")]
        self.clients.append(Client(engine, self._world.info, self.front_id, beat, on_change))
        return self.clients[-1]

    async def update(self) -> None:
        """Hear what the directory knows."""
        await self.front.update([each.member for each in self._world.engines.values()], self._world.keys)
        await asyncio.sleep(0)

    def beat(self, now: float) -> int:
        self.clients = [each for each in self.clients if each.dead is None]
        return sum(client.beat(now) for client in self.clients)


class Phase:
    """What is counted in a phase of the traffic."""

    def __init__(self) -> None:
        self.hits = self.tokens = self.messages = self.early_hits = self.early_tokens = 0
        self.waits: list[float] = []
        self.choices: list[float] = []
        self.admissions: list[float] = []
        self.imbalance: list[float] = []
        self.errors: list[float] = []  # of what a server believes to be live everywhere, as a share


class World:
    """All of it, in simulated seconds."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.rng = random.Random(options.seed)
        self.keys = CurveKeys("p" * 40, "s" * 40)
        self.info = EngineInfo("m", 10**6, 50_000, options.kv_tokens, [])
        self.numbers = itertools.count()
        self.engines: dict[str, Engine] = {}
        self.servers: list[Server] = []
        self.restarted: set[int] = set()
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.live = 0
        for _ in range(options.replicas):
            self.add_engine()

    def add_engine(self) -> None:
        engine = Engine(next(self.numbers), self.options)
        self.engines[engine.member.member_id] = engine

    async def start(self) -> None:
        self.servers = [Server(number, self) for number in range(self.options.fronts)]
        for server in self.servers:
            await server.update()

    async def replace_engines(self) -> None:
        """A tenth of the replicas is gone, and as many new ones are there."""
        for engine in self.rng.sample(list(self.engines.values()), self.options.replicas // 10):
            engine.is_alive = False
            self.live -= engine.live
            del self.engines[engine.member.member_id]
            self.add_engine()
        for server in self.servers:
            for client in server.clients:
                if not client.engine.is_alive:
                    client.dead = "gone"
                    client.changed()
            await server.update()

    async def restart_servers(self) -> None:
        for number in range(0, self.options.fronts, 8):
            for engine in self.engines.values():
                engine.hear(self.servers[number].front_id, None)
            self.restarted.add(number)
            self.servers[number] = Server(self.options.fronts + number, self)
            await self.servers[number].update()

    def request(self, at: float, tokens: list[int], phase: Phase, *, counts_early: bool) -> None:
        number = self.rng.randrange(len(self.servers))
        server = self.servers[number]
        front = server.front
        started = time.perf_counter()
        front.admission.reserve(1, len(tokens))
        admitted = time.perf_counter()
        replica, waiting = front.route(GenerationRequest(request_id="r", prompt_token_ids=tokens, params=PARAMS))
        phase.choices.append(time.perf_counter() - admitted)
        phase.admissions.append(admitted - started)
        engine = replica.client.engine
        cached = engine.cache.take(tokens)
        engine.ready_at = max(engine.ready_at, at) + (len(tokens) - cached) / self.options.prefill_rate
        replica.load += Load(1, waiting)
        phase.messages += replica.client.tell(at)
        engine.live += 1
        self.live += 1
        phase.hits, phase.tokens = phase.hits + cached, phase.tokens + len(tokens)
        if counts_early and (not self.restarted or number in self.restarted):
            phase.early_hits, phase.early_tokens = phase.early_hits + cached, phase.early_tokens + len(tokens)
        phase.waits.append(engine.ready_at - at)

        def begin() -> None:
            replica.load += Load(0, -waiting)
            front.admission.release(0, len(tokens))

        def end() -> None:
            replica.load += Load(-1, 0)
            front.admission.release(1, 0)
            if engine.is_alive:
                engine.live -= 1
                self.live -= 1

        self.later(engine.ready_at, begin)
        self.later(engine.ready_at + self.options.lifetime, end)

    def later(self, at: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.events, (at, next(self.numbers), act))

    async def run(self, requests: list[Any], phase: Phase, since: float) -> None:
        """requests: of the phase, which begins at `since`."""
        beats = since
        for request in requests:
            while request.at >= beats:
                beats += timeouts.BEAT_S
                for server in self.servers:
                    phase.messages += server.beat(beats)
                    await server.update()
                    knows = server.front.admission.load.completions + server.front.admission.others.completions
                    phase.errors.append(abs(knows / max(self.live, 1) - 1))
                phase.imbalance.append(
                    max(each.live for each in self.engines.values()) * len(self.engines) / max(self.live, 1)
                )
            while self.events and self.events[0][0] <= request.at:
                heapq.heappop(self.events)[2]()
            self.request(request.at, request.tokens, phase, counts_early=request.at < since + EARLY_S)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--fronts", type=int, default=32)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=8.0, help="simulated, of each phase; the first has twice that")
    parser.add_argument("--rate", type=float, default=2000.0, help="requests a second, all servers together")
    parser.add_argument("--prefixes", type=int, default=2000)
    parser.add_argument("--prefix-len", type=int, default=1024)
    parser.add_argument("--tail-len", type=int, default=64)
    parser.add_argument("--max-len", type=int, default=4096, help="of an earlier prompt that a next turn repeats")
    parser.add_argument(
        "--turn-window", type=int, default=10_000, help="an earlier one is among so many latest requests"
    )
    parser.add_argument("--next-turns", type=float, default=0.3, help="share of requests that go on an earlier one")
    parser.add_argument("--zipf", type=float, default=1.0, help="0: all beginnings are equally likely")
    parser.add_argument("--kv-tokens", type=int, default=65_536, help="that a replica's cache holds")
    parser.add_argument("--prefill-rate", type=float, default=5_000.0, help="tokens a second and replica")
    parser.add_argument("--lifetime", type=float, default=5.0, help="seconds from first to last token")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # of engines that are lost
    options.requests = round(4 * options.seconds * options.rate)
    requests = make_requests(options)
    world = World(options)
    await world.start()
    print(f"{len(requests)} requests, {options.fronts} servers, {options.replicas} replicas, {vars(options)}")
    print(
        f"{'phase':10} {'hit rate':>9} {'early':>6} {'mean wait':>10} {'p99 wait':>9} {'busiest':>8} {'messages':>10} "
        f"{'choice p50':>11} {'p99':>7} {'admission':>10} {'error':>6}"
    )
    phases = {"steady": None, "replaced": world.replace_engines, "restarted": world.restart_servers}
    begin = 0.0
    for name, change in phases.items():
        seconds = options.seconds * (2 if change is None else 1)
        if change is not None:
            await change()
        phase = Phase()
        gc.collect()
        gc.freeze()
        await world.run([each for each in requests if begin <= each.at < begin + seconds], phase, begin)
        begin += seconds
        choices, waits = sorted(phase.choices), sorted(phase.waits)
        early = phase.early_hits / max(phase.early_tokens, 1)
        print(
            f"{name:10} {phase.hits / phase.tokens:9.1%} {early:6.1%} {statistics.mean(waits) * 1e3:7.0f} ms "
            f"{waits[int(0.99 * len(waits))] * 1e3:6.0f} ms {statistics.mean(phase.imbalance):7.2f}x "
            f"{phase.messages / seconds:8.0f}/s {statistics.median(choices) * 1e6:8.1f} us "
            f"{choices[int(0.99 * len(choices))] * 1e6:4.0f} us {statistics.median(phase.admissions) * 1e6:7.1f} us "
            f"{statistics.mean(phase.errors):6.1%}",
            flush=True,
        )


if __name__ == "__main__":
    asyncio.run(main())
