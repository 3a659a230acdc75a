"""A client that streams completions, for test hosts: `python -m stream_client JSON`, whose object `Options` describes.

It prints a line of JSON when so many streams have begun, {"begun": N}, and one for each stream at its end: `Result`. On
hosts this module is on its own, so it imports nothing of ours.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass

import httpx


@dataclass
class Options:
    """What to ask for."""

    # Of servers, without a path; stream i goes to urls[i % len(urls)].
    urls: list[str]
    count: int
    max_tokens: int
    model: str = "tiny-pydoc"
    # Seconds between two streams' beginnings.
    interval: float = 0.0
    # Each is followed by another one like it, until standard input ends.
    repeat: bool = False
    # Of a server, in seconds, after which the client gives a stream up.
    silence: float = 20.0


@dataclass
class Result:
    """One stream, from its request to its end."""

    url: str
    # Each stream has a prompt and a seed of its own, which follow from this.
    number: int
    text: str = ""
    num_tokens: int = 0
    finish_reason: str | None = None
    # Why it failed; empty if it did not.
    error: str = ""
    # time.time() of the request, of what came, first and last, and of the end of the longest gap between two events.
    asked: float = 0.0
    first: float = 0.0
    last: float = 0.0
    longest_gap: float = 0.0
    gap_at: float = 0.0


def prompt(number: int) -> str:
    """Of a stream."""
    return f"The function f{number} returns"


async def stream(client: httpx.AsyncClient, options: Options, number: int, on_begin) -> Result:
    """Run one stream to its end."""
    result = Result(options.urls[number % len(options.urls)], number, asked=time.time())
    body = {
        "model": options.model,
        "prompt": prompt(number),
        "max_tokens": options.max_tokens,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        async with client.stream("POST", f"{result.url}/v1/completions", json=body) as response:
            if response.status_code != 200:
                result.error = f"{response.status_code} {(await response.aread())[:300]!r}"
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    take(result, json.loads(line.removeprefix("data: ")), on_begin)
    except httpx.HTTPError as error:
        result.error = repr(error)
    if not result.error and result.finish_reason is None:
        result.error = "the stream ended without a finish_reason"
    return result


def take(result: Result, event: dict, on_begin) -> None:
    """Take in one event of a stream."""
    now = time.time()
    if not result.first:
        result.first = result.last = now
        on_begin()
    if now - result.last > result.longest_gap:
        result.longest_gap, result.gap_at = now - result.last, now
    result.last = now
    if "error" in event:
        result.error = str(event["error"])
    for choice in event.get("choices", ()):
        result.text += choice["text"]
        result.finish_reason = choice["finish_reason"] or result.finish_reason
    if event.get("usage"):
        result.num_tokens = event["usage"]["completion_tokens"]


async def main(options: Options) -> None:
    """Run all streams, and print what became of them."""
    begun, is_last = 0, asyncio.Event()

    async def stream_on(number: int) -> None:
        while True:
            result = await stream(client, options, number, on_begin)
            print(json.dumps(asdict(result)), flush=True)
            if result.error or not options.repeat or is_last.is_set():
                return

    def on_begin() -> None:
        nonlocal begun
        begun += 1
        if begun == options.count:
            print(json.dumps({"begun": begun}), flush=True)

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=httpx.Timeout(options.silence, connect=5)) as client:
        tasks = []
        for number in range(options.count):
            tasks.append(asyncio.create_task(stream_on(number)))
            await asyncio.sleep(options.interval)
        if options.repeat:
            await asyncio.to_thread(sys.stdin.read)
            is_last.set()
        await asyncio.gather(*tasks)


if __name__ == "__main__":
    asyncio.run(main(Options(**json.loads(sys.argv[1]))))
