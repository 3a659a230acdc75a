"""`Executor`: what the engine needs of its workers, wherever they run. One implementation a placement of the ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from rayllm.api.types import Adapter, KVBlocks, StartReport, StepPlan, StepResult
from rayllm.errors import EngineDeadError, RayllmError, StartupError


class Executor(ABC):
    """Runs StepPlans on the workers of one engine. Life: start, then submit and collect in turn, then shutdown.

    Called from one thread, but for `check_health` and `load_adapter`. The caller keeps at most max_in_flight plans in
    flight, and collects no more results than it has submitted plans.

    report: how the start went, filled in as it goes.
    """

    max_in_flight = 2  # one plan computes while the next is scheduled; more would only add latency
    can_recover = False  # workers that failed can be replaced

    def __init__(self) -> None:
        self.report = StartReport([], [], [], [])
        self._dead = "the engine has not been started"  # why no step can run; "" while they can

    @abstractmethod
    def start(self) -> KVBlocks:
        """Start the workers, load the model, size and allocate the KV pools, warm up. Once. Returns the pools' sizes.

        Raises ConfigError or ModelError as a worker raised it, and StartupError for everything else; what had been
        started by then is taken down again.
        """

    @abstractmethod
    def submit(self, plan: StepPlan) -> None:
        """Hand a plan to the workers. It may be changed afterwards. Raises EngineDeadError if a worker failed."""

    @abstractmethod
    def collect(self) -> StepResult:
        """The result of the oldest plan in flight; blocks until it is there. Raises EngineDeadError."""

    @abstractmethod
    def load_adapter(self, adapter: Adapter) -> None:
        """Have all workers read an adapter into host memory; plans may name it then. Blocks; steps go on meanwhile.

        Raises ModelError if a worker cannot read it; then none has it. EngineDeadError if a worker failed.
        """

    @abstractmethod
    def drop_adapter(self, adapter_id: int) -> None:
        """Have all workers forget an adapter, which no plan in flight names. Does not wait until they have."""

    def recover(self) -> None:
        """Replace workers that failed by new ones, which hold nothing; plans in flight are forgotten. Blocks.

        Afterwards plans may be submitted as after `start`, whose pools keep their sizes. Raises EngineDeadError if it
        can't be done.
        """
        raise EngineDeadError(self._dead)

    def check_health(self) -> None:
        """Raise EngineDeadError if a worker failed. Cheap; from any thread if workers can't be replaced."""
        if self._dead:
            raise EngineDeadError(self._dead)

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the workers and free all they hold, in bounded time. Idempotent, safe after any error."""

    def _die(self, reason: str, cause: Exception | None = None) -> NoReturn:
        self._dead = self._dead or reason
        raise EngineDeadError(self._dead) from cause

    @contextmanager
    def _starting(self) -> Iterator[None]:
        """Around a start: one that fails is taken down again, and errors that are not ours become StartupError."""
        try:
            yield
        except BaseException as error:
            self.shutdown()
            if isinstance(error, RayllmError) or not isinstance(error, Exception):
                raise
            raise StartupError(f"the workers failed to start: {type(error).__name__}: {error}") from error
        self._dead = ""
