"""Workers without a model, for executors: one that computes, and one that fails where a test wants it to."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque

import torch
import torch.distributed as dist

from rayllm.api.types import DeviceMemory, KVCosts, RankReady, StepPlan, StepResult
from rayllm.errors import ConfigError, ModelError


def make_plan(step_id: int, num_rows: int = 3) -> StepPlan:
    """A decode step of rows 0..num_rows - 1."""
    rows = list(range(num_rows))
    return StepPlan(step_id, [], [], [], [], rows, [1] * num_rows, num_rows, num_rows)


class AddingWorker:
    """Tokens are (sum of 0..7 + step id) * row: each rank adds up its share of the sum, an all-reduce the rest."""

    def __init__(self, config, spec, tp, device):
        self.config, self.tp, self.device = config, tp, device
        self.calls = []
        self.pending = deque()

    def load_model(self):
        self.calls.append("load_model")
        self.share = torch.arange(8, device=self.device)[self.tp.rank :: self.tp.size].sum()

    def determine_num_blocks(self):
        self.calls.append("determine_num_blocks")
        return 100 - self.tp.rank, 50 + self.tp.rank

    def init_cache(self, num_gpu_blocks, num_cpu_blocks):
        self.calls.append("init_cache")
        self.limits = (num_gpu_blocks, num_cpu_blocks)

    def warm_up(self):
        self.calls.append("warm_up")
        assert self.limits == (100 - (self.tp.size - 1), 50)
        assert self.calls == ["load_model", "determine_num_blocks", "init_cache", "warm_up"]
        return RankReady(DeviceMemory(weights=8 + self.tp.rank))

    def measure_costs(self):
        return KVCosts(1e-5, 1e-6 * (1 + self.tp.rank), 2e-6)

    def submit(self, plan):
        total = self.share.clone()
        if self.tp.group is not None:
            dist.all_reduce(total, group=self.tp.group)
        self.pending.append(StepResult(plan.step_id, [(int(total) + plan.step_id) * row for row in plan.rows]))

    def collect(self):
        return self.pending.popleft()

    def close(self):
        self.calls.append("close")


class EmptyWorker(AddingWorker):
    """Does nothing, for measuring what a step costs beside the model."""

    def submit(self, plan):
        self.pending.append(StepResult(plan.step_id, plan.rows))


class FailingWorker(AddingWorker):
    """Fails on one rank in one method, in steps at step id 3. With functools.partial it is a worker factory.

    how: "raise", "config", "model" (errors of these kinds), "kill" (SIGKILL), "stop" (SIGSTOP), "hang".
    """

    def __init__(self, config, spec, tp, device, *, rank, where, how):
        super().__init__(config, spec, tp, device)
        self.fault = (rank, where, how)

    def load_model(self):
        self._maybe_fail("load_model")
        super().load_model()

    def determine_num_blocks(self):
        self._maybe_fail("determine_num_blocks")
        return super().determine_num_blocks()

    def init_cache(self, num_gpu_blocks, num_cpu_blocks):
        self._maybe_fail("init_cache")
        super().init_cache(num_gpu_blocks, num_cpu_blocks)

    def warm_up(self):
        self._maybe_fail("warm_up")
        return super().warm_up()

    def submit(self, plan):
        if plan.step_id == 3:
            self._maybe_fail("submit")
        super().submit(plan)

    def collect(self):
        result = super().collect()
        if result.step_id == 3:
            self._maybe_fail("collect")
        return result

    def _maybe_fail(self, method):
        rank, where, how = self.fault
        if (rank, where) != (self.tp.rank, method):
            return
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "hang":
            threading.Event().wait()
        time.sleep(0.1)  # the other ranks get ahead, into the next all-reduce
        kind = {"raise": ValueError, "config": ConfigError, "model": ModelError}[how]
        raise kind(f"made to fail in {method}")


class Replica:
    """As a Serve replica has it: bundle 0 of a placement group is this actor's, the others are for its workers."""

    def run(self, config, spec):
        """A step's result, and the placement: (owned by the executor, bundles, still there after its shutdown)."""
        import ray

        from rayllm.executor.ray import RayExecutor

        executor = RayExecutor(config, spec, AddingWorker)
        executor.start()
        executor.submit(make_plan(7))
        result = executor.collect()
        place = executor._placement
        executor.shutdown()
        state = ray.util.placement_group_table(place.group)["state"]
        return result, place.owned, place.bundles, state == "CREATED"
