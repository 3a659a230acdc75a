"""`WorkerActor`: one tensor-parallel rank in a process of its own, and the process groups it shares with the driver.

Ranks of the control group: the driver is 0, TP rank r is r + 1. Plans travel on the control group, results on a group
of ranks 0 and 1, the model's collectives on the device group of ranks 1..tp, so no two threads ever share a group.
"""

from __future__ import annotations

import ipaddress
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from rayllm.api.types import KVCosts, RankReady, StepPlan, StepResult
from rayllm.config.options import EngineConfig
from rayllm.parallel.tp_group import TPGroup
from rayllm.worker.gc_pauses import freeze_heap

if TYPE_CHECKING:
    from rayllm.config.model_spec import ModelSpec

CONNECT_TIMEOUT = timedelta(seconds=60)
DEVICE_TIMEOUT = timedelta(minutes=30)  # of the model's collectives; the driver's deadline for a step is shorter
FOREVER = timedelta(days=3650)  # an idle engine waits this long for its next plan

_PLANS = msgspec.msgpack.Decoder(StepPlan | None)
_RESULTS = msgspec.msgpack.Decoder(StepResult | None)
_FRAME_BYTES = 8192  # a result of 1,000 tokens without logprobs fits
_LENGTH_BYTES = 8


class AnyWorker(Protocol):
    """What a rank runs: `rayllm.worker.worker.Worker`, or a stand-in. `collect` runs on a thread of its own."""

    def load_model(self) -> None: ...
    def determine_num_blocks(self) -> tuple[int, int]: ...
    def init_cache(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None: ...
    def warm_up(self) -> RankReady: ...
    def measure_costs(self) -> KVCosts | None: ...
    def submit(self, plan: StepPlan) -> None: ...
    def collect(self) -> StepResult: ...
    def close(self) -> None: ...


WorkerFactory = Callable[[EngineConfig, "ModelSpec", TPGroup, torch.device], AnyWorker]


def default_worker(config: EngineConfig, spec: ModelSpec, tp: TPGroup, device: torch.device) -> AnyWorker:
    """The `WorkerFactory` of real engines."""
    from rayllm.worker.worker import Worker

    return Worker(config, spec, tp, device)


class Rendezvous(msgspec.Struct, frozen=True):
    """Where the driver and its workers meet: host and port of the driver's TCPStore, the number of TP ranks.

    device_backend: of the device group, "nccl" or "gloo".
    """

    host: str
    port: int
    num_ranks: int
    device_backend: str


class Groups(NamedTuple):
    """One process's groups; None where it is no member. The device group is None also for a single rank."""

    control: dist.ProcessGroup
    results: dist.ProcessGroup | None
    device: dist.ProcessGroup | None


def interface_variables(host: str) -> dict[str, str]:
    """Environment variables that keep gloo and NCCL on the network of the rendezvous, seen from this node.

    Gloo would resolve the hostname, which need not lead to an address of this machine, or to any. Empty if no network
    interface here owns the address: then they choose.
    """
    import ray
    import psutil  # type: ignore[import-untyped]  # isort: skip  # Ray brings it along

    own = host if ipaddress.ip_address(host).is_loopback else ray.util.get_node_ip_address()
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == own for address in addresses):
            return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    return {}


def join_groups(meeting: Rendezvous, rank: int, store: dist.TCPStore | None, idle_timeout: timedelta) -> Groups:
    """Create this process's groups; returns when all processes have. The control group becomes the process's default.

    rank: in the control group. store: the driver's own; workers connect to it. idle_timeout: how long one wait on the
    control group may take from now on. Raises RuntimeError if another process does not come within CONNECT_TIMEOUT.
    """
    if store is None:
        store = dist.TCPStore(
            meeting.host, meeting.port, is_master=False, wait_for_workers=False, timeout=CONNECT_TIMEOUT
        )
    size = meeting.num_ranks + 1
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=CONNECT_TIMEOUT)
    control = dist.group.WORLD
    # All processes create all groups, members or not: names are counted, and have to be the same everywhere.
    results = dist.new_group([0, 1], backend="gloo", timeout=CONNECT_TIMEOUT)
    device = None
    if meeting.num_ranks > 1:
        device = dist.new_group(list(range(1, size)), backend=meeting.device_backend, timeout=DEVICE_TIMEOUT)
    # Only connecting has a short limit: gloo drops a connection whose wait times out, and engines may idle for days.
    _set_pg_timeout(idle_timeout, control)
    if rank <= 1:
        _set_pg_timeout(FOREVER, results)
    assert control is not None
    return Groups(control, results if rank <= 1 else None, device if rank >= 1 else None)


def pack(message: StepPlan | StepResult | None) -> bytes:
    """A message as the functions below send it; None is the end of the stream."""
    return msgspec.msgpack.encode(message)


def send_plan(groups: Groups, packed: bytes) -> None:
    """Send a packed plan from the driver to all ranks; returns when they take it. RuntimeError if one is gone."""
    dist.broadcast_object_list([packed], src=0, group=groups.control)


def receive_plan(groups: Groups) -> StepPlan | None:
    """A rank's side of `send_plan`: waits for the next plan."""
    packed: list[Any] = [None]
    dist.broadcast_object_list(packed, src=0, group=groups.control)
    return _PLANS.decode(packed[0])


