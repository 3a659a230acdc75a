"""From the engine's token deltas to what users see: text, stop strings, log-probabilities."""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Sequence

from msgspec.structs import replace

from rayllm.api.types import (
    FATAL_DEATHS,
    Abort,
    CompletionOutput,
    GenerationRequest,
    Logprob,
    RequestOutput,
    TokenDelta,
    TokenLogprobs,
)
from rayllm.errors import InvalidRequestError
from rayllm.text.detokenizer import StopChecker
from rayllm.text.tokenizer import Tokenizer

MAX_LOG_BYTES = 32 * 2**20

logger = logging.getLogger(__name__)


class OutputProcessor:
    """Turns TokenDeltas into RequestOutputs for the requests it was told of. One thread uses it at a time.

    tokenizer: None if the engine has none (skip_tokenizer_init): text is "" then.
    """

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._requests: dict[str, RequestState] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def check(self, request: GenerationRequest) -> None:
        """Raise InvalidRequestError for a request that `add` would refuse."""
        if request.params.stop and self._tokenizer is None:
            raise InvalidRequestError("stop strings need a tokenizer, and skip_tokenizer_init left it out", "stop")
        if request.request_id in self._requests:
            raise InvalidRequestError(f"request_id {request.request_id!r} is in use by a live request", "request_id")

    def add(self, request: GenerationRequest, prompt_text: str | None = None) -> None:
        """Expect deltas of a request. prompt_text goes into its outputs. Raises InvalidRequestError (see `check`)."""
        self.follow(RequestState(self._tokenizer, request, prompt_text))

    def follow(self, state: RequestState) -> None:
        """Expect deltas of a request that may have begun elsewhere. Raises InvalidRequestError (see `check`)."""
        self.check(state.request)
        self._requests[state.request.request_id] = state

    def remove(self, request_id: str) -> bool:
        """Forget a request; deltas that still come for it are dropped. False if it was not there."""
        return self._requests.pop(request_id, None) is not None

    def process(self, deltas: Sequence[TokenDelta]) -> tuple[list[RequestOutput], list[Abort]]:
        """Take the deltas of a step; return (what is new, one output a request; what the caller is to abort).

        That is what is over for the user, by stop strings, while the engine goes on with it. A request whose output
        cannot be made ends alone, with finish_reason "error". Deltas of unknown requests and of completions that are
        over are dropped.
        """
        outputs: dict[str, RequestOutput] = {}
        aborts: list[Abort] = []
        for delta in deltas:
            request = self._requests.get(delta.request_id)
            if request is None:
                continue
            try:
                output = request.advance(delta)
            except Exception as error:
                logger.exception("request %s: its output could not be made", delta.request_id)
                output = request.fail(f"internal error while making the output: {error}")
            if len(request.in_engine) > len(request.running):
                ended = request.in_engine - request.running.keys()
                aborts += [Abort(delta.request_id, index) for index in sorted(ended)]
                request.in_engine -= ended
            if output is None:
                continue
            earlier = outputs.get(delta.request_id)
            outputs[delta.request_id] = output if earlier is None else accumulate(earlier, output)
            if output.finished:
                del self._requests[delta.request_id]
        return list(outputs.values()), aborts


def accumulate(total: RequestOutput | None, new: RequestOutput) -> RequestOutput:
    """Merge a stream's next output into what came before; returns `total`, changed in place (a copy of new for None).

    Texts, token ids and logprobs are joined; cumulative_logprob, finish_reason and stop_reason are the latest.
    """
    if total is None:
        total = RequestOutput(new.request_id, new.prompt, new.prompt_token_ids, [], False)
    completions = {completion.index: completion for completion in total.outputs}
    for part in new.outputs:
        completion = completions.get(part.index)
        if completion is None:
            completion = CompletionOutput(part.index, "", [])
            total.outputs.append(completion)
            total.outputs.sort(key=lambda completion: completion.index)
        _extend(completion, part)
    if total.prompt_logprobs is None:
        total.prompt_logprobs = new.prompt_logprobs
    total.num_cached_tokens = max(total.num_cached_tokens, new.num_cached_tokens)
    total.num_preemptions = max(total.num_preemptions, new.num_preemptions)
    total.num_recoveries = max(total.num_recoveries, new.num_recoveries)
    total.times = total.times or new.times
    total.embedding = total.embedding or new.embedding
    total.created = total.created or new.created
    total.num_discarded_tokens += new.num_discarded_tokens
    total.finished = total.finished or new.finished
    return total


