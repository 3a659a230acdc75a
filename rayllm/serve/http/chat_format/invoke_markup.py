"""Calls in markup of nested tags, whose arguments are plain text or JSON:

    <function_calls>
    <invoke name="f">
    <parameter name="a">text</parameter>
    <parameter name="b">[1, 2]</parameter>
    </invoke>
    </function_calls>

A parameter may say which of the two its value is, by a second attribute, string="true" or string="false"; the schema
tells otherwise. The outer tags may be missing. What is not of this form ends the arguments, and is left out up to the
end of the call.
"""

from __future__ import annotations

import re
from functools import partial
from typing import NamedTuple

from rayllm.serve.http.chat_format.calls import NAME, CallForm, Calls
from rayllm.serve.http.chat_format.lark import Lark, Schemas, literal, one_or_more
from rayllm.serve.http.chat_format.text_source import Reading
from rayllm.serve.http.chat_format.typed_values import ArgumentsWriter, skip_before

STRING = '" string="'

_KEY = re.compile(r'[^"\n]+')
_TYPES: dict[str, set[str]] = {"true": {"string"}, "false": set()}  # of an argument, by what its `string` says


class Markup(NamedTuple):
    """A family's tags.

    outer: the names of the tags around calls. mark: begins the name of each tag, and is a token of its own; empty for
    none. says_types: parameters have the attribute `string`.
    """

    outer: tuple[str, ...]
    mark: str = ""
    says_types: bool = False

    def parts(self, name: str, *, closes: bool = False) -> tuple[str, ...]:
        """The tag of a name, in parts that may each be a token."""
        slash = "</" if closes else "<"
        return (slash, self.mark, name) if self.mark else (slash + name,)

    def tag(self, name: str, *, closes: bool = False) -> str:
        """The tag as it is written."""
        return "".join(self.parts(name, closes=closes))


def invoke_form(markup: Markup) -> CallForm:
    """Calls with these tags."""
    openings = tuple(markup.tag(f"{name}>") for name in markup.outer)
    closings = tuple(markup.tag(f"{name}>", closes=True) for name in markup.outer)
    return CallForm(
        openings=(*openings, markup.tag('invoke name="')),
        tags=(markup.mark,) if markup.mark else (*openings, *closings),
        read=partial(_read, markup),
        grammar=partial(_grammar, markup),
    )


def _read(markup: Markup, calls: Calls) -> Reading[None]:
    source, invoke_end = calls.source, markup.tag("invoke>", closes=True)
    calls.suspected = True
    closing = ""
    for name in markup.outer:
        if (yield from source.take(markup.tag(f"{name}>"))):
            closing = markup.tag(f"{name}>", closes=True)
            break
    while (yield from source.take(markup.tag('invoke name="'), spaced=True)):
        name = yield from source.take_all(NAME)
        if not (yield from source.take('">')) or not calls.begin(name):
            return
        if not (yield from _read_arguments(markup, ArgumentsWriter(calls, name), calls)):
            yield from skip_before(source, invoke_end)
        yield from source.take(invoke_end)
        calls.settle()
    if calls.count and closing and (yield from source.take(closing)):
        calls.settle()


def _read_arguments(markup: Markup, arguments: ArgumentsWriter, calls: Calls) -> Reading[bool]:
    source, parameter_end = calls.source, markup.tag("parameter>", closes=True)
    while (yield from source.take(markup.tag('parameter name="'), spaced=True)):
        key = yield from source.take_all(_KEY)
        types = None  # those of the schema, if it does not say it
        if (yield from source.take(STRING)):
            types = _TYPES.get((yield from source.take_all(NAME)))
        if not (yield from source.take('">')):
            return False
        if not (yield from arguments.read_value(key, parameter_end, types=types)):
            return False
    ended = yield from source.at(markup.tag("invoke>", closes=True))
    if ended:
        arguments.end()
    return ended


def _grammar(markup: Markup, lark: Lark, schemas: Schemas, single: bool) -> str:
    names, end_name = lark.rule(" | ".join(map(literal, schemas))), literal('">')
    text = lark.through(*markup.parts("parameter>", closes=True))
    if markup.says_types:
        json = f"{lark.json({})} {lark.tag(*markup.parts('parameter>', closes=True))}"
        true, false = literal('true">'), literal('false">')
        value = f"{literal(STRING)} ({true} {text} | {false} {json})"
    else:
        value = f"{end_name} {text}"
    parameter = f"""{lark.tag(*markup.parts('parameter name="'))} /[^"\\n]+/ {value} NL?"""
    invoke, end_invoke = lark.tag(*markup.parts('invoke name="')), lark.tag(*markup.parts("invoke>", closes=True))
    call = lark.rule(f"{invoke} {names} {end_name} NL? ({parameter})* {end_invoke}")
    several = one_or_more(call, "NL?", single)
    around = [
        (lark.tag(*markup.parts(f"{name}>")), lark.tag(*markup.parts(f"{name}>", closes=True))) for name in markup.outer
    ]
    return lark.rule(" | ".join(f"{opening} NL? {several} NL? {closing}" for opening, closing in around))
