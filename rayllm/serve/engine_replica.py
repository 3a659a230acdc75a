"""`EngineReplica`: the engine's driver as a Ray Serve deployment, with what it knows of the API servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from rayllm.config import EngineConfig, make_config
from rayllm.errors import EngineDeadError
from rayllm.serve.admission import Load
from rayllm.serve.metrics import FrontMetrics
from rayllm.types import EngineInfo, EngineStats, GenerationRequest, TokenDelta

STEP_DEADLINE_S = 120.0  # work queued and no step finished for so long: unhealthy
GONE_S = 3.0  # an API server that has not come for so long is gone


class Endpoint(msgspec.Struct, frozen=True):
    """Where an engine listens. address: of its Unix socket, different for each start. node_id: the socket's node.

    draining: it is about to stop, and fronts must not send it more.
    """

    address: str
    node_id: str
    draining: bool = False


class _Front:
    """An API server as the engine's replica knows it. seen: time.monotonic() when it last came."""

    def __init__(self) -> None:
        self.load = Load()
        self.knows_of_drain = False
        self.seen = 0.0

    def saw(self, load: Load) -> None:
        self.load, self.seen = load, time.monotonic()


class EngineReplica:
    """The engine: scheduler and loop in this process, workers here (one rank) or in actors of its placement group.

    drain_timeout: seconds that running requests may go on when it stops.
    The constructor blocks until the engine is ready and raises ConfigError, ModelError or StartupError.
    """

    def __init__(self, options: dict[str, Any], drain_timeout: float = 5.0):
        from rayllm.engine.core import build_engine_core
        from rayllm.engine.driver import EngineDriver

        self._driver = EngineDriver(build_engine_core(make_config(EngineConfig, options)))
        self._driver.start()
        self._endpoint = Endpoint(self._driver.serve_zmq(), node_id())
        self._drain_timeout = drain_timeout
        self._figures: dict[str, FrontMetrics] = {}
        self._fronts: dict[str, _Front] = {}

    async def endpoint(self, server_id: str | None = None) -> Endpoint:
        """server_id: of the ApiServer that asks, if it is one."""
        if server_id in self._fronts:
            self._fronts[server_id].knows_of_drain = self._endpoint.draining
        return self._endpoint

    async def info(self) -> EngineInfo:
        return self._driver.info

    async def stats(self) -> EngineStats:
        return self._driver.stats()

    async def unhealthy_reason(self) -> str | None:
        """None while steps finish or there is nothing to do."""
        health = self._driver.healthy(STEP_DEADLINE_S)
        return None if health.ok else health.reason

    async def check_health(self) -> None:
        """For Serve, which restarts a replica after three failures in a row."""
        if (reason := await self.unhealthy_reason()) is not None:
            raise EngineDeadError(reason)

    async def exchange_metrics(self, server_id: str, figures: FrontMetrics) -> FrontMetrics:
        """Take one API server's figures, return the sum of all servers', those that are gone included."""
        self._figures[server_id] = figures
        total = FrontMetrics()
        for each in self._figures.values():
            total.add(each)
        return total

    async def exchange_load(self, server_id: str, load: Load) -> Load:
        """Take one API server's load, return the sum of the other servers' that are not gone."""
        self._fronts.setdefault(server_id, _Front()).saw(load)
        others = (front for other, front in self._living_fronts().items() if other != server_id)
        return sum((front.load for front in others), Load())

    def _living_fronts(self) -> dict[str, _Front]:
        now = time.monotonic()
        self._fronts = {key: front for key, front in self._fronts.items() if now - front.seen < GONE_S}
        return self._fronts

    async def relay(self, request: GenerationRequest) -> AsyncGenerator[list[TokenDelta], None]:
        """Run a request for an API server on another node."""
        from rayllm.serve.relay import RelayFront

        async for deltas in RelayFront(self._driver).run(request):
            yield deltas

    async def stop(self) -> None:
        """End the engine and its workers, in good order.

        The API servers learn of it when they next ask, within a second, and refuse new requests from then on with a
        503. What was accepted until then goes on for drain_timeout seconds at most; what is left gets an error.
        """
        self._endpoint = msgspec.structs.replace(self._endpoint, draining=True)
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._drain_timeout
        calm = 0  # times in a row that nothing was to do
        while calm < 2 and clock() < deadline:
            all_know = all(front.knows_of_drain for front in self._living_fronts().values())
            calm = calm + 1 if all_know and not self._driver.busy else 0
            await asyncio.sleep(0.05)
        await asyncio.to_thread(self._driver.shutdown)

    async def __del__(self) -> None:
        """Serve calls this before it ends the replica."""
        if hasattr(self, "_driver"):  # the constructor may have failed
            await self.stop()


def node_id() -> str:
    import ray

    return ray.get_runtime_context().get_node_id()
