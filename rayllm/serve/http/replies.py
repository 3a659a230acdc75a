"""From the engine's `RequestOutput`s to the JSON and the SSE frames of the OpenAI API.

A `Reply` is made for one HTTP request. It answers either with frames (`frames` for each output in the order in which
they come, then `last_frames`), or whole. Choice index = prompt index x n + i.
"""

from __future__ import annotations

import base64
import time
import uuid
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import orjson

from rayllm.api.types import CompletionOutput, Logprob, RequestOutput
from rayllm.serve.http.chat_format import ChatFormat, ChatParser, Piece, ReasoningCounter
from rayllm.serve.http.convert import Job
from rayllm.serve.http.errors import ApiError
from rayllm.serve.http.protocol import ChatBody, CompletionBody, EmbeddingBody, GenerationBody, StreamOptions
from rayllm.serve.http.served import Target

MIN_LOGPROB = -9999.0  # stands for -inf, which JSON does not have
DONE = b"data: [DONE]\n\n"

Entries = Sequence[Mapping[int, Logprob] | None]
Json = dict[str, Any]


def sse(payload: Json, event: str = "") -> bytes:
    """One SSE frame. event: its name, where the API has named events."""
    name = b"event: " + event.encode() + b"\n" if event else b""
    return name + b"data: " + orjson.dumps(payload) + b"\n\n"


class Reply(ABC):
    """Base of all replies, whatever API they belong to: ids, usage, and the completions of each output."""

    def __init__(self, stream: bool, n: int, job: Job, target: Target):
        self.stream = stream
        self._n = n
        self._job = job
        self._tokenizer = target.engine.tokenizer
        self._head: Json = {"id": target.reply_id, "created": int(time.time()), "model": target.name}
        self._prompt_entries: dict[int, Entries] = {}  # prompt index -> its log-probabilities
        self._prompt_tokens = sum(len(r.prompt_token_ids) for r in job.requests)
        self._cached_tokens = [0] * len(job.requests)
        self._completion_tokens = 0

    @abstractmethod
    def frames(self, prompt_index: int, output: RequestOutput) -> bytes:
        """The SSE frames of one output; may be empty."""

    @abstractmethod
    def last_frames(self) -> bytes:
        """What ends a stream in good order."""

    @abstractmethod
    def error_frames(self, error: ApiError) -> bytes:
        """What ends a stream in which something failed."""

    @abstractmethod
    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        """The answer as one JSON object. outputs: the whole output of each prompt."""

    def _completions(self, prompt_index: int, output: RequestOutput) -> Iterator[tuple[int, CompletionOutput]]:
        """(choice index, what is new in it) of an output, which is counted for the usage."""
        if output.created:  # the request was sent again: this is the answer of before
            self._head["created"] = output.created
        if output.prompt_logprobs is not None:
            self._prompt_entries[prompt_index] = output.prompt_logprobs
        self._cached_tokens[prompt_index] = max(self._cached_tokens[prompt_index], output.num_cached_tokens)
        for completion in output.outputs:
            if self._job.discard_output:
                finish_reason = completion.finish_reason and "length"
                completion = CompletionOutput(completion.index, "", [], finish_reason=finish_reason)
            self._completion_tokens += len(completion.token_ids)
            yield prompt_index * self._n + completion.index, completion
        if not self._job.discard_output:
            self._completion_tokens += output.num_discarded_tokens

    def _token_text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._tokenizer is None else self._tokenizer.token_text(token_id)


