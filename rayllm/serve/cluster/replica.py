"""`EngineReplica`: one engine's driver as a replica of a Ray Serve deployment, and what it and the API servers
exchange.

Serve's handles choose a replica themselves, so API servers do not use them for requests: once a second each one asks
all replicas of a model for a `ReplicaReport` (`handle.broadcast`), and connects to the sockets that those name.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from rayllm.api.types import EngineInfo, EngineStats, GenerationRequest, TokenDelta
from rayllm.config.options import EngineConfig, make_config
from rayllm.errors import EngineDeadError
from rayllm.serve.http.limits import Load

logger = logging.getLogger("ray.serve")

STEP_DEADLINE_S = 120.0  # work queued and no step finished for so long: unhealthy
GONE_S = 3.0  # an API server that has not come for so long is gone
SWITCH_S = 2e-4  # the engine's thread gives way so soon to the one that sends its results; by default after 5 ms
MAX_SERVERS = 256  # whose figures are kept after they are gone


class Endpoint(msgspec.Struct, frozen=True):
    """Where an engine listens. address: of its Unix socket, different for each start. node_id: the socket's node."""

    address: str
    node_id: str


class FrontReport(msgspec.Struct, frozen=True):
    """What an API server tells all replicas of a model. total: its load of this model, at whichever replica.

    loads: replica id -> the part of it that the replica has.
    """

    server_id: str
    total: Load = Load()
    loads: dict[str, Load] = {}
    metrics: bytes = b""


class ReplicaReport(msgspec.Struct, frozen=True):
    """What a replica answers. replica_id: unique for each start. index: small, and unique among those that run.

    draining: it is about to stop, and fronts must not send it more. unhealthy: why it cannot do its work, None if it
    can. others_total, others_here: the other API servers' load of this model, and the part that this replica has.
    metrics: server id -> its figures, those of API servers that are gone included.
    """

    replica_id: str
    index: int
    endpoint: Endpoint
    info: EngineInfo
    draining: bool = False
    unhealthy: str | None = None
    others_total: Load = Load()
    others_here: Load = Load()
    metrics: dict[str, bytes] = {}


class _Front:
    """An API server as a replica knows it. seen: time.monotonic() when it last came."""

    def __init__(self, report: FrontReport, replica_id: str):
        self.total = report.total
        self.here = report.loads.get(replica_id, Load())
        self.seen = time.monotonic()


class EngineReplica:
    """The engine: scheduler and loop in this process, workers here (one rank) or in actors of its placement group.

    drain_timeout: seconds that running requests may go on when Serve stops it. The constructor blocks until the engine
    is ready and raises ConfigError, ModelError or StartupError.
    """

    def __init__(self, options: dict[str, Any], drain_timeout: float = 5.0):
        from rayllm.engine.driver import EngineDriver
        from rayllm.engine.engine import build_engine_core

        sys.setswitchinterval(SWITCH_S)
        self._driver = EngineDriver(build_engine_core(make_config(EngineConfig, options)))
        self._driver.start()
        self._endpoint = Endpoint(self._driver.serve_zmq(), node_id())
        self._replica_id = replica_id()
        self._drain_timeout = drain_timeout
        self._drain_until: float | None = None  # time.monotonic(); None while nobody has told it to stop
        self._stopping: asyncio.Task[None] | None = None
        self._figures: dict[str, bytes] = {}  # least recently heard first
        self._fronts: dict[str, _Front] = {}

    async def exchange(self, report: FrontReport) -> ReplicaReport:
        """Take one API server's figures, return what it needs to know of this replica and of the other servers."""
        server_id = report.server_id
        self._fronts[server_id] = _Front(report, self._replica_id)
        self._figures.pop(server_id, None)
        self._figures[server_id] = report.metrics
        while len(self._figures) > MAX_SERVERS:
            del self._figures[next(iter(self._figures))]
        others = [front for other, front in self._living_fronts().items() if other != server_id]
        return ReplicaReport(
            replica_id=self._replica_id,
            index=replica_index(),
            endpoint=self._endpoint,
            info=self._driver.info,
            draining=self._drain_until is not None,
            unhealthy=await self.unhealthy_reason(),
            others_total=sum((front.total for front in others), Load()),
            others_here=sum((front.here for front in others), Load()),
            metrics=self._figures,
        )

    async def info(self) -> EngineInfo:
        return self._driver.info

    async def stats(self, replica_id: str | None = None) -> EngineStats:
        """replica_id: whose. Raises EngineDeadError if it is another one's."""
        if replica_id not in (None, self._replica_id):
            raise EngineDeadError(f"the engine's replica {replica_id} is gone")
        return self._driver.stats()

    async def unhealthy_reason(self) -> str | None:
        """None while steps finish or there is nothing to do."""
        health = self._driver.healthy(STEP_DEADLINE_S)
        return None if health.ok else health.reason

    async def check_health(self) -> None:
        """For Serve, which restarts a replica after three failures in a row."""
        if (reason := await self.unhealthy_reason()) is not None:
            raise EngineDeadError(reason)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """For Serve, which hands it to `autoscaling.QueuedTokensPolicy`: what all API servers have here."""
        load = sum((front.here for front in self._living_fronts().values()), Load())
        return {"queued_tokens": float(load.queued_tokens), "completions": float(load.completions)}

    async def relay(self, request: GenerationRequest, replica_id: str) -> AsyncGenerator[list[TokenDelta], None]:
        """Run a request for an API server on another node. replica_id: whom it was for, before that one went away."""
        from rayllm.serve.cluster.relay import RelayFront

        if replica_id != self._replica_id:
            logger.info("request %s was for replica %s, which is gone", request.request_id, replica_id)
        async for deltas in RelayFront(self._driver).run(request):
            yield deltas

    async def stop(self, drain_timeout: float) -> None:
        """End the engine and its workers, in good order. Calling it again can only shorten the time.

        The API servers learn of it when they next ask, within a second, or because Serve does not count this replica
        any more; they send new requests elsewhere from then on, and disconnect when the last of theirs here is done.
        What is left after drain_timeout seconds gets an error.
        """
        until = time.monotonic() + drain_timeout
        self._drain_until = until if self._drain_until is None else min(self._drain_until, until)
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        await asyncio.shield(self._stopping)

    async def __del__(self) -> None:
        """Serve calls this before it ends the replica."""
        if hasattr(self, "_driver"):  # the constructor may have failed
            await self.stop(self._drain_timeout)

    async def _stop(self) -> None:
        calm = 0  # times in a row that nobody was there and nothing to do
        while calm < 2 and self._drain_until is not None and time.monotonic() < self._drain_until:
            if self._driver.dead is not None:
                break
            calm = calm + 1 if self._driver.num_fronts == 0 and not self._driver.busy else 0
            await asyncio.sleep(0.05)
        await asyncio.to_thread(self._driver.shutdown)

    def _living_fronts(self) -> dict[str, _Front]:
        now = time.monotonic()
        self._fronts = {key: front for key, front in self._fronts.items() if now - front.seen < GONE_S}
        return self._fronts


def node_id() -> str:
    import ray

    return ray.get_runtime_context().get_node_id()


def replica_id() -> str:
    """Of this process's replica, as Serve knows it."""
    from ray import serve

    return serve.get_replica_context().replica_id.unique_id


def replica_index() -> int:
    """Serve's rank of this process's replica: from 0 up to the number of replicas, given anew when one has gone."""
    from ray import serve

    return serve.get_replica_context().rank.rank
