"""The HTTP client of these benchmarks: sends streamed completions to a running server and notes what it sees.

Either a fixed number of requests is in flight, or requests are sent at times that are fixed before the run. Tokens are
counted from the usage on the chunks of a stream, so a chunk may carry several.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson
from offline import TEMPERATURE, custom_workload

TIMEOUT_S = 600.0  # of one request
VOCAB_SIZE = 4096  # random token ids are below it
NO_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None)

Clock = Callable[[], float]


@dataclass(slots=True)
class Sample:
    """One request as its client saw it; times are seconds on the clock of the run."""

    sent: float = 0.0
    first: float | None = None  # when its first token came
    last: float = 0.0  # when its last token came
    ended: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    gaps: array[float] = field(default_factory=lambda: array("d"))  # a chunk after the first: seconds a token
    longest_gap: float = 0.0  # between two chunks, seconds
    failure: str | None = None  # what went wrong, if anything did


class RequestFailedError(Exception):
    """A request had no complete answer."""


def first_model(url: str) -> str:
    """The first model that the server lists. Raises httpx.HTTPError if it does not answer."""
    return str(httpx.get(f"{url}/v1/models", timeout=30).raise_for_status().json()["data"][0]["id"])


def completion_bodies(
    model: str, count: int, input_len: int, output_len: int, *, run: int, vocab_size: int = VOCAB_SIZE
) -> list[dict[str, Any]]:
    """Requests for streams of `output_len` tokens after random prompts; each `run` has prompts of its own."""
    batch = custom_workload(count, str(input_len), str(output_len)).make(run)
    return [
        {
            "model": model,
            "prompt": [token % vocab_size for token in prompt],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": TEMPERATURE,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        for prompt, max_tokens in zip(batch.prompts, batch.max_tokens, strict=True)
    ]


def arrival_times(rate: float, count: int, seed: int) -> list[float]:
    """Seconds at which requests are due: a Poisson process of `rate` a second, the first request at 0."""
    rng = random.Random(f"arrivals {seed}")
    times = [0.0]
    for _ in range(count - 1):
        times.append(times[-1] - math.log(1 - rng.random()) / rate)
    return times


def run_load(
    url: str, bodies: list[dict[str, Any]], *, concurrency: int | None = None, due: list[float] | None = None
) -> list[Sample]:
    """Send the requests and wait for all answers; returns a sample for each, in the order of `bodies`.

    concurrency: requests in flight; the next one is sent when one ends.
    due: instead of that, when each request is sent, in seconds from the start.
    """
    return asyncio.run(_run_load(url, bodies, concurrency, due))


def warm_up(url: str, bodies: list[dict[str, Any]]) -> None:
    """Send the requests all at once. Raises RequestFailedError if one fails, before anything is measured."""
    for sample in run_load(url, bodies, concurrency=len(bodies)):
        if sample.failure is not None:
            raise RequestFailedError(f"a request before the measurement failed: {sample.failure}")


async def _run_load(
    url: str, bodies: list[dict[str, Any]], concurrency: int | None, due: list[float] | None
) -> list[Sample]:
    work = [(orjson.dumps(body), Sample()) for body in bodies]  # encoded before the clock starts
    start = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - start

    async with httpx.AsyncClient(timeout=None, limits=NO_LIMITS) as client, asyncio.TaskGroup() as tasks:
        if due is None:
            remaining = iter(work)

            async def send_one_after_another() -> None:
                for body, sample in remaining:
                    await complete(client, url, body, sample, clock)

            for _ in range(min(concurrency or 1, len(work))):
                tasks.create_task(send_one_after_another())
        else:
            for at, (body, sample) in zip(due, work, strict=True):
                await asyncio.sleep(max(0.0, at - clock()))
                tasks.create_task(complete(client, url, body, sample, clock))
    return [sample for _, sample in work]


async def complete(client: httpx.AsyncClient, url: str, body: bytes, sample: Sample, clock: Clock) -> None:
    """Send one streamed completion and fill in its sample. Whatever goes wrong is the sample's failure."""
    sample.sent = clock()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await _read_stream(client, f"{url}/v1/completions", body, sample, clock)
    except RequestFailedError as error:
        sample.failure = str(error)
    except TimeoutError:
        sample.failure = f"no complete answer within {TIMEOUT_S:g} s"
    except httpx.HTTPError as error:
        sample.failure = f"{type(error).__name__}: {error}"
    sample.ended = clock()


async def _read_stream(client: httpx.AsyncClient, url: str, body: bytes, sample: Sample, clock: Clock) -> None:
    """Raises RequestFailedError for an answer that is refused, breaks off or does not count its tokens."""
    async with client.stream("POST", url, content=body, headers={"content-type": "application/json"}) as response:
        if response.status_code != 200:
            text = (await response.aread()).decode(errors="replace")
            raise RequestFailedError(f"status {response.status_code}: {text[:200]}")
        rest, done = b"", False
        async for data in response.aiter_bytes():  # to its end, or the connection could not be used again
            now = clock()
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line == b"data: [DONE]":
                    done = True
                elif line.startswith(b"data: "):
                    _count_tokens(line[6:], sample, now)
    if not done:
        raise RequestFailedError("the stream ended before its [DONE]")
    if sample.first is None:
        raise RequestFailedError("the answer has no tokens")


def _count_tokens(data: bytes, sample: Sample, now: float) -> None:
    """Put one event of a stream into the sample."""
    event = orjson.loads(data)
    if "error" in event:
        raise RequestFailedError(f"error in the stream: {event['error']['message']}")
    usage = event.get("usage")
    if usage is None:
        raise RequestFailedError("the server does not count the tokens on every chunk of the stream")
    new = usage["completion_tokens"] - sample.output_tokens
    sample.prompt_tokens = usage["prompt_tokens"]
    if new <= 0:
        return
    if sample.first is None:
        sample.first = now
    else:
        sample.gaps.append((now - sample.last) / new)
        sample.longest_gap = max(sample.longest_gap, now - sample.last)
    sample.last = now
    sample.output_tokens += new
