"""Reasoning and tool calls of one completion, parsed together."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayllm.serve.http.chat_format import ChatTextParser, ReplyFormat
from rayllm.serve.http.tool_calls import CallArguments, CallStart

PARTS = [
    "<think>",
    "</think>",
    '<tool_call>{"name": "f", "arguments": {"a": "<think>"}}</tool_call>',
    "<tool_call>",
    "{}",
    '{"name": "f", "parameters": {',
    "}}",
    " ",
    "\n",
    "word",
    "<",
    "</",
    "[",
    "]",
]


def parse(form, pieces):
    """(reasoning, [text or (call, arguments)], whether there are calls) of a completion in pieces."""
    parser = ChatTextParser(form)
    reasoning, found = "", []
    for number, piece in enumerate(pieces, start=1):
        parsed = parser.feed(piece, finished=number == len(pieces))
        reasoning += parsed.reasoning
        for event in parsed.events:
            match event:
                case CallStart():
                    found.append((event.name, ""))
                case CallArguments():
                    found[-1] = (event.index, found[-1][1] + event.fragment)
                case _ if found and isinstance(found[-1], str):
                    found[-1] += event
                case _:
                    found.append(event)
    return reasoning, found, parser.has_calls


@settings(deadline=None)
@given(
    st.sampled_from([None, "hermes", "llama3", "json"]),
    st.lists(st.sampled_from(PARTS), max_size=10),
    st.lists(st.integers(0, 400), max_size=12),
    st.booleans(),
    st.booleans(),
)
def test_any_pieces_give_the_same(tools, parts, borders, thinks, inside):
    form = ReplyFormat(tools, frozenset({"f"}), thinks=thinks, inside=inside)
    text = "".join(parts)
    places = [0, *sorted(b % (len(text) + 1) for b in borders), len(text)]
    whole = parse(form, [text])
    assert parse(form, [text[a:b] for a, b in itertools.pairwise(places)]) == whole
    assert whole[2] == any(isinstance(found, tuple) for found in whole[1])


@pytest.mark.parametrize(
    ("form", "tags"),
    [
        (ReplyFormat(), set()),
        (ReplyFormat("hermes"), {"<tool_call>", "</tool_call>"}),
        (ReplyFormat("llama3", thinks=True), {"<think>", "</think>"}),
        (ReplyFormat("json"), set()),
    ],
)
def test_tags(form, tags):
    assert form.tags == tags
