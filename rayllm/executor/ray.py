"""`RayExecutor`: one Ray actor a rank. Ray starts, watches and ends the processes; plans and results go past it.

A step is one broadcast of a plan over gloo to all ranks and one message with the result from rank 0, each on a group
and a thread of its own here, so that the engine's thread never waits for a socket and always finds out who failed.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

import ray
import torch.distributed as dist

from rayllm.api.types import StepPlan, StepResult
from rayllm.config.options import EngineConfig
from rayllm.errors import EngineDeadError, StartupError
from rayllm.executor.base import Executor, WorkerLimits
from rayllm.executor.channel import Channel, ChannelBroken
from rayllm.executor.placement import Placement, cluster_device, reserve
from rayllm.executor.ranks import RankActors
from rayllm.executor.ray_cluster import connect_to_ray
from rayllm.worker.actor import CONNECT_TIMEOUT, Groups, Rendezvous, WorkerFactory, interface_variables, join_groups

if TYPE_CHECKING:
    from rayllm.config.model_spec import ModelSpec

# No step takes this long; a result that is not there by then will not come. On a CPU, a chunk may take minutes.
STEP_SECONDS = {"cuda": 30.0, "cpu": 300.0}
START_SECONDS = 1800.0  # one phase of the start: loading hundreds of gigabytes from a slow disk
WATCH_SECONDS = 0.2  # how often a wait for a result looks at the workers
FAILURE_SECONDS = 3.0  # for Ray to notice why a connection broke
STOP_SECONDS = 5.0  # each wait of the shutdown

logger = logging.getLogger(__name__)


class RayExecutor(Executor):
    """Runs one actor a rank. See `Executor` for the contract.

    worker_factory: what makes a rank's worker, importable there; None takes `rayllm.worker.worker.Worker`.
    step_seconds: the longest `collect` waits for a result; None: STEP_SECONDS of the device. A process can have one of
    these at a time, since torch.distributed has one default group a process.
    """

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        worker_factory: WorkerFactory | None = None,
        step_seconds: float | None = None,
    ):
        super().__init__()
        self._config, self._spec, self._worker_factory = config, spec, worker_factory
        self._step_seconds = step_seconds or 0.0  # the device decides, once it is known
        self._last_step = "no step has finished"
        self._in_flight: deque[int] = deque()  # step ids
        self._next_watch = 0.0  # time.monotonic() from which `collect` looks at the workers again
        self._dead = "the engine has not been started"  # why no step can run; "" while they can
        self._shutdown_lock = threading.Lock()
        self._is_shut_down = False
        # What shutdown has to undo, in the order in which it came to be.
        self._owns_ray = False
        self._placement: Placement | None = None
        self._ranks: RankActors | None = None
        self._joining: Future[Groups] | None = None
        self._channel: Channel | None = None

    def start(self) -> WorkerLimits:
        if self._is_shut_down or self._placement is not None:
            raise RuntimeError("an executor starts once")
        if dist.is_initialized():
            raise StartupError(
                "this process has a torch.distributed group already: there can be one Ray engine per process at a time"
            )
        atexit.register(self.shutdown)
        with self._starting():
            limits = self._start()
        self._dead = ""
        return limits

    def _start(self) -> WorkerLimits:
        config = self._config
        with self._phase("ray"):
            self._owns_ray = connect_to_ray()
            device = cluster_device(config.device, ray.cluster_resources())
            self._step_seconds = self._step_seconds or STEP_SECONDS[device]
        with self._phase("place"):
            self._placement = reserve(config.tensor_parallel_size, device)
        with self._phase("start actors"):
            self._ranks = ranks = RankActors(self._placement, config, self._spec, device, self._worker_factory)
            self.report.placement.extend(ranks.wait_until_up(START_SECONDS))
        with self._phase("connect"):
            groups = self._connect(ranks, self._placement, "nccl" if device == "cuda" else "gloo")
        with self._phase("load model"):
            ranks.call("load the model", "load_model", seconds=START_SECONDS)
        with self._phase("size KV cache"):
            blocks = ranks.call("size the KV cache", "determine_num_blocks", seconds=START_SECONDS)
            limits = WorkerLimits(*(min(of_ranks) for of_ranks in zip(*blocks, strict=True)))
        with self._phase("allocate KV cache"):
            ranks.call("allocate the KV cache", "init_cache", *limits, seconds=START_SECONDS)
        with self._phase("warm up"):
            self.report.ready.extend(ranks.call("warm up", "warm_up", seconds=START_SECONDS))
            costs = ranks.call("measure costs", "measure_costs", seconds=START_SECONDS)
            self.report.kv_costs.extend(of_rank for of_rank in costs if of_rank is not None)
        ranks.run()
        self._channel = Channel(groups)
        return limits

    def _connect(self, ranks: RankActors, placement: Placement, device_backend: str) -> Groups:
        """Join the control group together with all ranks, on the loopback interface if they are on this node."""
        host = "127.0.0.1" if placement.one_node() else ray.util.get_node_ip_address()
        store, port = _open_store(host)
        excepthook = sys.excepthook  # which torch replaces, to mark this process's own errors with a rank
        meeting = Rendezvous(host, port, self._config.tensor_parallel_size, device_backend)
        with _environment(interface_variables(host)):
            # On a thread, because it waits for ranks that may fail, which only `ranks.call` would notice.
            joining = _on_thread(lambda: join_groups(meeting, 0, store, timedelta(seconds=self._step_seconds)))
            self._joining = joining
            seconds = 2 * CONNECT_TIMEOUT.total_seconds()
            ranks.call("connect", "connect", meeting, seconds=seconds)
            groups = joining.result(seconds)
        sys.excepthook = excepthook
        return groups

    def submit(self, plan: StepPlan) -> None:
        channel = self._living_channel()
        if len(self._in_flight) >= self.max_in_flight:
            raise RuntimeError(f"{len(self._in_flight)} plans are in flight; collect one first")
        channel.send(plan)
        self._in_flight.append(plan.step_id)

    def collect(self) -> StepResult:
        channel = self._living_channel()
        if not self._in_flight:
            raise RuntimeError("no plan is in flight")
        step_id = self._in_flight[0]
        deadline = time.monotonic() + self._step_seconds
        result = None
        while result is None:
            try:
                result = channel.receive(WATCH_SECONDS)
            except queue.Empty:
                pass
            except ChannelBroken as error:
                self._raise_failure(FAILURE_SECONDS)
                self._die(f"the connection to the workers broke: {error}", error)
            now = time.monotonic()
            if now >= self._next_watch:  # also while results come: they are those of rank 0 alone
                self._next_watch = now + WATCH_SECONDS
                self._raise_failure()
            if result is None and now > deadline:
                reason = f"no result of step {step_id} came within {self._step_seconds:g} s; the workers hang"
                self._die(f"{reason}; {self._last_step}")
        self._in_flight.popleft()
        self._last_step = f"the last finished step was {step_id}"
        if result.step_id != step_id:
            self._die(f"the workers sent the result of step {result.step_id} instead of step {step_id}")
        return result

    def check_health(self) -> None:
        self._living_channel()
        self._raise_failure()

    def shutdown(self) -> None:
        with self._shutdown_lock:
            if self._is_shut_down:
                return
            self._is_shut_down = True
        atexit.unregister(self.shutdown)
        is_serving = not self._dead
        self._dead = self._dead or "the engine was shut down"
        if ray.is_initialized():
            with _tolerate("ending the workers"):
                self._end_workers(gracefully=is_serving)
        with _tolerate("leaving the process groups"):
            self._leave_groups()
        if self._owns_ray:
            with _tolerate("stopping Ray"):
                ray.shutdown()

    def _end_workers(self, gracefully: bool) -> None:
        try:
            if gracefully and self._ranks is not None and self._channel is not None:
                self._channel.stop()
                self._ranks.wait_stopped(STOP_SECONDS)
        finally:
            if self._ranks is not None:
                self._ranks.kill(STOP_SECONDS)
            if self._placement is not None:
                self._placement.release()

    def _leave_groups(self) -> None:
        """Once the workers are gone, whose end unblocks our threads."""
        if self._joining is None:
            return
        with contextlib.suppress(Exception):  # it failed, or still waits for a rank that will not come
            self._joining.result(STOP_SECONDS)
        if self._channel is not None and not self._channel.join(STOP_SECONDS):
            logger.warning("a connection to a worker is still open; its thread is left behind")
        if dist.is_initialized():
            _on_thread(dist.destroy_process_group).result(STOP_SECONDS)

    def _living_channel(self) -> Channel:
        if self._dead or self._channel is None:
            raise EngineDeadError(self._dead)
        return self._channel

    def _raise_failure(self, wait_seconds: float = 0.0) -> None:
        assert self._ranks is not None
        if (failure := self._ranks.failure(wait_seconds)) is not None:
            reason, error = failure
            self._die(f"{reason}; {self._last_step}", error)

    def _die(self, reason: str, cause: Exception | None = None) -> NoReturn:
        self._dead = self._dead or reason
        raise EngineDeadError(self._dead) from cause


def _open_store(host: str) -> tuple[dist.TCPStore, int]:
    """A store that listens on a free port of `host` alone; by itself, PyTorch would listen on all interfaces."""
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port: int = listener.getsockname()[1]
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=CONNECT_TIMEOUT,
        master_listen_fd=listener.detach(),  # the store closes it
    )
    return store, port


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Environment variables for the body, where the user has not set them."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _tolerate(what: str) -> Iterator[None]:
    """Log an error of the body and go on: the rest has to be taken down all the same."""
    try:
        yield
    except Exception:
        logger.warning("%s failed", what, exc_info=True)


def _on_thread(function: Callable[[], Groups | None]) -> Future:
    """Run it on a daemon thread, which may hang without keeping the process alive."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