def _extend(total: CompletionOutput, new: CompletionOutput) -> None:
    # With its only reference in a local variable CPython extends a string in place: linear in all, not quadratic.
    text, total.text = total.text, ""
    text += new.text
    total.text = text
    total.token_ids += new.token_ids
    if new.logprobs is not None:
        total.logprobs = total.logprobs or []
        total.logprobs += new.logprobs
    if new.cumulative_logprob is not None:
        total.cumulative_logprob = new.cumulative_logprob
    if new.finish_reason is not None:
        total.finish_reason, total.stop_reason = new.finish_reason, new.stop_reason


class DeltaLog:
    """All deltas of a request from its beginning, with consecutive tokens of a completion in one.

    size: roughly the bytes that it holds. is_full: it has more than MAX_LOG_BYTES, and holds nothing any more.
    """

    def __init__(self) -> None:
        self._deltas: list[TokenDelta] = []
        self._last: dict[int, TokenDelta] = {}  # of each completion
        self.size, self.is_full = 0, False

    def add(self, delta: TokenDelta) -> None:
        """Take the next one."""
        if self.is_full:
            return
        self.size += _size(delta)
        if self.size > MAX_LOG_BYTES:
            self._deltas, self._last, self.size, self.is_full = [], {}, 0, True
            return
        last = self._last.get(delta.index)
        has_only_tokens = delta == TokenDelta(delta.request_id, delta.index, delta.token_ids, delta.logprobs)
        if last is not None and has_only_tokens and (last.logprobs is None) == (delta.logprobs is None):
            last.token_ids.extend(delta.token_ids)
            if last.logprobs is not None:
                last.logprobs.extend(delta.logprobs or [])
            return
        self.size += 200
        self._deltas.append(_copy(delta, delta.request_id))
        if delta.token_ids:
            self._last[delta.index] = self._deltas[-1]

    def copy(self, request_id: str) -> list[TokenDelta]:
        """They, as of a request with this id. The log's own deltas grow."""
        return [_copy(delta, request_id) for delta in self._deltas]


def _copy(delta: TokenDelta, request_id: str) -> TokenDelta:
    logprobs = None if delta.logprobs is None else list(delta.logprobs)
    return replace(delta, request_id=request_id, token_ids=list(delta.token_ids), logprobs=logprobs)


def _size(delta: TokenDelta) -> int:
    size = 40 * len(delta.token_ids) + len(delta.embedding or b"")
    for entries in (delta.logprobs, delta.prompt_logprobs):
        if entries is not None:
            size += sum(200 + 64 * len(entry.top_ids) for entry in entries if entry is not None)
    return size


