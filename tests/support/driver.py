"""A core that makes up tokens, a driver over it, and ways to wait for what they do; no tests here."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

from rayllm.api.sampling_params import SamplingParams
from rayllm.api.types import Abort, EngineInfo, EngineStats, GenerationRequest, RequestOutput, TokenDelta
from rayllm.engine.driver import EngineDriver
from rayllm.errors import EngineDeadError, InvalidRequestError
from rayllm.text.outputs import accumulate

INFO = EngineInfo(model="fake", max_model_len=1000, vocab_size=300, num_kv_tokens=10_000, eos_token_ids=[299])


def fake_token(request: GenerationRequest, index: int, position: int) -> int:
    return (sum(request.prompt_token_ids) + 7 * index + position) % 290


def fake_request(request_id: str, max_tokens: int = 3, prompt: list[int] | None = None, **params) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id, prompt_token_ids=prompt or [1, 2], params=SamplingParams(max_tokens=max_tokens, **params)
    )


def fake_tokens(request: GenerationRequest, index: int = 0) -> list[int]:
    """All tokens that a FakeCore makes for one of the request's completions."""
    return [fake_token(request, index, position) for position in range(request.params.max_tokens)]


class FakeCore:
    """One token a step for each completion of each request, until max_tokens.

    gated: a step waits until the test calls `allow`. Requests "refused..." are refused, "broken..." break `add`,
    "compiling..." wait for a grammar until the test calls `compiled`.
    """

    def __init__(self, token: Callable[[GenerationRequest, int, int], int] = fake_token, gated: bool = False):
        self.info = INFO
        self.on_compiled: Callable[[], None] = lambda: None
        self.adapters: list[str] = []
        self.calls: list[tuple] = []  # adds, aborts, steps and shutdowns in order
        self.crash: BaseException | None = None  # what the next step raises
        self.lost: str | None = None  # what check_health says of a dead worker
        self.contradiction = ""  # what check_integrity says
        self.num_polls = 0
        self.thread_ids: set[int] = set()
        self._token = token
        self.gated = gated
        self._gate = threading.Semaphore(0) if gated else None
        self._live: dict[str, tuple[GenerationRequest, int]] = {}
        self._compiling: dict[str, GenerationRequest] = {}
        self._compiled: list[str] = []
        self._steps = 0

    def allow(self, steps: int = 1) -> None:
        assert self._gate is not None
        self._gate.release(steps)

    def compiled(self, request_id: str) -> None:
        """The request's grammar is ready: the next step takes it in. From any thread."""
        self._compiled.append(request_id)
        self.on_compiled()

    @property
    def is_compiling(self) -> bool:
        return bool(self._compiling)

    def live(self) -> list[str]:
        return list(self._live)

    def add(self, request: GenerationRequest) -> None:
        self.calls.append(("add", request.request_id))
        self.thread_ids.add(threading.get_ident())
        if request.request_id.startswith("refused"):
            raise InvalidRequestError("the core does not like it", "prompt")
        if request.request_id.startswith("broken"):
            raise RuntimeError("a bug")
        if request.request_id in self._live:
            raise InvalidRequestError("request_id is in use", "request_id")
        if request.request_id.startswith("compiling"):
            self._compiling[request.request_id] = request
            return
        self._live[request.request_id] = (request, 0)

    def abort(self, aborts: list[Abort]) -> None:
        """Whole requests at once; single completions go on, as the driver has to drop what still comes of them."""
        self.thread_ids.add(threading.get_ident())
        for request_id in [abort.request_id for abort in aborts if abort.index is None]:
            self._live.pop(request_id, None)
            self._compiling.pop(request_id, None)
        names = [a.request_id if a.index is None else (a.request_id, a.index) for a in aborts]
        self.calls.append(("abort", *names))  # last, as tests wait for it

    is_recovering = False

    def watch(self) -> list[TokenDelta]:
        return []

    def check_health(self) -> None:
        if self.lost is not None:
            raise EngineDeadError(self.lost)

    def has_work(self) -> bool:
        self.num_polls += 1
        return bool(self._live or self._compiled)

    def step(self) -> list[TokenDelta]:
        self.thread_ids.add(threading.get_ident())
        if self._gate is not None:
            self._gate.acquire()
        if self.crash is not None:
            raise self.crash
        self.calls.append(("step",))
        self._steps += 1
        while self._compiled:
            request = self._compiling.pop(self._compiled.pop(), None)
            if request is not None:  # not aborted meanwhile
                self._live[request.request_id] = (request, 0)
        deltas = []
        for request_id, (request, position) in list(self._live.items()):
            done = position + 1 == request.params.max_tokens
            for index in range(request.params.n):
                token = self._token(request, index, position)
                deltas.append(TokenDelta(request_id, index, [token], finish_reason="length" if done else None))
            self._live[request_id] = (request, position + 1)
            if done:
                del self._live[request_id]
        return deltas

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self._live), num_steps=self._steps)

    def check_integrity(self) -> None:
        if self.contradiction:
            raise AssertionError(self.contradiction)

    def shutdown(self) -> None:
        self.calls.append(("shutdown",))


class RecordingFront:
    """Keeps what the driver delivers, with the time of each delivery."""

    def __init__(self) -> None:
        self.steps: list[list[TokenDelta]] = []
        self.times: list[float] = []
        self.reasons: list[str] = []
        self.order: list[str] = []

    def deliver(self, deltas: list[TokenDelta]) -> None:
        self.steps.append(deltas)
        self.times.append(time.monotonic())
        self.order.append("deltas")

    def dead(self, reason: str) -> None:
        self.reasons.append(reason)
        self.order.append("dead")

    @property
    def deltas(self) -> list[TokenDelta]:
        return [delta for step in self.steps for delta in step]

    def ends(self) -> list[tuple]:
        """(request id, index, finish reason, stop reason) of all that has ended."""
        return [(d.request_id, d.index, d.finish_reason, d.stop_reason) for d in self.deltas if d.finish_reason]

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        return [t for d in self.deltas if (d.request_id, d.index) == (request_id, index) for t in d.token_ids]


@contextmanager
def running(core: FakeCore, fronts: int = 1, **options: Callable[[], float]) -> Iterator[tuple]:
    """A driver that runs the core, and the fronts that are attached to it."""
    driver = EngineDriver(core, **options)
    attached = [RecordingFront() for _ in range(fronts)]
    for front in attached:
        driver.attach(front)
    try:
        yield (driver, *attached)
    finally:
        if core.gated:
            core.allow(1000)
        driver.shutdown(timeout=5)


def wait_for(condition: Callable[[], object], timeout: float = 10.0) -> None:
    """Poll until the condition is true; AssertionError after the timeout."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.002)


async def until(condition: Callable[[], object], timeout: float = 10.0) -> None:
    """As `wait_for`, while the event loop goes on."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.002)


async def whole(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    """All that a stream brings, in one."""
    total = None
    async for output in stream:
        total = accumulate(total, output)
    assert total is not None, "the stream ended without an output"
    return total
