"""A core that makes up tokens, for the tests of the driver and of AsyncEngine; no tests here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rayllm.api.sampling_params import SamplingParams
from rayllm.api.types import EngineInfo, EngineStats, GenerationRequest, TokenDelta
from rayllm.errors import EngineDeadError, InvalidRequestError

INFO = EngineInfo(model="fake", max_model_len=1000, vocab_size=300, num_kv_tokens=10_000, eos_token_ids=[299])


def fake_token(request: GenerationRequest, index: int, position: int) -> int:
    return (sum(request.prompt_token_ids) + 7 * index + position) % 290


def fake_request(request_id: str, max_tokens: int = 3, prompt: list[int] | None = None, **params) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id, prompt_token_ids=prompt or [1, 2], params=SamplingParams(max_tokens=max_tokens, **params)
    )


class FakeCore:
    """One token a step for each completion of each request, until max_tokens.

    gated: a step waits until the test calls `allow`. Requests "refused..." are refused, "broken..." break `add`.
    crash: what the next step raises. lost: what check_health says of a dead worker.
    calls: adds, aborts, steps and shutdowns in order.
    """

    def __init__(self, token: Callable[[GenerationRequest, int, int], int] = fake_token, gated: bool = False):
        self.info = INFO
        self.calls: list[tuple] = []
        self.crash: BaseException | None = None
        self.lost: str | None = None
        self.num_polls = 0
        self.thread_ids: set[int] = set()
        self._token = token
        self._gate = threading.Semaphore(0) if gated else None
        self._live: dict[str, tuple[GenerationRequest, int]] = {}
        self._steps = 0

    def allow(self, steps: int = 1) -> None:
        assert self._gate is not None
        self._gate.release(steps)

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
        self._live[request.request_id] = (request, 0)

    def abort(self, request_ids: list[str]) -> None:
        self.thread_ids.add(threading.get_ident())
        for request_id in request_ids:
            self._live.pop(request_id, None)
        self.calls.append(("abort", *request_ids))  # last, as tests wait for it

    def check_health(self) -> None:
        if self.lost is not None:
            raise EngineDeadError(self.lost)

    def has_work(self) -> bool:
        self.num_polls += 1
        return bool(self._live)

    def step(self) -> list[TokenDelta]:
        self.thread_ids.add(threading.get_ident())
        if self._gate is not None:
            self._gate.acquire()
        if self.crash is not None:
            raise self.crash
        self.calls.append(("step",))
        self._steps += 1
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

    def shutdown(self) -> None:
        self.calls.append(("shutdown",))


def wait_for(condition: Callable[[], object], timeout: float = 10.0) -> None:
    """Poll until the condition is true; AssertionError after the timeout."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.002)
