"""What the driver tells fronts of sequences: the deltas that carry more than a token."""

from __future__ import annotations

from collections.abc import Callable

from rayllm.api.types import RequestTimes, TokenDelta, TokenLogprobs
from rayllm.core.beam_search import Hypothesis
from rayllm.core.sequence import Sequence, SequenceGroup


def token_delta(
    seq: Sequence, token: int, logprobs: list[TokenLogprobs] | None, times_of: Callable[[SequenceGroup], RequestTimes]
) -> TokenDelta:
    """Of a token that has been appended to a sequence. Its first has what is known of the request by then."""
    group, reason, stop = seq.group, None, None
    if token in seq.stop_ids:
        reason = "stop"
        stop = token if token in group.params.stop_token_ids else None
    elif len(seq.token_ids) >= seq.max_len:
        reason = "length"
    cached, prompt_logprobs, times = 0, None, None
    if seq.fresh:
        seq.fresh = False
        cached = group.num_cached_tokens or 0
        if seq.index == 0:
            prompt_logprobs = group.prompt_logprobs
            times = times_of(group)
    return TokenDelta(
        seq.request_id,
        seq.index,
        [token],
        logprobs,
        reason,
        stop,
        cached,
        prompt_logprobs,
        times,
        num_preemptions=group.num_preemptions,
    )


def embedding_delta(seq: Sequence, embedding: bytes, times: RequestTimes) -> TokenDelta:
    """The only delta of a pooled prompt."""
    group = seq.group
    return TokenDelta(
        seq.request_id,
        seq.index,
        [],
        finish_reason="stop",
        num_cached_tokens=group.num_cached_tokens or 0,
        times=times,
        num_preemptions=group.num_preemptions,
        embedding=embedding,
    )


def search_delta(group: SequenceGroup, times: RequestTimes) -> TokenDelta:
    """Says that the prompt of a beam search is done. Tokens come when the search is over."""
    logprobs: list[TokenLogprobs] | None = None if group.params.logprobs is None else []
    return TokenDelta(
        group.request_id,
        0,
        [],
        logprobs,
        num_cached_tokens=group.num_cached_tokens or 0,
        prompt_logprobs=group.prompt_logprobs,
        times=times,
    )


def result_deltas(group: SequenceGroup, finished: list[Hypothesis]) -> list[TokenDelta]:
    """The only deltas with tokens of a beam search, best first."""
    params, deltas = group.params, []
    for index in range(params.n):
        if index >= len(finished):  # only if logits are not numbers
            message = "the search found fewer sequences than were asked for"
            deltas.append(TokenDelta(group.request_id, index, [], finish_reason="error", stop_reason=message))
            continue
        _score, token_ids, cumulative, stop_id, entries = finished[index]
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
