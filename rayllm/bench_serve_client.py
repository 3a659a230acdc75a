"""The client of `rayllm bench serve`: sends a load to a running server and measures what it sees.

Tokens are counted from the usage that the server puts on every chunk of a stream, so a chunk may carry several. The
times of a load by rate are fixed before it starts, and latencies are also taken from when a request was due: a server
(or this client) that falls behind cannot make its figures look better by delaying the requests that would show it.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson
from tqdm import tqdm

from rayllm.bench_serve_load import Load, ServeBenchOptions, make_load
from rayllm.cli.api_client import api_base, auth_headers, error_of, first_model
from rayllm.errors import EngineDeadError, RayllmError

TICK_S = 0.1  # resolution of the tokens over time
_PATHS = {"completions": "/completions", "chat": "/chat/completions"}

Clock = Callable[[], float]


@dataclass(slots=True)
class Sample:
    """One request as its client saw it; times are seconds from the start of the run.

    due: when it was to be sent; sent: when it was. first, last: its first and last token. gaps: seconds a token between
    two chunks with tokens, gap_tokens: how many tokens each of them stands for. failure: (kind, message) if it failed.
    """

    due: float
    sent: float = 0.0
    first: float | None = None
    last: float = 0.0
    ended: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    gaps: array[float] = field(default_factory=lambda: array("d"))
    gap_tokens: array[int] = field(default_factory=lambda: array("L"))
    failure: tuple[str, str] | None = None


@dataclass(slots=True)
class Measured:
    """A run's requests in the order in which they were sent, and the tokens of each TICK_S."""

    samples: list[Sample] = field(default_factory=list)
    ticks: Counter[int] = field(default_factory=Counter)


class RequestFailedError(RayllmError):
    """One request had no complete answer. kind: what failures are counted by."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


def run_load(options: ServeBenchOptions, api_key: str | None = None) -> tuple[str, Measured]:
    """Warm up, send the load, wait for all answers. Returns the model's name and what was measured.

    Raises ConfigError for options that do not fit, and InvalidRequestError or EngineDeadError if the server refuses
    or fails a request before anything is measured; failures after that are part of the samples.
    """
    return asyncio.run(_run(options, api_key))


async def _run(options: ServeBenchOptions, api_key: str | None) -> tuple[str, Measured]:
    base = api_base(options.url)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits, headers=auth_headers(api_key)) as client:
        model = options.model
        if model is None:
            try:
                model = first_model(await client.get(f"{base}/models", timeout=30))
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise EngineDeadError(f"no answer from {base}: {error or type(error).__name__}") from None
        load = make_load(options, model)
        sender = _Sender(client, base + _PATHS[options.endpoint], options.timeout)
        await _warm_up(sender, load.warmup)
        return model, await _measure(sender, load, options.concurrency)


async def _warm_up(sender: _Sender, bodies: list[dict[str, Any]]) -> None:
    samples = [Sample(0.0) for _ in bodies]
    measured, clock = Measured(samples), _clock()
    async with asyncio.TaskGroup() as tasks:
        for body, sample in zip(bodies, samples, strict=True):
            tasks.create_task(sender.send(orjson.dumps(body), sample, measured, clock))
    for sample in samples:
        if sample.failure is not None:
            raise EngineDeadError(f"a warm-up request failed: {': '.join(sample.failure)}")


async def _measure(sender: _Sender, load: Load, concurrency: int | None) -> Measured:
    bodies = [orjson.dumps(body) for body in load.bodies]  # before the clock starts
    measured, clock = Measured(), _clock()
    with tqdm(total=len(bodies), unit="req", disable=None, dynamic_ncols=True) as bar:

        async def send(body: bytes, due: float) -> None:
            sample = Sample(due)
            measured.samples.append(sample)
            await sender.send(body, sample, measured, clock)
            bar.update()

        if load.due is None:
            assert concurrency is not None
            await _keep_in_flight(bodies, concurrency, send, clock)
        else:
            await _send_when_due(bodies, load.due, send, clock)
    return measured


Send = Callable[[bytes, float], Coroutine[Any, Any, None]]


async def _keep_in_flight(bodies: list[bytes], concurrency: int, send: Send, clock: Clock) -> None:
    remaining = iter(bodies)

    async def one_after_another() -> None:
        for body in remaining:
            await send(body, clock())

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(concurrency, len(bodies))):
            tasks.create_task(one_after_another())


async def _send_when_due(bodies: list[bytes], due: list[float], send: Send, clock: Clock) -> None:
    async with asyncio.TaskGroup() as tasks:
        for body, at in zip(bodies, due, strict=True):
            await asyncio.sleep(max(0.0, at - clock()))
            tasks.create_task(send(body, at))


class _Sender:
    """Sends requests and fills in their samples. Whatever goes wrong with one is a failure of its sample."""

    def __init__(self, client: httpx.AsyncClient, url: str, timeout: float):
        self._client = client
        self._url = url
        self._timeout = timeout

    async def send(self, body: bytes, sample: Sample, measured: Measured, clock: Clock) -> None:
        sample.sent = clock()
        try:
            async with asyncio.timeout(self._timeout):
                await self._stream(body, sample, measured, clock)
        except RequestFailedError as error:
            sample.failure = (error.kind, str(error))
        except TimeoutError:
            sample.failure = ("timeout", f"no complete answer within {self._timeout:g} s")
        except httpx.ConnectError as error:
            sample.failure = ("no connection", str(error))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            sample.failure = ("connection broken", str(error) or type(error).__name__)
        sample.ended = clock()

    async def _stream(self, body: bytes, sample: Sample, measured: Measured, clock: Clock) -> None:
        headers = {"content-type": "application/json"}
        async with self._client.stream("POST", self._url, content=body, headers=headers) as response:
            if response.status_code != 200:
                message, code = error_of(response.status_code, await response.aread())
                raise RequestFailedError(f"HTTP {response.status_code}" + (f" {code}" if code else ""), message)
            rest, done = b"", False
            async for data in response.aiter_bytes():  # to its end, or the connection could not be used again
                now = clock()
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    if line.strip() == b"data: [DONE]":
                        done = True
                    elif line.startswith(b"data:"):
                        measured.ticks[int(now / TICK_S)] += _take(line[5:], sample, now)
        if not done:
            raise RequestFailedError("ended early", "the stream ended before its [DONE]")
        if sample.first is None:
            raise RequestFailedError("no tokens", "the answer has no tokens")


def _take(data: bytes, sample: Sample, now: float) -> int:
    """Put one event into the sample. Returns how many tokens it brought. Raises RequestFailedError."""
    try:
        event = orjson.loads(data)
        if "error" in event:
            raise RequestFailedError(f"error in stream {event['error'].get('code')}", str(event["error"]["message"]))
        usage = event.get("usage")
        if usage is None:
            raise RequestFailedError("no usage", "the server does not count tokens on every chunk of a stream")
        new = usage["completion_tokens"] - sample.output_tokens
        sample.prompt_tokens = usage["prompt_tokens"]
        sample.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    except (ValueError, KeyError, TypeError, AttributeError):
        raise RequestFailedError("not understood", f"an event of the stream is not an answer: {data[:80]!r}") from None
    if new <= 0:
        return 0
    if sample.first is None:
        sample.first = now
    else:
        sample.gaps.append((now - sample.last) / new)
        sample.gap_tokens.append(new)
    sample.last = now
    sample.output_tokens += new
    return new


def _clock() -> Clock:
    start = time.perf_counter()
    return lambda: time.perf_counter() - start
