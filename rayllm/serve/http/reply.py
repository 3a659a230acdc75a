"""From the engine's `RequestOutput`s to the JSON and the SSE frames of the OpenAI API.

A `Reply` is made for one HTTP request and fed its outputs in the order in which they come. It answers either with
frames (`frames`, then `last_frames`) or whole (`collect`, then `whole`). Choice index = prompt index x n + i.
The two replies are in `replies.py`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from rayllm.api.types import CompletionOutput, Logprob, RequestOutput
from rayllm.serve.http.chat_format import ParsedText
from rayllm.serve.http.convert import Job, Tokenizer
from rayllm.serve.http.errors import request_failed
from rayllm.serve.http.protocol import GenerationBody

MIN_LOGPROB = -9999.0  # stands for -inf, which JSON does not have
DONE = b"data: [DONE]\n\n"

Entries = Sequence[Mapping[int, Logprob] | None]


def sse(payload: Any) -> bytes:
    """One SSE frame."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


class Delta(NamedTuple):
    """What is new in one choice. prompt_index: whose prompt it continues. first: nothing was sent of it before.

    parsed: what the text turned out to be, in chats.
    """

    prompt_index: int
    choice: int
    text: str
    token_ids: list[int]
    entries: Entries | None
    finish_reason: str | None
    first: bool
    parsed: ParsedText | None = None


class Reply(ABC):
    """Base of both replies: ids, usage, and the bookkeeping per choice."""

    chunk_object: str
    whole_object: str

    def __init__(self, body: GenerationBody, job: Job, reply_id: str, model: str, tokenizer: Tokenizer | None):
        self._n = body.n or 1
        self._job = job
        self._tokenizer = tokenizer
        self._head = {"id": reply_id, "created": int(time.time()), "model": model}
        self._include_usage = body.include_usage
        self._continuous_usage = body.continuous_usage
        self._wants_prompt_logprobs = body.prompt_logprobs is not None
        self._started: set[int] = set()
        self._choices: dict[int, dict[str, Any]] = {}
        self._prompt_entries: dict[int, Entries] = {}
        self._prompt_tokens = sum(len(r.prompt_token_ids) for r in job.requests)
        self._cached_tokens = [0] * len(job.requests)
        self._completion_tokens = 0

    def frames(self, prompt_index: int, output: RequestOutput) -> bytes:
        """The SSE frames of one output; may be empty. Raises ApiError if the engine failed on the request."""
        parts = []
        for delta in self._deltas(prompt_index, output):
            for choice in self._chunk_choices(delta):
                chunk = {**self._head, "object": self.chunk_object, "choices": [choice]}
                if self._continuous_usage:
                    chunk["usage"] = self._usage()
                elif self._include_usage:
                    chunk["usage"] = None
                parts.append(sse(chunk))
        return b"".join(parts)

    def last_frames(self) -> bytes:
        """The usage chunk, if it was asked for, and the end mark."""
        if not self._include_usage:
            return DONE
        return sse({**self._head, "object": self.chunk_object, "choices": [], "usage": self._usage()}) + DONE

    def collect(self, prompt_index: int, output: RequestOutput) -> None:
        """Add one output to the whole answer. Raises ApiError if the engine failed on the request."""
        for delta in self._deltas(prompt_index, output):
            choice = self._choices.setdefault(delta.choice, {"text": [], "logprobs": None, "finish_reason": None})
            self._add(choice, delta)
            choice["finish_reason"] = delta.finish_reason or choice["finish_reason"]
            logprobs = self._logprobs(delta)
            if choice["logprobs"] is None:
                choice["logprobs"] = logprobs
            elif logprobs is not None:
                for key, values in logprobs.items():
                    choice["logprobs"][key].extend(values)

    def whole(self) -> dict[str, Any]:
        """The answer as one JSON object, after the last output was collected."""
        choices = [self._whole_choice(index, self._choices[index]) for index in sorted(self._choices)]
        return {**self._head, "object": self.whole_object, "choices": choices, "usage": self._usage()}

    def _deltas(self, prompt_index: int, output: RequestOutput) -> list[Delta]:
        if output.prompt_logprobs is not None:
            self._prompt_entries[prompt_index] = output.prompt_logprobs
        self._cached_tokens[prompt_index] = max(self._cached_tokens[prompt_index], output.num_cached_tokens)
        if not self._job.discard_output:
            self._completion_tokens += output.num_discarded_tokens
        deltas = []
        for completion in output.outputs:
            if completion.finish_reason == "error":
                raise request_failed(completion.stop_reason)
            index = prompt_index * self._n + completion.index
            deltas.append(self._delta(prompt_index, index, completion))
            self._started.add(index)
        return deltas

    def _delta(self, prompt_index: int, index: int, completion: CompletionOutput) -> Delta:
        first = index not in self._started
        if self._job.discard_output:
            return Delta(prompt_index, index, "", [], None, completion.finish_reason and "length", first)
        self._completion_tokens += len(completion.token_ids)
        return Delta(
            prompt_index,
            index,
            completion.text,
            completion.token_ids,
            completion.logprobs,
            completion.finish_reason,
            first,
        )

    def _usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached_tokens)},
        }

    def _token_text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._tokenizer is None else self._tokenizer.token_text(token_id)

    def _prompt_logprobs(self, prompt_index: int) -> list[dict[str, Any] | None]:
        """The `prompt_logprobs` extension: {id: {logprob, rank, decoded_token}} a token, null for the first."""

        def as_json(token: int, logprob: Logprob) -> dict[str, Any]:
            text = self._token_text(token)
            return {"logprob": finite(logprob.logprob), "rank": logprob.rank, "decoded_token": text}

        entries = self._prompt_entries.get(prompt_index, [])
        return [None if e is None else {str(t): as_json(t, p) for t, p in e.items()} for e in entries]

    def _add(self, choice: dict[str, Any], delta: Delta) -> None:
        """Add a delta's text to a whole reply's choice."""
        choice["text"].append(delta.text)

    @abstractmethod
    def _chunk_choices(self, delta: Delta) -> list[dict[str, Any]]:
        """The `choices` entries, one a chunk, that carry this delta."""

    @abstractmethod
    def _logprobs(self, delta: Delta) -> dict[str, list[Any]] | None:
        """The delta's log-probabilities as this endpoint gives them; None if they were not asked for."""

    @abstractmethod
    def _whole_choice(self, index: int, choice: dict[str, Any]) -> dict[str, Any]:
        """One entry of a whole reply's `choices`."""


def ranked(entry: Mapping[int, Logprob]) -> list[tuple[int, float]]:
    """(token id, log-probability), best first; equal ones by id."""
    return sorted(((token, p.logprob) for token, p in entry.items()), key=lambda item: (-item[1], item[0]))


def finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