class RequestState:
    """A live request: what has come of it so far, so that it can go on where it was on another engine.

    running: its completions that are not over for the user. in_engine: the indices of those that the engine goes on
    with, as far as is known here.
    """

    def __init__(self, tokenizer: Tokenizer | None, request: GenerationRequest, prompt_text: str | None):
        self.request = request
        self._tokenizer = tokenizer
        self._n = request.params.n
        self._begun = self._alone = False  # it has a first delta; the engine said that it runs alone
        self._lost = 0  # recoveries up to the loss of the last engine, that included
        self._num_deaths = 0  # of engines, since the last token
        # With a key: what has come since its beginning, and how many tokens of that each completion has seen before.
        self._log: DeltaLog | None = None
        self._seen: dict[int, int] = {}
        self.in_engine = set(range(request.params.num_completions))
        self.running = {index: _Completion(tokenizer, request, index) for index in self.in_engine}
        # What is the same in all outputs, or so far.
        self._common = RequestOutput(request.request_id, prompt_text, request.prompt_token_ids, [], False)
        # With best_of, what all samples have so far: which are the best is known when all have ended.
        self._chooses = len(self.running) > self._n
        self._samples: RequestOutput | None = None

    def advance(self, delta: TokenDelta) -> RequestOutput | None:
        """What a delta brings for the user; None if its completion is over, or not known to be one of the best."""
        if delta.created:
            self._common.created, self._log = delta.created, DeltaLog()
            self._log.add(delta)
            self._seen = {index: len(completion.token_ids) for index, completion in self.running.items()}
            return None
        if self._log is not None:
            self._log.add(delta)
            delta = self._unseen(delta)
        if delta.alone:
            self._alone = True
            return None
        # That it was scheduled is no beginning: an engine that goes on with it would not tell what first deltas tell.
        self._begun = self._begun or bool(delta.token_ids) or delta.finish_reason is not None
        if delta.token_ids:
            self._alone, self._num_deaths = False, 0
        if delta.finish_reason is not None:
            self.in_engine.discard(delta.index)
        common = self._common
        common.num_cached_tokens = max(common.num_cached_tokens, delta.num_cached_tokens)
        common.num_preemptions = max(common.num_preemptions, delta.num_preemptions)
        common.num_recoveries = max(common.num_recoveries, self._lost + delta.num_recoveries)
        completion = self.running.get(delta.index)
        if completion is None:
            return None
        new = completion.advance(delta)
        if new.finish_reason is not None:
            del self.running[delta.index]
        output = replace(common, outputs=[new], finished=not self.running, times=delta.times)
        if delta.prompt_logprobs is not None:
            entries = delta.prompt_logprobs
            output.prompt_logprobs = [None if e is None else logprob_dict(self._tokenizer, e) for e in entries]
        if delta.embedding is not None:
            output.embedding = array("f", delta.embedding)
        return self._choose(output, delta) if self._chooses else output

    @property
    def num_live(self) -> int:
        """Sequences that the engine still has to make of it."""
        params = self.request.params
        return params.width if params.use_beam_search and self.running else len(self.running)

    def lose_engine(self, died: bool = True) -> RequestOutput | None:
        """Note that the engine is gone; returns the last output if the request is what it died of.

        died: it was not about to stop anyway.
        """
        self._num_deaths += died
        self._lost = self._common.num_recoveries = self._common.num_recoveries + 1
        if self._alone and self._num_deaths >= FATAL_DEATHS:
            return self.fail(f"engines died {FATAL_DEATHS} times while they had this request, at last with it alone")
        self.in_engine = set(self.running)
        return None

    def to_send(self) -> GenerationRequest:
        """The request, for an engine to begin or to go on with. A beam search begins again: nothing is known of it."""
        emitted, key = None, self.request.key
        if self._log is not None and (self._log.is_full or any(self._seen.values())):
            # Nobody could be told all that came before, so the next engine is not to keep the request.
            self.request, self._log, self._seen, key = replace(self.request, key=None), None, {}, None
        if key is not None and self._log is not None:
            key = replace(key, deltas=self._log.copy(self.request.request_id))
        if self._begun and not self.request.params.use_beam_search and self.request.pooling is None:
            emitted = {index: completion.token_ids for index, completion in self.running.items()}
        if emitted is None and not self._num_deaths and key is self.request.key:
            return self.request
        return replace(self.request, emitted=emitted, num_deaths=self._num_deaths, key=key)

    def _unseen(self, delta: TokenDelta) -> TokenDelta:
        """What this has not seen of a delta, if the engine tells from the beginning what another one had told."""
        seen = min(self._seen.get(delta.index, 0), len(delta.token_ids))
        if not seen:
            return delta
        self._seen[delta.index] -= seen
        logprobs = None if delta.logprobs is None else delta.logprobs[seen:]
        return replace(delta, token_ids=delta.token_ids[seen:], logprobs=logprobs)

    def fail(self, message: str) -> RequestOutput:
        """End all completions that still run with an error."""
        failed = range(self._n) if self._chooses else list(self.running)
        self.running.clear()
        ends = [CompletionOutput(i, "", [], finish_reason="error", stop_reason=message) for i in failed]
        return replace(self._common, outputs=ends, finished=True)

    def _choose(self, output: RequestOutput, delta: TokenDelta) -> RequestOutput | None:
        """With best_of: the output with the n samples of the highest log-probability per token when all have ended.

        Before that, the output without samples if it is the first, otherwise None.
        """
        samples = self._samples = accumulate(self._samples, output)
        output.outputs = []
        if self.running:
            return None if delta.token_ids and delta.times is None else output
        ranked = sorted(samples.outputs, key=_badness)
        for index, sample in enumerate(ranked[: self._n]):
            sample.index = index
        output.outputs = ranked[: self._n]
        output.num_discarded_tokens = sum(len(sample.token_ids) for sample in ranked[self._n :])
        return output


