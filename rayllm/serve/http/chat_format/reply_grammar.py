"""The grammar of a reply that must be tool calls, or an answer in a given form, or one of the two.

Calls that must be made are JSON (`json_calls.py`), which any model can write; those that may be made are in the form of
the model's family. If the model reasons, the reply may begin with that.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from rayllm.api.sampling_params import StructuredOutputs
from rayllm.serve.http.chat_format import harmony
from rayllm.serve.http.chat_format.families import CALL_FORMS, THINK_TAGS
from rayllm.serve.http.chat_format.form import ChatFormat
from rayllm.serve.http.chat_format.json_calls import calls_schema
from rayllm.serve.http.chat_format.lark import Lark, escaped, literal


def reply_grammar(
    form: ChatFormat, answer: StructuredOutputs | None, arguments_key: str, special_id: Callable[[str], int | None]
) -> StructuredOutputs:
    """What the reply must look like: calls of the form's tools if it has any, or the answer if that is given.

    arguments_key: see `calls_schema`. special_id: see `Lark`. Raises InvalidRequestError naming structured_outputs if
    it gets too long.
    """
    schema = calls_schema(form.schemas, form.single_call, arguments_key) if form.tools == "json" else None
    if form.reasoning is None and form.tools is None and answer is not None:
        return answer
    if form.reasoning is None and schema is not None:
        return StructuredOutputs(json=json.dumps(schema, ensure_ascii=False))
    lark = Lark(special_id)
    parts = [_rule(lark, answer)] if answer is not None else []
    if form.is_harmony:
        return StructuredOutputs(grammar=lark.source(harmony.grammar(lark, form.schemas, *parts)))
    if schema is not None:
        parts.append(lark.json(schema))
    elif form.tools is not None and (grammar := CALL_FORMS[form.tools].grammar) is not None:
        parts.append(lark.rule(grammar(lark, form.schemas, form.single_call)))
    return StructuredOutputs(grammar=lark.source(_reasoning(lark, form) + lark.rule(" | ".join(parts))))


def _reasoning(lark: Lark, form: ChatFormat) -> str:
    if form.reasoning is None:
        return ""
    tags = THINK_TAGS[form.reasoning]
    thought = f"{lark.through(tags.closing)} NL? NL?"
    opening = lark.tag(tags.opening, tags.label) if tags.label else lark.tag(tags.opening)
    return f"{thought} " if form.inside else f"({opening} {thought})? "


def _rule(lark: Lark, answer: StructuredOutputs) -> str:
    """The rule of an answer that is not a call."""
    if answer.regex is not None:
        return lark.rule(f"/{escaped(answer.regex)}/")
    if answer.choice is not None:
        return lark.rule(" | ".join(map(literal, answer.choice)))
    if answer.grammar is not None:
        return lark.rule(f"%lark {{\n{answer.grammar}\n}}")
    return lark.json({"type": "object"} if answer.json is None else json.loads(answer.json))
