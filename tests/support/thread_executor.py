"""`ThreadExecutor`: the ranks of an engine as threads of this process, so that tests of many models need no Ray."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from support.thread_group import ThreadGroup

from rayllm.api.types import Adapter, KVBlocks, StepPlan, StepResult
from rayllm.config.resolved import ResolvedConfig
from rayllm.executor.base import Executor
from rayllm.worker.worker import RankModel, Worker


class ThreadExecutor(Executor):
    """On the CPU. A rank's thread is always the same, and computes alone. See `Executor` for the contract."""

    max_in_flight = 1

    def __init__(self, config: ResolvedConfig):
        super().__init__()
        self._config, self._workers = config, list[Worker]()
        self._threads = [ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) for _ in self._ranks]

    def start(self) -> KVBlocks:
        with self._starting():
            groups, cpu = ThreadGroup.make(self._config.tp), torch.device("cpu")
            loaded = self._on_each(lambda rank: RankModel(self._config, groups[rank], cpu))
            blocks = loaded[0].count_blocks()
            self._workers = self._on_each(lambda rank: loaded[rank].build(blocks))
        self.report.ready.extend(worker.ready for worker in self._workers)
        return blocks

    def submit(self, plan: StepPlan) -> None:
        self._on_each(lambda rank: self._workers[rank].submit(plan))

    def collect(self) -> StepResult:
        """What all ranks come to, which has to be the same."""
        first, *others = self._on_each(lambda rank: self._workers[rank].collect())
        assert all(other == first for other in others)
        return first

    def load_adapter(self, adapter: Adapter) -> None:
        self._on_each(lambda rank: self._workers[rank].adapters.load(adapter))

    def drop_adapter(self, adapter_id: int) -> None:
        self._on_each(lambda rank: self._workers[rank].adapters.drop(adapter_id))

    def shutdown(self) -> None:
        self._dead = self._dead or "the engine was shut down"
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.close()
        for thread in self._threads:
            thread.shutdown()

    @property
    def _ranks(self) -> range:
        return range(self._config.tp)

    def _on_each(self, call: Callable[[int], Any]) -> list[Any]:
        """Of each rank, in its thread, all at once."""
        futures = [self._threads[rank].submit(call, rank) for rank in self._ranks]
        return [future.result() for future in futures]
