"""Literals of Python in a text that arrives in pieces, made into JSON: what Llama 4 writes as arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from rayllm.serve.http.chat_format.text_source import SPACE, Reading, TextSource

MAX_DEPTH = 64

_SCALAR = re.compile(r"[\w.+-]+")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ONE = re.compile(r".", re.DOTALL)
_HEX = re.compile(r"[0-9a-fA-F]")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": "", "\\": "\\", "'": "'", '"': '"'}
_CODE_DIGITS = {"x": 2, "u": 4, "U": 8}
_ORDINARY = {quote: re.compile(rf"[^\\{quote}]+") for quote in ("'", '"')}


def read_literal(source: TextSource, emit: Callable[[str], object], depth: int = MAX_DEPTH) -> Reading[bool]:
    """Read a string, number, constant, list, tuple or dict, and emit it as JSON. False if it breaks off or is none.

    depth: how deep it may be nested.
    """
    for quote in ("'", '"'):
        if (yield from source.take(quote)):
            return (yield from _read_string(source, emit, quote))
    for opening, closing in (("[", "]"), ("(", ")"), ("{", "}")):
        if (yield from source.take(opening)):
            return depth > 0 and (yield from _read_items(source, emit, closing, depth - 1))
    scalar = yield from source.take_all(_SCALAR)
    if scalar in _CONSTANTS or _NUMBER.fullmatch(scalar):
        emit(_CONSTANTS.get(scalar, scalar))
        return True
    return False


def _read_items(source: TextSource, emit: Callable[[str], object], closing: str, depth: int) -> Reading[bool]:
    """Read what stands between two brackets, and the second of them."""
    emit("{" if closing == "}" else "[")
    separator = ""
    while not (yield from source.take(closing, spaced=True)):
        emit(separator)
        if closing == "}":
            if not (yield from source.at('"')) and not (yield from source.at("'")):
                return False
            if not (yield from read_literal(source, emit)) or not (yield from source.take(":", spaced=True)):
                return False
            emit(": ")
            yield from source.take_all(SPACE)
        if not (yield from read_literal(source, emit, depth)):
            return False
        if not (yield from source.take(",", spaced=True)) and not (yield from source.at(closing)):
            return False
        separator = ", "
    emit("}" if closing == "}" else "]")
    return True


def _read_string(source: TextSource, emit: Callable[[str], object], quote: str) -> Reading[bool]:
    """Read a string behind its opening quote."""
    emit('"')
    while not (yield from source.take(quote)):
        if run := (yield from source.take_run(_ORDINARY[quote])):
            emit(json.dumps(run, ensure_ascii=False)[1:-1])
        elif (yield from source.take("\\")):
            char = yield from source.take_run(_ONE)
            if not char:
                return False
            if char in _CODE_DIGITS:
                emit(json.dumps((yield from _read_code(source, char)), ensure_ascii=False)[1:-1])
            else:
                emit(json.dumps(_ESCAPES.get(char, "\\" + char), ensure_ascii=False)[1:-1])
        else:
            return False
    emit('"')
    return True


def _read_code(source: TextSource, kind: str) -> Reading[str]:
    r"""The character of \x41, \u0041 or \U00000041 behind its letter; U+FFFD for a code that has none."""
    digits = ""
    while len(digits) < _CODE_DIGITS[kind] and (digit := (yield from source.take_run(_HEX))):
        digits += digit
    code = int(digits or "0", 16)
    return chr(code) if digits and code < 0x110000 and not 0xD800 <= code < 0xE000 else "\N{REPLACEMENT CHARACTER}"
