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
from typing import NoReturn

import ray
import torch.distributed as dist

from rayllm import timeouts
from rayllm.api.types import KVBlocks, StepPlan, StepResult
from rayllm.config.resolved import ResolvedConfig
from rayllm.errors import EngineDeadError, StartupError
from rayllm.executor.base import Executor
from rayllm.executor.channel import Channel, ChannelBroken
from rayllm.executor.placement import Placement, reserve
from rayllm.executor.ranks import RankActors
from rayllm.parallel.process_groups import CONNECT_TIMEOUT, Groups, Rendezvous, interface_variables, join_groups
from rayllm.worker.worker import LoadRank, RankModel

logger = logging.getLogger(__name__)


class RayExecutor(Executor):
    """Runs one actor a rank. See `Executor` for the contract.

    This process is connected to Ray, and has one of these at a time, since torch.distributed has one default group.

    load: importable in the actors. owns_ray: Ray was started for this engine, and is to be stopped with it.
    step_seconds: the longest `collect` waits for a result; None takes what is usual for the device.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        load: LoadRank = RankModel,
        *,
        owns_ray: bool = False,
        step_seconds: float | None = None,
    ):
        super().__init__()
        self._config, self._load, self._owns_ray = config, load, owns_ray
        self._step_seconds = step_seconds or timeouts.STEP_S[config.device]
        self._last_step = "no step has finished"
        self._in_flight: deque[int] = deque()  # step ids
        self._next_watch = 0.0  # time.monotonic() from which `collect` looks at the workers again
        self._dead = "the engine has not been started"  # why no step can run; "" while they can
        self._shutdown_lock = threading.Lock()
        self._is_shut_down = False
        # What shutdown has to undo, in the order in which it came to be.
        self._placement: Placement | None = None
        self._ranks: RankActors | None = None
        self._joining: Future[Groups] | None = None
        self._channel: Channel | None = None

    def start(self) -> KVBlocks:
        if self._is_shut_down or self._placement is not None:
            raise RuntimeError("an executor starts once")
        if dist.is_initialized():
            raise StartupError(
                "this process has a torch.distributed group already: there can be one Ray engine per process at a time"
            )
        atexit.register(self.shutdown)
        with self._starting():
            blocks = self._start()
        self._dead = ""
        return blocks

    def _start(self) -> KVBlocks:
        config, seconds = self._config, timeouts.RANK_START_S
        with self._phase("place"):
            self._placement = reserve(config.tp, config.device)
        with self._phase("start actors"):
            self._ranks = ranks = RankActors(self._placement, config, self._load)
            self.report.placement.extend(ranks.wait_until_up(seconds))
        with self._phase("connect"):
            groups = self._connect(ranks, self._placement, "nccl" if config.device == "cuda" else "gloo")
        room: list[KVBlocks] = ranks.call("load the model", "load", seconds=seconds)
        blocks = KVBlocks(min(rank.gpu for rank in room), min(rank.cpu for rank in room))
        self.report.ready.extend(ranks.call("get ready", "build", blocks, seconds=seconds))
        self.report.phases.extend(self.report.ready[0].phases)
        ranks.run()
        self._channel = Channel(groups)
        return blocks

    def _connect(self, ranks: RankActors, placement: Placement, device_backend: str) -> Groups:
        """Join the control group together with all ranks, on the loopback interface if they are on this node."""
        host = "127.0.0.1" if placement.one_node() else ray.util.get_node_ip_address()
        store, port = _open_store(host)
        excepthook = sys.excepthook  # which torch replaces, to mark this process's own errors with a rank
        meeting = Rendezvous(host, port, self._config.tp, device_backend)
        with _environment(interface_variables(host, ray.util.get_node_ip_address())):
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
                result = channel.receive(timeouts.RANK_WATCH_S)
            except queue.Empty:
                pass
            except ChannelBroken as error:
                self._raise_failure(timeouts.RANK_FAILURE_S)
                self._die(f"the connection to the workers broke: {error}", error)
            now = time.monotonic()
            if now >= self._next_watch:  # also while results come: they are those of rank 0 alone
                self._next_watch = now + timeouts.RANK_WATCH_S
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
                self._ranks.wait_stopped(timeouts.RANK_STOP_S)
        finally:
            if self._ranks is not None:
                self._ranks.kill(timeouts.RANK_STOP_S)
            if self._placement is not None:
                self._placement.release()

    def _leave_groups(self) -> None:
        """Once the workers are gone, whose end unblocks our threads."""
        if self._joining is None:
            return
        with contextlib.suppress(Exception):  # it failed, or still waits for a rank that will not come
            self._joining.result(timeouts.RANK_STOP_S)
        if self._channel is not None and not self._channel.join(timeouts.RANK_STOP_S):
            logger.warning("a connection to a worker is still open; its thread is left behind")
        if dist.is_initialized():
            _on_thread(dist.destroy_process_group).result(timeouts.RANK_STOP_S)

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
