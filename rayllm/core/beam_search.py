"""`BeamSearch`: which continuations of a request's beams live on, and which finished sequences are kept.

The rules are those of beam search in transformers (`generate` with num_beams): all continuations of all beams are
ranked by their cumulative log-probability. Of the first `width` those that end are finished, later ones that end are
lost, and the first `width` that do not end are the next beams. A finished sequence's score is its cumulative
log-probability / tokens ** length_penalty, and the best `width` are kept. The search is over when every continuation
ends, at the length limit, or when `width` sequences are finished and early_stopping says so.

A beam that knows its `width` most likely tokens, and one more for each token that ends a sequence, knows enough:
`width` of them go on, and no other beam's continuation can need more than `width` of one beam.

Only tokens and numbers are known here; rows and blocks follow in `beam_group`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from rayllm.api.sampling_params import SamplingParams
from rayllm.api.types import TokenLogprobs

if TYPE_CHECKING:
    from rayllm.core.sequence import Sequence


@dataclass(slots=True)
class Beam:
    """cumulative: the sum of the log-probabilities of its tokens. entries: those tokens', if the request asks for them.

    found: its best next tokens, once the step that looks for them is done and until the group's choice is made.
    """

    cumulative: float = 0.0
    entries: list[TokenLogprobs] = field(default_factory=list)
    found: TokenLogprobs | None = None


class Continuation(NamedTuple):
    """A beam and one more token. beam: its place among the beams. place: the token's among those the beam found.

    cumulative: the log-probability of all generated tokens together.
    """

    cumulative: float
    beam: int
    place: int
    token: int


class Hypothesis(NamedTuple):
    """A finished sequence. token_ids: generated ones. stop_id: the end-of-sequence or stop id, if one ended it.

    entries: as of `Beam`.
    """

    score: float
    token_ids: list[int]
    cumulative: float
    stop_id: int | None
    entries: list[TokenLogprobs]


class BeamSearch:
    """The search of one request. finished: what is kept of finished sequences, best first.

    num_prompt: tokens of the prompt. max_len: of prompt and output together.
    """

    def __init__(self, params: SamplingParams, num_prompt: int, max_len: int):
        self.width = params.width
        self.finished: list[Hypothesis] = []
        self.started = False  # a choice has been made
        self._num_prompt, self._max_len = num_prompt, max_len
        self._min_tokens = params.min_tokens
        self._length_penalty, self._early_stopping = params.length_penalty, params.early_stopping
        self._num_top = params.logprobs

    def choose(self, beams: list[Sequence]) -> list[Continuation]:
        """The next beams, best first; none if the search is over. All of `beams`, best first, must have found tokens.

        Of a log-probability that two continuations share, the better beam's comes first, and of one beam's that of
        the lower token id.
        """
        self.started = True
        length = len(beams[0].token_ids) + 1 - self._num_prompt
        ends = length + self._num_prompt >= self._max_len
        stop_ids = beams[0].stop_ids
        live: list[Continuation] = []
        for rank, continuation in enumerate(self._ranked(beams, length)):
            stops = continuation.token in stop_ids
            if stops or ends:
                if rank < self.width:
                    self._finish(beams[continuation.beam], continuation, length, stops)
            elif len(live) < self.width:
                live.append(continuation)
            elif rank >= self.width:
                break
        return [] if self._is_over(live, length) else live

    def entries_of(self, beam: Beam, place: int) -> list[TokenLogprobs]:
        """What a continuation of `beam` by the token at `place` reports of its tokens; nothing if not asked for."""
        if self._num_top is None:
            return []
        assert beam.found is not None
        ids, logprobs = beam.found.top_ids, beam.found.top_logprobs
        rank = 1 + sum(other > logprobs[place] for other in logprobs[:place])
        last = TokenLogprobs(ids[place], logprobs[place], rank, ids[: self._num_top], logprobs[: self._num_top])
        return [*beam.entries, last]

    def _ranked(self, beams: list[Sequence], length: int) -> list[Continuation]:
        """All that the beams found, best first, without those that would end before min_tokens."""
        early = length <= self._min_tokens
        found = []
        for number, seq in enumerate(beams):
            beam = seq.beam
            assert beam is not None and beam.found is not None
            for place, (token, logprob) in enumerate(zip(beam.found.top_ids, beam.found.top_logprobs, strict=True)):
                if logprob > -math.inf and not (early and token in seq.stop_ids):
                    found.append(Continuation(beam.cumulative + logprob, number, place, token))
        found.sort(key=lambda each: (-each.cumulative, each.beam, each.place))
        return found

    def _finish(self, seq: Sequence, continuation: Continuation, length: int, stops: bool) -> None:
        assert seq.beam is not None
        token, cumulative = continuation.token, continuation.cumulative
        hypothesis = Hypothesis(
            score=self._score(cumulative, length),
            token_ids=[*seq.token_ids[self._num_prompt :], token],
            cumulative=cumulative,
            stop_id=token if stops else None,
            entries=self.entries_of(seq.beam, continuation.place),
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
        if self._early_stopping is True:
            return True
        if self._early_stopping == "never" and self._length_penalty > 0:
            length = self._max_len - self._num_prompt  # which flatters a sum of logarithms most
        return self._score(live[0].cumulative, length) <= self.finished[-1].score

    def _score(self, cumulative: float, length: int) -> float:
        return cumulative / length**self._length_penalty
