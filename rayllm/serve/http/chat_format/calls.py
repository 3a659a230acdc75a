"""What all families' readers of tool calls share: where calls go, and calls that are JSON objects."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Literal

import msgspec

from rayllm.serve.http.chat_format.lark import Lark, Schemas
from rayllm.serve.http.chat_format.text_source import SPACE, Reading, TextSource

Kind = Literal["content", "reasoning_content", "call", "arguments"]  # of a piece

NAME = re.compile(r"[a-zA-Z0-9_-]+")  # characters of tools' names
SEPARATORS = re.compile(r"[ \t\r\n;,]+")
_SCALAR = re.compile(r"[\w.+-]+")
_OPENING = re.compile(r'["{[]')
_BETWEEN_BRACKETS = re.compile(r'[^][{}"<]+|.', re.DOTALL)
_IN_STRING = re.compile(r'[^"\\]+|["\\]')
_KEYS_OF_CALLS = ("name", "arguments", "parameters", "type")


class Calls:
    """The calls found so far in one completion.

    source: its text. offered: the schemas of the tools that may be called, by their names. single: at most one call.
    emit: takes (kind, text, index of the call).
    """

    def __init__(self, source: TextSource, offered: Schemas, single: bool, emit: Callable[[Kind, str, int], None]):
        self.source = source
        self.offered = offered
        self.count = 0
        # What is being read is a call or nothing else: if the text is cut off in it, it is left out.
        self.suspected = False
        self._single = single
        self._emit = emit

    @property
    def is_full(self) -> bool:
        """Whether there may be no further call."""
        return self._single and self.count > 0

    def begin(self, name: str) -> bool:
        """Begin a call. False if there is no such tool, or there may be no further call."""
        if name not in self.offered or self.is_full:
            return False
        self._emit("call", name, self.count)
        self.count += 1
        return True

    def add(self, arguments: str) -> None:
        """More of the JSON text of the arguments of the call that was begun last."""
        self._emit("arguments", arguments, self.count - 1)

    def settle(self) -> None:
        """All that was taken belongs to calls, so it will not be text."""
        self.source.taken.clear()


class CallForm(msgspec.Struct, frozen=True):
    """How a family of models writes calls between its text.

    read: takes one call or several, from an opening on. What it has taken after it last called `Calls.settle` is text.
    grammar: the expression of calls of these tools, of one if the last argument is true; None for calls that are
    nothing but JSON, which have a schema.
    """

    openings: tuple[str, ...]  # what a call begins with, anywhere in the text
    tags: tuple[str, ...]  # all tags that must be in the text to be found
    read: Callable[[Calls], Reading[None]]
    bare: str = ""  # characters that begin a call at the start of the text or of a line, or right after another one
    separators: re.Pattern[str] = SPACE  # what may stand between calls
    grammar: Callable[[Lark, Schemas, bool], str] | None = None


class _Call(msgspec.Struct):
    """A call in JSON that is being read."""

    name: str | None = None
    has_begun: bool = False
    has_arguments: bool = False
    arguments: list[str] = []  # those that came before the name


def read_call_object(calls: Calls, closing: str = "", tagged: bool = True) -> Reading[bool]:
    """Read an object {"name": ..., "arguments" or "parameters": ...}, keys in any order, others skipped.

    closing: a tag that ends the call wherever it comes but in strings. tagged: the object can be nothing but a call.
    False, with nothing emitted, if it is no call, or breaks off before it is known as one.
    """
    source, call = calls.source, _Call()
    if not (yield from source.take("{", spaced=True)):
        return False
    while not (yield from source.take("}", spaced=True)):
        key = yield from read_string(source)
        if key is None or not (yield from source.take(":", spaced=True)):
            break
        if key not in _KEYS_OF_CALLS and not tagged:
            calls.suspected = False
        yield from source.take_all(SPACE)
        if not (yield from _read_member(calls, call, key, closing)):
            break
        if not (yield from source.take(",", spaced=True)) and not (yield from source.at("}")):
            break
    else:
        if call.name is not None and not call.has_arguments:
            _add(calls, call, "{}")  # a tool without parameters, called without arguments
    if call.has_begun:
        calls.settle()
    return call.has_begun


def _read_member(calls: Calls, call: _Call, key: str, closing: str) -> Reading[bool]:
    """Read one value; False if it broke off or cannot be part of a call."""
    source = calls.source
    if key == "name" and call.name is None:
        call.name = yield from read_string(source)
        if call.name not in calls.offered:
            return False
        if call.has_arguments:
            _add(calls, call, "")
            return call.has_begun
        return True
    if key not in ("arguments", "parameters") or call.has_arguments:
        return (yield from read_value(source, lambda _: None, closing))
    call.has_arguments = True
    if (yield from source.at("{")):
        return (yield from read_value(source, partial(_add, calls, call), closing))
    # Some models write the object's JSON into a string.
    text = "{}" if (yield from source.take("null")) else (yield from read_string(source))
    if text is None or not _is_object(text):
        return False
    _add(calls, call, text)
    return True


def _add(calls: Calls, call: _Call, text: str) -> None:
    """Pass arguments on, or keep them until the name is known."""
    call.arguments.append(text)
    if call.name is None:
        return
    if not call.has_begun:
        call.has_begun = calls.begin(call.name)
    if call.has_begun:
        calls.add("".join(call.arguments))
    call.arguments.clear()


def read_string(source: TextSource) -> Reading[str | None]:
    """Read a JSON string; its value. None if there is none, or it breaks off."""
    pieces: list[str] = []
    if not (yield from source.at('"')) or not (yield from read_value(source, pieces.append)):
        return None
    try:
        return json.loads("".join(pieces), strict=False)
    except ValueError:
        return None


def read_value(source: TextSource, emit: Callable[[str], object], closing: str = "") -> Reading[bool]:
    """Read a JSON value of any kind as it is written; False if it breaks off or there is none.

    closing: ends it even where brackets are open, but not inside strings.
    """
    depth, quoted, escaped = 0, False, False
    if scalar := (yield from source.take_all(_SCALAR)):
        emit(scalar)
        return True
    run = yield from source.take_run(_OPENING)
    while run:
        emit(run)
        if escaped:
            escaped = False
        elif run == '"':
            quoted = not quoted
        elif quoted:
            escaped = run == "\\"
        else:
            depth += (run in ("{", "[")) - (run in ("}", "]"))
        if depth == 0 and not quoted:
            return True
        if closing and not quoted and (yield from source.at(closing)):
            return False
        run = yield from source.take_run(_IN_STRING if quoted else _BETWEEN_BRACKETS)
    return False


def _is_object(text: str) -> bool:
    """Whether this is a JSON object that can be sent: text with lone surrogates cannot."""
    try:
        text.encode()
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
