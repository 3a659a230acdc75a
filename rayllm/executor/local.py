"""`LocalExecutor`: one rank, in this process. No Ray, no process group."""

from __future__ import annotations

import logging

import torch

from rayllm.api.types import KVBlocks, StepPlan, StepResult
from rayllm.config.resolved import ResolvedConfig
from rayllm.errors import EngineDeadError
from rayllm.executor.base import Executor
from rayllm.parallel.tp_group import TPGroup
from rayllm.worker.worker import LoadRank, RankModel, Worker

logger = logging.getLogger(__name__)


class LocalExecutor(Executor):
    """Runs the rank in the caller's process and thread. See `Executor` for the contract."""

    def __init__(self, config: ResolvedConfig, load: LoadRank = RankModel):
        super().__init__()
        self._config, self._load = config, load
        self._worker: Worker | None = None
        self._in_flight = 0
        self._was_started = False
        self._dead = "the engine has not been started"

    def start(self) -> KVBlocks:
        if self._was_started:
            raise RuntimeError("an executor starts once")
        self._was_started = True
        with self._starting():
            if self._config.device == "cuda":
                device = torch.device("cuda", torch.cuda.current_device())
                name = torch.cuda.get_device_name(device)
            else:
                device, name = torch.device("cpu"), "CPU"
                self.max_in_flight = 1  # submit computes before it returns: nothing would overlap
            loaded = self._load(self._config, TPGroup.single(), device)
            blocks = loaded.count_blocks()
            self._worker = loaded.build(blocks)
        self.report.ready.append(self._worker.ready)
        self.report.phases.extend(self._worker.ready.phases)
        self.report.placement.append(f"this process, {name}")
        self._dead = ""
        return blocks

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

    def _living_worker(self) -> Worker:
        if self._dead or self._worker is None:
            raise EngineDeadError(self._dead)
        return self._worker

    def _fail(self, error: Exception) -> EngineDeadError:
        self._dead = f"the worker failed: {type(error).__name__}: {error}"
        return EngineDeadError(self._dead)
