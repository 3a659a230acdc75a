"""`SchedulerState`: the queue, the batch and the blocks of one engine, and the operations that keep them consistent.

The scheduler and its policies are the only ones to change it. A sequence waits, runs in a row of the workers'
persistent batch, or is a fork on its way there.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable

from rayllm.api.types import Counters, RequestTimes
from rayllm.core.adapter_slots import AdapterSlots
from rayllm.core.memory import KVMemory, PreemptionMode
from rayllm.core.sequence import Sequence, SequenceGroup, SequenceStatus, policy_order

# Blocks of each group that admission leaves free for each running sequence that may outgrow its own. With one, batches
# are as large and preemptions about as rare as with a forecast of all lengths: docs/decisions/admission.md has the
# figures.
GROWTH_BLOCKS = 1


class InOrder(list[Sequence]):
    """Sequences in policy order. Finding a place takes O(log n), making or closing one a move of pointers."""

    def add(self, seq: Sequence) -> None:
        """Put a sequence at the place its key gives it; a preempted one thus comes before newer ones."""
        bisect.insort(self, seq, key=policy_order)

    def discard(self, seq: Sequence) -> None:
        """Take a sequence out, if it is there."""
        place = bisect.bisect_left(self, seq.key, key=policy_order)
        if place < len(self) and self[place] is seq:
            del self[place]


class SchedulerState:
    """Queues, batch rows and blocks of one engine, and the operations that keep them consistent with each other.

    max_num_seqs: sequences that run at once. max_num_batched_tokens: tokens that one step computes at most.
    max_model_len: tokens of a prompt and its output together, no more than the pool can hold.
    eos_token_ids: end a sequence unless its request ignores them.
    preemptive: whether more urgent requests preempt less urgent ones.
    preemption_mode: what becomes of the KV of a preempted sequence, see `KVMemory.swap_out`.
    growth_blocks: that admission leaves free, of each group, for each running sequence that may outgrow its own.
    adapters: the slots that there are for adapters.
    clock: seconds.
    """

    def __init__(
        self,
        memory: KVMemory,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: Iterable[int] = (),
        preemptive: bool = False,
        preemption_mode: PreemptionMode = "cost",
        growth_blocks: int = GROWTH_BLOCKS,
        adapters: AdapterSlots | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ):
        self.memory = memory
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.preemptive, self.preemption_mode, self.growth_blocks = preemptive, preemption_mode, growth_blocks
        self.adapters = adapters or AdapterSlots(0)
        self.clock = clock
        self.groups: dict[str, SequenceGroup] = {}  # live requests by id
        self.awaiting_mask: list[Sequence] = []  # constrained, with a known last token and no mask for the next one
        self.alone: str | None = None  # the only request that may run, if there is such
        self.counters = Counters()
        self.clear()

    def clear(self) -> None:
        """Forget what the workers hold, which are new and empty; all sequences wait, with the tokens that are known."""
        self.memory.clear()
        self.adapters.clear()
        self.waiting = InOrder()
        self.running = InOrder()
        self.forks: list[Sequence] = []  # enter the batch in the next step
        self.free_rows = list(range(self.max_num_seqs - 1, -1, -1))
        # For the next plan: rows that the workers are to forget, and by row newest tokens that they are to replace.
        self.left_rows: list[int] = []
        self.chosen_tokens: dict[int, int] = {}
        awaiting = {id(seq) for seq in self.awaiting_mask}
        for group in self.groups.values():
            for seq in group.sequences:
                seq.num_pending = int(seq.awaits_choice)
                if seq.status is SequenceStatus.FINISHED:
                    continue
                seq.reset()
                seq.status, seq.row, seq.pinned = SequenceStatus.WAITING, -1, []
                if seq.gate is not None:
                    seq.gate.closed = seq.awaits_choice or id(seq) in awaiting
                if not seq.awaits_choice and all(seq is not sibling for sibling in group.siblings):
                    self.waiting.add(seq)

    def enter(self, seq: Sequence) -> None:
        """Give a sequence a row of the batch; there must be a free one."""
        seq.status = SequenceStatus.RUNNING
        seq.row = self.free_rows.pop()
        seq.adapter_slot = -1 if seq.group.adapter is None else self.adapters.hold(seq.group.adapter)
        self.running.add(seq)

    def fork(self, seq: Sequence, parent: Sequence, num_tokens: int) -> None:
        """Let a sequence hold its running parent's blocks of the first num_tokens tokens, and enter next."""
        self.memory.fork(seq, parent, num_tokens)
        seq.status = SequenceStatus.FORKED
        self.forks.append(seq)

    def send_back(self, seq: Sequence) -> None:
        """Free a sequence's row and device blocks and let it wait. It computes what it does not find in the cache."""
        self._release(seq)
        seq.status = SequenceStatus.WAITING
        if not seq.awaits_choice:
            self.waiting.add(seq)

    def retire(self, seq: Sequence) -> None:
        """End a sequence and free what it holds. A group that loses its last live sequence is forgotten."""
        if seq.status is SequenceStatus.FORKED:
            self.forks.remove(seq)
        self.waiting.discard(seq)
        self._release(seq)
        self.memory.unpin(seq)
        seq.status = SequenceStatus.FINISHED
        if seq.group.finished:
            self.groups.pop(seq.request_id, None)
            seq.group.sequences = []

    def preempt_last(self) -> Sequence:
        """Take the last sequence in policy order out of the batch and let it wait, so the first makes progress."""
        victim, counters = self.running[-1], self.counters
        victim.group.num_preemptions += 1
        counters.num_preemptions += 1
        self.memory.drop_behind(victim)
        counters.num_swap_preemptions += self.memory.swap_out(victim, self.preemption_mode)
        self.send_back(victim)
        return victim

    def times(self, group: SequenceGroup) -> RequestTimes:
        """Where a request's time went, for its first delta with a result."""
        return RequestTimes(group.started_at - group.added_at, self.clock() - group.started_at)

    def _release(self, seq: Sequence) -> None:
        """Take back a sequence's row, if it runs, and its device blocks."""
        if seq.status is SequenceStatus.RUNNING:
            self.running.discard(seq)
            if seq.group.adapter is not None:
                self.adapters.release(seq.group.adapter)
            self.left_rows.append(seq.row)
            self.chosen_tokens.pop(seq.row, None)
            self.free_rows.append(seq.row)
            seq.row = -1
        self.memory.release(seq)
