"""`BeamSearch`: which continuations of a request's beams live on, and which finished sequences are kept.

The rules are those of beam search in transformers (`generate` with num_beams): all continuations of all beams are
ranked by their cumulative log-probability. Of the first `width` those that end are finished, later ones that end are
lost, and the first `width` that do not end are the next beams. A finished sequence's score is its cumulative
log-probability / tokens ** length_penalty, and the best `width` are kept. The search is over when every continuation
ends, at the length limit, or when `width` sequences are finished and early_stopping says so.

A beam that knows its `width` most likely tokens, and one more for each token that ends a sequence, knows enough:
`width` of them go on, and no other beam's continuation can need more than `width` of one beam.

This module knows tokens and numbers only; `beams` carries out the choices in rows and blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rayllm.api.sampling_params import SamplingParams
from rayllm.api.types import TokenLogprobs


@dataclass(slots=True)
class Beam:
    """What a sequence is to its group's beam search."""

    # The sum of the log-probabilities of its generated tokens.
    cumulative: float = 0.0
    # Those tokens' log-probabilities, if the request asks for them.
    entries: list[TokenLogprobs] = field(default_factory=list)
    # Its most likely next tokens, from the step that found them until the group's choice is made.
    found: TokenLogprobs | None = None


class Continuation(NamedTuple):
    """A beam and one more token."""

    # The log-probability of all generated tokens together.
    cumulative: float
    # The beam's place among the beams.
    beam: int
    # The token's place among those that the beam found.
    place: int
    token: int


class Hypothesis(NamedTuple):
    """A finished sequence."""

    score: float
    # Generated tokens.
    token_ids: list[int]
    cumulative: float
    # The end-of-sequence or stop id, if one ended it.
    stop_id: int | None
    # As of `Beam`.
    entries: list[TokenLogprobs]


class BeamSearch:
    """The search of one request. stop_ids: tokens that end a sequence. max_len: of prompt and output together."""

    def __init__(self, params: SamplingParams, num_prompt: int, max_len: int, stop_ids: frozenset[int]):
        self.width = params.width
        self.finished: list[Hypothesis] = []  # the best finished sequences, best first
        self.started = False  # a choice has been made
        self._params, self._num_prompt, self._max_len, self._stop_ids = params, num_prompt, max_len, stop_ids

    def choose(self, beams: Sequence[Beam], token_ids: Sequence[list[int]]) -> list[Continuation]:
        """The next beams, best first; none if the search is over.

        beams: best first; all must have found tokens. token_ids: of each beam, prompt first. Of continuations with
        equal log-probability the better beam's comes first, and of one beam's that of the lower token id.
        """
        self.started = True
        length = len(token_ids[0]) + 1 - self._num_prompt
        ends = length + self._num_prompt >= self._max_len
        live: list[Continuation] = []
        for rank, continuation in enumerate(self._ranked(beams, length)):
            stops = continuation.token in self._stop_ids
            if stops or ends:
                if rank < self.width:
                    generated = token_ids[continuation.beam][self._num_prompt :]
                    self._finish(beams[continuation.beam], generated, continuation, stops)
            elif len(live) < self.width:
                live.append(continuation)
            elif rank >= self.width:
                break
        return [] if self._is_over(live, length) else live

    def entries_of(self, beam: Beam, place: int) -> list[TokenLogprobs]:
        """What a continuation of `beam` by the token at `place` reports of its tokens; nothing if not asked for."""
        num_top = self._params.logprobs
        if num_top is None:
            return []
        assert beam.found is not None
        ids, logprobs = beam.found.top_ids, beam.found.top_logprobs
        rank = 1 + sum(other > logprobs[place] for other in logprobs[:place])
        return [*beam.entries, TokenLogprobs(ids[place], logprobs[place], rank, ids[:num_top], logprobs[:num_top])]

    def _ranked(self, beams: Sequence[Beam], length: int) -> list[Continuation]:
        """All that the beams found, best first, without those that would end before min_tokens."""
        early = length <= self._params.min_tokens
        ranked = []
        for number, beam in enumerate(beams):
            assert beam.found is not None
            for place, (token, logprob) in enumerate(zip(beam.found.top_ids, beam.found.top_logprobs, strict=True)):
                if logprob > -math.inf and not (early and token in self._stop_ids):
                    ranked.append(Continuation(beam.cumulative + logprob, number, place, token))
        ranked.sort(key=lambda each: (-each.cumulative, each.beam, each.place))
        return ranked

    def _finish(self, beam: Beam, generated: list[int], continuation: Continuation, stops: bool) -> None:
        token, cumulative = continuation.token, continuation.cumulative
        hypothesis = Hypothesis(
            score=self._score(cumulative, len(generated) + 1),
            token_ids=[*generated, token],
            cumulative=cumulative,
            stop_id=token if stops else None,
            entries=self.entries_of(beam, continuation.place),
        )
        self.finished.append(hypothesis)
        self.finished.sort(key=lambda each: -each.score)
        del self.finished[self.width :]

    def _is_over(self, live: list[Continuation], length: int) -> bool:
        """Whether to stop, now that continuations have `length` tokens."""
        if not live:
            return True
        if len(self.finished) < self.width:
            return False
        if self._params.early_stopping is True:
            return True
        if self._params.early_stopping == "never" and self._params.length_penalty > 0:
            length = self._max_len - self._num_prompt  # which flatters a sum of logarithms most
        return self._score(live[0].cumulative, length) <= self.finished[-1].score

    def _score(self, cumulative: float, length: int) -> float:
        return cumulative / length**self._params.length_penalty
