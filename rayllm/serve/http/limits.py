"""Admission and deadlines: how much work this front takes on, and how long a request may take.

A completion is *live* from its request's arrival until the engine is done with it. At most `max_running` (what a
model's engines run at once) + `max_queued_requests` completions are live, and at most `max_queued_tokens` prompt tokens
wait for their first token; a request that would exceed either is refused at once. A request is never refused for its
own size: one that comes alone is always let in, as it would be refused for ever otherwise. Each model has limits of its
own; until a request's body says which model it is for, it counts among those that have arrived, for all models
together.

One front's limits hold exactly. The live work of the other fronts is known from figures up to a second old, so N fronts
together may exceed a limit by what they let in within that second, at most N times the limit.
"""

from __future__ import annotations

import asyncio
from typing import Literal

import msgspec

from rayllm.config.options import ModelServerConfig, ServerConfig
from rayllm.serve.http.errors import ApiError

RETRY_AFTER_S = 1
BODY_TIMEOUT_S = 60.0  # to receive a request's body: who sends it slowly must not hold a place for ever

DeadlineName = Literal["queue_timeout", "first_token_timeout", "request_timeout"]

_MISSED: dict[DeadlineName, str] = {
    "queue_timeout": "the engine did not start the request within {} s (queue_timeout)",
    "first_token_timeout": "there was no first token within {} s (first_token_timeout)",
    "request_timeout": "the answer was not complete within {} s (request_timeout)",
}


class Load(msgspec.Struct, frozen=True):
    """Work of one front, or of several: live completions, and prompt tokens of requests without a first token."""

    completions: int = 0
    queued_tokens: int = 0

    def __add__(self, other: Load) -> Load:
        return Load(self.completions + other.completions, self.queued_tokens + other.queued_tokens)


class Admission:
    """This front's live work against its limits.

    max_running: completions that the engines run at once; it may change as replicas come and go.
    """

    def __init__(self, server: ModelServerConfig, max_running: int):
        self.max_running = max_running
        self._max_queued = server.max_queued_requests
        self._max_tokens = server.max_queued_tokens
        self._completions = self._tokens = 0
        self.others = Load()  # of the other fronts, as last heard

    @property
    def load(self) -> Load:
        """This front's own."""
        return Load(self._completions, self._tokens)

    @property
    def max_live(self) -> int:
        """Completions that may be live."""
        return self.max_running + self._max_queued

    def enter(self) -> Ticket:
        """Take in an HTTP request, as one completion as long as nobody knows more. Raises ApiError 429."""
        ticket = Ticket(self)
        self._reserve(1, 0)
        ticket.completions = 1
        return ticket

    def _reserve(self, completions: int, tokens: int, own: int = 0) -> None:
        """Add to the load. own: completions that the same request holds already. Raises ApiError 429."""
        live = self._completions + self.others.completions
        if live > own and live + completions > self.max_live:
            limit = f"{self.max_running} running and {self._max_queued} queued completions"
            raise _queue_full(f"the server has {live} completions, and takes {limit}")
        waiting = self._tokens + self.others.queued_tokens
        if waiting and waiting + tokens > self._max_tokens:
            raise _queue_full(
                f"{waiting} prompt tokens wait and the request has {tokens}; at most {self._max_tokens} may wait"
            )
        self._completions += completions
        self._tokens += tokens

    def _release(self, completions: int, tokens: int) -> None:
        self._completions -= completions
        self._tokens -= tokens


class Ticket:
    """One HTTP request's share of the load. `close` gives it back and may be called more than once."""

    def __init__(self, admission: Admission):
        self._admission = admission
        self.completions = self.tokens = 0

    def move(self, admission: Admission) -> None:
        """Hold the same share of another load instead. Raises ApiError 429, and keeps the old one then."""
        if admission is not self._admission:
            admission._reserve(self.completions, self.tokens)
            self._admission._release(self.completions, self.tokens)
            self._admission = admission

    def admit(self, completions: int, tokens: int) -> None:
        """Settle how much it is, once the body is known. Raises ApiError 429."""
        self._admission._reserve(completions - self.completions, tokens, own=self.completions)
        self.completions, self.tokens = completions, tokens

    def release(self, completions: int = 0, tokens: int = 0) -> None:
        """So many of its completions have ended; prompts of so many tokens have had their first token."""
        completions, tokens = min(completions, self.completions), min(tokens, self.tokens)
        self.completions -= completions
        self.tokens -= tokens
        self._admission._release(completions, tokens)

    def close(self) -> None:
        """All of it has ended."""
        self.release(self.completions, self.tokens)


class Deadlines:
    """One HTTP request's deadlines. Made on arrival, in an event loop."""

    def __init__(self, server: ServerConfig):
        self._arrival = asyncio.get_running_loop().time()
        self._limits: dict[DeadlineName, float] = {
            "queue_timeout": server.queue_timeout,
            "first_token_timeout": server.first_token_timeout,
            "request_timeout": server.request_timeout,
        }

    @property
    def body(self) -> float:
        """Seconds to receive the request's body."""
        return min(BODY_TIMEOUT_S, self._limits["request_timeout"] or BODY_TIMEOUT_S)

    @property
    def watches_queue(self) -> bool:
        """Whether anyone wants to know when the engine starts the request."""
        return self._limits["queue_timeout"] > 0

    def next(self, *, started: bool, has_token: bool) -> tuple[float | None, DeadlineName]:
        """(when, in the loop's time, or None; its name) of the deadline that comes next for a prompt."""
        names: list[DeadlineName] = ["request_timeout"]
        if not has_token:
            names.append("first_token_timeout")
            if not started:
                names.append("queue_timeout")
        name = min(names, key=lambda name: self._limits[name] or float("inf"))
        limit = self._limits[name]
        return (self._arrival + limit if limit else None), name

    def body_missed(self) -> ApiError:
        """The answer to a request whose body did not come in time."""
        message = f"the request body did not arrive within {self.body:g} s"
        return ApiError(408, message, kind="timeout_error", code="body_timeout")

    def missed(self, name: DeadlineName) -> ApiError:
        """The answer to a request that missed this deadline."""
        return ApiError(408, _MISSED[name].format(f"{self._limits[name]:g}"), kind="timeout_error", code=name)


def _queue_full(message: str) -> ApiError:
    return ApiError(429, message, kind="rate_limit_error", code="queue_full", retry_after=RETRY_AFTER_S)
