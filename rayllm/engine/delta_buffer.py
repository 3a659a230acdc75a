"""`DeltaBuffer`: joins a completion's deltas until it ends, for those who read no completion while it grows."""

from __future__ import annotations

from collections.abc import Set

from rayllm.api.types import TokenDelta


class DeltaBuffer:
    """Holds back a completion's deltas until it ends, and then passes them on as one, before its last.

    Nobody reads offline completions while they grow, and turning tokens into text once costs a fraction of doing it a
    token at a time. Deltas are joined as they come: kept one by one, they are so many objects that the garbage
    collector stalls steps. through: ids of requests that are not held back; it may change.
    """

    def __init__(self, through: Set[str]):
        self._through = through
        self._held: dict[tuple[str, int], TokenDelta] = {}

    def merge(self, deltas: list[TokenDelta]) -> list[TokenDelta]:
        """Take over a step's deltas; return those to process now."""
        ready = []
        for delta in deltas:
            key = (delta.request_id, delta.index)
            if delta.finish_reason is not None:
                if (held := self._held.pop(key, None)) is not None:
                    ready.append(held)
                ready.append(delta)
            elif delta.request_id in self._through or delta.alone:  # one that says `alone` has nothing else to say
                ready.append(delta)
            elif (held := self._held.setdefault(key, delta)) is not delta:
                held.token_ids.extend(delta.token_ids)
                if held.logprobs is not None:
                    held.logprobs.extend(delta.logprobs or [])
        return ready

    def forget(self, request_id: str) -> None:
        """Drop what is held of a request that has ended by an abort."""
        for key in [key for key in self._held if key[0] == request_id]:
            del self._held[key]
