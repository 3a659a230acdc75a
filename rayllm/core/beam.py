"""Beam search: which continuations of a request's beams live on, and what that means for rows, blocks and queues.

The rules are those of beam search in transformers (`generate` with num_beams): all continuations of all beams are
ranked by their cumulative log-probability. Of the first `width` those that end are finished, later ones that end are
lost, and the first `width` that do not end are the next beams. A finished sequence's score is its cumulative
log-probability / tokens ** length_penalty, and the best `width` are kept. The search is over when every continuation
ends, at the length limit, or when `width` sequences are finished and early_stopping says so.

A beam that knows its `width` most likely tokens, and one more for each token that ends a sequence, knows enough:
`width` of them go on, and no other beam's continuation can need more than `width` of one beam.

Beams are sequences. When all beams of a group have found their next tokens, the choice is made. Of a beam's
continuations the best stays in its row, where the next plan only replaces the newest token; the others fork off and
hold its blocks, to enter the batch in the next step with a copy of the last block, if that is not full. A beam without
continuations gives up its row and blocks at once.

A beam that is preempted before it has found its tokens waits like any other sequence. One that has found them is in no
queue until the choice is made, because nothing is left to compute for it; should those that have not find no room, it
makes way. So beams for which there is no room together take turns, and a search ends whatever the room is.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

from rayllm.api.types import TokenDelta, TokenLogprobs
from rayllm.core.sequence import Beam, BeamSearch, Gate, Hypothesis, Sequence, SequenceGroup, SequenceStatus
from rayllm.core.state import SchedulerState


class Continuation(NamedTuple):
    """A beam and one more token."""

    # The log-probability of all generated tokens together.
    cumulative: float
    # The beam's place among the beams.
    beam: int
    # The token's place among those that the beam found.
    place: int
    token: int


def take(state: SchedulerState, seq: Sequence, beam: Beam, found: TokenLogprobs | None) -> bool:
    """Take what a beam's step found; its next token stays pending until its group has chosen. Whether that is due."""
    assert found is not None, f"a step without log-probabilities for {seq}"
    seq.num_pending += 1
    beam.found = found
    state.waiting.discard(seq)
    return all(other.awaits_choice for other in seq.group.sequences)


def advance(state: SchedulerState, group: SequenceGroup) -> list[TokenDelta]:
    """Replace a group's beams by those chosen, or end them all; the results if the search is over.

    New beams become forks.
    """
    search, parents = group.search, group.sequences
    assert search is not None
    search.started = True
    beams = [seq.gate.beam for seq in parents if seq.gate is not None and seq.gate.beam is not None]
    chosen = _choose(group, search, beams)
    going_on = {continuation.beam for continuation in chosen}
    for place, seq in enumerate(parents):
        if place not in going_on:
            state.retire(seq)
    if not chosen:
        return _results(group, search)
    taken = {parents[place].index for place in going_on}
    indices = (index for index in itertools.count() if index not in taken)
    group.sequences = []
    for cumulative, place, token_place, token in chosen:
        parent = parents[place]
        after = Gate(beam=Beam(cumulative, _entries(group, beams[place], token_place)))
        if place in going_on:  # the first and best of its continuations
            going_on.remove(place)
            _go_on(state, parent, token, after)
            group.sequences.append(parent)
        else:
            group.sequences.append(_fork(state, parent, next(indices), token, after))
    return []


def _go_on(state: SchedulerState, seq: Sequence, token: int, after: Gate) -> None:
    """Continue a beam in place."""
    seq.gate = after
    seq.token_ids.append(token)
    seq.num_pending -= 1
    if seq.status is SequenceStatus.RUNNING:
        state.chosen_tokens[seq.row] = token
        if len(seq.token_ids) > seq.next_full:
            state.memory.register(seq, len(seq.token_ids) - 1)
    else:
        state.waiting.add(seq)


def _fork(state: SchedulerState, parent: Sequence, index: int, token: int, after: Gate) -> Sequence:
    """Another continuation of a beam that has been continued already. Without blocks to share it has to wait."""
    seq = Sequence(parent.group, index, (*parent.key[:-1], index))
    seq.token_ids = [*parent.token_ids[:-1], token]
    seq.block_hashes = list(parent.block_hashes)  # of full blocks, none of which holds the last token
    seq.gate = after
    if parent.status is SequenceStatus.RUNNING:
        state.fork(seq, parent, len(seq.token_ids) - 1)
    else:
        state.waiting.add(seq)
    return seq


