"""`WorkerActor`: one tensor-parallel rank in a process of its own."""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, as_completed
from functools import partial
from typing import Any, NamedTuple

import psutil
import ray
import torch
import torch.distributed as dist

from rayllm.api.types import Adapter, KVBlocks, RankReady
from rayllm.config.resolved import ResolvedConfig
from rayllm.parallel import symmetric
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
from rayllm.parallel.shared_weights import SharedWeights
from rayllm.parallel.tp_group import TPGroup
from rayllm.worker.memory import limit_stacks
from rayllm.worker.worker import LoadRank, RankModel, Worker
from rayllm_kernels import ops


class Whereabouts(NamedTuple):
    """The process of a rank, and its node. created: seconds since the epoch."""

    pid: int
    created: float
    device: str
    # Ray's id, and the address in the cluster.
    node_id: str
    address: str


class WorkerActor:
    """One rank, or its standby. Public methods are Ray calls of the driver, each returning when it is done here.

    A rank gets `connect`, `load`, `build` and `run`. A standby gets `warm_up` and `adopt` before, maybe long before,
    and `end` when it takes over.

    All of the rank's methods but `collect` and those of adapters run on one thread of ours, since PyTorch keeps
    streams, gradient mode and the like by thread, and Ray's own thread has to stay free to report an error of either
    thread at once.
    """

    def __init__(self, rank: int, config: ResolvedConfig, load: LoadRank):
        self._rank, self._config, self._load = rank, config, load
        self._device = torch.device("cuda", 0) if config.device == "cuda" else torch.device("cpu")
        self._thread = _CallThread("worker")
        self._weights: SharedWeights | None = None  # what `adopt` left
        # What `connect`, `load` and `build` leave, which the driver calls in this order.
        self._groups: Groups
        self._loaded: RankModel
        self._worker: Worker

    def whereabouts(self) -> Whereabouts:
        """This process and its device, once everything it needs is imported."""
        device = "CPU" if self._device.type == "cpu" else f"GPU {os.environ.get('CUDA_VISIBLE_DEVICES', '0')}"
        node_id, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        return Whereabouts(os.getpid(), psutil.Process().create_time(), device, node_id, address)

    def ping(self) -> None:
        """Answers as long as this process can run Python; called in a thread of its own."""

    def live(self) -> None:
        """Returns never; called in a thread of its own, so that Ray tells when this process ends."""
        threading.Event().wait()

    def memory(self) -> int:
        """Bytes in use: of this process alone, without what it shares, or on its GPU, of all processes."""
        if self._device.type == "cpu":
            num_bytes: int = psutil.Process().memory_full_info().uss
            return num_bytes
        free, total = self._thread.call(torch.cuda.mem_get_info, self._device)
        return total - free

    def warm_up(self) -> None:
        """Do what needs neither weights nor other ranks: on CUDA, make the context."""
        if self._device.type == "cuda":
            self._thread.call(self._make_context)
        _freeze()

    def _make_context(self) -> None:
        torch.cuda.set_device(self._device)
        limit_stacks(self._device)
        ops.prepare(self._device)
        part = torch.zeros(64, 64, dtype=getattr(torch, self._config.dtype), device=self._device)
        torch.mm(part, part)  # loads cuBLAS
        if self._config.tp > 1:
            symmetric.prepare(self._device)
        torch.cuda.synchronize()

    def adopt(self, names: list[bytes]) -> bool:
        """Map the weights that this rank hands out in another process, by rank; False if that is gone."""
        weights = SharedWeights(self._device)
        if not self._thread.call(weights.adopt, names[self._rank]):
            return False
        self._weights = weights
        return True

    def end(self, ranks: list[Whereabouts], seconds: float) -> None:
        """Kill the process that was this rank before, on this host, and wait for its end.

        Ray would ask it to end, and a process that is stopped does not hear. Raises psutil.TimeoutExpired.
        """
        before = ranks[self._rank]
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(before.pid)
            if abs(process.create_time() - before.created) < 1:  # else its number has gone to another process
                process.kill()
                process.wait(seconds)

    def connect(self, meeting: Rendezvous) -> None:
        """Join the groups, and try the device group out."""
        for name, value in interface_variables(meeting.host, ray.util.get_node_ip_address()).items():
            os.environ.setdefault(name, value)
        self._thread.call(self._connect, meeting)

    def _connect(self, meeting: Rendezvous) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._groups = join_groups(meeting, self._rank + 1, None, FOREVER)
        if self._groups.device is not None:
            # NCCL connects at the first collective: better here than in the middle of loading.
            present = torch.ones(1, device=self._device)
            dist.all_reduce(present, group=self._groups.device)
            if present.item() != meeting.num_ranks:
                raise RuntimeError(f"the first all-reduce summed {present.item():g} ranks of {meeting.num_ranks}")

    def load(self, has_weights: bool) -> bytes:
        """Load this rank's part of the model; returns where it hands out the weights, empty if there are no standbys.

        has_weights: all ranks have adopted theirs.
        """
        fixed_order = self._config.options.deterministic
        tp = TPGroup(self._rank, self._config.tp, self._groups.device, fixed_order=fixed_order)
        weights = self._weights if has_weights else SharedWeights(self._device) if self._config.standbys else None
        self._loaded = self._thread.call(self._load, self._config, tp, self._device, weights)
        return b"" if weights is None else weights.hand_out()

    def count_blocks(self) -> KVBlocks:
        """The KV blocks that this rank has room for."""
        blocks: KVBlocks = self._thread.call(self._loaded.count_blocks)
        return blocks

    def build(self, blocks: KVBlocks, resumes: bool) -> RankReady:
        """Allocate the KV cache and get ready to serve. resumes: as `RankModel.build` has it."""
        self._worker = self._thread.call(partial(self._loaded.build, blocks, resumes=resumes))
        _freeze()
        return self._worker.ready

    def load_adapter(self, adapter: Adapter) -> None:
        """Read an adapter into host memory; called in a thread of its own. Raises ModelError."""
        assert self._worker.adapters is not None
        self._worker.adapters.load(adapter)

    def drop_adapter(self, adapter_id: int) -> None:
        """Forget an adapter that no plan in flight names; called in a thread of its own."""
        assert self._worker.adapters is not None
        self._worker.adapters.drop(adapter_id)

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


def _freeze() -> None:
    """Full passes of the garbage collector visit libraries too, for 100 to 200 ms, if these are not left out."""
    gc.collect()
    gc.freeze()


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
