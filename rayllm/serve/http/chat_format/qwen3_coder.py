"""Calls of Qwen3-Coder, whose arguments are plain text between tags:

    <tool_call>
    <function=f>
    <parameter=a>
    text, on as many lines as it takes
    </parameter>
    </function>
    </tool_call>

The outer tags may be missing. What is not of this form ends the arguments, and is left out up to the end of the call.
"""

from __future__ import annotations

import re

from rayllm.serve.http.chat_format.calls import NAME, CallForm, Calls
from rayllm.serve.http.chat_format.lark import Lark, Schemas, literal, one_or_more
from rayllm.serve.http.chat_format.text_source import SPACE, Reading
from rayllm.serve.http.chat_format.typed_values import ArgumentsWriter, skip_before

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"

_KEY = re.compile(r"[^<>\n]+")


def _read(calls: Calls) -> Reading[None]:
    source = calls.source
    calls.suspected = True
    if (yield from source.take(OPEN)):
        yield from source.take_all(SPACE)
    if not (yield from source.take(FUNCTION)):
        return
    name = yield from source.take_all(NAME)
    if not (yield from source.take(">")) or not calls.begin(name):
        return
    if not (yield from _read_arguments(ArgumentsWriter(calls, name), calls)):
        yield from skip_before(source, CLOSE)
    calls.settle()
    if (yield from source.take(CLOSE, spaced=True)):
        calls.settle()


def _read_arguments(arguments: ArgumentsWriter, calls: Calls) -> Reading[bool]:
    source = calls.source
    while (yield from source.take(PARAMETER, spaced=True)):
        key = yield from source.take_all(_KEY)
        if not (yield from source.take(">")):
            return False
        if not (yield from arguments.read_value(key, PARAMETER_END, lines=True)):
            return False
    ended = yield from source.take(FUNCTION_END)
    if ended:
        arguments.end()
    return ended


def _grammar(lark: Lark, schemas: Schemas, single: bool) -> str:
    names = lark.rule(" | ".join(map(literal, schemas)))
    parameter = f"{literal(PARAMETER)} /[^<>\\n]+/ {literal('>')} {lark.through(PARAMETER_END)} NL?"
    function = f"{literal(FUNCTION)} {names} {literal('>')} NL? ({parameter})* {literal(FUNCTION_END)}"
    return one_or_more(f"{lark.tag(OPEN)} NL? {function} NL? {lark.tag(CLOSE)}", "NL?", single)


QWEN3_CODER = CallForm(openings=(OPEN, FUNCTION), tags=(OPEN, CLOSE), read=_read, grammar=_grammar)
