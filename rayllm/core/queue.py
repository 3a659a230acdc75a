"""`WaitingQueue`: sequences outside the batch, in the scheduling policy's order."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from rayllm.core.sequence import Sequence


class WaitingQueue:
    """A priority queue by `Sequence.key` (unique, lower first). Push and peek are O(log n), remove is O(1)."""

    def __init__(self) -> None:
        # The counter breaks ties with a sequence's own stale entry: it may be pushed again after a removal.
        self._heap: list[tuple[tuple, int, Sequence]] = []
        self._pushes = itertools.count()
        self._members: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        """The members, in no particular order."""
        return iter(self._members.values())

    def __contains__(self, seq: Sequence) -> bool:
        return id(seq) in self._members

    def push(self, seq: Sequence) -> None:
        """Add a sequence at the place its key gives it; a preempted one thus comes before newer ones."""
        if id(seq) not in self._members:
            self._members[id(seq)] = seq
            heapq.heappush(self._heap, (seq.key, next(self._pushes), seq))

    def peek(self) -> Sequence | None:
        """The first in order, or None."""
        while self._heap and id(self._heap[0][2]) not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out, wherever it is."""
        self._members.pop(id(seq), None)
