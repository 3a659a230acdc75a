"""`Admission`: which sequences enter the batch, in which order, and with which blocks."""

from __future__ import annotations

from rayllm.api.types import SequenceData
from rayllm.core.memory import Match
from rayllm.core.passes import schedule_chunk
from rayllm.core.preemption import Preemption
from rayllm.core.sequence import Sequence
from rayllm.core.state import SchedulerState
from rayllm.core.step import Draft

WATERMARK = 0.01  # share of the blocks that admission leaves free
# Blocks that admission leaves free for each running sequence that may outgrow its own. With one, batches are as large
# and preemptions about as rare as with a forecast of all lengths: docs/decisions/admission.md has the figures.
GROWTH_BLOCKS = 1


class Admission:
    """Lets sequences in while there is budget, a row and room. Nobody overtakes the first in policy order."""

    def __init__(self, state: SchedulerState, preemption: Preemption, growth_blocks: int):
        self._state, self._memory, self._batch = state, state.memory, state.batch
        self._preemption, self._growth_blocks = preemption, growth_blocks
        self._watermark = int(state.memory.gpu.num_blocks * WATERMARK)

    def admit_forks(self, draft: Draft) -> None:
        """Let forked siblings enter; those that don't fit give their blocks back and wait like new sequences."""
        gpu = self._memory.gpu
        forks, self._state.forks = self._state.forks, []
        for seq in forks:
            if not (draft.budget and self._batch.free_rows and self._fits(seq, gpu.num_free - 1)):
                self._state.send_back(seq)
                continue
            last = len(seq.token_ids) - 1
            place = last // gpu.block_size - seq.first_block
            if place == len(seq.block_table):  # a beam's token, behind full blocks
                seq.block_table += gpu.allocate(1)
            elif (copy := gpu.make_writable(seq.block_table, place)) is not None:
                draft.copies.append(copy)
                draft.copied.append(copy[0])
            seq.capacity = (seq.first_block + len(seq.block_table)) * gpu.block_size
            self._enter(seq, last, draft)
            schedule_chunk(seq, self._memory, draft)

    def admit(self, draft: Draft) -> None:
        """Admit waiting sequences in policy order, up to the first for which anything is short.

        In that order whoever ran before comes before whoever is new.
        """
        while draft.budget and self._batch.free_rows and (seq := self.head()) is not None:
            match = self._memory.match(seq)
            if not self._has_room(seq, match):
                return
            self._state.waiting.remove(seq)
            self._count(seq, match, draft)
            num_computed = match.end * self._memory.block_size
            # With a sliding window the first blocks suffice: chunks find the others as they come.
            whole = self._memory.window.tokens is None
            arriving = self._memory.claim(seq, match, len(seq.token_ids) if whole else num_computed + 1)
            self._enter(seq, num_computed, draft)
            if arriving:
                draft.arriving.append(seq)  # its blocks arrive while this step computes
            else:
                schedule_chunk(seq, self._memory, draft)

    def yield_to_urgent(self) -> None:
        """Preempt sequences of lower priority while one of higher priority waits for a row or for blocks."""
        head = self.head()
        if head is None:
            return
        match = self._memory.match(head)
        running = self._batch.sequences
        while running and head.key[0] < running[-1].key[0]:
            if self._batch.free_rows and self._has_room(head, match):
                return
            self._preemption.preempt_last()

    def make_way(self, draft: Draft) -> None:
        """Let the first in order in at the cost of the last that run; called if all that run await a group's choice."""
        running = self._batch.sequences
        while draft.is_empty and not draft.arriving and running and self.head() is not None:
            self._preemption.preempt_last()
            self.admit(draft)

    def head(self) -> Sequence | None:
        """The first in policy order outside the batch. None also while something about it is not known yet."""
        head = self._state.waiting.peek()
        # Preempted while its last token is in flight: the id is needed first, and then its mask.
        return None if head is None or head.num_pending or head.closed else head

    def _has_room(self, seq: Sequence, match: Match) -> bool:
        """Whether the sequence's blocks can be allocated once those of the match are held."""
        return self._fits(seq, self._memory.num_free_after(match) - self._missing(seq, match))

    def _missing(self, seq: Sequence, match: Match) -> int:
        """Blocks beyond the match that it has to find at first, or until it decodes if its chunks find them.

        The latter are those of a window and the longest chunk; the only sequence gets along with less.
        """
        blocks_for, window = self._memory.gpu.blocks_for, self._memory.window
        missing = max(0, blocks_for(len(seq.token_ids)) - match.end)
        if window.tokens is None:
            return missing
        if not self._batch.sequences:
            return max(0, blocks_for(match.end * self._memory.block_size + 1) - match.end)
        most = window.most_blocks(len(seq.token_ids)) + blocks_for(self._state.max_num_batched_tokens)
        return min(missing, max(1, most - len(match.blocks)))

    def _fits(self, seq: Sequence, num_free: int) -> bool:
        """Whether a sequence may enter that leaves num_free blocks free.

        The only sequence may take all of them; it could otherwise wait for ever. A more urgent one need not care for
        those that it may preempt, nor a beam of a search that has begun: it takes the place of one that died, or its
        group waits for it alone.
        """
        running = self._batch.sequences
        if not running:
            return num_free >= 0
        if num_free < self._watermark:
            return False
        urgent = self._state.preemptive and seq.key[0] < running[-1].key[0]
        if urgent or (seq.group.search is not None and seq.group.search.started):
            return True
        if num_free >= self._growth_blocks * len(running):
            return True
        return num_free >= self._growth_blocks * sum(each.capacity < each.max_len - 1 for each in running)

    def _count(self, seq: Sequence, match: Match, draft: Draft) -> None:
        """Record what the prefix cache found for a waiting sequence, and when its request was first admitted."""
        counters, size = self._state.counters, self._memory.block_size
        if self._memory.caching and self._memory.looks_up(seq) and not seq.pinned:
            on_device = len(match.on_device) * size
            counters.prefix_cache_queries += len(seq.token_ids)
            counters.prefix_cache_hits += match.end * size
            if self._memory.tiered:
                counters.cpu_prefix_cache_queries += len(seq.token_ids) - match.first * size - on_device
                counters.cpu_prefix_cache_hits += len(match.host) * size
        if seq.group.num_cached_tokens is None:
            seq.group.num_cached_tokens = match.end * size
            draft.started.append(seq.group)

    def _enter(self, seq: Sequence, num_computed: int, draft: Draft) -> None:
        """Put a sequence that has blocks into the batch; nothing of it is scheduled yet."""
        size = self._memory.block_size
        self._batch.enter(seq)
        seq.num_computed = num_computed
        seq.num_registered = num_computed // size
        if self._memory.caching:
            seq.next_full = (seq.num_registered + 1) * size
        draft.new.append(
            SequenceData(
                row=seq.row,
                token_ids=list(seq.token_ids),
                num_prompt_tokens=len(seq.group.prompt_token_ids),
                num_computed_tokens=num_computed,
                block_table=list(seq.block_table),
                params=seq.group.params,
                seed=seq.seed,
                pooling=seq.group.pooling,
                first_block=seq.first_block,
            )
        )
