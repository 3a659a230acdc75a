"""`Suspects`: requests that workers died of, or beside.

A request whose computation kills the workers would do so again after each recovery, and take all others along. After
ALONE_DEATHS deaths in which a request was computed it runs alone; if workers die of it then, it is the cause, and ends.
A request that gets a token in between is no suspect any more, so that one death after the other, of other causes, harms
nobody however long a stream runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from rayllm.api.types import ALONE_DEATHS, FATAL_DEATHS


class Suspects:
    """Ids of requests, with the number of deaths since their last tokens. Empty unless workers have died."""

    def __init__(self) -> None:
        self._deaths: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._deaths)

    def add(self, request_id: str, num_deaths: int) -> None:
        """A request comes from an engine that died."""
        self._deaths[request_id] = num_deaths

    def died(self, computed: Iterable[str]) -> list[str]:
        """Note that workers died while they computed these; returns those among them that are the cause."""
        computed = set(computed)
        for request_id in computed:
            self._deaths[request_id] = self._deaths.get(request_id, 0) + 1
        guilty = [each for each, deaths in self._deaths.items() if each in computed and deaths >= FATAL_DEATHS]
        self.got_results(guilty)
        return guilty

    def got_results(self, request_ids: Iterable[str]) -> None:
        """These are no suspects any more."""
        for request_id in request_ids:
            self._deaths.pop(request_id, None)

    def next_alone(self, live: Collection[str]) -> str | None:
        """Which request is to run alone, if there is such. live: those that have not ended."""
        self.got_results([request_id for request_id in self._deaths if request_id not in live])
        return next((each for each, deaths in self._deaths.items() if deaths >= ALONE_DEATHS), None)
