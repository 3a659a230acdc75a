"""`OutputLengths`: how long outputs that end by themselves become, as those of late did.

The expected length of an output that has g tokens by now is the mean of the recent lengths above g, each cut to what
the request allows: E[min(L, limit) | L > g]. That holds for mixtures of short and long answers and needs no model of
either. To condition on recent lengths is the idea of Gong et al., "Past-Future Scheduler for LLM Serving under SLA
Guarantees" (ASPLOS 2025), which draws from them; the mean makes it deterministic.
"""

from __future__ import annotations

import bisect
import itertools
from collections import deque

RECENT = 256
PRIOR = [16 << i for i in range(8)] * 2  # before anything is known, every magnitude is alike; the first to be forgotten


class OutputLengths:
    """The lengths, in tokens, of the last `RECENT` outputs."""

    def __init__(self) -> None:
        self._recent = deque(PRIOR)
        self._sorted = sorted(PRIOR)
        self._sums: list[int] = []  # _sums[i]: of the i shortest; empty when out of date

    def add(self, length: int) -> None:
        """An output has ended."""
        if len(self._recent) == RECENT:
            del self._sorted[bisect.bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(length)
        bisect.insort(self._sorted, length)
        self._sums = []

    def expected(self, generated: int, limit: int) -> int:
        """Tokens that an output of `generated` tokens, which ends at `limit` at the latest, has in the end.

        At least one more than it has. One that is longer than all of late is expected to double.
        """
        if not self._sums:
            self._sums = list(itertools.accumulate(self._sorted, initial=0))
        longer = bisect.bisect_right(self._sorted, generated)
        cut = bisect.bisect_left(self._sorted, limit, longer)
        count = len(self._sorted) - longer
        if not count:
            return min(limit, max(generated + 1, 2 * generated))
        total = self._sums[cut] - self._sums[longer] + (len(self._sorted) - cut) * limit
        return min(limit, max(generated + 1, -(-total // count)))
