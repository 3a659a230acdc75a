"""`Admission`: which sequences enter the batch, in which order, and with which blocks."""

from __future__ import annotations

from rayllm.api.types import SequenceData
from rayllm.core.batch import RunningBatch
from rayllm.core.forecast import Forecast
from rayllm.core.kv_memory import KVMemory, Match
from rayllm.core.preemption import Preemption
from rayllm.core.prefill import schedule_chunk
from rayllm.core.queue import WaitingQueue
from rayllm.core.sequence import Sequence, SequenceStatus, policy_order
from rayllm.core.step import Draft

WATERMARK = 0.01  # share of blocks kept free at admission, so that running sequences can grow a while


class Admission:
    """Lets sequences in while there is budget, a row and room. Nobody overtakes the first in policy order.

    num_queries, num_hits: tokens looked up in the prefix cache so far, and found there. num_cpu_queries, num_cpu_hits:
    those that the device had not and the host was asked for, and those found there.
    """

    def __init__(
        self,
        memory: KVMemory,
        batch: RunningBatch,
        preemption: Preemption,
        waiting: WaitingQueue,
        swapped: WaitingQueue,
        longest_chunk: int,
        preemptive: bool,
    ):
        self._memory, self._batch, self._preemption = memory, batch, preemption
        self._waiting, self._swapped = waiting, swapped
        self._longest_chunk, self._preemptive = longest_chunk, preemptive
        self.forecast = Forecast(memory, batch, longest_chunk)
        self._watermark = int(memory.gpu.num_blocks * WATERMARK)
        self.num_queries = self.num_hits = self.num_cpu_queries = self.num_cpu_hits = 0

    def admit_forks(self, forks: list[Sequence], draft: Draft, in_flight: int) -> None:
        """Let forked siblings enter; those that don't fit give their blocks back and wait like new sequences.

        in_flight: steps whose results are not known yet.
        """
        blocks = self._memory.gpu
        self.forecast.start_step(in_flight)
        for seq in forks:
            if not (draft.budget and self._batch.free_rows and self._has_room_for_fork(seq)):
                self._preemption.send_back(seq)
                continue
            last = len(seq.token_ids) - 1
            place = last // blocks.block_size - seq.first_block
            if place == len(seq.block_table):  # a beam's token, behind full blocks
                seq.block_table += blocks.allocate(1)
            elif (copy := blocks.make_writable(seq.block_table, place)) is not None:
                draft.copies.append(copy)
                draft.copied.append(copy[0])
            self._enter(seq, last, draft)
            schedule_chunk(seq, self._memory, draft)

    def admit(self, draft: Draft) -> None:
        """Admit swapped and waiting sequences in policy order, up to the first for which anything is short.

        In that order whoever ran before comes before whoever is new.
        """
        while draft.budget and self._batch.free_rows:
            seq = self.head()
            if seq is None:
                return
            match = self._find(seq)
            if not self._has_room(seq, match):
                return
            if seq.status is SequenceStatus.SWAPPED:
                self._swapped.remove(seq)
                num_computed = seq.num_swapped
            else:
                self._waiting.remove(seq)
                num_computed = self._count(seq, match, draft)
            arriving = self._claim(seq, match, num_computed)
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
        match = self._find(head)
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
        heads = [seq for seq in (self._swapped.peek(), self._waiting.peek()) if seq is not None]
        head = min(heads, key=policy_order, default=None)
        # Preempted while its last token is in flight: the id is needed first, and then its mask.
        return None if head is None or head.num_pending or head.blocked else head

    def _find(self, seq: Sequence) -> Match:
        return self._memory.match_swapped(seq) if seq.status is SequenceStatus.SWAPPED else self._memory.match(seq)

    def _has_room(self, seq: Sequence, match: Match) -> bool:
        """Whether the sequence's blocks can be allocated once those of the match are held."""
        missing = self._missing(seq, match)
        room = self._memory.num_free_after(match) - missing - self._reserve(seq)
        return self._will_have_room(seq, len(match.blocks) + missing, self._memory.num_shared(match), room)

    def _has_room_for_fork(self, seq: Sequence) -> bool:
        """Whether there is a block for the copy of the last one."""
        room = self._memory.gpu.num_free - 1 - self._reserve(seq)
        return self._will_have_room(seq, len(seq.block_table), seq.num_shared, room)

    def _will_have_room(self, seq: Sequence, held: int, shared: int, room: int) -> bool:
        """Whether there is room now, and will be for all that run. Those less urgent make room when it comes to it."""
        running = self._batch.sequences
        if room < 0 or not running:
            return room >= 0
        if seq.group.search is not None and seq.group.search.started:
            return True  # it takes the place of a beam that died, or its group waits for it alone
        yields = self._preemptive and seq.key[0] < running[-1].key[0]
        return yields or self.forecast.fits(seq, held, shared, room)

    def _missing(self, seq: Sequence, match: Match) -> int:
        """Blocks beyond the match that it has to find at first, or until it decodes if its chunks find them.

        The latter are those of a window and the longest chunk; the only sequence gets along with less.
        """
        blocks_for, window = self._memory.gpu.blocks_for, self._memory.window
        missing = max(0, blocks_for(len(seq.token_ids)) - match.end)
        if window.tokens is None:
            return missing
        if not self._batch.sequences:
            return max(0, blocks_for(self._num_found(seq, match) + 1) - match.end)
        most = window.most_blocks(len(seq.token_ids)) + blocks_for(self._longest_chunk)
        return min(missing, max(1, most - len(match.blocks)))

    def _num_found(self, seq: Sequence, match: Match) -> int:
        """Tokens that need not be computed any more."""
        return seq.num_swapped or match.end * self._memory.block_size

    def _claim(self, seq: Sequence, match: Match, num_computed: int) -> bool:
        """Take the sequence's blocks: all of them, or with a sliding window the first, and its chunks find the others.

        Returns whether some of them arrive while this step computes.
        """
        whole = self._memory.window.tokens is None
        seq.first_block = match.first
        seq.num_shared = self._memory.num_shared(match)
        seq.block_table, arriving = self._memory.claim(seq, match, len(seq.token_ids) if whole else num_computed + 1)
        self._memory.release_swapped(seq)
        return arriving

    def _reserve(self, seq: Sequence) -> int:
        """Blocks that admission leaves free; none for the only sequence, which could otherwise wait for ever.

        One that was preempted would be the next victim again: it comes back when all that run can grow by a block.
        """
        running = len(self._batch.sequences)
        if not running:
            return 0
        return max(self._watermark, running) if seq.group.num_preemptions else self._watermark

    def _count(self, seq: Sequence, match: Match, draft: Draft) -> int:
        """Record what the prefix cache found for a waiting sequence; returns how many tokens that is."""
        size = self._memory.block_size
        hit = match.end * size
        if self._memory.looks_up(seq):
            self.num_queries += len(seq.token_ids)
            self.num_hits += hit
            if self._memory.tiered:
                self.num_cpu_queries += len(seq.token_ids) - hit + len(match.host) * size
                self.num_cpu_hits += len(match.host) * size
        if seq.group.num_cached_tokens is None:
            seq.group.num_cached_tokens = hit
            draft.started.append(seq.group)
        return hit

    def _enter(self, seq: Sequence, num_computed: int, draft: Draft) -> None:
        """Put a sequence that has blocks into the batch; nothing of it is scheduled yet."""
        size = self._memory.block_size
        self._batch.enter(seq)
        seq.capacity = (seq.first_block + len(seq.block_table)) * size
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
