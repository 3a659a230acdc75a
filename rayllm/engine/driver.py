"""`EngineDriver`: the thread that runs the engine, and the fronts that send it requests.

The engine thread alone touches the core. Fronts put adds and aborts into its inbox and get deltas back through
`Front.deliver`, on the engine thread, once a step and front. `EngineSocket` makes fronts of what connects to it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from rayllm.api.types import EngineInfo, EngineStats, GenerationRequest, TokenDelta
from rayllm.engine.engine import failures, refusal
from rayllm.errors import EngineDeadError, InvalidRequestError

logger = logging.getLogger(__name__)


class Core(Protocol):
    """What the driver needs of `EngineCore`; all calls but check_health are the engine thread's."""

    info: EngineInfo
    on_compiled: Callable[[], None]

    def add(self, request: GenerationRequest) -> None: ...
    def abort(self, request_ids: list[str]) -> None: ...
    def has_work(self) -> bool: ...
    @property
    def is_compiling(self) -> bool: ...
    def check_health(self) -> None: ...
    def step(self) -> list[TokenDelta]: ...
    def stats(self) -> EngineStats: ...
    def shutdown(self) -> None: ...


class Front(Protocol):
    """One user of the engine. Both calls must return at once; one that raises counts as gone."""

    def deliver(self, deltas: list[TokenDelta]) -> None: ...
    def dead(self, reason: str) -> None: ...


class _Live(msgspec.Struct):
    """A request in the core."""

    front: Front
    # Indices of completions that have no finish reason yet.
    open: set[int]


class _Add(msgspec.Struct, frozen=True):
    front: Front
    request: GenerationRequest


class _Abort(msgspec.Struct, frozen=True):
    front: Front
    # None for all of the front's.
    request_ids: list[str] | None


class _Wake(msgspec.Struct, frozen=True):
    """A grammar has been compiled, so the core has something to do."""


