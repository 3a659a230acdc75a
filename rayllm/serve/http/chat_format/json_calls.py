"""Calls in the form that `tool_choice` "required" or a named tool enforces: one JSON object, or an array of them."""

from __future__ import annotations

from rayllm.serve.http.chat_format.calls import SEPARATORS, CallForm, Calls, read_call_object
from rayllm.serve.http.chat_format.text_source import SPACE, Reading


def _read(calls: Calls) -> Reading[None]:
    calls.suspected = True
    if (yield from calls.source.take("[")):
        yield from calls.source.take_all(SPACE)
    if (yield from read_call_object(calls)):
        yield from calls.source.take_all(SEPARATORS)
        if (yield from calls.source.take("]")):
            calls.settle()


JSON_CALLS = CallForm(openings=(), tags=(), read=_read, bare="[{", separators=SEPARATORS)
