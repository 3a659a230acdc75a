"""Runs the requests of a batch: many in flight, each answered once.

The runner knows lines and an `ask`; who answers is left to that: the HTTP app in this process (`app_client.py`), or
engines in other processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Protocol

import msgspec

from rayllm.batch.lines import BatchRequest, BatchResult, LineReader, answered, failed
from rayllm.errors import ConfigError

FLUSH_S = 1.0  # after so long a result is in the file
RETRY_S, MAX_RETRY_S = 0.1, 5.0  # between tries of a request that was refused for now
LONG_LINE = 2**18  # bytes; longer ones are read in a thread, so that streams beside a batch go on
_FOR_NOW = (429, 503)

Ask = Callable[[BatchRequest], Awaitable[tuple[int, bytes]]]  # the status, and the body as JSON


class NotSentError(Exception):
    """What `ask` raises for a request that nobody is to answer any more. code, message: of its result."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code, self.message = code, message


class Results(Protocol):
    """Where results go. answered: ids of the results that are there, those that were added included."""

    answered: set[str]

    def add(self, result: BatchResult) -> None: ...
    def flush(self) -> None:
        """Bring all that was added to where the next run finds it. Raises OutputError, and so may `add`."""


class Counts(msgspec.Struct):
    """What came of a batch so far, in this run and in those before. Tokens are those of this run alone."""

    completed: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def done(self) -> int:
        return self.completed + self.failed

    def add(self, result: BatchResult) -> None:
        """Count a result, with the tokens that it says it took."""
        if not result.succeeded or result.response is None:
            self.failed += 1
            return
        self.completed += 1
        usage = _read_usage(result.response.body).usage or _Usage()
        self.prompt_tokens += usage.prompt_tokens or usage.input_tokens
        self.completion_tokens += usage.completion_tokens or usage.output_tokens


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_read_usage = msgspec.json.Decoder(_Answer).decode


async def run_batch(
    lines: AsyncIterator[bytes],
    endpoints: Collection[str],
    ask: Ask,
    results: Results,
    counts: Counts,
    limit: int,
    on_result: Callable[[BatchResult], None] = lambda _result: None,
) -> None:
    """Add the result of each line that `results` has none of, in any order.

    endpoints: the urls that requests may have. counts: of the results that are there already; it goes on counting.
    limit: requests in flight. on_result: told of each new result. Raises what else `ask` raises, OutputError, and
    ConfigError at the end if `results` had results of other lines. However it ends, cancelled too, what was added is
    flushed.
    """
    reader, unmet, lock = LineReader(endpoints), set(results.answered), asyncio.Lock()

    def add(result: BatchResult) -> None:
        results.add(result)
        counts.add(result)
        on_result(result)

    async def next_request() -> BatchRequest | None:
        async with lock:
            async for line in lines:
                item = reader.read(line) if len(line) < LONG_LINE else await asyncio.to_thread(reader.read, line)
                if item.id in results.answered:
                    unmet.discard(item.id)
                elif isinstance(item, BatchRequest):
                    return item
                else:
                    add(item)
                    await asyncio.sleep(0)
        return None

    async def work() -> None:
        while (request := await next_request()) is not None:
            add(await _result(request, ask))

    async def flush_often() -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            results.flush()

    try:
        async with asyncio.TaskGroup() as group:
            flushing = group.create_task(flush_often())
            await asyncio.wait([group.create_task(work()) for _ in range(limit)])
            flushing.cancel()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        results.flush()
    if unmet:
        raise foreign_results(len(unmet))


async def _result(request: BatchRequest, ask: Ask) -> BatchResult:
    delay = RETRY_S
    try:
        while (answer := await ask(request))[0] in _FOR_NOW:
            await asyncio.sleep(delay)
            delay = min(2 * delay, MAX_RETRY_S)
    except NotSentError as error:
        return failed(request, error.code, error.message)
    return answered(request, *answer)


async def check_results(lines: AsyncIterator[bytes], endpoints: Collection[str], results: Results) -> None:
    """Raise ConfigError if there are results of lines that are not in the input."""
    reader, unmet = LineReader(endpoints), set(results.answered)
    async for line in lines:
        unmet.discard(reader.read(line).id)
    if unmet:
        raise foreign_results(len(unmet))


def foreign_results(count: int) -> ConfigError:
    """The output is not of this input."""
    were = "1 result is" if count == 1 else f"{count} results are"
    return ConfigError(f"the output does not belong to the input: {were} of other lines; name another output file")