class ChoicesReply(Reply):
    """Base of the replies of completions and chats, which have `choices`."""

    chunk_object: str
    whole_object: str

    def __init__(self, body: GenerationBody, job: Job, target: Target):
        super().__init__(bool(body.stream), body.n or 1, job, target)
        self._options = body.stream_options or StreamOptions()
        self._wants_prompt_logprobs = body.prompt_logprobs is not None
        self._wants_ids = bool(body.return_token_ids)
        self._started: set[int] = set()  # choices of which something was sent

    def frames(self, prompt_index: int, output: RequestOutput) -> bytes:
        """The SSE frames of one output; may be empty."""
        parts = []
        for index, completion in self._completions(prompt_index, output):
            for choice in self._chunks(index, completion):
                chunk = {**self._head, **self._beside(), "object": self.chunk_object, "choices": [choice]}
                if self._options.continuous_usage_stats:
                    chunk["usage"] = self._usage()
                elif self._options.include_usage:
                    chunk["usage"] = None
                parts.append(sse(chunk))
        return b"".join(parts)

    def last_frames(self) -> bytes:
        """The usage chunk, if it was asked for, and the end mark."""
        if not self._options.include_usage:
            return DONE
        return sse({**self._head, "object": self.chunk_object, "choices": [], "usage": self._usage()}) + DONE

    def error_frames(self, error: ApiError) -> bytes:
        """What ends a stream in which something failed."""
        return sse(error.body()) + DONE

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        """The answer as one JSON object. outputs: the whole output of each prompt."""
        choices = [
            self._choice(index, completion)
            for prompt_index, output in enumerate(outputs)
            for index, completion in self._completions(prompt_index, output)
        ]
        return {**self._head, "object": self.whole_object, "choices": choices, "usage": self._usage()}

    def _beside(self) -> Json:
        """What the next chunk has beside its choices."""
        return {}

    def _is_first(self, index: int) -> bool:
        """Whether nothing of this choice was sent before. Asked once for each output."""
        first = index not in self._started
        self._started.add(index)
        return first

    def _usage(self) -> Json:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached_tokens)},
        }

    def _prompt_logprobs(self, prompt_index: int) -> list[Json | None]:
        """The `prompt_logprobs` extension: {id: {logprob, rank, decoded_token}} a token, null for the first."""

        def as_json(token: int, logprob: Logprob) -> Json:
            text = self._token_text(token)
            return {"logprob": finite(logprob.logprob), "rank": logprob.rank, "decoded_token": text}

        entries = self._prompt_entries.get(prompt_index, [])
        return [None if e is None else {str(t): as_json(t, p) for t, p in e.items()} for e in entries]

    @abstractmethod
    def _chunks(self, index: int, completion: CompletionOutput) -> list[Json]:
        """The `choices` entries, one a chunk, that carry what is new in a choice."""

    @abstractmethod
    def _choice(self, index: int, completion: CompletionOutput) -> Json:
        """The entry of a whole completion in a whole reply's `choices`."""


