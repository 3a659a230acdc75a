"""`RankActors`: the actors of one engine, asked in parallel, and which of them is to blame for a failure.

A process that is gone is Ray's to report. One that is stopped, or stuck in a way that no error shows, is found by a
question that is kept open to each actor (`ping`), which a thread of its own answers there while the rank loads,
compiles, computes or waits for others.
"""

from __future__ import annotations

import contextlib
import functools
import re
import time
from typing import Any, NamedTuple

import psutil
import ray
from ray.exceptions import RayError, RayTaskError

from rayllm import timeouts
from rayllm.api.types import Adapter
from rayllm.config.resolved import ResolvedConfig
from rayllm.errors import ConfigError, EngineDeadError, ModelError, RayllmError, StartupError
from rayllm.executor.placement import Placement
from rayllm.worker.actor import Whereabouts, WorkerActor
from rayllm.worker.worker import LoadRank

# Concurrency groups of the actors, beside the one for all else.
_PINGS = "ping"
_LIFE = "live"
_ADAPTERS = "adapters"
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


@functools.cache
def _actor_class() -> Any:
    """Made once a process: Ray stores each that is made in the cluster's memory before it makes the first actor."""
    return ray.remote(concurrency_groups={_PINGS: 1, _LIFE: 1, _ADAPTERS: 1})(WorkerActor)  # type: ignore[call-overload] # a gap in Ray's types


