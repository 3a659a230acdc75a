"""`KeptRequests`: an engine's requests with an `Idempotency-Key`, and what came of them.

They outlive the API server and the connection over which they came: whoever sends one again gets the same answer from
its beginning. Each is kept KEEP_S after its end, or after the last one left who wanted its tokens, if nobody comes.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from rayllm import timeouts
from rayllm.api.types import GenerationRequest, IdempotencyKey, TokenDelta
from rayllm.text.outputs import DeltaLog

MAX_KEPT = 4096  # requests
MAX_KEPT_BYTES = 256 * 2**20  # of what came of them all, roughly


class KeptRequest:
    """A request with a key. listeners: the ids of those requests of fronts that get its deltas.

    request_id: in the core; "" until it has it. width: sequences that it runs there.
    """

    def __init__(self, key: IdempotencyKey):
        self.key = replace(key, deltas=[])
        self.log = DeltaLog()
        self.request_id, self.width = "", 0
        self.listeners: set[str] = set()
        self.has_ended = self.has_failed = False


class KeptRequests:
    """All of them. `open`, `in` and `num_orphans` may be used from any thread, all else from the engine's.

    Beyond the bounds, those that ended first are forgotten. If none has ended, a new one, or the one that grows, runs
    on without being kept.
    """

    def __init__(
        self, clock: Callable[[], float], max_requests: int = MAX_KEPT, max_bytes: int = MAX_KEPT_BYTES
    ) -> None:
        self._clock, self._max_requests, self._max_bytes = clock, max_requests, max_bytes
        self._by_key: dict[str, KeptRequest] = {}
        self._num_bytes = 0
        self.due: dict[str, float] = {}  # key id -> when to forget it, soonest first

    def __contains__(self, key_id: str) -> bool:
        return key_id in self._by_key

    def open(self, key: IdempotencyKey) -> KeptRequest:
        """The request with this key, which may be new."""
        return self._by_key.setdefault(key.id, KeptRequest(key))

    def get(self, key_id: str) -> KeptRequest | None:
        """The request with this key, if there is one."""
        return self._by_key.get(key_id)

    @property
    def num_orphans(self) -> int:
        """Sequences that run although nobody listens."""
        waiting = [self._by_key.get(key_id) for key_id in list(self.due)]
        return sum(kept.width for kept in waiting if kept is not None and not kept.has_ended)

    def begin(self, kept: KeptRequest, request: GenerationRequest, deltas: list[TokenDelta]) -> None:
        """The core has it, as this request. deltas: what came of it so far."""
        kept.request_id, kept.width = request.request_id, request.params.width
        for delta in deltas:
            self._log(kept, delta)
        if len(self._by_key) > self._max_requests and not self._forget_ended():
            self.forget(kept)

    def join(self, kept: KeptRequest, request_id: str) -> list[TokenDelta]:
        """Another listener, if it has not ended; returns all that came of it so far."""
        if not kept.has_ended:
            kept.listeners.add(request_id)
            self.due.pop(kept.key.id, None)
        return kept.log.copy(request_id)

    def take(self, kept: KeptRequest, delta: TokenDelta) -> list[TokenDelta]:
        """Note a delta; returns it as each listener gets it."""
        self._log(kept, delta)
        kept.has_failed = kept.has_failed or delta.finish_reason == "error"
        return [replace(delta, request_id=request_id) for request_id in kept.listeners]

    def leave(self, kept: KeptRequest, request_id: str) -> None:
        """A listener goes."""
        kept.listeners.remove(request_id)
        if not kept.listeners:
            self._wait(kept)

    def is_wanted(self, kept: KeptRequest) -> bool:
        """Whether it is to go on: somebody listens, or it is kept for who may come."""
        return bool(kept.listeners) or self._is_kept(kept)

    def end(self, kept: KeptRequest) -> None:
        """No more deltas come. If it has failed it is forgotten, as who sends it again wants another try."""
        kept.has_ended = True
        kept.listeners.clear()
        if kept.has_failed:
            self.forget(kept)
        self._wait(kept)

    def expired(self) -> list[KeptRequest]:
        """Those that nobody came for, which are forgotten now."""
        found = []
        while self.due and next(iter(self.due.values())) <= self._clock():
            found.append(self._by_key[next(iter(self.due))])
            self.forget(found[-1])
        return found

    def forget(self, kept: KeptRequest) -> None:
        """Who comes with its key now begins anew. It may go on for those that listen."""
        if self._is_kept(kept):
            del self._by_key[kept.key.id]
            self.due.pop(kept.key.id, None)
            self._num_bytes -= kept.log.size

    def _is_kept(self, kept: KeptRequest) -> bool:
        return self._by_key.get(kept.key.id) is kept

    def _wait(self, kept: KeptRequest) -> None:
        if self._is_kept(kept):
            self.due.pop(kept.key.id, None)
            self.due[kept.key.id] = self._clock() + timeouts.KEEP_S

    def _log(self, kept: KeptRequest, delta: TokenDelta) -> None:
        if not self._is_kept(kept):
            return
        before = kept.log.size
        kept.log.add(delta)
        self._num_bytes += kept.log.size - before
        while self._num_bytes > self._max_bytes and self._forget_ended():
            pass
        if kept.log.is_full or self._num_bytes > self._max_bytes:
            self.forget(kept)

    def _forget_ended(self) -> bool:
        """Make room by what ended first; whether there was one."""
        for key_id in self.due:
            if self._by_key[key_id].has_ended:
                self.forget(self._by_key[key_id])
                return True
        return False
