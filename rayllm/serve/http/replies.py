"""The replies of the two endpoints: `CompletionReply` and `ChatReply`, over `Reply` of `reply.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayllm.api.types import CompletionOutput, Logprob
from rayllm.serve.http.chat_format import ChatTextParser
from rayllm.serve.http.convert import Job, Tokenizer
from rayllm.serve.http.protocol import ChatBody, CompletionBody
from rayllm.serve.http.reasoning import ReasoningCounter
from rayllm.serve.http.reply import DONE, Delta, Reply, finite, ranked, sse
from rayllm.serve.http.tool_calls import CallArguments, CallStart, Event

__all__ = ["DONE", "ChatReply", "CompletionReply", "Reply", "sse"]


class CompletionReply(Reply):
    """Answers POST /v1/completions."""

    chunk_object = whole_object = "text_completion"

    def __init__(self, body: CompletionBody, job: Job, reply_id: str, model: str, tokenizer: Tokenizer | None):
        super().__init__(body, job, reply_id, model, tokenizer)
        self._echo = bool(body.echo)
        self._top = body.logprobs
        self._offsets: dict[int, int] = {}

    def _delta(self, prompt_index: int, index: int, completion: CompletionOutput) -> Delta:
        delta = super()._delta(prompt_index, index, completion)
        if self._echo and delta.first:
            delta = delta._replace(text=(self._job.prompts[prompt_index] or "") + delta.text)
        return delta

    def _chunk_choices(self, delta: Delta) -> list[dict[str, Any]]:
        logprobs = self._logprobs(delta)
        if not delta.text and delta.finish_reason is None and not (logprobs and logprobs["tokens"]):
            return []  # text held back until it is known not to be part of a stop string or of a longer character
        return [{"index": delta.choice, "text": delta.text, "logprobs": logprobs, "finish_reason": delta.finish_reason}]

    def _logprobs(self, delta: Delta) -> dict[str, list[Any]] | None:
        """Parallel arrays; text_offset counts characters from the start of the choice's text."""
        if self._top is None:
            return None
        token_ids, entries, num_prompt = list(delta.token_ids), list(delta.entries or []), 0
        if self._echo and delta.first:
            prompt_ids = self._job.requests[delta.prompt_index].prompt_token_ids
            num_prompt = len(prompt_ids)
            token_ids = prompt_ids + token_ids
            entries = list(self._prompt_entries.get(delta.prompt_index, [None] * num_prompt)) + entries
        arrays: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": []}
        for token_id, entry in zip(token_ids, entries, strict=True):
            arrays["tokens"].append(self._token_text(token_id))
            arrays["token_logprobs"].append(None if entry is None else finite(entry[token_id].logprob))
            arrays["top_logprobs"].append(None if entry is None else self._top_dict(token_id, entry))
        arrays["text_offset"] = self._offset_of_each(delta, token_ids, num_prompt)
        return arrays

    def _offset_of_each(self, delta: Delta, token_ids: list[int], num_prompt: int) -> list[int]:
        """Where each token begins in the choice's text, in characters; special tokens and parts of one have no length.

        num_prompt: leading tokens that are an echoed prompt's. They end where its text ends, whatever white space
        their decoding adds or drops in front.
        """
        if self._tokenizer is None:
            return [0] * len(token_ids)
        offset, offsets = self._offsets.get(delta.choice, 0), []
        for place, token_id in enumerate(token_ids, start=1):
            raw = b"" if token_id in self._tokenizer.special_ids else self._tokenizer.token_bytes(token_id)
            begins = sum(byte & 0xC0 != 0x80 for byte in raw)  # characters that begin in this token
            within = bool(raw) and raw[0] & 0xC0 == 0x80  # it goes on with the last token's character
            offsets.append(max(offset - within, 0))
            offset += begins
            if place == num_prompt:
                end = len(self._job.prompts[delta.prompt_index] or "")
                offsets = [max(each - max(offset - end, 0), 0) for each in offsets]
                offset = end
        self._offsets[delta.choice] = offset
        return offsets

    def _top_dict(self, token_id: int, entry: Mapping[int, Logprob]) -> dict[str, float]:
        """Token text -> log-probability of the most likely tokens, best first, and always of the token itself."""
        best: dict[str, float] = {}
        for token, logprob in ranked(entry)[: self._top]:
            best.setdefault(self._token_text(token), finite(logprob))
        best[self._token_text(token_id)] = finite(entry[token_id].logprob)
        return best

    def _whole_choice(self, index: int, choice: dict[str, Any]) -> dict[str, Any]:
        answer = {
            "index": index,
            "text": "".join(choice["text"]),
            "logprobs": choice["logprobs"],
            "finish_reason": choice["finish_reason"],
        }
        if self._wants_prompt_logprobs:
            answer["prompt_logprobs"] = self._prompt_logprobs(index // self._n)
        return answer


class ChatReply(Reply):
    """Answers POST /v1/chat/completions."""

    chunk_object, whole_object = "chat.completion.chunk", "chat.completion"

    def __init__(self, body: ChatBody, job: Job, reply_id: str, model: str, tokenizer: Tokenizer | None):
        super().__init__(body, job, reply_id, model, tokenizer)
        self._top = (body.top_logprobs or 0) if body.logprobs else None
        form = job.reply_format
        self._parsers = [ChatTextParser(form) for _ in range(self._n)]
        self._counters = [ReasoningCounter(form.inside) for _ in range(self._n)] if form.thinks else []

    def _delta(self, prompt_index: int, index: int, completion: CompletionOutput) -> Delta:
        delta = super()._delta(prompt_index, index, completion)
        parser, reason = self._parsers[index], delta.finish_reason
        parsed = parser.feed(delta.text, finished=reason is not None)
        if reason == "stop" and parser.has_calls:
            reason = "tool_calls"
        if self._counters:
            for token_id in delta.token_ids:
                self._counters[index].add(self._token_text(token_id))
        return delta._replace(parsed=parsed, finish_reason=reason)

    def _usage(self) -> dict[str, Any]:
        usage = super()._usage()
        if self._counters:
            usage["completion_tokens_details"] = {"reasoning_tokens": sum(c.tokens for c in self._counters)}
        return usage

    def _chunk_choices(self, delta: Delta) -> list[dict[str, Any]]:
        assert delta.parsed is not None
        pieces = [_event_delta(event) for event in delta.parsed.events]
        if delta.parsed.reasoning:
            pieces.insert(0, {"reasoning_content": delta.parsed.reasoning})
        logprobs = self._logprobs(delta)
        if not pieces and logprobs is not None and logprobs["content"]:
            pieces.append({"content": ""})
        choices = [_chat_choice(delta.choice, piece) for piece in pieces]
        if choices:
            choices[0]["logprobs"] = logprobs
        if delta.first:
            choices.insert(0, _chat_choice(delta.choice, {"role": "assistant", "content": ""}))
        if delta.finish_reason is not None:
            choices.append(_chat_choice(delta.choice, {}, finish_reason=delta.finish_reason))
        return choices

    def _logprobs(self, delta: Delta) -> dict[str, list[Any]] | None:
        if self._top is None:
            return None
        content = []
        for token_id, entry in zip(delta.token_ids, delta.entries or [], strict=True):
            assert entry is not None, "only a prompt's first token has no log-probability"
            token = self._chat_token(token_id, entry[token_id].logprob)
            token["top_logprobs"] = [self._chat_token(t, p) for t, p in ranked(entry)[: self._top]]
            content.append(token)
        return {"content": content}

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._token_text(token_id)
        raw = text.encode() if self._tokenizer is None else self._tokenizer.token_bytes(token_id)
        return {"token": text, "logprob": finite(logprob), "bytes": list(raw)}

    def _add(self, choice: dict[str, Any], delta: Delta) -> None:
        assert delta.parsed is not None
        choice.setdefault("reasoning", []).append(delta.parsed.reasoning)
        calls: list[tuple[CallStart, list[str]]] = choice.setdefault("calls", [])
        for event in delta.parsed.events:
            match event:
                case CallStart():
                    calls.append((event, []))
                case CallArguments():
                    calls[event.index][1].append(event.fragment)
                case _:
                    choice["text"].append(event)

    def _whole_choice(self, index: int, choice: dict[str, Any]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(choice["text"])}
        if reasoning := "".join(choice["reasoning"]):
            message["reasoning_content"] = reasoning
        if choice["calls"]:
            message["content"] = message["content"] or None
            message["tool_calls"] = [_call(start, "".join(arguments)) for start, arguments in choice["calls"]]
        return {
            "index": index,
            "message": message,
            "logprobs": choice["logprobs"],
            "finish_reason": choice["finish_reason"],
        }

    def whole(self) -> dict[str, Any]:
        answer = super().whole()
        if self._wants_prompt_logprobs:
            answer["prompt_logprobs"] = self._prompt_logprobs(0)
        return answer


def _chat_choice(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _event_delta(event: Event) -> dict[str, Any]:
    """The `delta` of a chunk that carries one event."""
    match event:
        case CallStart():
            return {"tool_calls": [{"index": event.index, **_call(event, "")}]}
        case CallArguments():
            return {"tool_calls": [{"index": event.index, "function": {"arguments": event.fragment}}]}
        case _:
            return {"content": event}


def _call(start: CallStart, arguments: str) -> dict[str, Any]:
    return {"id": start.call_id, "type": "function", "function": {"name": start.name, "arguments": arguments}}
