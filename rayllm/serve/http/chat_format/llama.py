"""Calls of Llama 3 and 4, at the start of the text or of a line, after another call, or after a tag.

{"name": "f", "parameters": {...}}; {...}              Llama 3, after nothing or <|python_tag|>; Llama 4 too
[f(a=1, b="x"), g()]                                   Llama 4, between nothing or <|python_start|>, <|python_end|>
"""

from __future__ import annotations

import re

from rayllm.serve.http.chat_format.calls import SEPARATORS, CallForm, Calls, read_call_object
from rayllm.serve.http.chat_format.lark import Lark, Schemas, call_schema, one_or_more
from rayllm.serve.http.chat_format.python_literals import read_literal
from rayllm.serve.http.chat_format.text_source import SPACE, Reading

PYTHON_TAG = "<|python_tag|>"
PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"

_NAME = re.compile(r"[\w.-]+")  # of functions and keywords
_LINE = re.compile(r"[^\n]+")


def _read_llama3(calls: Calls) -> Reading[None]:
    tagged = yield from calls.source.take(PYTHON_TAG)
    calls.suspected = True
    yield from read_call_object(calls, tagged=tagged)


def _read_llama4(calls: Calls) -> Reading[None]:
    source = calls.source
    tagged = yield from source.take(PYTHON_START)
    calls.suspected = True
    yield from source.take_all(SPACE)
    before = calls.count
    if (yield from source.take("[")):
        yield from _read_list(calls, tagged)
    else:
        yield from read_call_object(calls, tagged=tagged)
    if calls.count > before and (yield from source.take(PYTHON_END, spaced=True)):
        calls.settle()


def _read_list(calls: Calls, tagged: bool) -> Reading[None]:
    """Read calls behind an opening bracket, in Python or JSON."""
    source, before = calls.source, calls.count
    yield from source.take_all(SPACE)
    is_json = yield from source.at("{")
    calls.suspected = tagged or is_json
    while (yield from read_call_object(calls, tagged=tagged) if is_json else _read_python(calls)):
        yield from source.take_all(SEPARATORS)
    if calls.count > before and (yield from source.take("]")):
        calls.settle()


def _read_python(calls: Calls) -> Reading[bool]:
    """Read `f(a=1, b="x")`; False with nothing emitted if that does not come next.

    What is no literal breaks the arguments off; the rest of its line belongs to the call.
    """
    source = calls.source
    name = yield from source.take_all(_NAME)
    calls.suspected = calls.suspected or any(offered.startswith(name) for offered in calls.offered)
    if name not in calls.offered or not (yield from source.take("(")):
        return False
    yield from source.take_all(SPACE)
    keyword = yield from source.take_all(_NAME)
    yield from source.take_all(SPACE)
    if not (yield from source.take("=" if keyword else ")")) or not calls.begin(name):
        return False
    start = "{"
    while keyword:
        calls.add(f'{start}"{keyword}": ')
        yield from source.take_all(SPACE)
        if not (yield from read_literal(source, calls.add)):
            yield from source.take_all(_LINE)
            break
        start = ", "
        if not (yield from source.take(",", spaced=True)):
            if (yield from source.take(")")):
                calls.add("}")
            else:
                yield from source.take_all(_LINE)
            break
        yield from source.take_all(SPACE)
        keyword = yield from source.take_all(_NAME)
        if keyword and not (yield from source.take("=", spaced=True)):
            yield from source.take_all(_LINE)
            break
        if not keyword and (yield from source.take(")")):  # a comma behind the last argument
            calls.add("}")
    else:
        if start == "{":
            calls.add("{}")
    calls.settle()
    return True


def _grammar(lark: Lark, schemas: Schemas, single: bool) -> str:
    """Calls in JSON without a tag, which both write."""
    return one_or_more(lark.json(call_schema(schemas, "parameters")), '"; "', single)


LLAMA3 = CallForm(openings=(PYTHON_TAG,), tags=(), read=_read_llama3, grammar=_grammar, bare="{", separators=SEPARATORS)
LLAMA4 = CallForm(
    openings=(PYTHON_START,),
    tags=(PYTHON_START, PYTHON_END),
    read=_read_llama4,
    grammar=_grammar,
    bare="[{",
    separators=SEPARATORS,
)
