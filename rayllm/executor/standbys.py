"""`Standbys`: a second process for each rank, which waits with all imported and the weights mapped."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future

from rayllm import timeouts
from rayllm.executor.ranks import RankActors
from rayllm.executor.threads import on_thread

logger = logging.getLogger(__name__)


class Standbys:
    """All ranks have standbys, or none: if one is lost, all are replaced, which costs nothing but time beside serving.

    start: makes the actors. delay_s: from a recovery on. What takes long runs on a thread of its own, so that no step
    waits for it.
    """

    def __init__(self, start: Callable[[], RankActors], delay_s: float):
        self._start, self._delay_s = start, delay_s
        self._made: RankActors | None = None  # also before they are up
        self._starting: Future[RankActors] | None = None
        self._next_start = 0.0  # time.monotonic()
        self._closed = False

    def begin(self, weights: list[bytes] | None = None) -> None:
        """Start them, in place of those that there may be. weights: to map then, if the ranks have theirs already."""
        self._next_start = time.monotonic() + timeouts.STANDBY_RETRY_S
        self._starting = on_thread(lambda: self._bring_up(weights))

    @property
    def places(self) -> list[str]:
        """Where they are, once they are up."""
        is_up = self._starting is not None and self._starting.done()
        return self._made.places if is_up and self._made is not None else []

    def wait(self) -> RankActors | None:
        """The standbys, once they are up; None if they did not come up, which the log explains."""
        assert self._starting is not None
        try:
            return self._starting.result(timeouts.RANK_START_S)
        except Exception as error:
            logger.warning("standby ranks failed to start: %s", error)
            self._starting = None
            return None

    def tend(self, weights: list[bytes]) -> None:
        """Replace them if one was lost, and start them if there are none. Cheap; to be called now and then."""
        if self._starting is None:
            if time.monotonic() >= self._next_start:
                self.begin(weights)
        elif self._starting.done() and (ranks := self.wait()) is not None and (failure := ranks.failure()) is not None:
            logger.warning("standby ranks are replaced: %s", failure[0])
            self._starting = None

    def take(self) -> RankActors | None:
        """All of them, if they live and answer, to be ranks from now on; waits for those that are about to be up."""
        ranks = None if self._starting is None else self.wait()
        if ranks is not None and (ranks.failure() is not None or not ranks.answer(timeouts.STANDBY_ANSWER_S)):
            return None
        self._starting = self._made = None
        self._next_start = time.monotonic() + self._delay_s
        return ranks

    def close(self) -> None:
        """End them. None start afterwards."""
        self._closed = True
        if self._made is not None:
            self._made.kill(timeouts.RANK_STOP_S)

    def _bring_up(self, weights: list[bytes] | None) -> RankActors:
        if self._made is not None:
            self._made.kill(timeouts.RANK_STOP_S)
        self._made = ranks = self._start()
        if self._closed:  # meanwhile
            ranks.kill(timeouts.RANK_STOP_S)
        ranks.wait_until_up(timeouts.RANK_START_S)
        if weights is not None:
            ranks.call("warm up", "warm_up", seconds=timeouts.RANK_START_S)
            ranks.adopt(weights, timeouts.RANK_START_S)
        return ranks
