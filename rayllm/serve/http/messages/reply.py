"""From the engine's outputs to Anthropic's message and its events.

The answer is a list of blocks: what the model thinks, text, uses of tools. In a stream each block begins, grows and
stops before the next one begins.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import orjson
from pydantic_core import from_json

from rayllm.api.types import CompletionOutput, RequestOutput
from rayllm.serve.http.chat_format import Piece
from rayllm.serve.http.convert import Job
from rayllm.serve.http.errors import ApiError
from rayllm.serve.http.messages.protocol import MessagesBody
from rayllm.serve.http.replies import ChatReader, Json, Reply, call_id, sse
from rayllm.serve.http.served import Target


class MessagesReply(Reply):
    """Answers POST /v1/messages. request_id: what errors in the stream name."""

    def __init__(self, body: MessagesBody, job: Job, target: Target, request_id: str):
        super().__init__(bool(body.stream), 1, job, target)
        self._request_id, self._id = request_id, target.reply_id
        self._reader = ChatReader(job.reply_format, self._token_text)
        self._shows_thinking = body.thinking is None or body.thinking.display != "omitted"
        asked, given = body.max_tokens, job.requests[0].params.max_tokens or 1
        self._at_limit = "max_tokens" if given >= asked else "model_context_window_exceeded"
        self._started = False  # whether something was sent
        self._open = ""  # what the block is made of that was begun last
        self._index = -1  # of that block
        self._stop: Json = {"stop_reason": None, "stop_sequence": None}

    def frames(self, prompt_index: int, output: RequestOutput) -> bytes:
        """The SSE frames of one output; may be empty."""
        return b"".join(
            _frame(event)
            for _, completion in self._completions(prompt_index, output)
            for event in self._events(completion)
        )

    def last_frames(self) -> bytes:
        """Why the message stopped, its usage, and the end mark."""
        last = {"type": "message_delta", "delta": self._stop, "usage": self._usage()}
        return _frame(last) + _frame({"type": "message_stop"})

    def error_frames(self, error: ApiError) -> bytes:
        """What ends a stream in which something failed."""
        return _frame(error.anthropic_body(self._request_id))

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        """The answer as one JSON object. outputs: the whole output of the one prompt."""
        content: list[Json] = []
        for _, completion in self._completions(0, outputs[0]):
            for piece in self._read(completion):
                if piece.kind == "arguments":
                    content[-1]["input"] = _input(piece.text)
                else:
                    content.append(self._block(piece, len(content), whole=True))
        return self._message(content)

    def _events(self, completion: CompletionOutput) -> Iterator[Json]:
        """What is new in the message."""
        pieces = self._read(completion)
        if not self._started:
            self._started = True
            start = self._message([]) | {"stop_reason": None, "stop_sequence": None}
            yield {"type": "message_start", "message": start}
            yield {"type": "ping"}
        for piece in pieces:
            if piece.kind not in ("arguments", self._open):  # a call is always another block
                yield from self._end_block()
                self._open, self._index = "" if piece.kind == "call" else piece.kind, self._index + 1
                block = self._block(piece, self._index, whole=False)
                yield {"type": "content_block_start", "index": self._index, "content_block": block}
            if piece.kind == "content":
                yield self._delta({"type": "text_delta", "text": piece.text})
            elif piece.kind == "arguments":
                yield self._delta({"type": "input_json_delta", "partial_json": piece.text})
            elif piece.kind == "reasoning_content" and self._shows_thinking:
                yield self._delta({"type": "thinking_delta", "thinking": piece.text})
        if completion.finish_reason is not None:
            yield from self._end_block()

    def _read(self, completion: CompletionOutput) -> list[Piece]:
        pieces, reason = self._reader.read(completion)
        if reason is not None:
            self._stop = self._why(reason, completion)
        return pieces

    def _why(self, reason: str, completion: CompletionOutput) -> Json:
        """The end of the message. reason: in OpenAI's words."""
        stop = completion.stop_reason if isinstance(completion.stop_reason, str) and reason == "stop" else None
        reasons = {"tool_calls": "tool_use", "length": self._at_limit}
        otherwise = "end_turn" if stop is None else "stop_sequence"
        return {"stop_reason": reasons.get(reason, otherwise), "stop_sequence": stop}

    def _block(self, piece: Piece, index: int, *, whole: bool) -> Json:
        """The block that a piece begins. whole: with its text, and what comes at the end of a block."""
        text = piece.text if whole else ""
        if piece.kind == "call":
            tool_id = f"toolu_{call_id(self._id, 0, piece.call).removeprefix('call_')}"
            return {"type": "tool_use", "id": tool_id, "name": piece.text, "input": {}}
        if piece.kind == "content":
            return {"type": "text", "text": text}
        thinking = text if self._shows_thinking else ""
        return {"type": "thinking", "thinking": thinking, "signature": self._signature(index) if whole else ""}

    def _end_block(self) -> Iterator[Json]:
        if self._index < 0:
            return
        if self._open == "reasoning_content":
            yield self._delta({"type": "signature_delta", "signature": self._signature(self._index)})
        yield {"type": "content_block_stop", "index": self._index}

    def _signature(self, index: int) -> str:
        """Clients keep it and send it back; some take a block without one for damaged. It is never checked."""
        return f"{self._id}_{index}"

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _message(self, content: list[Json]) -> Json:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._head["model"]}
        return {**head, "content": content, **self._stop, "usage": self._usage()}

    def _usage(self) -> Json:
        """Anthropic counts cached tokens apart from the others of the prompt."""
        cached = sum(self._cached_tokens)
        usage: Json = {
            "input_tokens": self._prompt_tokens - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": self._completion_tokens,
        }
        if self._reader.reasoning_tokens is not None:
            usage["output_tokens_details"] = {"thinking_tokens": self._reader.reasoning_tokens}
        return usage


def _frame(event: Json) -> bytes:
    return sse(event, event["type"])


def _input(arguments: str) -> orjson.Fragment | Json:
    """The object that arguments are, or as much as there is of it where the model broke off.

    What is no JSON is wrapped as Anthropic's documentation has it, so that the model can be told. Clients that read a
    stream get the text itself.
    """
    try:
        value = from_json(arguments, allow_inf_nan=False, allow_partial=True)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        return {"INVALID_JSON": arguments}
    return orjson.Fragment(json.dumps(value, ensure_ascii=False))  # which has integers of any size
