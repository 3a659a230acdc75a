"""`ResponseReply`: from the engine's outputs to the Response object and the events of its stream.

A whole answer is made of the same events as a streamed one, so that the two are the same.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import orjson

from rayllm.api.types import CompletionOutput, RequestOutput
from rayllm.serve.http.chat_format import Piece
from rayllm.serve.http.convert import Job
from rayllm.serve.http.errors import ApiError
from rayllm.serve.http.replies import ChatReader, Reply, call_id, finite, ranked, sse
from rayllm.serve.http.responses.protocol import AllowedTools, ChosenFunction, Json, ResponseBody, item_id
from rayllm.serve.http.served import Target

ENDS = ("response.completed", "response.incomplete", "response.failed")  # the events that end a stream

_ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}  # of a Response's error, by HTTP status
_SAID_AGAIN = (
    *("background", "instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "prompt_cache_key"),
    *("prompt_cache_retention", "safety_identifier", "top_logprobs", "user"),
)


class ResponseReply(Reply):
    """Answers POST /v1/responses. Events are JSON objects in order; `frames` and the like are their SSE frames.

    num_items: of the conversation before the answer.
    """

    def __init__(self, body: ResponseBody, job: Job, target: Target, num_items: int):
        super().__init__(bool(body.stream), 1, job, target)
        if target.key is not None:
            self._head["created"] = target.key.created
        self._body, self._num_items = body, num_items
        self._reader = ChatReader(job.reply_format, self._token_text)
        self._status = "queued" if body.background else "in_progress"
        self._error: Json | None = None
        self._completed_at: int | None = None
        self._finish_reason: str | None = None
        self._output: list[Json] = []
        self._open: Json | None = None  # the last item of the output, if more of it may come
        self._num_tokens = 0  # that have come
        self._logprobs: list[tuple[int, Json]] = []  # of tokens whose text is still to come, with their numbers
        self._due = 0  # bytes of the message's text whose tokens' log-probabilities are still to be given
        self._number = 0  # of the next event
        self._has_begun = False

    @property
    def status(self) -> str:
        """Of the Response object."""
        return self._status

    # ---- as SSE frames, and whole

    def frames(self, prompt_index: int, output: RequestOutput) -> bytes:
        """The SSE frames of one output; may be empty."""
        if output.created:  # the request was sent again: the first event says so too
            self._head["created"] = output.created
        return _frames(self.begin() + self.events(output, prompt_index))

    def last_frames(self) -> bytes:
        """What ends a stream in good order."""
        return _frames(self.end())

    def error_frames(self, error: ApiError) -> bytes:
        """What ends a stream in which something failed."""
        return _frames(self.fail(error))

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        """The answer as one JSON object. outputs: the whole output of the one prompt."""
        for output in outputs:
            self.events(output)
        self.end()
        return self.response()

    # ---- events

    def queue(self) -> list[Json]:
        """The events of a response that has no place in the engine yet."""
        self._has_begun = True
        return [self._state("response.created"), self._state("response.queued")]

    def begin(self) -> list[Json]:
        """The events of a response that is about to run; none if it has begun before."""
        is_new, self._has_begun = not self._has_begun, True
        was_queued, self._status = self._status == "queued", "in_progress"
        created = [self._state("response.created")] if is_new else []
        return [*created, self._state("response.in_progress")] if is_new or was_queued else []

    def events(self, output: RequestOutput, prompt_index: int = 0) -> list[Json]:
        """The events of one output of the one prompt."""
        events: list[Json] = []
        for _, completion in self._completions(prompt_index, output):
            events += self._read(completion)
        return events

    def end(self) -> list[Json]:
        """The events that end a stream in good order."""
        is_cut = self._finish_reason == "length"
        events = self._close("incomplete" if is_cut else "completed")
        if not is_cut and not any(item["type"] != "reasoning" for item in self._output):
            events += self._add_text("message", "output_text", "") + self._close("completed")  # an answer without text
        self._status = "incomplete" if is_cut else "completed"
        self._completed_at = None if is_cut else int(time.time())
        return [*events, self._state(f"response.{self._status}")]

    def fail(self, error: ApiError) -> list[Json]:
        """The events that end a stream in which something failed."""
        self._status = "failed"
        if self._open is not None:
            self._open["status"] = "incomplete"
        self._error = {"code": _ERROR_CODES.get(error.status_code, "server_error"), "message": error.detail}
        return [self._state("response.failed")]

    def cancel(self) -> list[Json]:
        """The events that end a cancelled stream."""
        events = self._close("incomplete")
        self._status = "cancelled"
        return [*events, self._state("response.incomplete")]  # there is no event for this status

    def response(self) -> Json:
        """The Response object as far as it has come."""
        body = self._body
        params = self._job.requests[0].params
        has_ended = self._status in ("completed", "incomplete")
        is_cut = self._status == "incomplete"
        return {
            "id": self._head["id"],
            "object": "response",
            "created_at": self._head["created"],
            "completed_at": self._completed_at,
            "status": self._status,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": self._head["model"],
            "output": [dict(item) for item in self._output],
            "usage": self._usage() if has_ended else None,
            **{name: getattr(body, name) for name in _SAID_AGAIN},
            "background": bool(body.background),
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "reasoning": {"effort": None, "summary": None} | (body.reasoning.model_dump() if body.reasoning else {}),
            "service_tier": "default",
            "store": body.is_stored,
            "temperature": params.temperature,
            "text": self._text_options(),
            "tool_choice": self._tool_choice(),
            "tools": [tool.echo() for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": body.truncation or "disabled",
        }

    # ---- items

    def _read(self, completion: CompletionOutput) -> list[Json]:
        """The events of what is new in the completion."""
        if self._finish_reason is not None:
            return []
        self._logprobs += self._logprobs_of(completion)
        self._num_tokens += len(completion.token_ids)
        events: list[Json] = []
        pieces, self._finish_reason = self._reader.read(completion)
        for piece in pieces:
            events += self._take(piece)
        return events

    def _take(self, piece: Piece) -> list[Json]:
        match piece.kind:
            case "content":
                return self._add_text("message", "output_text", piece.text)
            case "reasoning_content":
                return self._add_text("reasoning", "reasoning_text", piece.text)
            case "call":
                self._logprobs.clear()
                call = call_id(self._head["id"], 0, piece.call)
                return self._open_item("function_call", call_id=call, name=piece.text, arguments="")
            case "arguments":
                self._logprobs.clear()
                assert self._open is not None
                self._open["arguments"] += piece.text
                return [self._of_item("response.function_call_arguments.delta", delta=piece.text)]

    def _add_text(self, kind: str, part_kind: str, text: str) -> list[Json]:
        """More text of an item, which may be new. Log-probabilities are those of answers, not of reasoning."""
        events: list[Json] = []
        if self._open is None or self._open["type"] != kind:
            other: Json = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
            events = self._open_item(kind, content=[], **other)
            assert self._open is not None
            part: Json = {"type": part_kind, "text": ""}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
            self._open["content"].append(part)
            events.append(self._of_part("response.content_part.added", part=dict(part)))
        assert self._open is not None
        part = self._open["content"][0]
        if kind == "reasoning":
            part["text"] += text
            return [*events, self._of_part("response.reasoning_text.delta", delta=text)]
        logprobs = self._take_logprobs(text, is_first=not part["text"])
        part["text"] += text
        part["logprobs"] = part["logprobs"] + logprobs
        return [*events, self._of_part("response.output_text.delta", delta=text, logprobs=logprobs)]

    def _take_logprobs(self, text: str, *, is_first: bool) -> list[Json]:
        """Those of the tokens that a piece of a message's text begins in, and not of reasoning or blanks before it."""
        waiting, thought = self._logprobs, self._reader.reasoning_tokens or 0
        is_stripped = is_first and not text[:1].isspace()
        while waiting and (waiting[0][0] < thought or (is_stripped and _is_blank(waiting[0][1]))):
            del waiting[0]
        self._due = (0 if is_first else self._due) + len(text.encode())
        count = 0
        while count < len(waiting) and self._due > 0:
            self._due -= len(waiting[count][1]["bytes"])
            count += 1
        taken, self._logprobs = waiting[:count], waiting[count:]
        return [logprob for _, logprob in taken]

    def _open_item(self, kind: str, **fields: Any) -> list[Json]:
        """Begin an item; the one before is complete."""
        events = self._close("completed")
        number = self._num_items + len(self._output)
        item = {"id": item_id(kind, self._head["id"], number), "type": kind, "status": "in_progress", **fields}
        if kind == "message":
            item["role"] = "assistant"
        self._output.append(item)
        self._open = item
        return [*events, self._event("response.output_item.added", output_index=self._index, item=_copy(item))]

    def _close(self, status: str) -> list[Json]:
        """End the item that is open, if one is."""
        item = self._open
        if item is None:
            return []
        events = []
        if item["type"] == "function_call":
            name, arguments = item["name"], item["arguments"]
            events.append(self._of_item("response.function_call_arguments.done", name=name, arguments=arguments))
        for part in item.get("content") or ():
            text = {"text": part["text"]}
            if item["type"] == "message":
                events.append(self._of_part("response.output_text.done", **text, logprobs=part["logprobs"]))
            else:
                events.append(self._of_part("response.reasoning_text.done", **text))
            events.append(self._of_part("response.content_part.done", part=dict(part)))
        item["status"] = status
        events.append(self._event("response.output_item.done", output_index=self._index, item=_copy(item)))
        self._open = None
        return events

    # ---- single events

    @property
    def _index(self) -> int:
        return len(self._output) - 1

    def _event(self, kind: str, **fields: Any) -> Json:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event

    def _state(self, kind: str) -> Json:
        return self._event(kind, response=self.response())

    def _of_item(self, kind: str, **fields: Any) -> Json:
        assert self._open is not None
        return self._event(kind, item_id=self._open["id"], output_index=self._index, **fields)

    def _of_part(self, kind: str, **fields: Any) -> Json:
        return self._of_item(kind, content_index=0, **fields)

    # ---- values

    def _logprobs_of(self, completion: CompletionOutput) -> list[tuple[int, Json]]:
        top = self._body.num_logprobs
        if top is None:
            return []
        special = frozenset() if self._tokenizer is None else self._tokenizer.special_ids
        found = []
        entries = zip(completion.token_ids, completion.logprobs or [], strict=True)
        for number, (token_id, entry) in enumerate(entries, start=self._num_tokens):
            if token_id not in special:
                token = self._token(token_id, entry[token_id].logprob)
                found.append((number, token | {"top_logprobs": [self._token(t, p) for t, p in ranked(entry)[:top]]}))
        return found

    def _token(self, token_id: int, logprob: float) -> Json:
        text = self._token_text(token_id)
        raw = text.encode() if self._tokenizer is None else self._tokenizer.token_bytes(token_id)
        return {"token": text, "bytes": list(raw), "logprob": finite(logprob)}

    def _usage(self) -> Json:
        return {
            "input_tokens": self._prompt_tokens,
            "input_tokens_details": {"cached_tokens": sum(self._cached_tokens), "cache_write_tokens": 0},
            "output_tokens": self._completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reader.reasoning_tokens or 0},
            "total_tokens": self._prompt_tokens + self._completion_tokens,
        }

    def _text_options(self) -> Json:
        form, text = self._body.format, self._body.text
        shown: Json = {"type": "text"}
        if form is not None:
            shown = form.model_dump(by_alias=True) if form.type == "json_schema" else {"type": form.type}
        return {"format": shown, "verbosity": (text and text.verbosity) or "medium"}

    def _tool_choice(self) -> Any:
        choice = self._body.tool_choice
        return choice.model_dump() if isinstance(choice, ChosenFunction | AllowedTools) else choice or "auto"


def _is_blank(token: Json) -> bool:
    return not bytes(token["bytes"]).strip()


def _copy(item: Json) -> Json:
    """As it is now; the parts of its content are new objects too."""
    return item | {"content": [dict(part) for part in item["content"]]} if "content" in item else dict(item)


def _frames(events: Sequence[Json]) -> bytes:
    return b"".join(sse(event, event["type"]) for event in events)


def lines(events: Sequence[Json]) -> bytes:
    """As a log has them: a line each."""
    return b"".join(orjson.dumps(event) + b"\n" for event in events)
