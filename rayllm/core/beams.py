"""`Beams`: carries out what a beam search chooses, in rows, blocks and queues.

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

from rayllm.api.types import TokenDelta, TokenLogprobs
from rayllm.core.beam_search import Beam, BeamSearch
from rayllm.core.sequence import Gate, Sequence, SequenceGroup, SequenceStatus
from rayllm.core.state import SchedulerState


class Beams:
    """All beam searches of an engine."""

    def __init__(self, state: SchedulerState):
        self._state = state
        self._due: list[SequenceGroup] = []  # groups whose choice is to be made now

    def take(self, seq: Sequence, beam: Beam, found: TokenLogprobs | None) -> None:
        """Take what a beam's step found. Its next token stays pending until its group has chosen."""
        assert found is not None, f"a step without log-probabilities for {seq}"
        seq.num_pending += 1
        beam.found = found
        self._state.waiting.remove(seq)
        if all(other.awaits_choice for other in seq.group.sequences):
            self._due.append(seq.group)

    def choose(self) -> list[TokenDelta]:
        """Make the choices that are due; returns the results of searches that are over. New beams become forks."""
        due, self._due = self._due, []
        deltas: list[TokenDelta] = []
        for group in due:
            search = group.search
            assert search is not None
            if not search.started:
                deltas.append(self._first_delta(group))
            self._advance(group, search)
            if group.finished:
                deltas += _results(group, search)
        if due:
            self._state.batch.drop_finished()
            self._state.counters.generation_tokens += sum(len(delta.token_ids) for delta in deltas)
        return deltas

    def _first_delta(self, group: SequenceGroup) -> TokenDelta:
        """Says that the prompt of a search is done. Tokens come when the search is over."""
        return TokenDelta(
            group.request_id,
            0,
            [],
            None if group.params.logprobs is None else [],
            num_cached_tokens=group.num_cached_tokens or 0,
            prompt_logprobs=group.prompt_logprobs,
            times=self._state.times(group),
        )

    def _advance(self, group: SequenceGroup, search: BeamSearch) -> None:
        """Replace a group's beams by those chosen, or end them all."""
        parents = group.sequences
        before = [seq.gate.beam for seq in parents if seq.gate is not None and seq.gate.beam is not None]
        chosen = search.choose(before, [seq.token_ids for seq in parents])
        going_on = {continuation.beam for continuation in chosen}
        for place, seq in enumerate(parents):
            if place not in going_on:
                self._state.retire(seq)
        if not chosen:
            return
        taken = {parents[place].index for place in going_on}
        indices = (index for index in itertools.count() if index not in taken)
        group.sequences = []
        continued: set[int] = set()
        for cumulative, place, token_place, token in chosen:
            parent = parents[place]
            after = Beam(cumulative, search.entries_of(before[place], token_place))
            if place not in continued:  # the first and best of its continuations
                continued.add(place)
                self._go_on(parent, token, after)
                group.sequences.append(parent)
            else:
                group.sequences.append(self._fork(parent, next(indices), token, after))

    def _go_on(self, seq: Sequence, token: int, after: Beam) -> None:
        """Continue a beam in place."""
        seq.gate = Gate(beam=after)
        seq.fresh = False
        seq.token_ids.append(token)
        seq.num_pending -= 1
        if seq.status is SequenceStatus.RUNNING:
            self._state.batch.set_token(seq, token)
            if len(seq.token_ids) > seq.next_full:
                self._state.memory.register(seq, len(seq.token_ids) - 1)
        else:
            self._state.waiting.push(seq)

    def _fork(self, parent: Sequence, index: int, token: int, after: Beam) -> Sequence:
        """Another continuation of a beam that has been continued already. Without blocks to share it has to wait."""
        seq = Sequence(parent.group, index, parent.max_len, parent.stop_ids, (*parent.key[:-1], index))
        seq.token_ids = [*parent.token_ids[:-1], token]
        seq.block_hashes = list(parent.block_hashes)  # of full blocks, none of which holds the last token
        seq.gate = Gate(beam=after)
        seq.fresh = False
        if parent.status is SequenceStatus.RUNNING:
            gpu, computed = self._state.memory.gpu, len(seq.token_ids) - 1
            seq.fork_from(parent, gpu.fork(parent.block_table[: gpu.blocks_for(computed) - parent.first_block]))
            self._state.forks.append(seq)
        else:
            self._state.waiting.push(seq)
        return seq

    def check_integrity(self) -> None:
        """Raise AssertionError if a choice was put off."""
        assert not self._due, "a choice was put off"


def _results(group: SequenceGroup, search: BeamSearch) -> list[TokenDelta]:
    """The only deltas with tokens of a beam search, best first."""
    params, deltas = group.params, []
    for index in range(params.n):
        if index >= len(search.finished):  # only if logits are not numbers
            message = "the search found fewer sequences than were asked for"
            deltas.append(TokenDelta(group.request_id, index, [], finish_reason="error", stop_reason=message))
            continue
        _score, token_ids, cumulative, stop_id, entries = search.finished[index]
        deltas.append(
            TokenDelta(
                group.request_id,
                index,
                token_ids,
                None if params.logprobs is None else entries,
                "length" if stop_id is None else "stop",
                stop_id if stop_id in params.stop_token_ids else None,
                num_preemptions=group.num_preemptions,
                cumulative_logprob=cumulative,
            )
        )
    return deltas
