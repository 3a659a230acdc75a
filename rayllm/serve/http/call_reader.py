"""Reads one tool call, a JSON object, out of a `TextSource`, and passes its arguments on while they come."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Protocol

from rayllm.serve.http.text_source import SPACE, Reading, TextSource

_IN_STRING = re.compile(r'[^"\\]+')
_BETWEEN_BRACKETS = re.compile(r'[^][{}"<]+')
_SCALAR = re.compile(r"[\w.+-]+")


class CallSink(Protocol):
    """Where calls go. names: of the tools that may be called."""

    names: frozenset[str]

    def start(self, name: str) -> int:
        """A call of this tool begins; its index."""
        ...

    def arguments(self, index: int, fragment: str) -> None:
        """The next piece of its arguments, which may be empty."""
        ...


class CallReader:
    """Reads one object {"name": ..., "arguments" or "parameters": ...}, keys in any order, others skipped.

    close: text that ends the call even where the object has not ended, except inside strings.
    """

    def __init__(self, sink: CallSink, source: TextSource, close: str):
        self._sink = sink
        self._source = source
        self._close = close
        self._name: str | None = None
        self._index: int | None = None  # of the call, once it has started
        self._seen = False  # the arguments' key
        self._buffered: list[str] = []  # arguments that came before the name

    def read(self) -> Reading[bool]:
        """Read the object. False, with nothing passed on, if it is no call, or breaks off before it is known as one."""
        source = self._source
        if not (yield from source.take("{")):
            return False
        first = True
        while True:
            yield from source.take_all(SPACE)
            if (yield from source.take("}")):
                break
            if not first:
                if not (yield from source.take(",")):
                    return self._index is not None
                yield from source.take_all(SPACE)
            key = yield from self._string()
            yield from source.take_all(SPACE)
            if key is None or not (yield from source.take(":")):
                return self._index is not None
            yield from source.take_all(SPACE)
            if not (yield from self._member(key)):
                return self._index is not None
            first = False
        if self._index is None and self._name is not None and not self._seen:
            self._begin("{}")  # a tool without parameters, called without arguments
        return self._index is not None

    def _member(self, key: str) -> Reading[bool]:
        """Read one value; False if it broke off or can't be part of a call."""
        if key == "name" and self._name is None:
            name = yield from self._string()
            if name is None or name not in self._sink.names:
                return False
            self._name = name
            if self._seen:
                self._begin("".join(self._buffered))
            return True
        if key in ("arguments", "parameters") and not self._seen:
            return (yield from self._argument_value())
        return (yield from self._value(lambda _: None))

    def _argument_value(self) -> Reading[bool]:
        self._seen = True
        char = yield from self._source.peek()
        if char == "{":
            if self._name is not None:
                self._begin("")
            return (yield from self._value(self._argument_text))
        if char == '"':  # some models write the object's JSON into a string
            inner = yield from self._string()
            text = inner if inner is not None and _is_object(inner) else None
        else:
            text = "{}" if (yield from self._source.take("null")) else None
        if text is None:
            return False
        if self._name is not None:
            self._begin(text)
        else:
            self._buffered.append(text)
        return True

    def _begin(self, arguments: str) -> None:
        assert self._name is not None
        self._index = self._sink.start(self._name)
        self._sink.arguments(self._index, arguments)

    def _argument_text(self, text: str) -> None:
        if self._index is None:
            self._buffered.append(text)
        else:
            self._sink.arguments(self._index, text)
            self._source.taken.clear()  # it is no text any more, whatever follows

    def _string(self) -> Reading[str | None]:
        """Read a string; its value. None if there is none, or it breaks off."""
        pieces: list[str] = []
        if (yield from self._source.peek()) != '"' or not (yield from self._raw_string(pieces.append)):
            return None
        try:
            return json.loads("".join(pieces), strict=False)
        except ValueError:
            return None

    def _raw_string(self, emit: Callable[[str], object]) -> Reading[bool]:
        emit((yield from self._source.take_char()))
        while True:
            run = yield from self._source.take_run(_IN_STRING)
            char = run or (yield from self._source.take_char())
            if not char:
                return False
            emit(char)
            if char == '"':
                return True
            if char == "\\":
                emit((yield from self._source.take_char()))

    def _value(self, emit: Callable[[str], object]) -> Reading[bool]:
        """Read a value of any kind, passing on its text; False if it breaks off or there is none."""
        char = yield from self._source.peek()
        if char == '"':
            return (yield from self._raw_string(emit))
        if char not in ("{", "["):
            scalar = yield from self._source.take_all(_SCALAR)
            emit(scalar)
            return bool(scalar)
        depth = 0
        while True:
            if run := (yield from self._source.take_run(_BETWEEN_BRACKETS)):
                emit(run)
                continue
            char = yield from self._source.peek()
            if char == '"':
                if not (yield from self._raw_string(emit)):
                    return False
                continue
            if not char or (self._close and (yield from self._source.at(self._close))):
                return False
            emit((yield from self._source.take_char()))
            depth += (char in "{[") - (char in "}]")
            if depth == 0:
                return True


def _is_object(text: str) -> bool:
    """Whether this is a JSON object that can be sent: text with lone surrogates cannot."""
    try:
        text.encode()
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
