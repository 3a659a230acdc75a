"""`LocalExecutor`: one rank, in this process. No Ray, no process group."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from rayllm.api.types import Adapter, KVBlocks, StepPlan, StepResult
from rayllm.config.resolved import ResolvedConfig
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
        if config.device == "cpu":
            self.max_in_flight = 1  # submit computes before it returns: nothing would overlap

    def start(self) -> KVBlocks:
        with self._starting():
            device, name = torch.device("cpu"), "CPU"
            if self._config.device == "cuda":
                device = torch.device("cuda", torch.cuda.current_device())
                name = torch.cuda.get_device_name(device)
            loaded = self._load(self._config, TPGroup.single(), device)
            blocks = loaded.count_blocks()
            self._worker = loaded.build(blocks)
        self.report.ready.append(self._worker.ready)
        self.report.phases.extend(self._worker.ready.phases)
        self.report.placement.append(f"this process, {name}")
        return blocks

    def submit(self, plan: StepPlan) -> None:
        self._run(lambda worker: worker.submit(plan))

    def collect(self) -> StepResult:
        return self._run(lambda worker: worker.collect())

    def load_adapter(self, adapter: Adapter) -> None:
        self.check_health()
        assert self._worker is not None
        assert self._worker.adapters is not None
        self._worker.adapters.load(adapter)

    def drop_adapter(self, adapter_id: int) -> None:
        if self._worker is not None and self._worker.adapters is not None:
            self._worker.adapters.drop(adapter_id)

    def shutdown(self) -> None:
        worker, self._worker = self._worker, None
        self._dead = self._dead or "the engine was shut down"
        if worker is None:
            return
        try:
            worker.close()
        except Exception:  # a device that failed fails here too; the first error is the one to report
            logger.warning("the worker did not close cleanly", exc_info=True)

    def _run(self, call: Callable[[Worker], Any]) -> Any:
        """Call the worker; what it raises is its end."""
        self.check_health()
        assert self._worker is not None
        try:
            return call(self._worker)
        except Exception as error:
            self._die(f"the worker failed: {type(error).__name__}: {error}", error)
