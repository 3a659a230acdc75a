"""Tool calls in a model's output, found while it is generated: text in; text, starts of calls and arguments out.

    hermes   <tool_call>{"name": "f", "arguments": {...}}</tool_call>, any number, anywhere in the text (Qwen, Hermes)
    llama3   {"name": "f", "parameters": {...}} at the start of the text or of a line, or after <|python_tag|>
    json     the whole text is one such object or an array of them, as `tool_choice` "required" or a named tool enforces

A call counts from the moment its name is that of an offered tool and its arguments begin; up to there, whatever does
not fit is text. Arguments are passed on as the model writes them, so if it breaks off or writes bad JSON in them, the
call has just that as its arguments. White space around calls is dropped.
"""

from __future__ import annotations

import re
import uuid
from abc import ABC, abstractmethod
from typing import Literal

import msgspec

from rayllm.serve.http.call_reader import CallReader
from rayllm.serve.http.text_source import ANYTHING, SPACE, Reading, TextSource

ToolFormat = Literal["hermes", "llama3", "json"]

TAGS = _OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_NOT_A_TAG = re.compile(r"[^<]+")
_WITHIN_A_LINE = re.compile(r"[^<\n]+")
_SEPARATORS = re.compile(r"[ \t\r\n;,]+")


class CallStart(msgspec.Struct, frozen=True):
    """A call of the tool `name` begins. index: 0, 1, ... within its message."""

    index: int
    call_id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """The next piece of the arguments' JSON text of call `index`."""

    index: int
    fragment: str


Event = str | CallStart | CallArguments


class ToolCallParser(ABC):
    """Parses one completion. names: the offered tools. single: what follows the first call is left out."""

    def __init__(self, names: frozenset[str], single: bool):
        self.names = names
        self._single = single
        self._source = TextSource()
        self._events: list[Event] = []
        self._calls = 0
        self._reading = self._read()
        next(self._reading)

    @property
    def num_calls(self) -> int:
        return self._calls

    def feed(self, text: str) -> list[Event]:
        """What a piece of text brings, in order; some is held back while it may become a call."""
        if text:
            self._source.put(text)
            next(self._reading, None)
        return self._taken()

    def finish(self) -> list[Event]:
        """What was held back, at the end of the text."""
        self._source.end()
        next(self._reading, None)
        return self._taken()

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    @abstractmethod
    def _read(self) -> Reading[None]:
        """The parser itself; ends with the text."""

    def _text(self, text: str) -> None:
        if not text:
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, str):
            self._events[-1] = last + text
        else:
            self._events.append(text)

    def _last_space(self, space: str) -> None:
        """White space at the end of the text: kept if it isn't what surrounds calls."""
        if not self._calls:
            self._text(space)

    def _skip_rest(self) -> Reading[None]:
        while (yield from self._source.take_run(ANYTHING)):
            self._source.taken.clear()

    def start(self, name: str) -> int:
        """Begin a call (see `CallSink`)."""
        index, self._calls = self._calls, self._calls + 1
        self._events.append(CallStart(index, f"call_{uuid.uuid4().hex[:24]}", name))
        return index

    def arguments(self, index: int, fragment: str) -> None:
        """Go on with a call's arguments (see `CallSink`)."""
        last = self._events[-1] if self._events else None
        if isinstance(last, CallArguments):
            self._events[-1] = CallArguments(index, last.fragment + fragment)
        elif fragment:
            self._events.append(CallArguments(index, fragment))

    def _read_call(self, close: str = "") -> Reading[bool]:
        """Read one call's object and emit its events; see `CallReader`."""
        return (yield from CallReader(self, self._source, close).read())


class _HermesParser(ToolCallParser):
    def _read(self) -> Reading[None]:
        source = self._source
        space = yield from source.take_all(SPACE)
        while True:
            if (yield from source.at(_OPEN)):
                source.taken.clear()
                yield from source.take(_OPEN)
                yield from source.take_all(SPACE)
                if (yield from self._read_call(_CLOSE)):
                    if self._single:
                        return (yield from self._skip_rest())
                    space = yield from source.take_all(SPACE)
                    if (yield from source.take(_CLOSE)):
                        space = yield from source.take_all(SPACE)
                    continue
                self._text(space + "".join(source.taken))
            elif not (yield from source.peek()):
                return self._last_space(space)
            else:
                run = (yield from source.take_run(_NOT_A_TAG)) or (yield from source.take_char())
                self._text(space + run)
            source.taken.clear()
            space = ""


class _Llama3Parser(ToolCallParser):
    def _read(self) -> Reading[None]:
        source = self._source
        space = yield from source.take_all(SPACE)
        at_start = True  # of the text, of a line, or right after a call
        while True:
            source.taken.clear()
            tagged = yield from source.take(_PYTHON_TAG)
            if tagged:
                yield from source.take_all(SPACE)
            char = yield from source.peek()
            if char == "{" and (at_start or tagged):
                if (yield from self._read_call()):
                    if self._single:
                        return (yield from self._skip_rest())
                    source.taken.clear()
                    space = yield from source.take_all(_SEPARATORS)
                    at_start = True
                    continue
            elif not char and not tagged:
                return self._last_space(space)
            elif not tagged:
                yield from source.take_run(_WITHIN_A_LINE)
                if not source.taken:
                    yield from source.take_char()
            text = "".join(source.taken)
            at_start = text.endswith("\n")
            self._text(space + text)
            space = ""


class _JsonParser(ToolCallParser):
    def _read(self) -> Reading[None]:
        source = self._source
        yield from source.take_all(SPACE)
        in_array = yield from source.take("[")
        while True:
            yield from source.take_all(SPACE)
            if not (yield from self._read_call()):
                self._text("".join(source.taken))
                break
            if self._single or not in_array:
                break
            yield from source.take_all(SPACE)
            source.taken.clear()
            if not (yield from source.take(",")):
                yield from source.take("]")
                break
        if self._single and self._calls:
            return (yield from self._skip_rest())
        space = yield from source.take_all(SPACE)
        if (yield from source.peek()):
            self._text(space)
        while run := (yield from source.take_run(ANYTHING)):
            source.taken.clear()
            self._text(run)


_PARSERS: dict[ToolFormat, type[ToolCallParser]] = {
    "hermes": _HermesParser,
    "llama3": _Llama3Parser,
    "json": _JsonParser,
}


def tool_call_parser(form: ToolFormat, names: frozenset[str], single: bool) -> ToolCallParser:
    """A parser for one completion."""
    return _PARSERS[form](names, single)
