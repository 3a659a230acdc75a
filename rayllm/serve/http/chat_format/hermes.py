"""Calls of Hermes and Qwen: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, anywhere in the text."""

from __future__ import annotations

from rayllm.serve.http.chat_format.calls import CallForm, Calls, read_call_object
from rayllm.serve.http.chat_format.lark import Lark, Schemas, call_schema, one_or_more
from rayllm.serve.http.chat_format.text_source import Reading

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def _read(calls: Calls) -> Reading[None]:
    calls.suspected = yield from calls.source.take(OPEN)
    if (yield from read_call_object(calls, CLOSE)) and (yield from calls.source.take(CLOSE, spaced=True)):
        calls.settle()


def _grammar(lark: Lark, schemas: Schemas, single: bool) -> str:
    call = f"{lark.tag(OPEN)} NL? {lark.json(call_schema(schemas, 'arguments'))} NL? {lark.tag(CLOSE)}"
    return one_or_more(call, "NL?", single)


HERMES = CallForm(openings=(OPEN,), tags=(OPEN, CLOSE), read=_read, grammar=_grammar)
