"""`Channel`: the driver's end of the connection to its workers, once they serve."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from rayllm.api.types import StepPlan, StepResult
from rayllm.parallel.process_groups import Groups, pack, receive_result, send_plan


class Channel:
    """Plans out and results in, each on a thread of its own: gloo's waits can be neither bounded nor interrupted.

    groups: the driver's, both with connections to living workers. After a failure or the end of the stream the threads
    end by themselves once the workers' processes have ended.
    """

    def __init__(self, groups: Groups):
        self._plans: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[StepResult | Exception] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, args=(loop, groups), name=name, daemon=True)
            for name, loop in (("send plans", self._send_plans), ("receive results", self._receive_results))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, plan: StepPlan) -> None:
        """Send a plan, soon; it is packed now, and may be changed afterwards."""
        self._plans.put(pack(plan))

    def stop(self) -> None:
        """Tell the workers to stop after the plans sent so far."""
        self._plans.put(None)

    def receive(self, seconds: float) -> StepResult:
        """The next result. Raises queue.Empty if there is none in time; gloo's error if a process is gone."""
        result = self._results.get(timeout=seconds)
        if isinstance(result, Exception):
            raise result
        return result

    def join(self, seconds: float) -> bool:
        """Wait for the threads, once the workers are gone. False if one is still there."""
        self.stop()
        for thread in self._threads:
            thread.join(seconds)
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, loop: Callable[[Groups], None], groups: Groups) -> None:
        try:
            loop(groups)
        except Exception as error:
            self._results.put(error)

    def _send_plans(self, groups: Groups) -> None:
        while (packed := self._plans.get()) is not None:
            send_plan(groups, packed)
        send_plan(groups, pack(None))

    def _receive_results(self, groups: Groups) -> None:
        while (result := receive_result(groups)) is not None:
            self._results.put(result)
