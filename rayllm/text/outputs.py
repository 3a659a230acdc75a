"""From the engine's token deltas to what users see: text, stop strings, log-probabilities."""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Sequence

from rayllm.api.float32 import float32_values
from rayllm.api.sampling_params import SamplingParams
from rayllm.api.types import (
    CompletionOutput,
    GenerationRequest,
    Logprob,
    RequestOutput,
    RequestTimes,
    TokenDelta,
    TokenLogprobs,
)
from rayllm.errors import InvalidRequestError
from rayllm.text.detokenizer import StopChecker
from rayllm.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_STOP_CHARS = 16 * 1024  # of all stop strings of a request: their automaton is built on the front's event loop


class OutputProcessor:
    """Turns TokenDeltas into RequestOutputs for the requests it was told of. One thread uses it at a time.

    tokenizer: None if the engine has none (skip_tokenizer_init): text is "" then.
    """

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._requests: dict[str, _Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def request_ids(self) -> list[str]:
        """Ids of all requests that have not finished, oldest first."""
        return list(self._requests)

    def check(self, request: GenerationRequest) -> None:
        """Raise InvalidRequestError for a request that `add` would refuse."""
        stops = request.params.stop
        if stops and self._tokenizer is None:
            raise InvalidRequestError("stop strings need a tokenizer, and skip_tokenizer_init left it out", "stop")
        size = sum(map(len, stops))
        if size > MAX_STOP_CHARS:
            raise InvalidRequestError(f"stop strings may have {MAX_STOP_CHARS} characters in all, not {size}", "stop")
        if request.request_id in self._requests:
            raise InvalidRequestError(f"request_id {request.request_id!r} is in use by a live request", "request_id")

    def add(self, request: GenerationRequest, prompt_text: str | None = None) -> None:
        """Expect deltas of a request. prompt_text goes into its outputs. Raises InvalidRequestError (see `check`)."""
        self.check(request)
        self._requests[request.request_id] = _Request(self._tokenizer, request, prompt_text)

    def remove(self, request_id: str) -> bool:
        """Forget a request; deltas that still come for it are dropped. False if it was not there."""
        return self._requests.pop(request_id, None) is not None

    def process(self, deltas: Sequence[TokenDelta]) -> tuple[list[RequestOutput], list[str]]:
        """Take the deltas of a step; return (what is new, one output a request; ids for the caller to abort).

        Aborted must be requests that are over for the user, by stop strings, while the engine goes on with them.
        A request whose output cannot be made ends alone, with finish_reason "error". Deltas of unknown requests and
        of completions that are over are dropped.
        """
        outputs: dict[str, RequestOutput] = {}
        aborts: list[str] = []
        for delta in deltas:
            request = self._requests.get(delta.request_id)
            if request is None:
                continue
            try:
                output = request.advance(delta)
            except Exception as error:
                logger.exception("request %s: its output could not be made", delta.request_id)
                output = request.fail(f"internal error while making the output: {error}")
            if output is None:
                continue
            earlier = outputs.get(delta.request_id)
            outputs[delta.request_id] = output if earlier is None else accumulate(earlier, output)
            if output.finished:
                del self._requests[delta.request_id]
                if request.in_engine:
                    aborts.append(delta.request_id)
        return list(outputs.values()), aborts


def accumulate(total: RequestOutput | None, new: RequestOutput) -> RequestOutput:
    """Merge a stream's next output into what came before; returns `total`, changed in place (a copy of new for None).

    Texts, token ids and logprobs are joined; cumulative_logprob, finish_reason and stop_reason are the latest.
    """
    if total is None:
        return RequestOutput(
            new.request_id,
            new.prompt,
            new.prompt_token_ids,
            [_copy(output) for output in new.outputs],
            new.finished,
            new.prompt_logprobs,
            new.num_cached_tokens,
            new.times,
            new.num_preemptions,
            new.embedding,
            new.num_discarded_tokens,
        )
    by_index = {output.index: output for output in total.outputs}
    for output in new.outputs:
        if output.index in by_index:
            _extend(by_index[output.index], output)
        else:
            total.outputs.append(_copy(output))
    if len(total.outputs) > len(by_index):
        total.outputs.sort(key=lambda output: output.index)
    if total.prompt_logprobs is None:
        total.prompt_logprobs = new.prompt_logprobs
    total.num_cached_tokens = max(total.num_cached_tokens, new.num_cached_tokens)
    total.num_preemptions = max(total.num_preemptions, new.num_preemptions)
    total.times = total.times or new.times
    total.embedding = total.embedding or new.embedding
    total.num_discarded_tokens += new.num_discarded_tokens
    total.finished = total.finished or new.finished
    return total


def _copy(output: CompletionOutput) -> CompletionOutput:
    return CompletionOutput(
        output.index,
        output.text,
        list(output.token_ids),
        output.cumulative_logprob,
        None if output.logprobs is None else list(output.logprobs),
        output.finish_reason,
        output.stop_reason,
    )


def _extend(total: CompletionOutput, new: CompletionOutput) -> None:
    # With its only reference in a local variable CPython extends a string in place: linear in all, not quadratic.
    text, total.text = total.text, ""
    text += new.text
    total.text = text
    total.token_ids += new.token_ids
    if new.logprobs is not None:
        if total.logprobs is None:
            total.logprobs = []
        total.logprobs += new.logprobs
    if new.cumulative_logprob is not None:
        total.cumulative_logprob = new.cumulative_logprob
    if new.finish_reason is not None:
        total.finish_reason, total.stop_reason = new.finish_reason, new.stop_reason


class _Samples:
    """A request's samples as long as it is not known which are the best. n: how many are wanted."""

    def __init__(self, n: int):
        self._n = n
        self._samples: dict[int, CompletionOutput] = {}

    def add(self, output: CompletionOutput) -> None:
        """Take what is new in one of them."""
        earlier = self._samples.setdefault(output.index, output)
        if earlier is not output:
            _extend(earlier, output)

    def best(self) -> tuple[list[CompletionOutput], int]:
        """The n of the highest log-probability per token, best first, and how many tokens the others have."""
        ranked = sorted(self._samples.values(), key=_badness)
        for index, output in enumerate(ranked[: self._n]):
            output.index = index
        return ranked[: self._n], sum(len(output.token_ids) for output in ranked[self._n :])


def _badness(output: CompletionOutput) -> float:
    if output.finish_reason == "error" or output.cumulative_logprob is None:
        return math.inf
    return -output.cumulative_logprob / max(len(output.token_ids), 1)


class _Request:
    """A live request. in_engine: the engine has not said that all its completions are over."""

    def __init__(self, tokenizer: Tokenizer | None, request: GenerationRequest, prompt_text: str | None):
        self._tokenizer = tokenizer
        self._request = request
        self._prompt_text = prompt_text
        self._num_cached_tokens = 0
        self._num_preemptions = 0
        speaker = tokenizer if request.pooling is None else None  # an embedding has no text
        self._running = {
            index: _Completion(speaker, request, index) for index in range(request.params.num_completions)
        }  # over for the user: removed
        self._samples = _Samples(request.params.n) if len(self._running) > request.params.n else None
        self._in_engine = set(self._running)

    @property
    def in_engine(self) -> bool:
        return bool(self._in_engine)

    def advance(self, delta: TokenDelta) -> RequestOutput | None:
        """What a delta brings for the user; None if its completion is over, or not known to be one of the best."""
        if delta.finish_reason is not None:
            self._in_engine.discard(delta.index)
        self._num_cached_tokens = max(self._num_cached_tokens, delta.num_cached_tokens)
        self._num_preemptions = max(self._num_preemptions, delta.num_preemptions)
        completion = self._running.get(delta.index)
        if completion is None:
            return None
        output = completion.advance(delta)
        if output.finish_reason is not None:
            del self._running[delta.index]
        prompt_logprobs = None
        if delta.prompt_logprobs is not None:
            prompt_logprobs = [e if e is None else logprob_dict(self._tokenizer, e) for e in delta.prompt_logprobs]
        embedding = None if delta.embedding is None else float32_values(delta.embedding)
        if self._samples is None:
            return self._output([output], prompt_logprobs, delta.times, embedding)
        self._samples.add(output)
        if self._running and delta.token_ids and delta.times is None:
            return None
        best, num_discarded = ([], 0) if self._running else self._samples.best()
        return self._output(best, prompt_logprobs, delta.times, num_discarded=num_discarded)

    def fail(self, message: str) -> RequestOutput:
        """End all completions that still run with an error."""
        failed = self._running if self._samples is None else range(self._request.params.n)
        outputs = [CompletionOutput(i, "", [], finish_reason="error", stop_reason=message) for i in failed]
        self._running.clear()
        return self._output(outputs, None)

    def _output(
        self,
        outputs: list[CompletionOutput],
        prompt_logprobs: list[dict[int, Logprob] | None] | None,
        times: RequestTimes | None = None,
        embedding: array[float] | None = None,
        num_discarded: int = 0,
    ) -> RequestOutput:
        return RequestOutput(
            self._request.request_id,
            self._prompt_text,
            self._request.prompt_token_ids,
            outputs,
            not self._running,
            prompt_logprobs,
            self._num_cached_tokens,
            times,
            self._num_preemptions,
            embedding,
            num_discarded,
        )


class _Completion:
    """The text state of one of a request's n completions."""

    def __init__(self, tokenizer: Tokenizer | None, request: GenerationRequest, index: int):
        params: SamplingParams = request.params
        self._tokenizer = tokenizer
        self._index = index
        self._params = params
        self._num_tokens = 0
        self._cumulative_logprob: float | None = None
        self._detokenizer = (
            None if tokenizer is None else tokenizer.detokenizer(request.prompt_token_ids, params.skip_special_tokens)
        )
        self._stops = StopChecker(params.stop, params.include_stop_str_in_output) if params.stop else None

    def advance(self, delta: TokenDelta) -> CompletionOutput:
        """New text, tokens and log-probabilities; cut after the token that completes a stop string."""
        text, kept, stop = self._text_of(delta)
        token_ids = delta.token_ids[:kept]
        self._num_tokens += kept
        logprobs = None
        if delta.cumulative_logprob is not None:
            self._cumulative_logprob = delta.cumulative_logprob
        elif delta.logprobs is not None:
            so_far = self._cumulative_logprob or 0.0
            self._cumulative_logprob = so_far + sum(entry.logprob for entry in delta.logprobs[:kept])
        if delta.logprobs is not None and self._params.logprobs is not None:
            logprobs = [logprob_dict(self._tokenizer, entry) for entry in delta.logprobs[:kept]]
        return CompletionOutput(
            self._index,
            text,
            token_ids,
            self._cumulative_logprob,
            logprobs,
            delta.finish_reason if stop is None else "stop",
            delta.stop_reason if stop is None else stop,
        )

    def _text_of(self, delta: TokenDelta) -> tuple[str, int, str | None]:
        """(new text, how many of the delta's tokens count, the stop string found)."""
        count = len(delta.token_ids)
        detokenizer = self._detokenizer
        if detokenizer is None:
            return "", count, None
        spoken = delta.token_ids
        if delta.finish_reason == "stop" and not self._params.include_stop_str_in_output:
            spoken = spoken[:-1]  # end-of-sequence or a stop id: a token, but no text
        if self._stops is None:
            text = detokenizer.step(spoken)
            return (text + detokenizer.flush() if delta.finish_reason is not None else text), count, None
        pieces: list[str] = []
        for place, token in enumerate(spoken, start=1):
            piece = detokenizer.step((token,))
            if self._num_tokens + place > self._params.min_tokens:
                piece, stop = self._stops.feed(piece)
                if stop is not None:
                    return "".join([*pieces, piece]), place, stop
            pieces.append(piece)
        if delta.finish_reason is not None:
            piece, stop = self._stops.feed(detokenizer.flush())
            pieces += [piece, "" if stop else self._stops.flush()]
            return "".join(pieces), count, stop
        return "".join(pieces), count, None


def logprob_dict(tokenizer: Tokenizer | None, entry: TokenLogprobs) -> dict[int, Logprob]:
    """Token id -> Logprob at one position: the chosen token first, then the most likely ones, best first."""

    def text(token_id: int) -> str | None:
        return None if tokenizer is None else tokenizer.token_text(token_id)

    result = {entry.token_id: Logprob(entry.logprob, entry.rank, text(entry.token_id))}
    for rank, (token_id, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), start=1):
        if token_id != entry.token_id:
            result[token_id] = Logprob(logprob, rank, text(token_id))
    return result
