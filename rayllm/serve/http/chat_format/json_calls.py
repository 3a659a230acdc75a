"""Calls in the form that `tool_choice` "required" or a named tool enforces: one JSON object, or an array of them."""

from __future__ import annotations

from typing import Any

from rayllm.serve.http.chat_format.calls import SEPARATORS, CallForm, Calls, read_call_object
from rayllm.serve.http.chat_format.lark import COMPACT, Schemas, array_of, call_schema
from rayllm.serve.http.chat_format.text_source import SPACE, Reading
from rayllm.text.json_schema import enforceable


def _read(calls: Calls) -> Reading[None]:
    calls.suspected = True
    if (yield from calls.source.take("[")):
        yield from calls.source.take_all(SPACE)
    if (yield from read_call_object(calls)):
        yield from calls.source.take_all(SEPARATORS)
        if (yield from calls.source.take("]")):
            calls.settle()


MAX_FORCED_CALLS = 16  # in one reply; a model that does not know how to end it would go on until max_tokens


def calls_schema(schemas: Schemas, single: bool, arguments_key: str) -> dict[str, Any]:
    """The JSON schema of one call (single) or of an array of 1 to MAX_FORCED_CALLS.

    arguments_key: "arguments" or "parameters", whichever the model is used to.
    """
    call = call_schema(schemas, arguments_key)
    return enforceable(call if single else array_of(call) | {"maxItems": MAX_FORCED_CALLS}, **COMPACT)


JSON_CALLS = CallForm(openings=(), tags=(), read=_read, bare="[{", separators=SEPARATORS)
