"""Calls of DeepSeek V3, R1 and V3.1, some of them between two outer tags. V3 and R1 name the kind of tool first:

    <｜tool▁call▁begin｜>function<｜tool▁sep｜>f
    ```json
    {"a": 1}
    ```<｜tool▁call▁end｜>

V3.1 leaves out the kind and the fence: `<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>`.
"""

from __future__ import annotations

import re

from rayllm.serve.http.chat_format.calls import NAME, CallForm, Calls, read_value
from rayllm.serve.http.chat_format.lark import Lark, Schemas, literal, one_or_more
from rayllm.serve.http.chat_format.text_source import SPACE, Reading

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
KIND, FENCE = "function", "```"

_LANGUAGE = re.compile(r"[a-z]+")


def _read(calls: Calls) -> Reading[None]:
    source = calls.source
    calls.suspected = True
    yield from source.take(CALLS)
    while (yield from source.take(CALL, spaced=True)):
        if not (yield from _read_one(calls)):
            return
    if calls.count and (yield from source.take(CALLS_END)):
        calls.settle()


def _read_one(calls: Calls) -> Reading[bool]:
    """Read a call behind its opening tag; False if it is none, or does not end as it should."""
    source = calls.source
    yield from source.take_all(SPACE)
    name = yield from source.take_all(NAME)
    if not (yield from source.take(SEPARATOR, spaced=True)):
        return False
    yield from source.take_all(SPACE)
    if name == KIND and not (yield from source.at("{")):
        name = yield from source.take_all(NAME)
        yield from source.take(FENCE, spaced=True)
        yield from source.take_all(_LANGUAGE)
        yield from source.take_all(SPACE)
    if not (yield from source.at("{")) or not calls.begin(name):
        return False
    yield from read_value(source, calls.add, CALL_END)
    calls.settle()
    if (yield from source.take(FENCE, spaced=True)):
        calls.settle()
    ended = yield from source.take(CALL_END, spaced=True)
    if ended:
        calls.settle()
    return ended


def _grammar(lark: Lark, schemas: Schemas, single: bool) -> str:
    begin, separator, end = lark.tag(CALL), lark.tag(SEPARATOR), lark.tag(CALL_END)
    calls = []
    for name, schema in schemas.items():
        arguments = lark.arguments(schema)
        fenced, closing = f"{name}\n{FENCE}json\n", literal(f"\n{FENCE}")
        calls.append(f"{begin} {literal(KIND)} {separator} {literal(fenced)} {arguments} {closing} {end}")
        calls.append(f"{begin} {literal(name)} {separator} {arguments} {end}")
    call = lark.rule(" | ".join(calls))
    return f"{lark.tag(CALLS)} {one_or_more(call, 'NL?', single)} {lark.tag(CALLS_END)}"


DEEPSEEK = CallForm(
    openings=(CALLS, CALL), tags=(CALLS, CALLS_END, CALL, CALL_END, SEPARATOR), read=_read, grammar=_grammar
)
