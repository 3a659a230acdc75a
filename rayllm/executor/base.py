"""`Executor`: what the engine needs of its workers, wherever they run. One implementation a placement of the ranks."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from rayllm.api.types import KVBlocks, StartReport, StepPlan, StepResult
from rayllm.errors import RayllmError, StartupError

MAX_IN_FLIGHT = 2  # one plan computes while the next is scheduled; more would only add latency


class Executor(ABC):
    """Runs StepPlans on the workers of one engine. Life: start, then submit and collect in turn, then shutdown.

    Called from one thread, but for `check_health`.
    """

    # Plans that may be submitted before the oldest one's result is collected.
    max_in_flight = MAX_IN_FLIGHT

    def __init__(self) -> None:
        self.report = StartReport([], [], [])  # how the start went, filled in as it goes

    @abstractmethod
    def start(self) -> KVBlocks:
        """Start the workers, load the model, size and allocate the KV pools, warm up. Once. Returns the pools' sizes.

        Raises ConfigError or ModelError as a worker raised it, and StartupError for everything else; what had been
        started by then is taken down again.
        """

    @abstractmethod
    def submit(self, plan: StepPlan) -> None:
        """Hand a plan to the workers. It may be changed afterwards.

        Raises RuntimeError if max_in_flight plans wait for `collect` already, EngineDeadError if a worker failed.
        """

    @abstractmethod
    def collect(self) -> StepResult:
        """The result of the oldest plan not yet collected; blocks until it is there.

        Raises RuntimeError if no plan is in flight, EngineDeadError if a worker failed.
        """

    @abstractmethod
    def check_health(self) -> None:
        """Raise EngineDeadError if the workers cannot go on. From any thread, at any time; cheap."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the workers and free all they hold, in bounded time. Idempotent, safe after any error."""

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

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Record how long the body took; a body that raises is not recorded."""
        started = time.monotonic()
        yield
        self.report.phases.append((name, time.monotonic() - started))
