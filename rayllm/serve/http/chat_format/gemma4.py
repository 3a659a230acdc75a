"""Calls of Gemma 4, whose arguments are an object with bare keys, and strings between tokens of their own:

    <|tool_call>call:f{a:<|"|>text<|"|>,b:[1,true,{c:null}]}<tool_call|>

They become JSON. Keys may be strings too, strings may be those of JSON, and what is neither a number nor a constant nor
between brackets is a string. What breaks off ends the arguments, and is left out up to the end of the call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from rayllm.serve.http.chat_format.calls import NAME, CallForm, Calls, read_value
from rayllm.serve.http.chat_format.lark import Lark, Schemas, literal, one_or_more
from rayllm.serve.http.chat_format.text_source import BEFORE_TAG, SPACE, Reading, TextSource
from rayllm.serve.http.chat_format.typed_values import as_json, skip_before

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
CALL = "call:"
MAX_DEPTH = 64

_KEY = re.compile(r"[^][{}:,<]+")
_BARE = re.compile(r"[^][{},<]+")
# In a grammar.
_BARE_KEY = r'/[^\[\]{}:,<"]+/'
_SCALAR = r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null/"

Emit = Callable[[str], object]


def _read(calls: Calls) -> Reading[None]:
    source = calls.source
    calls.suspected = yield from source.take(OPEN)
    if not (yield from source.take(CALL)):
        return
    name = yield from source.take_all(NAME)
    if not (yield from source.at("{")) or not calls.begin(name):
        return
    if not (yield from _read_value(source, calls.add)) or not (yield from source.at(CLOSE)):
        yield from skip_before(source, CLOSE)
    yield from source.take(CLOSE)
    calls.settle()


def _read_value(source: TextSource, emit: Emit, depth: int = MAX_DEPTH) -> Reading[bool]:
    """Read a value and emit it as JSON; False if it breaks off. depth: how deep it may be nested."""
    yield from source.take_all(SPACE)
    for opening, closing in (("[", "]"), ("{", "}")):
        if (yield from source.take(opening)):
            return depth > 0 and (yield from _read_items(source, emit, closing, depth - 1))
    if (yield from source.take(QUOTE)):
        return (yield from _read_quoted(source, emit))
    if (yield from source.at('"')):
        return (yield from read_value(source, emit))
    bare = (yield from source.take_all(_BARE)).strip()
    # The end of the text may have cut it off.
    if not bare or not ((yield from source.at(",")) or (yield from source.at("]")) or (yield from source.at("}"))):
        return False
    emit(as_json(bare, set()))
    return True


def _read_items(source: TextSource, emit: Emit, closing: str, depth: int) -> Reading[bool]:
    """Read what stands between two brackets, and the second of them."""
    emit("{" if closing == "}" else "[")
    separator = ""
    while not (yield from source.take(closing, spaced=True)):
        if closing == "}":
            key = yield from _read_key(source)
            if key is None or not (yield from source.take(":", spaced=True)):
                return False
            separator += f"{key}: "
        emit(separator)
        if not (yield from _read_value(source, emit, depth)):
            return False
        if not (yield from source.take(",", spaced=True)) and not (yield from source.at(closing)):
            return False
        separator = ", "
    emit("}" if closing == "}" else "]")
    return True


def _read_key(source: TextSource) -> Reading[str | None]:
    """Read an object's key: its JSON text; None if there is none."""
    pieces: list[str] = []
    if (yield from source.take(QUOTE)):
        return "".join(pieces) if (yield from _read_quoted(source, pieces.append)) else None
    if (yield from source.at('"')):
        return "".join(pieces) if (yield from read_value(source, pieces.append)) else None
    bare = (yield from source.take_all(_KEY)).strip()
    return json.dumps(bare, ensure_ascii=False) if bare else None


def _read_quoted(source: TextSource, emit: Emit) -> Reading[bool]:
    """Read a string behind its opening token."""
    emit('"')
    while run := (yield from source.take_before(QUOTE, BEFORE_TAG)):
        emit(json.dumps(run, ensure_ascii=False)[1:-1])
    if not (yield from source.take(QUOTE)):
        return False
    emit('"')
    return True


def _grammar(lark: Lark, schemas: Schemas, single: bool) -> str:
    names, quoted = lark.rule(" | ".join(map(literal, schemas))), f"{lark.tag(QUOTE)} {lark.through(QUOTE)}"

    def fields(value: str) -> str:
        field = f'{_BARE_KEY} ":" {value}'
        return f'"{{" ({field} ("," {field})*)? "}}"'

    value = lark.recursive(lambda value: f'{quoted} | {_SCALAR} | {fields(value)} | "[" ({value} ("," {value})*)? "]"')
    return one_or_more(f"{lark.tag(OPEN)} {literal(CALL)} {names} {fields(value)} {lark.tag(CLOSE)}", "NL?", single)


GEMMA4 = CallForm(openings=(OPEN,), tags=(OPEN, CLOSE, QUOTE), read=_read, grammar=_grammar)