# ---------------------------------------------------------------------------------------------------- the choice


def _choose(group: SequenceGroup, search: BeamSearch, beams: list[Beam]) -> list[Continuation]:
    """The next beams, best first; none if the search is over. What ends is finished.

    beams: of the group's sequences, best first; all have found tokens. Of continuations with equal log-probability the
    better beam's comes first, and of one beam's that of the lower token id.
    """
    width, prompt = group.request.params.width, len(group.request.prompt_token_ids)
    length = len(group.sequences[0].token_ids) + 1 - prompt
    live: list[Continuation] = []
    for rank, continuation in enumerate(_ranked(group, beams, length)):
        stops = continuation.token in group.stop_ids
        if stops or length + prompt >= group.max_len:
            if rank < width:
                tokens = [*group.sequences[continuation.beam].token_ids[prompt:], continuation.token]
                _finish(group, search, tokens, continuation, stops, beams[continuation.beam])
        elif len(live) < width:
            live.append(continuation)
        elif rank >= width:
            break
    return [] if _is_over(group, search, live, length) else live


def _ranked(group: SequenceGroup, beams: list[Beam], length: int) -> list[Continuation]:
    """All that the beams found, best first, without those that would end before min_tokens."""
    early = length <= group.request.params.min_tokens
    ranked = []
    for number, beam in enumerate(beams):
        assert beam.found is not None
        for place, (token, logprob) in enumerate(zip(beam.found.top_ids, beam.found.top_logprobs, strict=True)):
            if logprob > -math.inf and not (early and token in group.stop_ids):
                ranked.append(Continuation(beam.cumulative + logprob, number, place, token))
    ranked.sort(key=lambda each: (-each.cumulative, each.beam, each.place))
    return ranked


def _finish(
    group: SequenceGroup, search: BeamSearch, token_ids: list[int], last: Continuation, stops: bool, beam: Beam
) -> None:
    """Keep a sequence of these generated tokens if it is among the best."""
    score = _score(group, last.cumulative, len(token_ids))
    entries, stop_id = _entries(group, beam, last.place), last.token if stops else None
    search.finished.append(Hypothesis(score, token_ids, last.cumulative, stop_id, entries))
    search.finished.sort(key=lambda each: -each.score)
    del search.finished[group.request.params.width :]


def _is_over(group: SequenceGroup, search: BeamSearch, live: list[Continuation], length: int) -> bool:
    """Whether to stop, now that continuations have `length` tokens."""
    params = group.request.params
    if not live:
        return True
    if len(search.finished) < params.width:
        return False
    if params.early_stopping is True:
        return True
    if params.early_stopping == "never" and params.length_penalty > 0:
        length = group.max_len - len(group.request.prompt_token_ids)  # which flatters a sum of logarithms most
    return _score(group, live[0].cumulative, length) <= search.finished[-1].score


def _score(group: SequenceGroup, cumulative: float, length: int) -> float:
    return cumulative / length**group.request.params.length_penalty


def _entries(group: SequenceGroup, beam: Beam, place: int) -> list[TokenLogprobs]:
    """What a continuation of `beam` by the token at `place` reports of its tokens; nothing if not asked for."""
    num_top = group.request.params.logprobs
    if num_top is None:
        return []
    assert beam.found is not None
    ids, logprobs = beam.found.top_ids, beam.found.top_logprobs
    rank = 1 + sum(other > logprobs[place] for other in logprobs[:place])
    return [*beam.entries, TokenLogprobs(ids[place], logprobs[place], rank, ids[:num_top], logprobs[:num_top])]


def _results(group: SequenceGroup, search: BeamSearch) -> list[TokenDelta]:
    """The only deltas with tokens of a beam search, best first."""
    params, request_id, deltas = group.request.params, group.request.request_id, []
    for index in range(params.n):
        if index >= len(search.finished):  # only if logits are not numbers
            message = "the search found fewer sequences than were asked for"
            deltas.append(TokenDelta(request_id, index, [], finish_reason="error", stop_reason=message))
            continue
        _, token_ids, cumulative, stop_id, entries = search.finished[index]
        deltas.append(
            TokenDelta(
                request_id,
                index,
                token_ids,
                None if params.logprobs is None else entries,
                "length" if stop_id is None else "stop",
                stop_id if stop_id in params.stop_token_ids else None,
                num_preemptions=group.num_preemptions,
                num_recoveries=group.num_recoveries,
                cumulative_logprob=cumulative,
            )
        )
    return deltas