class RankActors:
    """Actors in order of rank: those that serve, or their standbys.

    `call` is for the start-up, `run` and `wait_stopped` for the step loops, `failure` for both from `wait_until_up` on.
    node_ids: Ray's ids of their nodes, and places: where each is, for users; both from `wait_until_up` on. weights:
    where each hands out its weights, from their load on.
    """

    def __init__(self, placement: Placement, config: ResolvedConfig, load: LoadRank):
        # Where Ray has placed them; no address, as long as one that has lost its host waits for another.
        self._addresses = [address or "that is still to come" for address in placement.addresses]
        share = 0.5 if config.standbys else 1.0
        self._actors: list[Any] = [
            _actor_class().options(**placement.actor_options(rank, share)).remote(rank, config, load)
            for rank in range(len(placement.bundles))
        ]
        self._whereabouts: list[Whereabouts] = []
        self._processes: list[psutil.Process] = []  # of this node
        self._pings: list[tuple[float, ray.ObjectRef]] = []  # when each rank was asked last, and the question
        self._loops: list[ray.ObjectRef] = []
        self.node_ids: list[str] = []
        self.places: list[str] = []
        self.weights: list[bytes] = []
        self._has_weights = False
        self._patience = timeouts.RANK_START_SILENCE_S  # with a rank that is silent while it starts

    def wait_until_up(self, seconds: float) -> None:
        """Returns when all processes have started and imported what they need. Raises StartupError."""
        self._whereabouts = self.call("start", "whereabouts", seconds=seconds)
        self._pings = [self._ping(rank) for rank in range(len(self._actors))]
        self._loops = [actor.live.options(concurrency_group=_LIFE).remote() for actor in self._actors]
        here = ray.get_runtime_context().get_node_id()
        self._processes = [psutil.Process(each.pid) for each in self._whereabouts if each.node_id == here]
        self._addresses = [each.address for each in self._whereabouts]
        self.node_ids = [each.node_id for each in self._whereabouts]
        self.places = [f"node {each.address}, process {each.pid}, {each.device}" for each in self._whereabouts]

    def on_one_node(self) -> bool:
        """Whether all ranks are on this process's node."""
        return set(self.node_ids) == {ray.get_runtime_context().get_node_id()}

    def end_before(self, ranks: RankActors, seconds: float) -> None:
        """As standbys, end the processes of these ranks on other hosts, for which `kill` can only ask Ray."""
        if len(ranks._processes) < len(ranks._actors):
            self.call("end the rank before it", "end", ranks._whereabouts, seconds, seconds=2 * seconds)

    def adopt(self, weights: list[bytes], seconds: float) -> None:
        """As standbys, map the weights of the ranks that serve; they are loaded anew if one of these has ended."""
        self._patience = timeouts.RANK_RESUME_SILENCE_S
        self._has_weights = all(self.call("map the weights", "adopt", weights, seconds=seconds))

    def load(self, seconds: float) -> None:
        """Load the model, collectively."""
        self.weights = self.call("load the model", "load", self._has_weights, seconds=seconds)

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
            if (silent := self._silent(self._patience)) is not None:
                raise StartupError(f"{silent} while it had to {purpose}")
            if time.monotonic() > deadline:
                late = self._name(calls.index(pending[0]))
                raise StartupError(f"{late} did not {purpose} within {seconds:g} s")

    def run(self) -> None:
        """Start the step loops of all ranks, from when on they have to answer sooner."""
        self._pings = [self._ping(rank) for rank in range(len(self._actors))]
        self._loops = [actor.run.remote() for actor in self._actors]

    def load_adapter(self, adapter: Adapter, seconds: float) -> None:
        """Have all ranks read an adapter beside their steps; none has it if one cannot. From any thread.

        Raises ModelError as a rank raised it, and EngineDeadError for everything else.
        """
        calls = [actor.load_adapter.options(concurrency_group=_ADAPTERS).remote(adapter) for actor in self._actors]
        try:
            ray.get(calls, timeout=seconds)
        except Exception as error:
            self.drop_adapter(adapter.id)
            cause = getattr(error, "cause", None)
            if isinstance(cause, ModelError):
                raise cause from error
            raise EngineDeadError(f"adapter {adapter.name} could not be loaded: {_explain(error)}") from error

    def drop_adapter(self, adapter_id: int) -> None:
        """Have all ranks forget an adapter, behind what they still load."""
        for actor in self._actors:
            actor.drop_adapter.options(concurrency_group=_ADAPTERS).remote(adapter_id)

    def failure(self, wait_seconds: float = 0.0) -> tuple[str, Exception] | None:
        """Which rank failed or went silent, where and why, and the error behind it; None if none did. Cheap then.

        wait_seconds: how long a failure may take to show, if it is known that there is one.
        """
        found = _first_cause(self._loops, wait_seconds)
        if found is None:
            silent = self._silent(timeouts.RANK_SILENCE_S)
            return None if silent is None else (silent, TimeoutError(silent))
        return f"{self._name(found.rank)} failed: {_explain(found.error)}", found.error

    def answer(self, seconds: float) -> bool:
        """Whether all answer within so many seconds."""
        questions = [self._ping(rank)[1] for rank in range(len(self._actors))]
        return len(ray.wait(questions, num_returns=len(questions), timeout=seconds)[0]) == len(questions)

    def wait_stopped(self, seconds: float) -> None:
        """Wait until all step loops have ended, in whatever way."""
        ray.wait(self._loops, num_returns=len(self._loops), timeout=seconds)

    def kill(self, seconds: float, *, at_once: bool = False) -> None:
        """End the processes, and wait for that as far as it can be seen from here: on this node.

        at_once: those of this node without Ray, which takes a moment, needs the GCS, and calls an end that it was not
        asked for an error.
        """
        if not ray.is_initialized():  # they have ended with it
            return
        if not at_once or len(self._processes) < len(self._actors):
            for actor in self._actors:
                with contextlib.suppress(Exception):  # it may be dead already
                    ray.kill(actor)
        _, left = psutil.wait_procs(self._processes, timeout=0 if at_once else seconds / 4)
        for process in left:  # a stopped process does not hear Ray
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=seconds)

    def _silent(self, limit: float) -> str | None:
        """Which rank has not answered for `limit` seconds, if any. Cheap; asks again, so it is called now and then."""
        if not self._pings:
            return None
        waited = time.monotonic() - min(asked for asked, _question in self._pings)
        if waited < timeouts.PING_S:
            return None
        questions = [question for _asked, question in self._pings]
        # If it was this process that stood still, an answer may still be on its way.
        grace = timeouts.PING_S if waited > limit else 0
        answered, _ = ray.wait(questions, num_returns=len(questions), timeout=grace)
        for rank, (asked, question) in enumerate(self._pings):
            if question in answered:
                self._pings[rank] = self._ping(rank)
            elif time.monotonic() - asked > limit:
                return f"{self._name(rank)} has not answered for {limit:g} s"
        return None

    def _ping(self, rank: int) -> tuple[float, ray.ObjectRef]:
        return time.monotonic(), self._actors[rank].ping.options(concurrency_group=_PINGS).remote()

    def _name(self, rank: int) -> str:
        return f"worker rank {rank} on node {self._addresses[rank]}"


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
