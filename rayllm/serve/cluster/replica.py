"""`EngineReplica`: one engine's driver as a replica of a Ray Serve deployment.

Serve starts it, watches it and ends it. Requests come over the engine's socket, whose address API servers find in the
directory.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable
from functools import partial

from rayllm import timeouts
from rayllm.api.types import EngineInfo
from rayllm.api.wire import VERSION
from rayllm.config.resolved import ResolvedConfig
from rayllm.engine.build import start_resolved_engine
from rayllm.engine.driver import SWITCH_S, Core, EngineDriver, start_core
from rayllm.engine.socket import EngineSocket
from rayllm.errors import EngineDeadError
from rayllm.executor.checkpoints import fetch_checkpoint
from rayllm.serve.cluster.adapters import ReplicaAdapters
from rayllm.serve.cluster.directory import DirectoryLink, EngineMember, Membership, Place, Report, View, own_place
from rayllm.serve.cluster.spot import watch_host
from rayllm.serve.cluster.stopped import end_if_stopped

logger = logging.getLogger("ray.serve")


class EngineReplica:
    """The engine: scheduler and loop in this process, workers here (one rank) or in actors of its placement group.

    model: the name in the API. drain_timeout: seconds that running requests may go on here when Serve stops it, before
    they go on elsewhere. spot_notices: as in `ServerConfig`. The constructor blocks until the engine is ready.
    It raises ConfigError, ModelError or StartupError.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        config: ResolvedConfig,
        model: str,
        drain_timeout: float,
        spot_notices: str = "none",
        start: Callable[[ResolvedConfig], Core] | None = None,
        place: Place | None = None,
        registry: DirectoryLink | None = None,
    ) -> None:
        sys.setswitchinterval(SWITCH_S)
        if place is None:  # in a process of its own
            end_if_stopped(timeouts.STOPPED_S)
        self._model, self._drain_timeout = model, drain_timeout
        self._place = place or own_place()
        watch_host(spot_notices, self._place.node_id)
        self._core = start_core(partial(start or _start, config))  # the driver's, while that runs
        self._driver = EngineDriver(self._core)
        self._socket = EngineSocket(self._driver)
        self._adapters = ReplicaAdapters(model, self._driver, self._core.adapters)
        self._servers: set[str] | None = None  # the model's API servers; None until the directory has told them
        directory = registry or DirectoryLink(self._place.app_name)
        self._membership = Membership(directory, self._member, self._report, self._on_view, self._stop)
        # Serve asks the instance for this. As a method of the class, Python would call it at the end of an instance
        # too, and nobody would await it.
        self.__del__ = self._leave
        await self._wait_for_servers()

    async def info(self) -> EngineInfo:
        """The engine's limits, and how its start went."""
        return self._driver.info

    async def check_health(self) -> None:
        """For Serve, which restarts a replica after three failures in a row."""
        if (reason := self._driver.unhealthy(timeouts.STALL_S)) is not None:
            raise EngineDeadError(reason)
        if not self._socket.is_alive and not self._membership.is_stopping:
            raise EngineDeadError("the engine's sockets have failed")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """For Serve, which hands it to `application.QueuedTokensPolicy`: what all API servers have here.

        Batches are completions, in units of as many as run at once.
        """
        load = self._socket.load()
        batches = load.completions / self._driver.info.max_num_seqs
        return {"queued_tokens": float(load.queued_tokens), "batches": batches}

    async def _leave(self) -> None:
        """Serve calls this before it ends the replica, if the constructor has come so far."""
        seconds = await self._membership.time_to_stop(self._drain_timeout, self._place)
        await self._membership.stop_within(seconds)

    async def _wait_for_servers(self) -> None:
        """Return when all API servers send requests here: Serve then ends the replicas that this one replaces."""
        deadline = time.monotonic() + timeouts.JOIN_S
        while time.monotonic() < deadline and (self._servers is None or self._servers - self._socket.front_ids()):
            await asyncio.sleep(timeouts.REGISTER_S / 10)

    async def _stop(self) -> None:
        """End the engine and its workers, in good order.

        API servers hear at once that it drains; they send new requests elsewhere from then on, and disconnect when the
        last of theirs here is done. What is left at the end of the time they send to another replica.
        """
        self._socket.drain()
        await self._membership.announce()
        calm = 0  # times in a row that nobody was there and nothing to do
        while calm < 2 and self._driver.dead is None and time.monotonic() < self._membership.stop_at:
            calm = calm + 1 if self._driver.num_fronts == 0 and not self._driver.busy else 0
            await asyncio.sleep(0.05)
        await asyncio.to_thread(self._driver.shutdown)
        await asyncio.to_thread(self._socket.close)
        try:
            self._core.check_integrity()
        except AssertionError as error:
            logger.error("the engine has ended, and its records contradict each other: %s", error)
        else:
            logger.info("the engine has ended; its records agree with each other")

    def _member(self) -> EngineMember:
        return EngineMember(
            member_id=self._place.replica_id,
            model=self._model,
            index=self._place.replica_index,
            node_id=self._place.node_id,
            endpoint=self._socket.endpoint,
            draining=self._membership.is_stopping or self._membership.is_leaving or not self._adapters.have_begun,
            adapters=self._adapters.versions,
            adapter_errors=self._adapters.errors,
        )

    def _report(self) -> Report:
        stats = self._driver.stats
        return Report(
            member=self._member(),
            load=self._socket.load(),
            stop_in=self._membership.stop_in,
            ranks=self._driver.info.start.placement,
            num_recoveries=stats.num_recoveries,
            recovery_seconds=stats.recovery_seconds,
        )

    async def _on_view(self, view: View) -> None:
        self._socket.allow([view.front_keys.public])
        had_begun = self._adapters.have_begun
        self._adapters.update(view)
        if self._adapters.have_begun and not had_begun:
            await self._membership.announce()
        servers = [each for each in view.servers if self._model in each.models and not each.draining]
        mine = {each.member_id for each in servers if each.version == VERSION}
        self._servers = mine if mine or not servers else None  # those of its own version are still to come
        elsewhere = any(server.node_id != self._place.node_id for server in view.servers)
        if elsewhere and not self._socket.endpoint.tcp:
            await asyncio.to_thread(self._socket.open_tcp, self._place.host)


def _start(config: ResolvedConfig) -> Core:
    for folder in (config.options.model, *config.options.adapters.values()):
        fetch_checkpoint(folder)
    return start_resolved_engine(config)
