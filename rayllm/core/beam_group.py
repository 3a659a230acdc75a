"""`BeamGroups`: carries out what a beam search chooses, in rows, blocks and queues.

Beams are sequences. When all beams of a group have found their next tokens, the choice is made (`BeamSearch.choose`).
Of a beam's continuations the best stays in its row, where the next plan only replaces the newest token; the others fork
off and hold its blocks, to enter the batch in the next step with a copy of the last block, if that is not full. A beam
without continuations gives up its row and blocks at once.

A beam that is preempted before it has found its tokens waits like any other sequence. One that has found them is in no
queue until the choice is made, because nothing is left to compute for it; should those that have not find no room, it
makes way. So beams for which there is no room together take turns, and a search ends whatever the room is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from rayllm.api.types import RequestTimes, TokenDelta, TokenLogprobs
from rayllm.core.batch import RunningBatch
from rayllm.core.beam_search import Beam, BeamSearch
from rayllm.core.deltas import result_deltas, search_delta
from rayllm.core.kv_memory import KVMemory
from rayllm.core.queue import WaitingQueue
from rayllm.core.sequence import Sequence, SequenceGroup, SequenceStatus


class BeamGroups:
    """groups: all that live, which loses those that finish. retire: ends a sequence and frees what it holds.

    times: of a group whose first choice is made. due: groups whose choice is to be made now. num_tokens: of all
    results so far.
    """

    def __init__(
        self,
        memory: KVMemory,
        batch: RunningBatch,
        waiting: WaitingQueue,
        swapped: WaitingQueue,
        groups: dict[str, SequenceGroup],
        retire: Callable[[Sequence], None],
        times: Callable[[SequenceGroup], RequestTimes],
    ):
        self._memory, self._batch, self._waiting, self._swapped = memory, batch, waiting, swapped
        self._groups, self._retire, self._times = groups, retire, times
        self.due: list[SequenceGroup] = []
        self.num_tokens = 0

    def take(self, seq: Sequence, found: TokenLogprobs | None) -> None:
        """Take what a beam's step found. Its next token stays pending until its group has chosen."""
        assert seq.beam is not None and found is not None, f"a step without log-probabilities for {seq}"
        seq.num_pending += 1
        seq.beam.found = found
        self._waiting.remove(seq)
        self._swapped.remove(seq)
        if all(other.awaits_choice for other in seq.group.sequences):
            self.due.append(seq.group)

    def choose(self, forks: list[Sequence]) -> list[TokenDelta]:
        """Make the choices that are due; returns the results of searches that are over.

        forks: what enters the batch in the next step; new beams are added.
        """
        due, self.due = self.due, []
        deltas: list[TokenDelta] = []
        for group in due:
            assert group.search is not None
            if not group.search.started:
                deltas.append(search_delta(group, self._times(group)))
            self._advance(group, group.search, forks)
            if group.finished:
                del self._groups[group.request_id]
                deltas += result_deltas(group, group.search.finished)
        self._batch.drop_finished()
        self.num_tokens += sum(len(delta.token_ids) for delta in deltas)
        return deltas

    def _advance(self, group: SequenceGroup, search: BeamSearch, forks: list[Sequence]) -> None:
        """Replace a group's beams by those chosen, or end them all."""
        parents = group.sequences
        chosen = search.choose(parents)
        going_on = {continuation.beam for continuation in chosen}
        for place, seq in enumerate(parents):
            if place not in going_on:
                self._retire(seq)
        if not chosen:
            return
        indices = _unused({parents[place].index for place in going_on})
        before = [seq.beam for seq in parents]
        group.sequences = []
        for cumulative, place, token_place, token in chosen:
            parent, beam = parents[place], before[place]
            assert beam is not None
            after = Beam(cumulative, search.entries_of(beam, token_place))
            if parent.beam is beam:  # the first and best of its continuations
                self._go_on(parent, token, after)
                group.sequences.append(parent)
            else:
                group.sequences.append(self._fork(parent, next(indices), token, after, forks))

    def _go_on(self, seq: Sequence, token: int, after: Beam) -> None:
        """Continue a beam in place."""
        seq.beam = after
        seq.fresh = False
        seq.token_ids.append(token)
        seq.num_pending -= 1
        seq.blocked = False
        if seq.status is SequenceStatus.RUNNING:
            self._batch.set_token(seq, token)
            if len(seq.token_ids) > seq.next_full:
                self._memory.register(seq, len(seq.token_ids) - 1)
        else:
            (self._swapped if seq.status is SequenceStatus.SWAPPED else self._waiting).push(seq)

    def _fork(self, parent: Sequence, index: int, token: int, after: Beam, forks: list[Sequence]) -> Sequence:
        """Another continuation of a beam that has been continued already. Without blocks to share it has to wait."""
        key = (*parent.key[:-1], index)
        seq = Sequence(parent.group, index, parent.max_len, parent.stop_ids, key)
        seq.token_ids = [*parent.token_ids[:-1], token]
        seq.block_hashes = list(parent.block_hashes)  # of full blocks, none of which holds the last token
        seq.beam = after
        seq.fresh = False
        if parent.status is SequenceStatus.RUNNING:
            first, computed = parent.first_block, len(seq.token_ids) - 1
            seq.status = SequenceStatus.FORKED
            seq.block_table = self._memory.gpu.fork(parent.block_table[: self._memory.gpu.blocks_for(computed) - first])
            seq.first_block = first
            seq.num_shared = computed // self._memory.block_size - first  # the last is copied if it is not full
            forks.append(seq)
        else:
            self._waiting.push(seq)
        return seq


def _unused(indices: set[int]) -> Iterator[int]:
    return (index for index in itertools.count() if index not in indices)
