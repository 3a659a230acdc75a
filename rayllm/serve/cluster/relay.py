"""The way to an engine on another node: an `EngineClient` over Ray Serve's handles instead of a Unix socket.

Used only where an ApiServer and the engine's replica ended up on different nodes. A socket on the network would need
authentication and encryption of our own; Ray's channels between nodes have what the cluster was set up with.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

from rayllm.api.types import EngineInfo, EngineStats, GenerationRequest, TokenDelta
from rayllm.engine.client import OnDead, OnDeltas
from rayllm.errors import EngineDeadError

logger = logging.getLogger(__name__)


class RelayClient:
    """Talks to one replica behind a Serve handle (see `addressed_router.py`); one streaming call a request.

    A request for a replica that Serve has just taken away is run by another one.
    """

    def __init__(self, handle: Any, replica_id: str, info: EngineInfo):
        self._handle = handle
        self._replica_id = replica_id
        self._info = info
        self._dead: str | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._on_deltas: OnDeltas = lambda _: None
        self._on_dead: OnDead = lambda _: None

    async def start(self, on_deltas: OnDeltas, on_dead: OnDead) -> None:
        self._on_deltas, self._on_dead = on_deltas, on_dead

    def info(self) -> EngineInfo:
        return self._info

    def add(self, request: GenerationRequest) -> None:
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        task = asyncio.create_task(self._run(request))
        self._tasks[request.request_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(request.request_id, None))

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if (task := self._tasks.get(request_id)) is not None:
                task.cancel()

    async def stats(self) -> EngineStats:
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        try:
            return await self._handle.stats.remote(replica_id=self._replica_id)
        except Exception as error:
            raise EngineDeadError(f"the engine does not answer: {error}") from None

    async def close(self) -> None:
        self._dead = self._dead or "the engine's client was closed"
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, request: GenerationRequest) -> None:
        response = self._handle.options(stream=True).relay.remote(request, replica_id=self._replica_id)
        try:
            async for deltas in response:
                self._on_deltas(deltas)
        except asyncio.CancelledError:
            response.cancel()  # ends `relay` on the other side, which aborts the request
            raise
        except Exception as error:
            logger.warning("relaying request %s failed", request.request_id, exc_info=error)
            message = f"the connection to the engine broke: {error}"
            self._on_deltas(
                [
                    TokenDelta(request.request_id, index, [], finish_reason="error", stop_reason=message)
                    for index in range(request.params.num_completions)
                ]
            )


class RelayFront:
    """One relayed request on the engine's side: a front of the driver, whose calls come from the engine thread."""

    def __init__(self, driver: Any):
        self._driver = driver
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[list[TokenDelta] | str] = asyncio.Queue()

    def deliver(self, deltas: list[TokenDelta]) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, deltas)

    def dead(self, reason: str) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, reason)

    async def run(self, request: GenerationRequest) -> AsyncGenerator[list[TokenDelta], None]:
        """The request's deltas to its end. Leaving early aborts it. Raises EngineDeadError."""
        self._driver.attach(self)
        try:
            self._driver.add(self, request)
            open_choices = set(range(request.params.num_completions))
            while open_choices:
                item = await self._queue.get()
                if isinstance(item, str):
                    raise EngineDeadError(item)
                open_choices -= {delta.index for delta in item if delta.finish_reason is not None}
                yield item
        finally:
            self._driver.detach(self)
