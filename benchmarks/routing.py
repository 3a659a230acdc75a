"""Prefix-aware routing against round robin: how many prompt tokens are found in the replicas' caches. CPU, no model.

    python benchmarks/routing.py [--replicas 4] [--prefixes 64] [--requests 4000] ...

Conversations share system prompts, as chat traffic does: a request has one of `prefixes` beginnings, chosen with Zipf's
weights, and a tail of its own; a share of the requests are the next turn of an earlier one. A replica is the engine's
own map of cached blocks (`rayllm/core/prefix_cache.py`) with least recently used blocks reused first, in simulated
time: prompts are computed at a fixed rate, one after the other, and a completion lives for a fixed time after that. All
policies get the same requests at the same times.

Hit rates are counted, waits are those of the simulated engines, and the time of a choice is this machine's.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import time
from collections.abc import Callable
from typing import NamedTuple

from rayllm.api.types import Load
from rayllm.core.prefix_cache import PrefixCache
from rayllm.serve.cluster.router import Router

BLOCK = 16


class Request(NamedTuple):
    """at: seconds."""

    at: float
    tokens: list[int]


class Cache:
    """A replica's KV blocks: the engine's own hash map, with least recently used blocks reused first."""

    def __init__(self, num_blocks: int):
        self._cache = PrefixCache(BLOCK, b"")
        self._free = list(range(num_blocks))
        self._used: dict[int, None] = {}  # blocks, least recent first

    def take(self, tokens: list[int]) -> int:
        """Compute a prompt; returns how many of its tokens were there."""
        hashes: list[bytes] = []
        self._cache.extend(hashes, self._cache.root(""), tokens, len(tokens) // BLOCK)
        found = self._cache.match(hashes)
        blocks = list(found)
        for block in found:  # in use now, so not to be reused for this prompt's own end
            del self._used[block]
        for digest in hashes[len(found) :]:
            if not self._free and not self._used:
                break  # the prompt alone fills the pool
            block = self._free.pop() if self._free else next(iter(self._used))
            self._used.pop(block, None)
            self._cache.evict(block)
            self._cache.register(digest, block)
            blocks.append(block)
        for block in reversed(blocks):  # a prompt's end goes before its beginning
            self._used[block] = None
        return len(found) * BLOCK


class Result(NamedTuple):
    """hits: share of prompt tokens that were cached. mean_wait, p99_wait: seconds to the first token.

    spread: tokens computed by the busiest replica over the mean. us_a_choice: microseconds to choose, hashing included.
    """

    hits: float
    mean_wait: float
    p99_wait: float
    spread: float
    us_a_choice: float


Choose = Callable[[list[int], dict[str, Load]], str]


def simulate(requests: list[Request], choose: Choose, options: argparse.Namespace) -> Result:
    """Run the requests through replicas that are chosen one by one."""
    names = [str(number) for number in range(options.replicas)]
    caches = {name: Cache(options.kv_tokens // BLOCK) for name in names}
    ready_at = dict.fromkeys(names, 0.0)
    loads = dict.fromkeys(names, Load())
    computed = dict.fromkeys(names, 0)
    events: list[tuple[float, str, Load]] = []  # (when, replica, what it has less then)
    hits = tokens = 0
    waits, choosing = [], 0.0
    for request in requests:
        while events and events[0][0] <= request.at:
            _, name, less = heapq.heappop(events)
            loads[name] += Load(-less.completions, -less.queued_tokens)
        started = time.perf_counter()
        name = choose(request.tokens, loads)
        choosing += time.perf_counter() - started
        cached = caches[name].take(request.tokens)
        work = len(request.tokens) - cached
        ready_at[name] = max(ready_at[name], request.at) + work / options.prefill_rate
        loads[name] += Load(1, work)
        heapq.heappush(events, (ready_at[name], name, Load(0, work)))
        heapq.heappush(events, (ready_at[name] + options.lifetime, name, Load(1, 0)))
        hits, tokens = hits + cached, tokens + len(request.tokens)
        computed[name] += work
        waits.append(ready_at[name] - request.at)
    waits.sort()
    mean = sum(computed.values()) / len(names)
    return Result(
        hits / tokens,
        sum(waits) / len(waits),
        waits[int(0.99 * len(waits))],
        max(computed.values()) / mean,
        choosing / len(requests) * 1e6,
    )


def make_requests(options: argparse.Namespace) -> list[Request]:
    """Traffic that depends on the options alone."""
    rng = random.Random(options.seed)

    def some(count: int) -> list[int]:
        return [rng.randrange(50_000) for _ in range(count)]

    prefixes = [some(options.prefix_len) for _ in range(options.prefixes)]
    weights = [1 / (rank + 1) ** options.zipf for rank in range(options.prefixes)]
    requests: list[Request] = []
    at = 0.0
    for _ in range(options.requests):
        at += rng.expovariate(options.rate)
        if requests and rng.random() < options.next_turns:
            earlier = requests[max(0, len(requests) - rng.randint(1, options.turn_window))].tokens
            tokens = earlier[: options.max_len] + some(options.tail_len)
        else:
            tokens = rng.choices(prefixes, weights)[0] + some(options.tail_len)
        requests.append(Request(at, tokens))
    return requests


def policies(options: argparse.Namespace) -> dict[str, Choose]:
    """Name -> how a replica is chosen."""
    names = [str(number) for number in range(options.replicas)]
    turn = itertools.cycle(names)
    router = Router(b"key", random.Random(options.seed))
    least = random.Random(options.seed)
    for name in names:
        router.add_replica(name, options.kv_tokens)

    def least_busy(_tokens: list[int], loads: dict[str, Load]) -> str:
        fewest = min(load.completions for load in loads.values())
        return least.choice([name for name, load in loads.items() if load.completions == fewest])

    def prefix(tokens: list[int], loads: dict[str, Load]) -> str:
        return router.choose(router.prompt(tokens), names, loads.get).replica_id

    return {"round robin": lambda _tokens, _loads: next(turn), "least busy": least_busy, "prefix": prefix}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--rate", type=float, default=60.0, help="requests a second, all replicas together")
    parser.add_argument("--prefixes", type=int, default=64)
    parser.add_argument("--prefix-len", type=int, default=1024)
    parser.add_argument("--tail-len", type=int, default=128)
    parser.add_argument("--max-len", type=int, default=4096, help="of an earlier prompt that a next turn repeats")
    parser.add_argument("--turn-window", type=int, default=200, help="an earlier one is among so many latest requests")
    parser.add_argument("--next-turns", type=float, default=0.3, help="share of requests that go on an earlier one")
    parser.add_argument("--zipf", type=float, default=1.0, help="0: all prefixes are equally likely")
    parser.add_argument("--kv-tokens", type=int, default=32768, help="that a replica's cache holds")
    parser.add_argument("--prefill-rate", type=float, default=40_000.0, help="tokens a second and replica")
    parser.add_argument("--lifetime", type=float, default=1.0, help="seconds from first to last token")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    requests = make_requests(options)
    tokens = sum(len(request.tokens) for request in requests)
    print(f"{len(requests)} requests, {tokens:,} prompt tokens, {options.replicas} replicas, {vars(options)}")
    print(f"{'policy':12} {'hit rate':>9} {'mean wait':>10} {'p99 wait':>9} {'busiest':>8} {'choice':>9}")
    for name, choose in policies(options).items():
        result = simulate(requests, choose, options)
        print(
            f"{name:12} {result.hits:9.1%} {result.mean_wait * 1e3:7.0f} ms {result.p99_wait * 1e3:6.0f} ms "
            f"{result.spread:7.2f}x {result.us_a_choice:6.1f} us"
        )


if __name__ == "__main__":
    main()
