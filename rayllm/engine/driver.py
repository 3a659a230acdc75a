"""`EngineDriver`: the thread that runs the engine, and the fronts that send it requests.

The engine thread alone touches the core. What fronts want done waits in its inbox; deltas come back through
`Front.deliver`, on the engine thread, once a step and front. `EngineSocket` makes fronts of what connects to it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from rayllm import timeouts
from rayllm.api.types import KEY_HEADER, Abort, EngineInfo, EngineStats, GenerationRequest, IdempotencyKey, TokenDelta
from rayllm.engine.adapters import PreparedAdapter
from rayllm.engine.engine import failures, refusal
from rayllm.engine.kept import KeptRequest, KeptRequests
from rayllm.errors import EngineDeadError, InvalidRequestError
from rayllm.executor.threads import on_thread

# So soon the engine's thread and those that send its results give way to one another (`sys.setswitchinterval`, which is
# for whoever owns the process to call); Python's default is 5 ms.
SWITCH_S = 2e-4
# So long at most what fronts sent is taken in between two steps, so that those that run go on: to add a request of
# 1,400 tokens takes a CPU 0.05 to 0.1 ms, and one client may send thousands at once.
INBOX_S = 0.005

logger = logging.getLogger(__name__)


class Core(Protocol):
    """What the driver needs of `EngineCore`; all calls are the engine thread's where nothing else is said."""

    info: EngineInfo
    on_compiled: Callable[[], None]

    def add(self, request: GenerationRequest) -> None: ...
    def abort(self, aborts: list[Abort]) -> None: ...
    def has_work(self) -> bool: ...
    @property
    def is_compiling(self) -> bool: ...
    @property
    def is_recovering(self) -> bool: ...
    def check_health(self) -> None: ...
    def watch(self) -> list[TokenDelta]: ...
    def step(self) -> list[TokenDelta]: ...
    def stats(self) -> EngineStats: ...
    def check_integrity(self) -> None: ...
    @property
    def adapters(self) -> list[str]: ...
    def prepare_adapter(self, name: str, path: str) -> PreparedAdapter: ...  # on any thread
    def add_adapter(self, prepared: PreparedAdapter) -> None: ...
    def remove_adapter(self, name: str) -> None: ...
    def shutdown(self) -> None: ...


class Front(Protocol):
    """One user of the engine. Both calls return at once, and never raise."""

    def deliver(self, deltas: list[TokenDelta]) -> None: ...

    def dead(self, reason: str) -> None:
        """The engine is dead: all of this front's requests are over, and no deltas will come."""


class _Live(NamedTuple):
    """A request that runs. One with a key is there under the core's id, with no front, and under each listener's."""

    front: Front | None
    running: set[int]  # its completions that go on
    kept: KeptRequest | None = None


def start_core(start: Callable[[], Core]) -> Core:
    """The core that `start` makes, for a driver. It runs on a thread of its own, which has ended when this returns.

    On CPUs OpenMP keeps a team of threads for each thread that has computed something. As soon as all teams together
    have more threads than there are cores, they sleep between computations instead of spinning, and a step of a small
    model takes a fifth longer. So what loads and warms up must not be a thread that stays.
    """
    return on_thread(start).result()