def _badness(sample: CompletionOutput) -> float:
    if sample.finish_reason == "error" or sample.cumulative_logprob is None:
        return math.inf
    return -sample.cumulative_logprob / max(len(sample.token_ids), 1)


class _Completion:
    """The text state of one of a request's completions."""

    def __init__(self, tokenizer: Tokenizer | None, request: GenerationRequest, index: int):
        params = request.params
        self._tokenizer = tokenizer
        self._index = index
        self._params = params
        self.token_ids: list[int] = []  # all that came, also those behind a stop string
        self._cumulative_logprob: float | None = None
        self._detokenizer = None
        if tokenizer is not None and request.pooling is None:  # an embedding has no text
            self._detokenizer = tokenizer.detokenizer(request.prompt_token_ids, params.skip_special_tokens)
        self._stops = StopChecker(params.stop, params.include_stop_str_in_output) if params.stop else None

    def advance(self, delta: TokenDelta) -> CompletionOutput:
        """New text, tokens and log-probabilities; cut after the token that completes a stop string."""
        text, num_kept, stop = self._text_of(delta)
        self.token_ids += delta.token_ids
        token_ids, logprobs = delta.token_ids[:num_kept], None
        finish, stop_reason = delta.finish_reason, delta.stop_reason
        if stop is not None:
            finish, stop_reason = "stop", stop
        if delta.logprobs is not None:
            kept = delta.logprobs[:num_kept]
            self._cumulative_logprob = sum((entry.logprob for entry in kept), self._cumulative_logprob or 0.0)
            if self._params.logprobs is not None:
                logprobs = [logprob_dict(self._tokenizer, entry) for entry in kept]
        if delta.cumulative_logprob is not None:
            self._cumulative_logprob = delta.cumulative_logprob
        total = self._cumulative_logprob
        return CompletionOutput(self._index, text, token_ids, total, logprobs, finish, stop_reason)

    def _text_of(self, delta: TokenDelta) -> tuple[str, int, str | None]:
        """(new text, how many of the delta's tokens count, the stop string found)."""
        detokenizer, token_ids = self._detokenizer, delta.token_ids
        if detokenizer is None:
            return "", len(token_ids), None
        ended = delta.finish_reason is not None
        if delta.finish_reason == "stop" and not self._params.include_stop_str_in_output:
            token_ids = token_ids[:-1]  # the last is end-of-sequence or a stop id: a token, but no text
        if self._stops is None:
            return detokenizer.step(token_ids, ended), len(delta.token_ids), None
        text, stop = "", None
        for count, token in enumerate(token_ids, start=1):
            piece = detokenizer.step((token,))
            if len(self.token_ids) + count > self._params.min_tokens:
                piece, stop = self._stops.feed(piece)
            text += piece
            if stop is not None:
                return text, count, stop
        if ended:
            piece, stop = self._stops.feed(detokenizer.step((), last=True), last=True)
            text += piece
        return text, len(delta.token_ids), stop


def logprob_dict(tokenizer: Tokenizer | None, entry: TokenLogprobs) -> dict[int, Logprob]:
    """Token id -> Logprob at one position: the chosen token first, then the most likely ones, best first."""

    def text(token_id: int) -> str | None:
        return None if tokenizer is None else tokenizer.token_text(token_id)

    result = {entry.token_id: Logprob(entry.logprob, entry.rank, text(entry.token_id))}
    for rank, (token_id, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), start=1):
        if token_id != entry.token_id:
            result[token_id] = Logprob(logprob, rank, text(token_id))
    return result