class CompletionReply(ChoicesReply):
    """Answers POST /v1/completions."""

    chunk_object = whole_object = "text_completion"

    def __init__(self, body: CompletionBody, job: Job, target: Target):
        super().__init__(body, job, target)
        self._echo = bool(body.echo)
        self._top = body.logprobs
        self._told_prompts: set[int] = set()  # choices with which the ids of their prompts were sent
        self._offsets: dict[int, int] = {}  # choice -> characters of its text so far
        self._shows_special = not job.requests[0].params.skip_special_tokens

    def _chunks(self, index: int, completion: CompletionOutput) -> list[Json]:
        chunk = self._part(index, completion)
        has_tokens = (chunk["logprobs"] or {}).get("tokens") or chunk.get("token_ids")
        if not chunk["text"] and chunk["finish_reason"] is None and not has_tokens:
            return []  # text held back until it is known not to be part of a stop string or of a longer character
        return [chunk]

    def _choice(self, index: int, completion: CompletionOutput) -> Json:
        choice = self._part(index, completion)
        if self._wants_prompt_logprobs:
            choice["prompt_logprobs"] = self._prompt_logprobs(index // self._n)
        return choice

    def _part(self, index: int, completion: CompletionOutput) -> Json:
        echo = self._echo and self._is_first(index)
        prompt = (self._job.prompts[index // self._n] or "") if echo else ""
        part = {
            "index": index,
            "text": prompt + completion.text,
            "logprobs": None if self._top is None else self._logprobs(index, completion, echo, len(prompt)),
            "finish_reason": completion.finish_reason,
        }
        if self._wants_ids:
            part["token_ids"] = list(completion.token_ids)
            if index not in self._told_prompts:
                self._told_prompts.add(index)
                part["prompt_token_ids"] = self._job.requests[index // self._n].prompt_token_ids
        return part

    def _logprobs(self, index: int, completion: CompletionOutput, echo: bool, prompt_chars: int) -> Json:
        """Parallel arrays; text_offset counts characters from the start of the choice's text."""
        token_ids, num_prompt = list(completion.token_ids), 0
        entries: Entries = completion.logprobs or []
        if echo:
            prompt_ids = self._job.requests[index // self._n].prompt_token_ids
            num_prompt = len(prompt_ids)
            token_ids = prompt_ids + token_ids
            entries = [*self._prompt_entries.get(index // self._n, [None] * num_prompt), *entries]
        arrays: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": []}
        for token_id, entry in zip(token_ids, entries, strict=True):
            arrays["tokens"].append(self._token_text(token_id))
            arrays["token_logprobs"].append(None if entry is None else finite(entry[token_id].logprob))
            arrays["top_logprobs"].append(None if entry is None else self._top_dict(token_id, entry))
        arrays["text_offset"] = self._offset_of_each(index, token_ids, num_prompt, prompt_chars)
        return arrays

    def _offset_of_each(self, index: int, token_ids: list[int], num_prompt: int, prompt_chars: int) -> list[int]:
        """Where each token begins in the choice's text, in characters; special tokens and parts of one have no length.

        num_prompt: leading tokens that are an echoed prompt's, of prompt_chars characters. They end where its text
        ends, whatever white space their decoding adds or drops in front.
        """
        if self._tokenizer is None:
            return [0] * len(token_ids)
        hidden = self._tokenizer.special_ids
        offset, offsets = self._offsets.get(index, 0), []
        for place, token_id in enumerate(token_ids, start=1):
            is_hidden = token_id in hidden and not (self._shows_special and place > num_prompt)
            raw = b"" if is_hidden else self._tokenizer.token_bytes(token_id)
            begins = sum(byte & 0xC0 != 0x80 for byte in raw)  # characters that begin in this token
            within = bool(raw) and raw[0] & 0xC0 == 0x80  # it goes on with the last token's character
            offsets.append(max(offset - within, 0))
            offset += begins
            if place == num_prompt:
                offsets = [max(each - max(offset - prompt_chars, 0), 0) for each in offsets]
                offset = prompt_chars
        self._offsets[index] = offset
        return offsets

    def _top_dict(self, token_id: int, entry: Mapping[int, Logprob]) -> dict[str, float]:
        """Token text -> log-probability of the most likely tokens, best first, and always of the token itself."""
        best: dict[str, float] = {}
        for token, logprob in ranked(entry)[: self._top]:
            best.setdefault(self._token_text(token), finite(logprob))
        best[self._token_text(token_id)] = finite(entry[token_id].logprob)
        return best


class ChatReader:
    """Finds out what one completion of a chat is made of, whatever API its answer belongs to."""

    def __init__(self, form: ChatFormat, token_text: Callable[[int], str]):
        """token_text: of a token by its id."""
        self._parser = ChatParser(form)
        self._counter = ReasoningCounter(form) if form.thinks else None
        self._token_text = token_text

    def read(self, completion: CompletionOutput) -> tuple[list[Piece], str | None]:
        """(what the new text turned out to be, the finish reason in OpenAI's words) of the next output."""
        reason = completion.finish_reason
        is_cut = reason == "length" or isinstance(completion.stop_reason, str)  # a stop string
        pieces = self._parser.feed(completion.text, last=reason is not None, cut=is_cut)
        if self._counter is not None:
            for token_id in completion.token_ids:
                self._counter.add(self._token_text(token_id))
        return pieces, "tool_calls" if reason == "stop" and self._parser.num_calls else reason

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens up to and with the closing tag so far; None if the model is not known to reason."""
        return None if self._counter is None else self._counter.tokens


def call_id(reply_id: str, index: int, call: int) -> str:
    """Of a tool call of a choice. It follows from the reply's id, which is the same if the request is sent again."""
    return f"call_{uuid.uuid5(uuid.NAMESPACE_OID, f'{reply_id}/{index}/{call}').hex[:24]}"


class ChatReply(ChoicesReply):
    """Answers POST /v1/chat/completions."""

    chunk_object, whole_object = "chat.completion.chunk", "chat.completion"

    def __init__(self, body: ChatBody, job: Job, target: Target):
        super().__init__(body, job, target)
        self._top = (body.top_logprobs or 0) if body.logprobs else None
        self._readers = [ChatReader(job.reply_format, self._token_text) for _ in range(self._n)]
        self._told_prompt = False  # its ids were sent
        self._calls_functions = bool(body.functions)  # calls have OpenAI's older form

    def _chunks(self, index: int, completion: CompletionOutput) -> list[Json]:
        pieces, reason = self._readers[index].read(completion)
        chunks = [_chunk(index, self._delta(index, piece)) for piece in pieces]
        logprobs, ids = self._logprobs(completion), list(completion.token_ids) if self._wants_ids else []
        if ((logprobs is not None and logprobs["content"]) or ids) and not chunks:
            chunks.append(_chunk(index, {"content": ""}))
        if chunks:
            chunks[0]["logprobs"] = logprobs
        if ids:
            chunks[0]["token_ids"] = ids
        if self._is_first(index):
            chunks.insert(0, _chunk(index, {"role": "assistant", "content": ""}))
        if reason is not None:
            chunks.append(_chunk(index, {}, self._reason(reason)))
        return chunks

    def _choice(self, index: int, completion: CompletionOutput) -> Json:
        pieces, reason = self._readers[index].read(completion)
        message: Json = {"role": "assistant", "content": ""}
        calls: list[Json] = []
        for piece in pieces:
            if piece.kind == "call":
                calls.append(self._call(index, piece))
            elif piece.kind == "arguments":
                calls[piece.call]["function"]["arguments"] = piece.text
            else:
                message[piece.kind] = message.get(piece.kind, "") + piece.text
        if calls:
            made = {"function_call": calls[0]["function"]} if self._calls_functions else {"tool_calls": calls}
            message |= {"content": message["content"] or None, **made}
        logprobs = self._logprobs(completion)
        choice = {"index": index, "message": message, "logprobs": logprobs, "finish_reason": self._reason(reason)}
        return choice | {"token_ids": list(completion.token_ids)} if self._wants_ids else choice

    def _reason(self, reason: str | None) -> str | None:
        return "function_call" if reason == "tool_calls" and self._calls_functions else reason

    def _delta(self, index: int, piece: Piece) -> Json:
        """The `delta` of a chunk that carries one piece."""
        if self._calls_functions and piece.kind in ("call", "arguments"):
            begin = {"name": piece.text, "arguments": ""}
            return {"function_call": begin if piece.kind == "call" else {"arguments": piece.text}}
        if piece.kind == "call":
            return {"tool_calls": [{"index": piece.call, **self._call(index, piece)}]}
        if piece.kind == "arguments":
            return {"tool_calls": [{"index": piece.call, "function": {"arguments": piece.text}}]}
        return {piece.kind: piece.text}

    def _beside(self) -> Json:
        if not self._wants_ids or self._told_prompt:
            return {}
        self._told_prompt = True
        return {"prompt_token_ids": self._job.requests[0].prompt_token_ids}

    def _call(self, index: int, piece: Piece) -> Json:
        """A tool call that begins."""
        name = {"name": piece.text, "arguments": ""}
        return {"id": call_id(self._head["id"], index, piece.call), "type": "function", "function": name}

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        answer = super().whole(outputs)
        if self._wants_prompt_logprobs:
            answer["prompt_logprobs"] = self._prompt_logprobs(0)
        if self._wants_ids:
            answer["prompt_token_ids"] = self._job.requests[0].prompt_token_ids
        return answer

    def _usage(self) -> Json:
        usage = super()._usage()
        counts = [reader.reasoning_tokens for reader in self._readers]
        if None not in counts:
            usage["completion_tokens_details"] = {"reasoning_tokens": sum(count or 0 for count in counts)}
        return usage

    def _logprobs(self, completion: CompletionOutput) -> Json | None:
        if self._top is None:
            return None
        content = []
        for token_id, entry in zip(completion.token_ids, completion.logprobs or [], strict=True):
            token = self._token(token_id, entry[token_id].logprob)
            token["top_logprobs"] = [self._token(t, p) for t, p in ranked(entry)[: self._top]]
            content.append(token)
        return {"content": content}

    def _token(self, token_id: int, logprob: float) -> Json:
        text = self._token_text(token_id)
        raw = text.encode() if self._tokenizer is None else self._tokenizer.token_bytes(token_id)
        return {"token": text, "logprob": finite(logprob), "bytes": list(raw)}


def _chunk(index: int, delta: Json, finish_reason: str | None = None) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def embeddings(body: EmbeddingBody, model: str, outputs: Sequence[RequestOutput]) -> Json:
    """The answer to POST /v1/embeddings. outputs: of each input."""
    data = [
        {"object": "embedding", "index": index, "embedding": _embedding(output.embedding, body.encoding_format)}
        for index, output in enumerate(outputs)
    ]
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}


def _embedding(values: array[float] | None, encoding: str | None) -> orjson.Fragment | str:
    """A list, as JSON that takes less memory than its floats, or the base64 of the little-endian float32 values."""
    values = values or array("f")
    if encoding == "base64":
        return base64.b64encode(values).decode()  # which are little-endian on every host that runs this
    return orjson.Fragment(orjson.dumps(values.tolist()))


def ranked(entry: Mapping[int, Logprob]) -> list[tuple[int, float]]:
    """(token id, log-probability), best first; equal ones by id."""
    return sorted(((token, p.logprob) for token, p in entry.items()), key=lambda item: (-item[1], item[0]))


def finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
