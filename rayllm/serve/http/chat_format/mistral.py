"""Calls of Mistral's models, which come after the text.

[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]       tokenizers up to version 7
[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{...}[TOOL_CALLS]...  version 11; later ones have no [CALL_ID]
"""

from __future__ import annotations

from rayllm.serve.http.chat_format.calls import NAME, SEPARATORS, CallForm, Calls, read_call_object, read_value
from rayllm.serve.http.chat_format.lark import Lark, Schemas, array_of, call_schema, literal, one_or_more
from rayllm.serve.http.chat_format.text_source import SPACE, Reading

OPEN, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def _read(calls: Calls) -> Reading[None]:
    source = calls.source
    calls.suspected = yield from source.take(OPEN)
    yield from source.take_all(SPACE)
    if (yield from source.take("[")):
        yield from _read_array(calls)
    elif (yield from source.at("{")):
        yield from read_call_object(calls)
    else:
        yield from _read_named(calls)


def _read_array(calls: Calls) -> Reading[None]:
    source, count = calls.source, calls.count
    while (yield from read_call_object(calls)):
        yield from source.take_all(SEPARATORS)
    if calls.count > count and (yield from source.take("]")):
        calls.settle()


def _read_named(calls: Calls) -> Reading[None]:
    source = calls.source
    name = yield from source.take_all(NAME)
    if (yield from source.take(CALL_ID)):
        yield from source.take_all(NAME)
    yield from source.take(ARGUMENTS)
    yield from source.take_all(SPACE)
    if (yield from source.at("{")) and calls.begin(name):
        yield from read_value(source, calls.add, OPEN)
        calls.settle()


def _grammar(lark: Lark, schemas: Schemas, single: bool) -> str:
    begin, arguments = lark.tag(OPEN), lark.tag(ARGUMENTS)
    before = f"({lark.tag(CALL_ID)} /[a-zA-Z0-9]{{9}}/)? {arguments}"
    call = call_schema(schemas, "arguments")
    array = array_of(call) | ({"maxItems": 1} if single else {})
    calls = [f"{literal(name)} {before} {lark.arguments(schema)}" for name, schema in schemas.items()]
    named = lark.rule(" | ".join(calls))
    return f'{begin} " "? {lark.json(array)} | {one_or_more(begin + " " + named, "", single)}'


MISTRAL = CallForm(openings=(OPEN,), tags=(OPEN, CALL_ID, ARGUMENTS), read=_read, grammar=_grammar)
