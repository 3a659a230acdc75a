"""`RayExecutor`: one Ray actor a rank. Ray starts, watches and ends the processes; plans and results go past it.

A step is one broadcast of a plan over gloo to all ranks and one message with the result from rank 0, each on a group
and a thread of its own here, so that the engine's thread never waits for a socket and always finds out who failed.

If a rank fails, all ranks are killed and their standbys take their place, or else new ones, in groups of their own:
whatever an old process that wakes up late sends reaches nobody. With standbys on this node that takes no call that the
GCS would have to answer.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import timedelta

import ray
import torch
import torch.distributed as dist

from rayllm import timeouts
from rayllm.api.types import Adapter, KVBlocks, StepPlan, StepResult, timed
from rayllm.config.resolved import ResolvedConfig
from rayllm.errors import EngineDeadError, StartupError
from rayllm.executor.base import Executor
from rayllm.executor.channel import Channel
from rayllm.executor.checkpoints import fetch_checkpoint, spread_adapter
from rayllm.executor.placement import Placement, reserve
from rayllm.executor.ranks import RankActors
from rayllm.executor.standbys import Standbys
from rayllm.executor.threads import on_thread
from rayllm.parallel.process_groups import CONNECT_TIMEOUT, Groups, Rendezvous, interface_variables, join_groups
from rayllm.parallel.shared_weights import SharedWeights
from rayllm.parallel.tp_group import TPGroup
from rayllm.worker.worker import LoadRank, RankModel

logger = logging.getLogger(__name__)


RECOVERY_ATTEMPTS = 3  # a rank may be lost during a recovery too


class RayExecutor(Executor):
    """Runs one actor a rank. See `Executor` for the contract.

    This process is connected to Ray, and has one of these at a time, since torch.distributed has one default group.

    load: importable in the actors. owns_ray: Ray was started for this engine, and is to be stopped with it.
    step_seconds: the longest `collect` waits for a result; None takes what is usual for the device. standbys: of the
    ranks, from `start` on; None if the config has none.
    """

    can_recover = True

    def __init__(
        self,
        config: ResolvedConfig,
        load: LoadRank | None = None,
        *,
        owns_ray: bool = False,
        step_seconds: float | None = None,
    ):
        super().__init__()
        self.standbys: Standbys | None = None
        self._config, self._load, self._owns_ray = config, load or load_on_this_host, owns_ray
        self._step_seconds = step_seconds or timeouts.STEP_S[config.device]
        self._last_step = "no step has finished"
        self._in_flight: deque[int] = deque()  # step ids
        self._closed = False  # `shutdown` has been called, perhaps from another thread in the middle of `recover`
        self._next_watch = 0.0  # time.monotonic() from which `collect` looks at the workers again
        self._undo = contextlib.ExitStack()  # what `shutdown` has to do, the last first
        self._undo_place = contextlib.ExitStack()  # what is to be done of it before there can be another place
        self._undo_ranks = contextlib.ExitStack()  # what is to be done of it before there can be other ranks
        # Made by `start`.
        self._blocks: KVBlocks
        self._placement: Placement
        self._ranks: RankActors
        self._groups: Groups
        self._joining: Future[Groups] | None = None
        self._channel: Channel | None = None

    def start(self) -> KVBlocks:
        if dist.is_initialized():
            raise StartupError(
                "this process has a torch.distributed group already: there can be one Ray engine per process at a time"
            )
        atexit.register(self.shutdown)
        if self._owns_ray:
            self._undo.callback(ray.shutdown)
        self._undo.callback(self._undo_place.close)
        self._undo.callback(self._undo_ranks.close)
        with self._starting():
            self._start_ranks(resumes=False)
            self._connect_and_load()
            self._warm_standbys()
            room = self._ranks.call("size the KV cache", "count_blocks", seconds=timeouts.RANK_START_S)
            self._blocks = KVBlocks(*(min(getattr(rank, name) for rank in room) for name in KVBlocks.__struct_fields__))
            self._build_ranks(resumes=False)
        return self._blocks

    def recover(self) -> None:
        reason = self._dead
        for attempt in range(RECOVERY_ATTEMPTS):
            if self._closed:
                raise EngineDeadError("the engine was shut down")
            try:
                self._in_flight.clear()
                for part in (self.report.phases, self.report.placement, self.report.ready):
                    part.clear()
                with timed(self.report.phases, "end workers"):
                    self._undo_ranks.close()
                standbys = None if self.standbys is None else self.standbys.take()
                if standbys is not None:
                    standbys.end_before(self._ranks, timeouts.RANK_STOP_S)
                    self._take(standbys)
                else:
                    self._undo_place.close()
                    self._start_ranks(resumes=True)
                self._connect_and_load()
                self._build_ranks(resumes=True)
            except Exception as error:
                logger.warning(
                    "new workers failed to start, attempt %d of %d: %s", attempt + 1, RECOVERY_ATTEMPTS, error
                )
                if attempt + 1 == RECOVERY_ATTEMPTS:
                    raise EngineDeadError(f"{reason}; new workers failed to start: {error}") from error
            else:
                self._dead = ""
                return

    def _start_ranks(self, *, resumes: bool) -> None:
        """Start a process for each rank, and one for its standby: at the same time, or once requests go on."""
        config = self._config
        with timed(self.report.phases, "place"):
            self._placement = self._undo_place.enter_context(reserve(config.tp, config.device))
        with timed(self.report.phases, "start actors"):
            self._take(RankActors(self._placement, config, self._load))
            if config.standbys:
                delay_s = timeouts.STANDBY_DELAY_S[config.device]
                self.standbys = Standbys(lambda: RankActors(self._placement, config, self._load), delay_s)
                self._undo_place.callback(self.standbys.close)
                if not resumes:
                    self.standbys.begin()
            self._ranks.wait_until_up(timeouts.RANK_START_S)

    def _take(self, ranks: RankActors) -> None:
        """Make these the engine's ranks."""
        self._ranks = ranks
        self._undo_ranks.callback(self._leave_groups)
        self._undo_ranks.callback(lambda: ranks.kill(timeouts.RANK_STOP_S, at_once=not self._closed))

    def _connect_and_load(self) -> None:
        self.report.placement.extend(self._ranks.places)
        with timed(self.report.phases, "connect"):
            self._groups = self._connect(self._ranks, "nccl" if self._config.device == "cuda" else "gloo")
        self._ranks.load(timeouts.RANK_START_S)

    def _warm_standbys(self) -> None:
        """Have them take the memory that they take, which the KV cache has to leave to them, and report it."""
        standbys = None if self.standbys is None else self.standbys.wait()
        if standbys is None:
            return
        with timed(self.report.phases, "standbys"):
            seconds, on_gpus = timeouts.RANK_START_S, self._config.device == "cuda"
            before = self._ranks.call("measure memory", "memory", seconds=seconds) if on_gpus else [0] * self._config.tp
            standbys.call("warm up", "warm_up", seconds=seconds)
            after = (self._ranks if on_gpus else standbys).call("measure memory", "memory", seconds=seconds)
            standbys.adopt(self._ranks.weights, seconds)
        self.report.standbys.extend(more - less for more, less in zip(after, before, strict=True))

    def _build_ranks(self, *, resumes: bool) -> None:
        """Have the ranks allocate the pools, and serve."""
        ranks, seconds = self._ranks, timeouts.RANK_START_S
        self.report.ready.extend(ranks.call("get ready", "build", self._blocks, resumes, seconds=seconds))
        self.report.phases.extend(self.report.ready[0].phases)
        ranks.run()
        self._channel = Channel(self._groups)

    def _connect(self, ranks: RankActors, device_backend: str) -> Groups:
        """Join the control group together with all ranks, on the loopback interface if they are on this node."""
        host = "127.0.0.1" if ranks.on_one_node() else ray.util.get_node_ip_address()
        store = _open_store(host)
        excepthook = sys.excepthook  # which torch replaces, to mark this process's own errors with a rank
        meeting = Rendezvous(host, store.port, self._config.tp, device_backend)
        with _environment(interface_variables(host, ray.util.get_node_ip_address())):
            # On a thread, because it waits for ranks that may fail, which only `ranks.call` would notice.
            joining = on_thread(lambda: join_groups(meeting, 0, store, timedelta(seconds=self._step_seconds)))
            self._joining = joining
            seconds = 2 * CONNECT_TIMEOUT.total_seconds()
            ranks.call("connect", "connect", meeting, seconds=seconds)
            groups = joining.result(seconds)
        sys.excepthook = excepthook
        return groups

    def submit(self, plan: StepPlan) -> None:
        self._living_channel().send(plan)
        self._in_flight.append(plan.step_id)

    def collect(self) -> StepResult:
        channel, step_id = self._living_channel(), self._in_flight.popleft()
        deadline = time.monotonic() + self._step_seconds
        result = None
        while result is None:
            try:
                result = channel.receive(timeouts.RANK_WATCH_S)
            except queue.Empty:
                pass
            except Exception as error:
                self._raise_failure(timeouts.RANK_FAILURE_S)
                self._die(f"the connection to the workers broke: {error}", error)
            now = time.monotonic()
            if now >= self._next_watch:  # also while results come: they are those of rank 0 alone
                self._next_watch = now + timeouts.RANK_WATCH_S
                self._watch()
            if result is None and now > deadline:
                reason = f"no result of step {step_id} came within {self._step_seconds:g} s; the workers hang"
                self._die(f"{reason}; {self._last_step}")
        self._last_step = f"the last finished step was {step_id}"
        return result

    def load_adapter(self, adapter: Adapter) -> None:
        super().check_health()
        if not self._ranks.on_one_node():
            spread_adapter(adapter.path, self._ranks.node_ids, timeouts.ADAPTER_S)
        self._ranks.load_adapter(adapter, timeouts.RANK_START_S)

    def drop_adapter(self, adapter_id: int) -> None:
        self._ranks.drop_adapter(adapter_id)

    def check_health(self) -> None:
        super().check_health()
        self._watch()

    def shutdown(self) -> None:
        atexit.unregister(self.shutdown)
        self._closed, is_serving = True, not self._dead
        self._dead = self._dead or "the engine was shut down"
        try:
            with self._undo.pop_all():
                if is_serving and self._channel is not None and ray.is_initialized():
                    self._channel.stop()
                    self._ranks.wait_stopped(timeouts.RANK_STOP_S)
        except Exception:
            logger.warning("the workers did not end in good order", exc_info=True)

    def _leave_groups(self) -> None:
        """Once the workers are gone, whose end unblocks our threads."""
        if self._joining is None:
            return
        with contextlib.suppress(Exception):  # it failed, or still waits for a rank that will not come
            # Before new groups can be joined, this has to have ended.
            self._joining.result(timeouts.RANK_STOP_S if self._closed else timeouts.RANK_CONNECT_S)
        if self._channel is not None and not self._channel.join(timeouts.RANK_HANGUP_S):
            logger.warning("a connection to a worker is still open; its thread is left behind")
        self._joining = self._channel = None
        if dist.is_initialized():
            on_thread(dist.destroy_process_group).result(timeouts.RANK_STOP_S)

    def _living_channel(self) -> Channel:
        super().check_health()
        assert self._channel is not None
        return self._channel

    def _watch(self) -> None:
        self._raise_failure()
        if self.standbys is not None:
            self.standbys.tend(self._ranks.weights)

    def _raise_failure(self, wait_seconds: float = 0.0) -> None:
        if (failure := self._ranks.failure(wait_seconds)) is not None:
            reason, error = failure
            self._die(f"{reason}; {self._last_step}", error)


def _open_store(host: str) -> dist.TCPStore:
    """A store that listens on a free port of `host` alone; by itself, PyTorch would listen on all interfaces."""
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    return dist.TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=CONNECT_TIMEOUT,
        master_listen_fd=listener.detach(),  # the store closes it
    )


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


def load_on_this_host(
    config: ResolvedConfig, tp: TPGroup, device: torch.device, weights: SharedWeights | None = None, /
) -> RankModel:
    """A rank whose checkpoint is copied first if its host lacks that."""
    if weights is None or not weights.is_filled:
        fetch_checkpoint(config.options.model)
    return RankModel(config, tp, device, weights)
