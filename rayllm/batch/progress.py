"""The progress bar of a batch: requests, tokens a second, errors."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

from rayllm.batch.lines import BatchResult
from rayllm.batch.runner import Counts

REFRESH_S = 0.5


class Progress:
    """A bar on standard error, where that is a terminal. total: lines of the input; None if it is not known."""

    def __init__(self, counts: Counts, total: int | None):
        self._counts, self._started, self._shown = counts, time.monotonic(), 0.0
        self._bar = tqdm(
            total=total, initial=counts.done, desc="Batch", unit="req", disable=not sys.stderr.isatty(), leave=True
        )

    def update(self, _result: BatchResult) -> None:
        """Count a new result."""
        self._bar.update()
        if (now := time.monotonic()) - self._shown > REFRESH_S:
            self._shown = now
            self._bar.set_postfix_str(self._figures(), refresh=False)

    def close(self) -> None:
        """Show it for the last time."""
        self._bar.set_postfix_str(self._figures())
        self._bar.close()

    def _figures(self) -> str:
        counts, seconds = self._counts, max(time.monotonic() - self._started, 1e-3)
        return f"{counts.completion_tokens / seconds:.0f} tok/s, {counts.failed} failed"
