"""The conversations with tools that the bundled model is trained on."""

import itertools
import json
import sys
from pathlib import Path

import jsonschema
import pytest

from rayllm.config.options import BUNDLED_MODEL
from rayllm.serve.http.protocol import ChatBody
from rayllm.text.tokenizer import load_tokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import tiny_tools  # found by the line above
from tiny_entries import Entry

ENTRIES = [
    Entry(f"{module}.{name}", kind, f"{module}.{name}()", f"Return the {name} of what {module} knows.\n\nMore.", module)
    for module in ("json", "os.path", "heapq", "zlib", "this_is_private._x")
    for kind, name in [("function", "dump"), ("class", "Part"), ("function", "join"), ("module", "tool")]
] + [Entry("the with statement", "topic", "The with statement", "The with statement wraps a block.", "topic with")]


@pytest.fixture(scope="module")
def conversations():
    return list(itertools.islice(tiny_tools.conversations(ENTRIES, 0), 500))


def calls_of(message):
    return [call["function"] for call in message.get("tool_calls", [])]


def test_they_are_the_same_each_time(conversations):
    assert conversations[:20] == list(itertools.islice(tiny_tools.conversations(ENTRIES, 0), 20))
    assert conversations[:20] != list(itertools.islice(tiny_tools.conversations(ENTRIES, 1), 20))


def test_every_learned_call_fits_an_offered_tool(conversations):
    number = 0
    for conversation in conversations:
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in conversation.tools}
        assert len(schemas) == len(conversation.tools) >= 1
        turns = [message for message in conversation.messages if message["role"] == "assistant"]
        for call in itertools.chain.from_iterable(map(calls_of, turns[conversation.skipped :])):
            jsonschema.validate(call["arguments"], schemas[call["name"]])
            number += 1
    assert number > 500


def test_the_server_takes_them_and_the_template_shows_them(conversations):
    tokenizer = load_tokenizer(BUNDLED_MODEL)
    for conversation in conversations[:100]:
        wire = json.loads(json.dumps(conversation.messages))
        for call in itertools.chain.from_iterable(map(calls_of, wire)):
            call["arguments"] = json.dumps(call["arguments"])
        body = ChatBody.model_validate({"messages": wire, "tools": conversation.tools})
        text = tokenizer.apply_chat_template(
            [message.for_template() for message in body.messages],
            add_generation_prompt=False,
            tools=[tool.for_template() for tool in body.tools],
        )
        assert text.count("<tool_call>") == sum(len(calls_of(message)) for message in wire)
        assert text == tokenizer.apply_chat_template(
            conversation.messages, add_generation_prompt=False, tools=conversation.tools
        )


def test_an_answer_repeats_what_the_tool_said(conversations):
    for conversation in conversations:
        for before, message in itertools.pairwise(conversation.messages):
            if before["role"] == "tool" and message["role"] == "assistant" and not message.get("tool_calls"):
                words = " ".join(before["content"].split())
                said = message["content"].partition(" says: ")[2]
                assert (
                    said[-20:] in words
                    or json.dumps(said[-20:])[1:-1] in words
                    or "no documentation" in message["content"]
                )


def test_held_out_names_are_not_looked_up_in_training(conversations):
    calls = [call for each in conversations for message in each.messages for call in calls_of(message)]
    looked_up = {name for call in calls for name in call["arguments"].values()}
    asked = tiny_tools.held_out_exchanges(ENTRIES, 30, 0)
    held_out = {name for _, exchange in asked for _, arguments in exchange.calls for name in arguments.values()}
    assert "os.path.tool" in held_out - looked_up
    assert "json.dump" in looked_up - held_out
