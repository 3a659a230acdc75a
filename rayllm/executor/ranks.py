"""`RankActors`: the actors of one engine, what they are asked in parallel, and which of them is to blame for a failure."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import ray
from ray.exceptions import RayError, RayTaskError

from rayllm.config import EngineConfig
from rayllm.errors import ConfigError, RayllmError, StartupError
from rayllm.executor.placement import Placement
from rayllm.worker.actor import WorkerActor, WorkerFactory

if TYPE_CHECKING:
    from rayllm.model_spec import ModelSpec

_POLL_SECONDS = 0.05
_OF_A_LOST_PEER = re.compile(r"gloo|NCCL|connection (closed|reset)|broken pipe", re.IGNORECASE)


class Failure(NamedTuple):
    """Why a rank failed. blame: 0 if its process is gone, 1 if it raised, 2 if it raised only for want of a peer."""

    blame: int
    rank: int
    error: Exception


# How long to look for a better explanation: a peer's death takes Ray a moment to notice, and gloo none.
_PATIENCE_SECONDS = (0.0, 0.5, 3.0)


class RankActors:
    """Actors in order of rank. `call` is for the start-up, `run` and `find_failure` for the step loops after it."""

    def __init__(self, placement: Placement, config: EngineConfig, spec: ModelSpec, device: str, factory: WorkerFactory | None):
        self._nodes = placement.nodes
        actor = ray.remote(WorkerActor)
        self._actors = [
            actor.options(**placement.actor_options(rank)).remote(rank, config, spec, device, factory)
            for rank in range(len(placement.nodes))
        ]
        self._pids: list[int] = []
        self._loops: list[ray.ObjectRef] = []

    def wait_until_up(self, seconds: float) -> None:
        """Wait for the processes. Raises StartupError."""
        self._pids = self.call("start", "process_id", seconds=seconds)

    def begin(self, method: str, *args: Any) -> list[ray.ObjectRef]:
        """Call a method of all ranks; `finish` waits for it."""
        return [getattr(actor, method).remote(*args) for actor in self._actors]
