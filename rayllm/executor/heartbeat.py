"""`Heartbeat`: which rank's process cannot answer any more: stopped, or stuck in a way that no error shows.

The question goes through Ray to a thread of its own in each actor, so ranks answer while they load, compile, compute
or wait for each other. A process that is gone is Ray's to report.
"""

from __future__ import annotations

import time
from typing import Any

import ray

GROUP = "heartbeat"  # the actors' concurrency group for `ping`
INTERVAL_SECONDS = 0.5
SILENCE_SECONDS = 6.0  # Python code that holds the interpreter's lock, or a host without a free core, takes less


class Heartbeat:
    """Keeps one question to each actor open. `silent_rank` has to be called now and then to ask the next one."""

    def __init__(self, actors: list[Any]):
        self._actors = actors
        self._asked = [time.monotonic()] * len(actors)
        self._open = [self._ask(rank) for rank in range(len(actors))]

    def silent_rank(self) -> int | None:
        """The rank whose answer has been due for SILENCE_SECONDS; None if there is none. Cheap."""
        now = time.monotonic()
        if now - min(self._asked) < INTERVAL_SECONDS:
            return None
        answered, _ = ray.wait(self._open, num_returns=len(self._open), timeout=0)
        for rank, question in enumerate(self._open):
            if question in answered:
                self._open[rank] = self._ask(rank)
            elif now - self._asked[rank] > SILENCE_SECONDS:
                return rank
        return None

    def _ask(self, rank: int) -> ray.ObjectRef:
        self._asked[rank] = time.monotonic()
        question: ray.ObjectRef = self._actors[rank].ping.options(concurrency_group=GROUP).remote()
        return question