class EngineDriver:
    """Runs a core in a thread of its own. Public methods may be called from any thread.

    Each request of a front gets finish reasons for all its completions, unless the front aborted it or is told that
    the engine is dead. A core that raises in `step` is dead for good. A request with a key goes on without its front,
    and others with this key get the same deltas from its beginning (`kept.py`).

    clock: for how long these are kept. info: the core's limits. dead: why the engine stopped; None while it runs.
    stats: its figures after the last step.
    """

    def __init__(self, core: Core, clock: Callable[[], float] = time.monotonic):
        self.info = core.info
        self.stats = core.stats()
        self.dead: str | None = None
        self._core = core
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        core.on_compiled = lambda: self._inbox.put(lambda: None)  # there is something to do
        self._live: dict[str, _Live] = {}  # by request id; engine thread only, like the core
        self._kept = KeptRequests(clock)
        self._lock = threading.Lock()  # of the fronts, and of `dead`
        self._fronts: list[Front] = []
        self._idle = True
        self._stopping = False
        self._last_progress = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="rayllm-engine", daemon=True)
        self._thread.start()

    def attach(self, front: Front) -> None:
        """Let a front send requests. A dead engine tells it so at once."""
        with self._lock:
            self._fronts.append(front)
            dead = self.dead
        if dead is not None:
            front.dead(dead)

    def detach(self, front: Front) -> None:
        """Forget a front and abort its requests without a key; nothing is delivered to it any more."""
        with self._lock:
            if front in self._fronts:
                self._fronts.remove(front)
                self._inbox.put(lambda: self._drop(front, [Abort(request_id) for request_id in self._live]))

    def add(self, front: Front, request: GenerationRequest) -> None:
        """Queue a request; one that the core refuses gets a refusing delta. A dead engine has said so already."""
        if request.key is not None:
            self._kept.open(request.key)  # from now on it `knows` it
        self._inbox.put(partial(self._admit, front, request))

    def abort(self, front: Front, aborts: list[Abort]) -> None:
        """Stop requests of this front, or completions of them; unknown ones are no error.

        One with a key only goes on without this front, unless its completions are stopped one by one.
        """
        self._inbox.put(partial(self._drop, front, aborts))

    def knows(self, key_id: str) -> bool:
        """Whether it has a request with this key."""
        return key_id in self._kept

    def forget(self, key_id: str) -> None:
        """Keep the request with this key no more. It ends when nobody listens to it."""
        self._inbox.put(partial(self._forget, key_id))

    def load_adapter(self, name: str, path: str) -> None:
        """Let requests ask for an adapter. Blocks while the workers read it; steps go on.

        Raises InvalidRequestError or ModelError, and EngineDeadError if the engine stops meanwhile.
        """
        prepared = self._core.prepare_adapter(name, path)
        self._call(partial(self._core.add_adapter, prepared))

    def unload_adapter(self, name: str) -> None:
        """Let no request ask for an adapter any more; those that have it go on. Raises as `load_adapter`."""
        self._call(partial(self._core.remove_adapter, name))

    def _call(self, act: Callable[[], None]) -> None:
        """Do something on the engine's thread and wait for it; what it raises is raised here."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                act()
                done.set_result(None)
            except Exception as error:
                done.set_exception(error)

        self._inbox.put(run)
        while True:
            try:
                return done.result(timeouts.IDLE_WATCH_S)
            except TimeoutError:
                if self.dead is not None:
                    raise EngineDeadError(self.dead) from None

    @property
    def busy(self) -> bool:
        """Whether requests run, or wait to be taken in. One that is just being taken in may be missed: ask twice."""
        return not self._idle or not self._inbox.empty() or self._core.is_compiling

    @property
    def num_orphans(self) -> int:
        """Sequences of requests with a key that nobody listens to."""
        return self._kept.num_orphans

    @property
    def num_fronts(self) -> int:
        """How many fronts are attached, and may send requests."""
        return len(self._fronts)

    def unhealthy(self, deadline: float) -> str | None:
        """What is wrong if the engine or a worker is dead, or has work and finished no step for `deadline` seconds."""
        if self.dead is not None:
            return self.dead
        try:
            self._core.check_health()  # an idle engine would not notice that a worker died
        except EngineDeadError as error:
            return str(error)
        waited = time.monotonic() - self._last_progress
        if self._idle or self._core.is_recovering or waited <= deadline:
            return None
        return f"work is queued and no step has finished for {waited:.1f} s (limit {deadline:g} s)"

    def shutdown(self, timeout: float = 30.0) -> None:
        """Stop the loop after the step that runs, tell the fronts, shut the core down.

        timeout: seconds to wait for the step. Safe to call twice. Raises what core.shutdown() raises.
        """
        self._stopping = True
        self._inbox.put(lambda: None)  # it wakes up
        self._thread.join(timeout)
        self._die("the engine was shut down")
        self._core.shutdown()

    def _run(self) -> None:
        """The engine loop: take what fronts sent, step while there is work, sleep on the inbox when there is none."""
        try:
            while self.dead is None and self._take_inbox():
                deltas: list[TokenDelta] = []
                if self._core.has_work():
                    deltas = self._core.step()
                    self._last_progress = time.monotonic()
                self.stats = self._core.stats()  # first, so that who has a result finds it in the figures
                self._route(deltas)
        except BaseException as error:
            logger.exception("the engine died")
            self._die(f"the engine died: {type(error).__name__}: {error}")

    def _take_inbox(self) -> bool:
        """Do what is in the inbox, for INBOX_S; wait for something if the core has no work. False: stop."""
        self._forget_expired()
        wait = self._idle = not self._core.has_work()
        started = time.monotonic()
        while wait or not self._inbox.empty():
            try:
                act = self._inbox.get(timeout=timeouts.IDLE_WATCH_S if wait else None)
            except queue.Empty:
                self._forget_expired()
                self._route(self._core.watch())
                continue
            if wait:
                self._last_progress = started = time.monotonic()
                self._idle = wait = False
            if self._stopping:
                break
            act()
            if time.monotonic() - started > INBOX_S:
                break
        return not self._stopping

    def _admit(self, front: Front, request: GenerationRequest) -> None:
        if request.key is not None:
            self._admit_kept(front, request, request.key)
        elif self._add(front, request.request_id, request):
            self._live[request.request_id] = _Live(front, set(request.live_indices))

    def _add(self, front: Front, request_id: str, request: GenerationRequest) -> bool:
        """Give the core a request that the front knows as request_id; whether it has it now."""
        if front not in self._fronts:  # gone since; its abort of all requests came first
            return False
        try:
            self._core.add(request)
        except InvalidRequestError as error:
            front.deliver([refusal(request_id, error)])
        except Exception as error:  # a poisonous request fails alone
            logger.exception("request %s could not be added", request_id)
            indices = request.live_indices
            front.deliver(failures(request_id, indices, f"internal error while adding it: {error}"))
        else:
            return True
        return False

    def _admit_kept(self, front: Front, request: GenerationRequest, key: IdempotencyKey) -> None:
        kept, request_id, is_here = self._kept.open(key), request.request_id, False
        if kept.key.fingerprint != key.fingerprint:
            error = InvalidRequestError(f"this {KEY_HEADER} came before, with another body", KEY_HEADER)
            front.deliver([refusal(request_id, error)])
            return
        if not kept.request_id:
            in_core = replace(request, request_id=f"kept-{request_id}", key=None)
            if not self._add(front, request_id, in_core):
                self._kept.forget(kept)
                return
            self._live[in_core.request_id] = _Live(None, set(request.live_indices), kept)
            first = TokenDelta(request_id, 0, [], created=key.created)
            self._kept.begin(kept, in_core, key.deltas or [first])
            is_here = bool(key.deltas)
        if front not in self._fronts:
            return
        if not kept.has_ended:
            self._live[request_id] = _Live(front, self._live[kept.request_id].running, kept)
        deltas = self._kept.join(kept, request_id)
        if not is_here:  # who sent it has them already
            front.deliver(deltas)

    def _drop(self, front: Front, aborts: list[Abort]) -> None:
        own = []
        for request_id, index in [(abort.request_id, abort.index) for abort in aborts]:
            live = self._live.get(request_id)
            if live is None or live.front is not front:
                continue
            live.running.discard(index)
            if live.kept is not None and index is None:
                del self._live[request_id]
                self._kept.leave(live.kept, request_id)
                if self._kept.is_wanted(live.kept):
                    continue
            if index is None or not live.running:
                self._end(request_id, live)
                index = None
            own.append(Abort(request_id if live.kept is None else live.kept.request_id, index))
        if own:
            self._core.abort(own)

    def _end(self, request_id: str, live: _Live) -> None:
        """No more deltas are to come."""
        if live.kept is None:
            del self._live[request_id]
            return
        for name in (live.kept.request_id, *live.kept.listeners):
            del self._live[name]
        self._kept.end(live.kept)

    def _forget(self, key_id: str) -> None:
        if (kept := self._kept.get(key_id)) is None:
            return
        self._kept.forget(kept)
        if kept.request_id and not kept.has_ended and not kept.listeners:
            del self._live[kept.request_id]
            self._core.abort([Abort(kept.request_id)])

    def _forget_expired(self) -> None:
        """Forget requests with a key for which nobody came; end those that still run."""
        if not self._kept.due:
            return
        ids = [kept.request_id for kept in self._kept.expired() if not kept.has_ended]
        for request_id in ids:
            del self._live[request_id]
        if ids:
            self._core.abort([Abort(request_id) for request_id in ids])

    def _route(self, deltas: list[TokenDelta]) -> None:
        """Deliver the deltas of a step, one call a front."""
        by_front: dict[Front, list[TokenDelta]] = defaultdict(list)
        for delta in deltas:
            live = self._live.get(delta.request_id)
            if live is None:
                continue
            if (front := live.front) is not None:
                by_front[front].append(delta)
            elif live.kept is not None:
                for each in self._kept.take(live.kept, delta):
                    if (listener := self._live[each.request_id].front) is not None:
                        by_front[listener].append(each)
                if not self._kept.is_wanted(live.kept):  # it has become too long for that
                    self._end(delta.request_id, live)
                    self._inbox.put(partial(self._core.abort, [Abort(delta.request_id)]))
                    continue
            if delta.finish_reason is not None:
                running = live.running
                running.discard(delta.index)
                if not running or delta.bad_param is not None:
                    self._end(delta.request_id, live)
                if running and delta.bad_param is not None:  # its other completions end too
                    self._inbox.put(partial(self._core.abort, [Abort(delta.request_id)]))
        for front, own in by_front.items():
            front.deliver(own)

    def _die(self, reason: str) -> None:
        """Take no more requests, and tell every front. Later calls do nothing."""
        with self._lock:
            if self.dead is not None:
                return
            self.dead = reason
            fronts = list(self._fronts)
        self._live = {}
        for front in fronts:
            front.dead(reason)
