"""`Constraint`: what the scheduler knows of a sequence's grammar; `AwaitedMasks`: who waits for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rayllm.core.sequence import Sequence


class Constraint(Protocol):
    """Says which tokens may come next in one sequence. All calls return at once, and come from one thread.

    The mask of the next token may take a while to compute: until it is there, `mask` is None and the sequence is not
    scheduled for a step that samples. It depends on the tokens alone, so preemption leaves a constraint as it is.
    """

    def mask(self) -> bytes | None:
        """Packed bits, token i allowed if bit i % 8 of byte i // 8 is set; None while the answer is not known."""

    def accept(self, token: int) -> None:
        """Go on behind a sampled token; the last mask allowed it, and it did not end the sequence."""

    def error(self) -> str | None:
        """Why there will be no further mask, if so: a limit was reached, or no token can follow."""


MakeConstraint = Callable[[], Constraint]


class AwaitedMasks:
    """Constrained sequences whose last token is known and whose next mask is not."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __bool__(self) -> bool:
        return bool(self._sequences)

    def __contains__(self, seq: Sequence) -> bool:
        return any(seq is other for other in self._sequences)

    def add(self, seq: Sequence, token: int) -> None:
        """Tell a constrained sequence's constraint its new token, and wait for the mask of the next."""
        assert seq.constraint is not None
        seq.constraint.accept(token)
        self._sequences.append(seq)

    def look(self) -> list[tuple[Sequence, str]]:
        """Unblock the sequences whose mask has become known; returns those that will get none, and why.

        Both may include sequences that have ended meanwhile.
        """
        awaited, self._sequences = self._sequences, []
        failed = []
        for seq in awaited:
            assert seq.constraint is not None
            if (reason := seq.constraint.error()) is not None:
                failed.append((seq, reason))
            elif seq.constraint.mask() is None:
                self._sequences.append(seq)
            else:
                seq.blocked = False
        return failed
