"""`LocalExecutor`: one rank, in this process. No Ray, no process group."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from rayllm.api.types import StepPlan, StepResult
from rayllm.config.options import EngineConfig
from rayllm.errors import EngineDeadError
from rayllm.executor.base import Executor, WorkerLimits, device_name, resolve_device
from rayllm.parallel.tp_group import TPGroup
from rayllm.worker.actor import AnyWorker, WorkerFactory, default_worker

if TYPE_CHECKING:
    from rayllm.config.model_spec import ModelSpec

logger = logging.getLogger(__name__)


class LocalExecutor(Executor):
    """Runs the worker in the caller's process and thread. See `Executor` for the contract.

    worker_factory: what makes the worker; None takes `rayllm.worker.worker.Worker`.
    """

    def __init__(self, config: EngineConfig, spec: ModelSpec, worker_factory: WorkerFactory | None = None):
        super().__init__()
        self._config, self._spec = config, spec
        self._worker_factory = worker_factory or default_worker
        self._worker: AnyWorker | None = None
        self._in_flight = 0
        self._was_started = False
        self._dead = "the engine has not been started"

    def start(self) -> WorkerLimits:
        if self._was_started:
            raise RuntimeError("an executor starts once")
        self._was_started = True
        with self._starting():
            limits = self._start()
        self._dead = ""
        return limits

    def _start(self) -> WorkerLimits:
        with self._phase("load model"):
            device = resolve_device(self._config.device)
            if device.type == "cpu":
                self.max_in_flight = 1  # submit computes before it returns: nothing would overlap
            self._worker = worker = self._worker_factory(self._config, self._spec, TPGroup.single(), device)
            worker.load_model()
        with self._phase("size KV cache"):
            limits = WorkerLimits(*worker.determine_num_blocks())
        with self._phase("allocate KV cache"):
            worker.init_cache(*limits)
        with self._phase("warm up"):
            self.report.ready.append(worker.warm_up())
            self.report.kv_costs.extend(costs for costs in [worker.measure_costs()] if costs is not None)
        self.report.placement.append(f"this process, {device_name(device)}")
        return limits

    def submit(self, plan: StepPlan) -> None:
        worker = self._living_worker()
        if self._in_flight >= self.max_in_flight:
            raise RuntimeError(f"{self._in_flight} plans are in flight; collect one first")
        try:
            worker.submit(plan)
        except Exception as error:
            raise self._fail(error) from error
        self._in_flight += 1

    def collect(self) -> StepResult:
        worker = self._living_worker()
        if not self._in_flight:
            raise RuntimeError("no plan is in flight")
        try:
            result = worker.collect()
        except Exception as error:
            raise self._fail(error) from error
        self._in_flight -= 1
        return result

    def check_health(self) -> None:
        self._living_worker()

    def shutdown(self) -> None:
        worker, self._worker = self._worker, None
        self._dead = self._dead or "the engine was shut down"
        if worker is None:
            return
        try:
            worker.close()
        except Exception:  # a device that failed fails here too; the first error is the one to report
            logger.warning("the worker did not close cleanly", exc_info=True)

    def _living_worker(self) -> AnyWorker:
        if self._dead or self._worker is None:
            raise EngineDeadError(self._dead)
        return self._worker

    def _fail(self, error: Exception) -> EngineDeadError:
        self._dead = f"the worker failed: {type(error).__name__}: {error}"
        return EngineDeadError(self._dead)
