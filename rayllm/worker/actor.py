"""`WorkerActor`: one tensor-parallel rank in a process of its own."""

from __future__ import annotations

import gc
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, as_completed
from typing import Any

import ray
import torch
import torch.distributed as dist

from rayllm.api.types import KVBlocks, RankReady
from rayllm.config.resolved import ResolvedConfig
from rayllm.parallel.process_groups import (
    FOREVER,
    Groups,
    Rendezvous,
    interface_variables,
    join_groups,
    pack,
    receive_plan,
    send_result,
)
from rayllm.parallel.tp_group import TPGroup
from rayllm.worker.worker import LoadRank, RankModel, Worker


class WorkerActor:
    """One rank. Public methods are Ray calls of the driver, each returning when this rank is done with it.

    All of the rank's methods but `collect` run on one thread of ours, since PyTorch keeps streams, gradient mode and
    the like by thread, and Ray's own thread has to stay free to report an error of either thread at once.
    """

    def __init__(self, rank: int, config: ResolvedConfig, load: LoadRank):
        self._rank, self._config, self._load = rank, config, load
        self._device = torch.device("cuda", 0) if config.device == "cuda" else torch.device("cpu")
        self._thread = _CallThread("worker")
        # What `connect`, `load` and `build` leave, which the driver calls in this order.
        self._groups: Groups
        self._loaded: RankModel
        self._worker: Worker

    def whereabouts(self) -> tuple[int, str]:
        """This process and its device, once everything it needs is imported."""
        if self._device.type == "cpu":
            return os.getpid(), "CPU"
        return os.getpid(), f"GPU {os.environ.get('CUDA_VISIBLE_DEVICES', '0')}"

    def ping(self) -> None:
        """Answers as long as this process can run Python; called in a thread of its own."""

    def connect(self, meeting: Rendezvous) -> None:
        """Join the groups, and try the device group out."""
        for name, value in interface_variables(meeting.host, ray.util.get_node_ip_address()).items():
            os.environ.setdefault(name, value)
        self._thread.call(self._connect, meeting)

    def _connect(self, meeting: Rendezvous) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        else:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // meeting.num_ranks))
        self._groups = join_groups(meeting, self._rank + 1, None, FOREVER)
        if self._groups.device is not None:
            # NCCL connects at the first collective: better here than in the middle of loading.
            present = torch.ones(1, device=self._device)
            dist.all_reduce(present, group=self._groups.device)
            if present.item() != meeting.num_ranks:
                raise RuntimeError(f"the first all-reduce summed {present.item():g} ranks of {meeting.num_ranks}")

    def load(self) -> KVBlocks:
        """Load this rank's part of the model; returns the KV blocks that it has room for."""
        fixed_order = self._config.options.deterministic
        tp = TPGroup(self._rank, self._config.tp, self._groups.device, fixed_order=fixed_order)
        self._loaded = self._thread.call(self._load, self._config, tp, self._device)
        return self._thread.call(self._loaded.count_blocks)

    def build(self, blocks: KVBlocks) -> RankReady:
        """Allocate the KV cache and get ready to serve."""
        self._worker = self._thread.call(self._loaded.build, blocks)
        # Full passes of the garbage collector visit libraries too, for 100 to 200 ms, if these are not left out.
        gc.collect()
        gc.freeze()
        return self._worker.ready

    def run(self) -> None:
        """The step loop: returns when the driver said stop and all plans before that are done.

        Raises what the rank raised, at once and without waiting for the other thread; RuntimeError if the driver or
        another rank is gone. The driver then ends this process.
        """
        worker, groups = self._worker, self._groups
        submitted: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True for each plan, False at the end

        def submit_plans() -> None:
            while (plan := receive_plan(groups)) is not None:
                worker.submit(plan)
                submitted.put(True)
            submitted.put(False)

        def collect_results() -> None:
            """Every rank collects, to keep its worker in step; the first one sends."""
            while submitted.get():
                result = worker.collect()
                if groups.results is not None:
                    send_result(groups, pack(result))
            if groups.results is not None:
                send_result(groups, pack(None))

        for loop in as_completed([self._thread.start(submit_plans), _CallThread("collect").start(collect_results)]):
            loop.result()
        self._thread.call(worker.close)


class _CallThread:
    """A daemon thread that runs calls one after the other. An executor's threads would be joined at exit, and hang."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...], Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def start(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.put((function, args, future))
        return future

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run it there, wait, return its result or raise its exception."""
        return self.start(function, *args).result()

    def _run(self) -> None:
        while True:
            function, args, future = self._calls.get()
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)