def send_result(groups: Groups, packed: bytes) -> None:
    """Send a packed result from TP rank 0 to the driver; returns when it takes it. RuntimeError if it is gone.

    One message unless the result is long: half the time of an object list, which sends its size ahead.
    """
    frame = bytearray(_FRAME_BYTES)
    frame[:_LENGTH_BYTES] = len(packed).to_bytes(_LENGTH_BYTES, "little")
    first = packed[: _FRAME_BYTES - _LENGTH_BYTES]
    frame[_LENGTH_BYTES : _LENGTH_BYTES + len(first)] = first
    dist.broadcast(torch.frombuffer(frame, dtype=torch.uint8), src=1, group=groups.results)
    if rest := bytearray(packed[len(first) :]):
        dist.broadcast(torch.frombuffer(rest, dtype=torch.uint8), src=1, group=groups.results)


def receive_result(groups: Groups) -> StepResult | None:
    """The driver's side of `send_result`: waits for the next result."""
    frame = bytearray(_FRAME_BYTES)
    dist.broadcast(torch.frombuffer(frame, dtype=torch.uint8), src=1, group=groups.results)
    end = _LENGTH_BYTES + int.from_bytes(frame[:_LENGTH_BYTES], "little")
    packed = frame[_LENGTH_BYTES:end]
    if end > _FRAME_BYTES:
        rest = bytearray(end - _FRAME_BYTES)
        dist.broadcast(torch.frombuffer(rest, dtype=torch.uint8), src=1, group=groups.results)
        packed += rest
    return _RESULTS.decode(packed)


class WorkerActor:
    """One rank. Public methods are Ray calls of the driver, each returning when this rank is done with it.

    All of the worker's methods but `collect` run on one thread of ours, since PyTorch keeps streams, gradient mode and
    the like by thread, and Ray's own thread has to stay free to report an error of either thread at once.
    """

    def __init__(
        self, rank: int, config: EngineConfig, spec: ModelSpec, device: str, worker_factory: WorkerFactory | None
    ):
        self._rank, self._config, self._spec = rank, config, spec
        self._device = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        self._worker_factory = worker_factory or default_worker
        self._thread = _CallThread()
        self._groups: Groups | None = None
        self._worker: AnyWorker | None = None

    def whereabouts(self) -> tuple[int, str]:
        """This process and its device, once everything it needs is imported."""
        if self._device.type == "cpu":
            return os.getpid(), "CPU"
        return os.getpid(), f"GPU {os.environ.get('CUDA_VISIBLE_DEVICES', '0')}"

    def ping(self) -> None:
        """Answers as long as this process can run Python; called in a thread of its own."""

    def connect(self, meeting: Rendezvous) -> None:
        """Join the groups, and try the device group out."""
        for name, value in interface_variables(meeting.host).items():
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

    def load_model(self) -> None:
        self._thread.call(self._load_model)

    def _load_model(self) -> None:
        assert self._groups is not None
        tp = TPGroup(self._rank, self._config.tensor_parallel_size, self._groups.device)
        self._worker = self._worker_factory(self._config, self._spec, tp, self._device)
        self._worker.load_model()

    def determine_num_blocks(self) -> tuple[int, int]:
        assert self._worker is not None
        return self._thread.call(self._worker.determine_num_blocks)

    def init_cache(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        assert self._worker is not None
        self._thread.call(self._worker.init_cache, num_gpu_blocks, num_cpu_blocks)

    def warm_up(self) -> RankReady:
        assert self._worker is not None
        ready: RankReady = self._thread.call(self._worker.warm_up)
        freeze_heap()
        return ready

    def measure_costs(self) -> KVCosts | None:
        assert self._worker is not None
        costs: KVCosts | None = self._thread.call(self._worker.measure_costs)
        return costs

    def run(self) -> None:
        """The step loop: returns when the driver said stop and all plans before that are done.

        Raises what the worker raised, at once and without waiting for the other thread; RuntimeError if the driver or
        another rank is gone. The driver then ends this process.
        """
        assert self._worker is not None
        assert self._groups is not None
        loops = _StepLoops(self._worker, self._groups)
        threading.Thread(target=loops.collect_results, name="collect", daemon=True).start()
        self._thread.start(loops.submit_plans)
        for _ in range(2):
            if (error := loops.ended.get()) is not None:
                raise error
        self._thread.call(self._worker.close)


class _StepLoops:
    """The two loops of a rank that serves. `ended` gets one entry a loop: None, or the exception that ended it."""

    def __init__(self, worker: AnyWorker, groups: Groups):
        self.ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._worker, self._groups = worker, groups
        self._submitted: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True for each plan, False at the end

    def submit_plans(self) -> None:
        try:
            while (plan := receive_plan(self._groups)) is not None:
                self._worker.submit(plan)
                self._submitted.put(True)
            self._submitted.put(False)
        except BaseException as error:
            self.ended.put(error)
        else:
            self.ended.put(None)

    def collect_results(self) -> None:
        """Every rank collects, to keep its worker in step; the first one sends."""
        try:
            while self._submitted.get():
                result = self._worker.collect()
                if self._groups.results is not None:
                    send_result(self._groups, pack(result))
            if self._groups.results is not None:
                send_result(self._groups, pack(None))
        except BaseException as error:
            self.ended.put(error)
        else:
            self.ended.put(None)


class _CallThread:
    """A daemon thread that runs calls one after the other. An executor's threads would be joined at exit, and hang."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...], Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="worker", daemon=True).start()

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
