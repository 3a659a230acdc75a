"""How much is served at once, and how long a request may take: admission and deadlines.

A completion is *live* from its request's arrival until the engine is done with it. At most `max_running`
(what a model's engines run at once) + `max_queued_requests` completions are live, and at most `max_queued_tokens`
prompt tokens wait for their first token; a request that would exceed either is refused at once. A request is never
refused for its own size: one that comes alone is always let in, as it would be refused for ever otherwise. Each model
has limits of its own; until a request's body says which model it is for, it counts among those that have arrived, for
all models together. Bodies that arrive, or wait to be parsed, may together have `BODIES_BYTES`.

One front's limits hold exactly. The live work of the other fronts is known from figures up to a second old, so N fronts
together may exceed a limit by what they let in within that second, at most N times the limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from rayllm import timeouts
from rayllm.api.types import Load
from rayllm.config.options import ModelServerConfig, ServerConfig
from rayllm.serve.http.errors import ApiError

# Deadlines of a prompt in the order in which it meets them, and what is said when one is missed.
_DEADLINES = {
    "queue_timeout": "the engine did not start the request within {:g} s (queue_timeout)",
    "first_token_timeout": "there was no first token within {:g} s (first_token_timeout)",
    "request_timeout": "the answer was not complete within {:g} s (request_timeout)",
}


BODIES_BYTES = 512 * 2**20  # of an API server

# ---- admission


class Admission:
    """This front's live work against its limits.

    max_running: completions that the engines run at once; it may change as replicas come and go.
    """

    def __init__(self, server: ModelServerConfig, max_running: int):
        self.max_running = max_running
        self.load = Load()  # this front's own
        self.others = Load()  # of the other fronts, as last heard
        self._max_queued = server.max_queued_requests
        self._max_tokens = server.max_queued_tokens

    @property
    def max_live(self) -> int:
        """Completions that may be live."""
        return self.max_running + self._max_queued

    def reserve(self, completions: int, tokens: int, own: int = 0) -> None:
        """Add to the load. own: completions that the same request holds already. Raises ApiError 429."""
        live = self.load.completions + self.others.completions
        if live > own and live + completions > self.max_live:
            limit = f"{self.max_running} running and {self._max_queued} queued completions"
            raise ApiError(429, f"the server has {live} completions, and takes {limit}", code="queue_full")
        waiting = self.load.queued_tokens + self.others.queued_tokens
        if waiting and waiting + tokens > self._max_tokens:
            message = f"{waiting} prompt tokens wait and the request has {tokens}; at most {self._max_tokens} may wait"
            raise ApiError(429, message, code="queue_full")
        self.release(-completions, -tokens)

    def release(self, completions: int, tokens: int) -> None:
        """Take from the load."""
        self.load += Load(-completions, -tokens)


class Ticket:
    """One HTTP request's share of the load: one completion as long as nobody knows more. Making it raises ApiError 429.

    `close` gives the share back and may be called more than once.
    """

    def __init__(self, admission: Admission):
        admission.reserve(1, 0)
        self._admission, self._completions, self._tokens = admission, 1, 0

    def move(self, admission: Admission) -> None:
        """Hold the same share of another load instead. Raises ApiError 429, and keeps the old one then."""
        if admission is not self._admission:
            admission.reserve(self._completions, self._tokens)
            self._admission.release(self._completions, self._tokens)
            self._admission = admission

    def admit(self, completions: int, tokens: int) -> None:
        """Settle how much it is, once the body is known. Raises ApiError 429."""
        self._admission.reserve(completions - self._completions, tokens, own=self._completions)
        self._completions, self._tokens = completions, tokens

    def release(self, completions: int = 0, tokens: int = 0) -> None:
        """So many of its completions have ended; prompts of so many tokens have had their first token."""
        completions, tokens = min(completions, self._completions), min(tokens, self._tokens)
        self._completions -= completions
        self._tokens -= tokens
        self._admission.release(completions, tokens)

    def close(self) -> None:
        """All of it has ended."""
        self.release(self._completions, self._tokens)


class Bodies:
    """What an API server holds of bodies that it has not parsed yet: many that break off must not fill its memory.

    num_bytes: of all of them.
    """

    def __init__(self) -> None:
        self.num_bytes = 0

    def add(self, num_bytes: int, own: int) -> None:
        """More has come of a body. own: bytes that it had before. Raises ApiError 429 if others' leave no room."""
        if self.num_bytes > own and self.num_bytes + num_bytes > BODIES_BYTES:
            message = f"the server holds {self.num_bytes} bytes of request bodies, and takes {BODIES_BYTES}"
            raise ApiError(429, message, code="queue_full")
        self.num_bytes += num_bytes

    def remove(self, num_bytes: int) -> None:
        """A body is parsed, or will never be."""
        self.num_bytes -= num_bytes


# ---- deadlines


class Deadlines:
    """One HTTP request's deadlines, counted from its arrival. Made then, in an event loop."""

    def __init__(self, server: ServerConfig):
        self._arrival = asyncio.get_running_loop().time()
        self._seconds: dict[str, float] = {name: getattr(server, name) for name in _DEADLINES}
        self.body_s = min(timeouts.BODY_S, server.request_timeout or timeouts.BODY_S)  # counted from when it is read

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[Callable[[str], None]]:
        """A block that runs one prompt; it calls what it gets with the name of each deadline that is met.

        Raises ApiError 408 at the first that is missed.
        """
        pending = {name: self._arrival + seconds for name, seconds in self._seconds.items() if seconds}

        def met(name: str) -> None:
            if pending.pop(name, None) is not None:
                timeout.reschedule(min(pending.values(), default=None))

        try:
            async with asyncio.timeout_at(min(pending.values(), default=None)) as timeout:
                yield met
        except TimeoutError:
            if not timeout.expired():
                raise
            name = min(pending, key=pending.__getitem__)
            raise ApiError(408, _DEADLINES[name].format(self._seconds[name]), code=name) from None
