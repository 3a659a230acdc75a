"""`RankActors`: the actors of one engine, asked in parallel, and which of them is to blame for a failure."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import ray
from ray.exceptions import RayError, RayTaskError

from rayllm.config.options import EngineConfig
from rayllm.errors import ConfigError, RayllmError, StartupError
from rayllm.executor.heartbeat import GROUP, SILENCE_SECONDS, Heartbeat
from rayllm.executor.placement import Placement
from rayllm.worker.actor import WorkerActor, WorkerFactory

if TYPE_CHECKING:
    from rayllm.config.model_spec import ModelSpec

_POLL_SECONDS = 0.05
_LOST_PEER = re.compile(r"gloo|NCCL|connection (closed|reset)|broken pipe", re.IGNORECASE)

_DIED, _RAISED, _LOST_A_PEER = range(3)
# How long to look for a better explanation than the one at hand: Ray needs a moment to notice a process's end.
_PATIENCE_SECONDS = {_DIED: 0.0, _RAISED: 0.5, _LOST_A_PEER: 3.0}


class Failure(NamedTuple):
    """A rank that failed. Of several the smallest is the cause: a dead process, then one that raised by itself."""

    blame: int
    rank: int
    error: Exception


class RankActors:
    """Actors in order of rank. `call` is for the start-up; `run`, `failure` and `wait_stopped` for the step loops."""

    def __init__(
        self, placement: Placement, config: EngineConfig, spec: ModelSpec, device: str, factory: WorkerFactory | None
    ):
        self._nodes = placement.nodes
        actor: Any = ray.remote(concurrency_groups={GROUP: 1})(WorkerActor)  # type: ignore[call-overload] # a gap in Ray's types
        self._actors: list[Any] = [
            actor.options(**placement.actor_options(rank)).remote(rank, config, spec, device, factory)
            for rank in range(len(placement.nodes))
        ]
        self._pids: list[int] = []
        self._heartbeat: Heartbeat | None = None
        self._loops: list[ray.ObjectRef] = []

    def wait_until_up(self, seconds: float) -> list[str]:
        """Where each rank is, once all processes have started and imported what they need. Raises StartupError."""
        whereabouts = self.call("start", "whereabouts", seconds=seconds)
        self._pids = [pid for pid, _device in whereabouts]
        self._heartbeat = Heartbeat(self._actors)
        places = zip(self._nodes, whereabouts, strict=True)
        return [f"node {address}, process {pid}, {device}" for (_id, address), (pid, device) in places]

    def call(self, purpose: str, method: str, *args: Any, seconds: float) -> list[Any]:
        """Call a method of all ranks; their results in order. purpose: for messages, a verb.

        The first rank that fails ends the wait: ConfigError and its subclasses come as raised there, everything else
        as StartupError that names rank and cause.
        """
        calls = [getattr(actor, method).remote(*args) for actor in self._actors]
        deadline = time.monotonic() + seconds
        while True:
            done, pending = ray.wait(calls, num_returns=len(calls), timeout=_POLL_SECONDS)
            failure = _first_cause(calls) if done else None
            if failure is not None:
                cause = getattr(failure.error, "cause", None)
                if isinstance(cause, ConfigError):
                    raise cause from failure.error
                reason = f"{self._name(failure.rank)} failed to {purpose}: {_explain(failure.error)}"
                raise StartupError(reason) from failure.error
            if not pending:
                return ray.get(calls)
            if (silent := self._silent()) is not None:
                raise StartupError(f"{silent} while it had to {purpose}")
            if time.monotonic() > deadline:
                late = self._name(calls.index(pending[0]))
                raise StartupError(f"{late} did not {purpose} within {seconds:g} s")

    def run(self) -> None:
        """Start the step loops of all ranks."""
        self._loops = [actor.run.remote() for actor in self._actors]

    def failure(self, wait_seconds: float = 0.0) -> tuple[str, Exception] | None:
        """Which rank failed or went silent, where and why, and the error behind it; None if none did. Cheap then.

        wait_seconds: how long a failure may take to show, if it is known that there is one.
        """
        found = _first_cause(self._loops, wait_seconds)
        if found is None:
            silent = self._silent()
            return None if silent is None else (silent, TimeoutError(silent))
        return f"{self._name(found.rank)} failed: {_explain(found.error)}", found.error

    def wait_stopped(self, seconds: float) -> bool:
        """Wait until all step loops have ended, in whatever way. False if they have not."""
        _, pending = ray.wait(self._loops, num_returns=len(self._loops), timeout=seconds)
        return not pending

    def kill(self, seconds: float) -> None:
        """End the processes, and wait for that as far as it can be seen from here: on this node."""
        for actor in self._actors:
            with contextlib.suppress(Exception):  # it may be dead already, and Ray too
                ray.kill(actor)
        here = ray.get_runtime_context().get_node_id()
        left = [pid for pid, (node_id, _) in zip(self._pids, self._nodes, strict=False) if node_id == here]
        started = time.monotonic()
        while left and time.monotonic() - started < seconds:
            time.sleep(_POLL_SECONDS)
            left = [pid for pid in left if _is_running(pid)]
            if time.monotonic() - started > seconds / 4:  # a stopped process does not hear Ray
                for pid in left:
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)

    def _silent(self) -> str | None:
        rank = None if self._heartbeat is None else self._heartbeat.silent_rank()
        return None if rank is None else f"{self._name(rank)} has not answered for {SILENCE_SECONDS:g} s"

    def _name(self, rank: int) -> str:
        return f"worker rank {rank} on node {self._nodes[rank][1]}"


def _first_cause(calls: list[ray.ObjectRef], wait_seconds: float = 0.0) -> Failure | None:
    """The failure that explains the others, among the calls of all ranks in order; None if none failed in time."""
    started = time.monotonic()
    seen: float | None = None
    while True:
        done, pending = ray.wait(calls, num_returns=len(calls), timeout=0)
        failures = [failure for rank, call in enumerate(calls) if call in done and (failure := _failure(rank, call))]
        now = time.monotonic()
        if failures:
            seen = seen or now
            cause = min(failures)
            if not pending or now - seen >= _PATIENCE_SECONDS[cause.blame]:
                return cause
        elif not pending or now - started >= wait_seconds:
            return None
        time.sleep(_POLL_SECONDS)


def _failure(rank: int, finished: ray.ObjectRef) -> Failure | None:
    try:
        ray.get(finished)
    except RayTaskError as error:
        return Failure(_LOST_A_PEER if _LOST_PEER.search(_explain(error)) else _RAISED, rank, error)
    except Exception as error:  # RayError: the process, its node or Ray itself is gone
        return Failure(_DIED, rank, error)
    return None


def _explain(error: Exception) -> str:
    """What a user can make use of, without Ray's own words and traceback."""
    text = str(error).strip()
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, RayllmError):
            return str(cause)
        if isinstance(cause, Exception) and not isinstance(cause, RayError):
            return f"{type(cause).__name__}: {cause}"
        return text.splitlines()[-1]  # an exception that cannot be pickled comes as a traceback only
    if "creation task" in text:
        return text.splitlines()[-1]
    detail = text.partition("Worker exit detail: ")[2].partition(" Some common causes")[0]
    if not detail or "connection error" in detail:
        detail = "it was killed, ran out of memory or crashed" if detail else text.splitlines()[0]
    return f"its process died: {detail}"


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
