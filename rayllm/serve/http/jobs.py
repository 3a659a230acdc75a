"""`Jobs`: the work of an API server that no connection waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Jobs:
    """Tasks that run until they end, or the API server does. A task is to answer for its own errors."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_closed = False

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run it from now on; not at all once this is closed."""
        if self.is_closed:
            work.close()
            return
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel what still runs, and wait for its end; nothing new begins."""
        self.is_closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