class EngineDriver:
    """Runs a core in a thread of its own. Public methods may be called from any thread.

    Each request of a front gets finish reasons for all its completions, unless the front aborted it. A core that
    raises in `step` is dead for good: every front gets `dead(reason)`, then error deltas for its live requests.
    """

    def __init__(self, core: Core):
        self.info = core.info
        self._core = core
        self._inbox: queue.SimpleQueue[_Add | _Abort | _Wake | None] = queue.SimpleQueue()  # None: stop
        core.on_compiled = lambda: self._inbox.put(_Wake())
        self._live: dict[str, _Live] = {}  # engine thread only, like the core
        self._lock = threading.Lock()  # of the fields down to _dead
        self._fronts: list[Front] = []
        self._thread: threading.Thread | None = None
        self._shut_down = False
        self._dead: str | None = None
        self._stats = core.stats()
        self._idle = True
        self._last_progress = time.monotonic()

    def start(self) -> None:
        """Start the engine thread, if it does not run yet."""
        with self._lock:
            if self._thread is None and self._dead is None:
                self._thread = threading.Thread(target=self._run, name="rayllm-engine", daemon=True)
                self._thread.start()

    def attach(self, front: Front) -> None:
        """Let a front send requests. A dead engine tells it so at once."""
        with self._lock:
            self._fronts.append(front)
            dead = self._dead
        if dead is not None:
            front.dead(dead)

    def detach(self, front: Front) -> None:
        """Forget a front and abort its requests; nothing is delivered to it any more."""
        with self._lock:
            if front in self._fronts:
                self._fronts.remove(front)
                self._inbox.put(_Abort(front, None))

    def add(self, front: Front, request: GenerationRequest) -> None:
        """Queue a request. Raises EngineDeadError; a request that the core refuses gets a refusing delta instead."""
        with self._lock:  # so that no request slips in behind _die, which answers all that are in the inbox
            if self._dead is not None:
                raise EngineDeadError(self._dead)
            self._inbox.put(_Add(front, request))

    def abort(self, front: Front, request_ids: list[str]) -> None:
        """Stop requests of this front; unknown ids are no error."""
        self._inbox.put(_Abort(front, request_ids))

    def stats(self) -> EngineStats:
        """The engine's figures after its last step."""
        return self._stats

    @property
    def busy(self) -> bool:
        """Whether requests run, or wait to be taken in. One that is just being taken in may be missed: ask twice."""
        return not self._idle or not self._inbox.empty() or self._core.is_compiling

    @property
    def num_fronts(self) -> int:
        """How many fronts are attached, and may send requests."""
        with self._lock:
            return len(self._fronts)

    @property
    def dead(self) -> str | None:
        """Why the engine stopped; None while it runs."""
        return self._dead

    def unhealthy(self, deadline: float) -> str | None:
        """What is wrong if the engine or a worker is dead, or has work and finished no step for `deadline` seconds."""
        if self._dead is not None:
            return self._dead
        try:
            self._core.check_health()  # an idle engine would not notice that a worker died
        except EngineDeadError as error:
            return str(error)
        waited = time.monotonic() - self._last_progress
        if self._idle or waited <= deadline:
            return None
        return f"work is queued and no step has finished for {waited:.1f} s (limit {deadline:g} s)"

    def shutdown(self, timeout: float = 30.0) -> None:
        """Stop the loop after the step that runs, answer all live requests, shut the core down.

        timeout: seconds to wait for the step. Safe to call twice. Raises what core.shutdown() raises.
        """
        with self._lock:
            if self._shut_down:
                return
            self._shut_down = True
            thread = self._thread
        self._inbox.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)
        self._die("the engine was shut down")
        self._core.shutdown()

    def _run(self) -> None:
        """The engine loop: take what fronts sent, step while there is work, sleep on the inbox when there is none."""
        try:
            while self._dead is None and self._take_inbox():
                deltas: list[TokenDelta] = []
                if self._core.has_work():
                    deltas = self._core.step()
                    self._last_progress = time.monotonic()
                self._stats = self._core.stats()  # first, so that who has a result finds it in the figures
                self._route(deltas)
        except BaseException as error:
            logger.exception("the engine died")
            self._die(f"the engine died: {type(error).__name__}: {error}")

    def _take_inbox(self) -> bool:
        """Handle all that is in the inbox, waiting for something if the core has no work. False: stop."""
        wait = not self._core.has_work()
        while True:
            try:
                if wait:
                    self._idle = True
                    item = self._inbox.get()
                    self._last_progress, self._idle = time.monotonic(), False
                    wait = False
                else:
                    item = self._inbox.get_nowait()
            except queue.Empty:
                return True
            match item:
                case None:
                    return False
                case _Add(front, request):
                    self._admit(front, request)
                case _Abort(front, request_ids):
                    self._drop(front, request_ids)

    def _admit(self, front: Front, request: GenerationRequest) -> None:
        if front not in self._fronts:  # gone since; its abort of all requests came first
            return
        try:
            self._core.add(request)
        except InvalidRequestError as error:
            self._deliver(front, [refusal(request.request_id, error)])
        except Exception as error:  # a poisonous request fails alone
            logger.exception("request %s could not be added", request.request_id)
            indices = range(request.params.num_completions)
            self._deliver(front, failures(request.request_id, indices, f"internal error while adding it: {error}"))
        else:
            self._live[request.request_id] = _Live(front, set(range(request.params.num_completions)))

    def _drop(self, front: Front, request_ids: list[str] | None) -> None:
        wanted = self._live if request_ids is None else request_ids
        own = [i for i in wanted if (live := self._live.get(i)) is not None and live.front is front]
        for request_id in own:
            del self._live[request_id]
        if own:
            self._core.abort(own)

    def _route(self, deltas: list[TokenDelta]) -> None:
        """Deliver the deltas of a step, one call a front."""
        by_front: dict[int, tuple[Front, list[TokenDelta]]] = {}
        for delta in deltas:
            live = self._live.get(delta.request_id)
            if live is None:
                continue
            by_front.setdefault(id(live.front), (live.front, []))[1].append(delta)
            if delta.finish_reason is not None:
                live.open.discard(delta.index)
                if not live.open or delta.bad_param is not None:
                    del self._live[delta.request_id]
        for front, own in by_front.values():
            self._deliver(front, own)

    def _deliver(self, front: Front, deltas: list[TokenDelta]) -> None:
        try:
            front.deliver(deltas)
        except Exception as error:
            logger.warning("a front is gone (%s); its requests are aborted", error)
            self.detach(front)

    def _die(self, reason: str) -> None:
        """End everything: refuse new requests, tell every front, answer every request. Later calls do nothing."""
        with self._lock:
            if self._dead is not None:
                return
            self._dead = reason
            fronts = list(self._fronts)
        ends = [(live.front, failures(request_id, live.open, reason)) for request_id, live in self._live.items()]
        self._live = {}
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._inbox.get_nowait()
                if isinstance(item, _Add):
                    indices = range(item.request.params.num_completions)
                    ends.append((item.front, failures(item.request.request_id, indices, reason)))
        self._inbox.put(None)
        for front in fronts:  # before the deltas, so that fronts can tell a dead engine from a failed request
            with contextlib.suppress(Exception):
                front.dead(reason)
            own = [delta for other, deltas in ends if other is front for delta in deltas]
            if own:
                with contextlib.suppress(Exception):
                    front.deliver(own)
