"""The decode pass of a step: every sequence whose prompt is computed gets one more token."""

from __future__ import annotations

from collections.abc import Callable

from rayllm.core.sequence import Sequence
from rayllm.core.step import Draft


def schedule_decodes(running: list[Sequence], draft: Draft, grow: Callable[[Sequence, Draft], bool]) -> list[Sequence]:
    """Advance every decoding sequence by one token. Returns the running ones that are still in their prompt.

    running: in policy order; preemption shortens it from its end, which ends the loop early. grow: gives a sequence a
    block, or preempts it and returns False. This loop runs over all running sequences in every step: it is written for
    speed.
    """
    prefilling: list[Sequence] = []
    budget, add = draft.budget, draft.decodes.append
    for seq in running:
        computed = seq.num_computed
        if computed >= seq.steady_computed or not budget:
            if not seq.decoding:
                if computed >= seq.capacity and not grow(seq, draft):
                    break  # as below; only where a sliding window lets a prompt begin without all of its blocks
                prefilling.append(seq)
                continue
            if seq.blocked or computed + 1 >= seq.max_len:
                continue  # its next mask or token is not known, or a step in flight samples its last token
            if not budget:
                break
            if computed >= seq.capacity and not grow(seq, draft):
                break  # the last in order, it was preempted itself
            if seq.constraint is not None:
                draft.constrain(seq)
            elif seq.beam is not None:
                seq.blocked = True
            else:
                seq.steady_computed = min(seq.capacity, seq.max_len - 1)
        budget -= 1
        seq.num_computed = computed + 1
        seq.num_pending += 1
        add(seq)
    draft.budget = budget
    return prefilling
