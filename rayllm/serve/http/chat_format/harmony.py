"""What gpt-oss writes: messages in the form of openai-harmony, each for a channel.

    <|channel|>analysis<|message|>reasoning<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>
    <|start|>assistant<|channel|>final<|message|>answer

`to=` may stand before the channel too. Text of the channel commentary that goes to no tool is part of the answer. A
message to a tool that is not offered is text, as it is written; on the channel analysis it is reasoning.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from rayllm.serve.http.chat_format.calls import Calls, Kind
from rayllm.serve.http.chat_format.lark import Lark, Schemas, literal
from rayllm.serve.http.chat_format.text_source import ANYTHING, BEFORE_TAG, Reading

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
TAGS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)

_NEXT = (END, CALL, RETURN, START, CHANNEL)  # what ends a message
_WORDS = re.compile(r"[^<]+")
_RECIPIENT = re.compile(r"\bto=(\S+)")
_TOOLS = "functions."


class Harmony:
    """Reads messages.

    reasons: whether the channel analysis is reasoning, and not part of the answer. emit: takes (kind, text).
    """

    def __init__(self, calls: Calls, reasons: bool, emit: Callable[[Kind, str], None]):
        self._calls = calls
        self._reasons = reasons
        self._emit = emit
        self._separators = {"content": "", "reasoning_content": ""}  # before the next message of this kind
        self.in_reasoning: bool | None = None  # None in a header

    def read(self, is_cut: Callable[[], bool]) -> Reading[None]:
        """All of the text. is_cut: whether it ended before the model had ended it."""
        source, calls = self._calls.source, self._calls
        first = True
        while not calls.is_full:
            source.taken.clear()
            source.starved = False
            self.in_reasoning = None
            channel, recipient = yield from self._header(first)
            first = False
            if channel is None and source.starved and (source.taken or is_cut()):
                return  # the text ended in a header
            if not source.taken and not (yield from source.take_run(BEFORE_TAG)):
                return
            yield from self._message(channel, recipient)
        yield from source.take_all(ANYTHING)

    def _header(self, first: bool) -> Reading[tuple[str | None, str]]:
        """Read up to a message's text: (channel, recipient); None for the channel if what comes is no header.

        first: the prompt may have begun it.
        """
        source = self._calls.source
        role = ""
        if (yield from source.take(START)) or (first and (yield from source.at(" to="))):
            role = yield from source.take_all(_WORDS)
        if not (yield from source.take(CHANNEL)):
            return None, ""
        channel = yield from source.take_all(_WORDS)
        if (yield from source.take(CONSTRAIN)):
            yield from source.take_all(_WORDS)
        if not (yield from source.take(MESSAGE)):
            return None, ""
        recipient = _RECIPIENT.search(f"{role} {channel}")
        return channel.partition(" ")[0], recipient.group(1) if recipient else ""

    def _message(self, channel: str | None, recipient: str) -> Reading[None]:
        """Read the text of a message, and its end."""
        source, calls = self._calls.source, self._calls
        self.in_reasoning = self._reasons and channel == "analysis"
        kind: Kind = "content"
        if recipient.startswith(_TOOLS) and calls.begin(recipient.removeprefix(_TOOLS)):
            kind = "arguments"
            self.in_reasoning = False
        elif self.in_reasoning:
            kind = "reasoning_content"
        elif channel is None or recipient:
            self._emit(kind, self._separators[kind] + "".join(source.taken))
            self._separators[kind] = ""
        is_empty = True
        while run := (yield from self._run()):
            if kind == "arguments":
                calls.add(run)
            else:
                self._emit(kind, self._separators[kind] + run)
                self._separators[kind] = ""
            is_empty = False
        source.taken.clear()
        for tag in (END, CALL, RETURN):
            if (yield from source.take(tag)):
                if kind == "arguments" and is_empty:
                    calls.add("{}")
                elif kind != "arguments" and channel is not None:
                    if recipient and kind == "content":
                        self._emit(kind, tag)
                    elif not is_empty:
                        self._separators[kind] = "\n"
                return

    def _run(self) -> Reading[str]:
        """Take a run of a message's text; "" at its end."""
        for tag in _NEXT:
            if (yield from self._calls.source.at(tag)):
                return ""
        return (yield from self._calls.source.take_run(BEFORE_TAG))


def grammar(lark: Lark, schemas: Schemas, answer: str | None = None) -> str:
    """The expression of a reply: messages of reasoning, then a call of one of these tools, or an answer by its rule."""
    channel, constrain, message = lark.tag(CHANNEL), lark.tag(CONSTRAIN), lark.tag(MESSAGE)
    analysis = f'{channel} "analysis" {message} {lark.through(END)} {lark.tag(START)} "assistant"'
    kind = f'(" "? {constrain}? "json")?'
    parts = []
    for name, schema in schemas.items():
        header = f"{channel} {literal(f'commentary to={_TOOLS}{name}')} {kind} {message}"
        parts.append(f"{header} {lark.arguments(schema)}")
    if answer is not None:
        parts.append(f'{channel} "final" {kind} {message} {answer}')
    return f"({lark.rule(analysis)})* {lark.rule(' | '.join(parts))}"
