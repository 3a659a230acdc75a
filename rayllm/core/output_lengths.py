"""`OutputLengths`: how long outputs that end by themselves become, as those of late did.

An output that has g tokens by now is expected to get as long as one of the recent lengths above g. Which one, each
sequence has a share for: the shares of many are spread evenly over [0, 1), so that together they have the recent
lengths' distribution, and their ends are as spread out as those were. (With the mean for all, a batch would seem to
grow together and to end together, and its peak would be overestimated.) That holds for mixtures of short and long
answers and needs no model of either. To draw from recent lengths is the idea of Gong et al., "Past-Future Scheduler for
LLM Serving under SLA Guarantees" (ASPLOS 2025); shares make it deterministic.
"""

from __future__ import annotations

import bisect
from collections import deque

RECENT = 256
PRIOR = [16 << i for i in range(8)] * 2  # before anything is known, every magnitude is alike; the first to be forgotten
GOLDEN = 0.6180339887498949  # its multiples are spread evenly modulo 1, however many there are


class OutputLengths:
    """The lengths, in tokens, of the last `RECENT` outputs."""

    def __init__(self) -> None:
        self._recent = deque(PRIOR)
        self._sorted = sorted(PRIOR)
        self._share = 0.0

    def next_share(self) -> float:
        """The share of another sequence."""
        self._share = (self._share + GOLDEN) % 1
        return self._share

    def add(self, length: int) -> None:
        """An output has ended."""
        if len(self._recent) == RECENT:
            del self._sorted[bisect.bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(length)
        bisect.insort(self._sorted, length)

    def expected(self, generated: int, limit: int, share: float) -> int:
        """Tokens that an output of `generated` tokens, which ends at `limit` at the latest, has in the end.

        At least one more than it has. One that is longer than all of late is expected to double.
        """
        longer = bisect.bisect_right(self._sorted, generated)
        count = len(self._sorted) - longer
        if not count:
            return min(limit, max(generated + 1, 2 * generated))
        return min(limit, self._sorted[longer + int(share * count)])
