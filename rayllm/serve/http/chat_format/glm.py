"""Calls of GLM 4.5 to 4.7, whose arguments are plain text between tags, with or without line breaks between these:

    <tool_call>f
    <arg_key>a</arg_key>
    <arg_value>text</arg_value>
    </tool_call>

What is not of this form ends the arguments, and is left out up to the end of the call.
"""

from __future__ import annotations

import re

from rayllm.serve.http.chat_format.calls import NAME, CallForm, Calls
from rayllm.serve.http.chat_format.lark import Lark, Schemas, literal, one_or_more
from rayllm.serve.http.chat_format.text_source import SPACE, Reading
from rayllm.serve.http.chat_format.typed_values import ArgumentsWriter, skip_before

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"

_KEY = re.compile(r"[^<]+")


def _read(calls: Calls) -> Reading[None]:
    source = calls.source
    calls.suspected = yield from source.take(OPEN)
    yield from source.take_all(SPACE)
    name = yield from source.take_all(NAME)
    yield from source.take_all(SPACE)
    is_call = (yield from source.at(KEY)) or (yield from source.at(CLOSE))
    if not is_call or not calls.begin(name):
        return
    arguments = ArgumentsWriter(calls, name)
    ended = yield from _read_arguments(arguments, calls)
    if ended:
        arguments.end()
    else:
        yield from skip_before(source, CLOSE)
    yield from source.take(CLOSE)
    calls.settle()


def _read_arguments(arguments: ArgumentsWriter, calls: Calls) -> Reading[bool]:
    source = calls.source
    while (yield from source.take(KEY, spaced=True)):
        key = yield from source.take_all(_KEY)
        if not (yield from source.take(KEY_END)) or not (yield from source.take(VALUE, spaced=True)):
            return False
        if not (yield from arguments.read_value(key.strip(), VALUE_END)):
            return False
    return (yield from source.at(CLOSE))


def _grammar(lark: Lark, schemas: Schemas, single: bool) -> str:
    names = lark.rule(" | ".join(map(literal, schemas)))
    pair = f"{lark.tag(KEY)} {lark.through(KEY_END)} NL? {lark.tag(VALUE)} {lark.through(VALUE_END)} NL?"
    call = f"{lark.tag(OPEN)} {names} NL? ({pair})* {lark.tag(CLOSE)}"
    return one_or_more(call, "NL?", single)


GLM = CallForm(openings=(OPEN,), tags=(OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END), read=_read, grammar=_grammar)
