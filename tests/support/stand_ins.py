"""Ranks without a model, for executors: one that computes, and one that fails where a test wants it to."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections import deque

import torch
import torch.distributed as dist

from rayllm.api.types import DeviceMemory, KVBlocks, KVCosts, RankReady, StepPlan, StepResult
from rayllm.config.options import EngineConfig
from rayllm.config.resolved import resolve
from rayllm.errors import ConfigError, ModelError


def cpu_config(**options):
    """Settled options of an engine on a CPU, without standbys unless they are asked for."""
    return resolve(EngineConfig(**{"device": "cpu", "standby_ranks": "none", **options}), 0)


def make_plan(step_id: int, num_rows: int = 3) -> StepPlan:
    """A decode step of rows 0..num_rows - 1."""
    rows = list(range(num_rows))
    return StepPlan(step_id, [], [], [], [], rows, [1] * num_rows, num_rows, num_rows)


class AddingRank:
    """Tokens are (sum of 0..7 + step id) * row: each rank adds up its share of the sum, an all-reduce the rest.

    It stands in for a `RankModel` and a `Worker`, and as a class it is a `LoadRank`.
    """

    def __init__(self, config, tp, device, weights=None):
        self.config, self.tp, self.device = config, tp, device
        self.ready = RankReady(
            DeviceMemory(weights=8 + tp.rank),
            kv_costs=KVCosts(1e-5, 1e-6 * (1 + tp.rank), 2e-6),
            phases=[("load model", 0.0), ("warm up", 0.0)],
        )
        self.pending = deque()
        self.num_closed = 0
        self.share = torch.arange(8, device=self.device)[self.tp.rank :: self.tp.size].sum()

    def count_blocks(self):
        return KVBlocks(100 - self.tp.rank, 50 + self.tp.rank)

    def build(self, blocks, resumes=False):
        assert blocks == KVBlocks(100 - (self.tp.size - 1), 50)
        return self

    def submit(self, plan):
        total = self.share.clone()
        if self.tp.group is not None:
            dist.all_reduce(total, group=self.tp.group)
        self.pending.append(StepResult(plan.step_id, [(int(total) + plan.step_id) * row for row in plan.rows]))

    def collect(self):
        return self.pending.popleft()

    def close(self):
        self.num_closed += 1


class FailingRank(AddingRank):
    """Fails on one rank in one method ("load" is __init__), in steps at step id 3. With functools.partial a LoadRank.

    how: "raise", "config", "model" (errors of these kinds), "kill" (SIGKILL), "stop" (SIGSTOP), "pause" (SIGSTOP, and
    SIGCONT after three seconds), "hang".
    """

    def __init__(self, config, tp, device, weights=None, *, rank, where, how):
        super().__init__(config, tp, device, weights)
        self.fault = (rank, where, how)
        self._maybe_fail("load")

    def count_blocks(self):
        self._maybe_fail("count_blocks")
        return super().count_blocks()

    def build(self, blocks, resumes=False):
        self._maybe_fail("build")
        return super().build(blocks)

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
        if how == "pause":
            subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {os.getpid()}"])
        if how in ("stop", "pause"):
            os.kill(os.getpid(), signal.SIGSTOP)
            return
        if how == "hang":
            threading.Event().wait()
        time.sleep(0.1)  # the other ranks get ahead, into the next all-reduce
        kind = {"raise": ValueError, "config": ConfigError, "model": ModelError}[how]
        raise kind(f"made to fail in {method}")


class StumblingRank(AddingRank):
    """Rank 1 leaves a file in `folder` whenever it starts, and dies if the number of the start is a deadly one.

    where: "load" (when it is made) or "build".
    """

    def __init__(self, config, tp, device, weights=None, *, folder, deadly_starts, where="load"):
        super().__init__(config, tp, device, weights)
        self.dies_in = ""
        if tp.rank == 1:
            start = len(list(folder.iterdir()))
            (folder / str(start)).touch()
            self.dies_in = where if start in deadly_starts else ""
        self._maybe_die("load")

    def build(self, blocks, resumes=False):
        self._maybe_die("build")
        return super().build(blocks)

    def _maybe_die(self, method):
        if method == self.dies_in:
            os.kill(os.getpid(), signal.SIGKILL)


def pids_of(executor):
    """The processes of an executor's ranks."""
    return pids_in(executor.report.placement)


def pids_in(places):
    """The processes of these ranks or standbys."""
    return [int(re.search(r"process (\d+)", place)[1]) for place in places]


class Replica:
    """As a Serve replica has it: bundle 0 of a placement group is this actor's, the others are for its workers."""

    def run(self, config):
        """A step's result, and the placement groups that there are while it runs."""
        import ray

        from rayllm.executor.ray import RayExecutor

        executor = RayExecutor(config, AddingRank)
        executor.start()
        executor.submit(make_plan(7))
        result = executor.collect()
        groups = [key for key, group in ray.util.placement_group_table().items() if group["state"] == "CREATED"]
        executor.shutdown()
        return result, groups
