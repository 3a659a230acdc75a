"""`BatchReplicas`: engines in actors of a Ray cluster, each with the HTTP API, which answer the requests of a batch."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rayllm.batch.lines import BatchRequest
from rayllm.batch.runner import Ask
from rayllm.config.options import ModelConfig
from rayllm.config.resolved import ResolvedConfig, resolve
from rayllm.errors import EngineDeadError, StartupError
from rayllm.executor.checkpoints import fetch_checkpoint, offered_checkpoint
from rayllm.executor.placement import actor_environment
from rayllm.hub import local_model, with_engine
from rayllm.serve.cluster.application import engine_placement
from rayllm.serve.offline import LocalEngine

START_S = 1800.0  # for all engines, and for nodes that are still to come
RESTARTS = 8  # of an actor that died
MAX_CONCURRENCY = 2**14  # calls of an actor; `BatchReplica.limit` says how many are of use


class BatchReplica:
    """An engine with the HTTP API. The constructor raises as `LocalEngine` does."""

    async def __init__(self, model: ModelConfig) -> None:  # type: ignore[misc]  # Ray awaits it
        for folder in (model.engine.model, *model.engine.adapters.values()):
            fetch_checkpoint(folder)
        self._life = AsyncExitStack()
        self._ask, self._limit = await self._life.enter_async_context(LocalEngine(model).answers())

    async def limit(self) -> int:
        """Requests that should be in flight here."""
        return self._limit

    async def ask(self, request: BatchRequest) -> tuple[int, bytes]:
        """(status, body) of the answer."""
        try:
            return await self._ask(request)
        except EngineDeadError:
            os._exit(1)  # Ray starts this actor again, and sends it its requests again

    async def close(self) -> None:
        """Stop the engine."""
        await self._life.aclose()


class BatchReplicas:
    """So many engines of a model. It is connected to Ray already.

    Blocks until they are there. Raises ConfigError for what cannot work as configured, StartupError.
    """

    def __init__(self, model: ModelConfig, count: int):
        model = local_model(model)
        config = resolve(model.engine, ray.cluster_resources().get("GPU", 0))
        model = with_engine(model, config.options)  # whose folder is the same everywhere
        self._life = ExitStack()
        for folder in (config.options.model, *config.options.adapters.values()):
            self._life.enter_context(offered_checkpoint(folder))
        self._groups: list[PlacementGroup] = []
        self._actors = [self._start(model, config) for _ in range(count)]
        try:
            limits = ray.get([actor.limit.remote() for actor in self._actors], timeout=START_S)
        except GetTimeoutError:
            self._end()
            raise StartupError(f"the {count} engines did not come up within {START_S:g} s") from None
        except RayError as error:
            self._end()
            raise StartupError(f"an engine could not be started: {_last_line(error)}") from None
        self._limit = sum(limits)

    @asynccontextmanager
    async def answers(self) -> AsyncIterator[tuple[Ask, int]]:
        """A block with what answers requests, and how many should be in flight. The engines end with it.

        What answers raises EngineDeadError when no engine is left. A request whose actor dies is sent again.
        """
        in_flight = Counter(dict.fromkeys(range(len(self._actors)), 0))  # by the actor's place in the list

        async def ask(request: BatchRequest) -> tuple[int, bytes]:
            while in_flight:
                place = min(in_flight, key=in_flight.__getitem__)
                in_flight[place] += 1
                try:
                    return await self._actors[place].ask.remote(request)
                except RayActorError:  # it has died too often
                    in_flight.pop(place, None)
                finally:
                    if place in in_flight:
                        in_flight[place] -= 1
            raise EngineDeadError("all engines of the batch have died too often")

        try:
            yield ask, self._limit
        finally:
            self._end()

    def _start(self, model: ModelConfig, config: ResolvedConfig) -> Any:
        placement = engine_placement(config)
        options = dict(placement["ray_actor_options"])
        if bundles := placement.get("placement_group_bundles"):
            group = placement_group(bundles, strategy=placement["placement_group_strategy"])
            self._groups.append(group)
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                group, 0, placement_group_capture_child_tasks=True
            )
        return (
            ray.remote(BatchReplica)
            .options(
                max_concurrency=MAX_CONCURRENCY,
                max_restarts=RESTARTS,
                max_task_retries=-1,
                runtime_env={"env_vars": actor_environment()},
                **options,
            )
            .remote(model)
        )

    def _end(self) -> None:
        self._life.close()
        for actor in self._actors:
            ray.kill(actor)
        for group in self._groups:
            remove_placement_group(group)


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
