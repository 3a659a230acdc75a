"""Calls of DeepSeek V3.2 in its markup language DSML, whose arguments are plain text or JSON, and say which:

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="f">
    <｜DSML｜parameter name="a" string="true">text</｜DSML｜parameter>
    <｜DSML｜parameter name="b" string="false">[1, 2]</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

V4 writes `tool_calls` for `function_calls`. The outer tags may be missing. What is not of this form ends the arguments,
and is left out up to the end of the call.
"""

from __future__ import annotations

import re

from rayllm.serve.http.chat_format.calls import NAME, CallForm, Calls
from rayllm.serve.http.chat_format.lark import Lark, Schemas, literal, one_or_more
from rayllm.serve.http.chat_format.text_source import Reading
from rayllm.serve.http.chat_format.typed_values import ArgumentsWriter, skip_before

DSML = "｜DSML｜"  # in all tags, and a token of its own
CALLS = ("function_calls>", "tool_calls>")
OPENINGS = tuple(f"<{DSML}{kind}" for kind in CALLS)
INVOKE, INVOKE_END = f'<{DSML}invoke name="', f"</{DSML}invoke>"
PARAMETER, PARAMETER_END = f'<{DSML}parameter name="', f"</{DSML}parameter>"
STRING = '" string="'

_KEY = re.compile(r'[^"\n]+')
_TYPES: dict[str, set[str]] = {"true": {"string"}, "false": set()}  # of an argument, by what its `string` says


def _read(calls: Calls) -> Reading[None]:
    source = calls.source
    calls.suspected = True
    closing = ""
    for opening in OPENINGS:
        if (yield from source.take(opening)):
            closing = opening.replace("<", "</")
            break
    while (yield from source.take(INVOKE, spaced=True)):
        name = yield from source.take_all(NAME)
        if not (yield from source.take('">')) or not calls.begin(name):
            return
        if not (yield from _read_arguments(ArgumentsWriter(calls, name), calls)):
            yield from skip_before(source, INVOKE_END)
        yield from source.take(INVOKE_END)
        calls.settle()
    if calls.count and closing and (yield from source.take(closing)):
        calls.settle()


def _read_arguments(arguments: ArgumentsWriter, calls: Calls) -> Reading[bool]:
    source = calls.source
    while (yield from source.take(PARAMETER, spaced=True)):
        key = yield from source.take_all(_KEY)
        types = None  # those of the schema, if it does not say it
        if (yield from source.take(STRING)):
            types = _TYPES.get((yield from source.take_all(NAME)))
        if not (yield from source.take('">')):
            return False
        if not (yield from arguments.read_value(key, PARAMETER_END, types=types)):
            return False
    ended = yield from source.at(INVOKE_END)
    if ended:
        arguments.end()
    return ended


def _grammar(lark: Lark, schemas: Schemas, single: bool) -> str:
    names, end_name = lark.rule(" | ".join(map(literal, schemas))), literal('">')
    text = f"""{literal('true">')} {lark.through("</", DSML, "parameter>")}"""
    value = f"""{literal('false">')} {lark.json({})} {lark.tag("</", DSML, "parameter>")}"""
    parameter = f"""{lark.tag("<", DSML, 'parameter name="')} /[^"\\n]+/ {literal(STRING)} ({text} | {value}) NL?"""
    invoke, end_invoke = lark.tag("<", DSML, 'invoke name="'), lark.tag("</", DSML, "invoke>")
    call = lark.rule(f"{invoke} {names} {end_name} NL? ({parameter})* {end_invoke}")
    several = one_or_more(call, "NL?", single)
    return lark.rule(
        " | ".join(f"{lark.tag('<', DSML, kind)} NL? {several} NL? {lark.tag('</', DSML, kind)}" for kind in CALLS)
    )


DEEPSEEK_DSML = CallForm(openings=(*OPENINGS, INVOKE), tags=(DSML,), read=_read, grammar=_grammar)
