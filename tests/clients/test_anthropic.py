"""anthropic, the client of Anthropic's API, against a live server."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest

anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")
pydantic = pytest.importorskip("pydantic", reason="pydantic is not installed")

MODEL = "tiny-pydoc"
QUESTION = [{"role": "user", "content": "What does len do?"}]
FIELDS = {"model": MODEL, "messages": QUESTION, "max_tokens": 16}
GREEDY = {"temperature": 0}  # newer clients have no argument of that name
PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"name": "travel", "description": "Go there.", "input_schema": PLACE},
    {"name": "rest", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}},
]


class Visit(pydantic.BaseModel):
    """A stay in a city."""

    city: Literal["Rome", "Oslo"]
    guide: bool


@pytest.fixture(scope="module")
def client(url):
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_text_whole_and_streamed(client):
    whole = client.messages.create(**FIELDS, extra_body=GREEDY)
    with client.messages.stream(**FIELDS, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    (block,) = whole.content
    assert block.type == "text"
    assert block.text == text == final.content[0].text != ""
    assert (whole.role, whole.model, whole.stop_reason) == ("assistant", MODEL, final.stop_reason)
    assert whole.usage.output_tokens == final.usage.output_tokens <= 16
    totals = [each.usage.input_tokens + each.usage.cache_read_input_tokens for each in (whole, final)]
    count = client.messages.count_tokens(model=MODEL, messages=QUESTION)
    assert totals == [count.input_tokens] * 2


def test_events(client):
    kinds = [event.type for event in client.messages.create(**FIELDS, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]  # the client keeps pings to itself
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


def test_a_system_prompt_in_blocks_and_a_stop_sequence(client):
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    text = client.messages.create(**FIELDS, system=system, extra_body=GREEDY).content[0].text
    stop = text[len(text) // 2 :][:3]
    cut = client.messages.create(**FIELDS, system=system, stop_sequences=["never there", stop], extra_body=GREEDY)
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert "".join(block.text for block in cut.content) == text[: text.index(stop)]


def test_enforced_tools_whole_streamed_and_answered(client):
    choice = {"type": "tool", "name": "travel"}
    fields = FIELDS | {"tools": TOOLS, "tool_choice": choice, "max_tokens": 200}
    whole = client.messages.create(**fields, extra_body=GREEDY)
    with client.messages.stream(**fields, extra_body=GREEDY) as stream:
        final = stream.get_final_message()
    (use,), (streamed,) = whole.content, final.content
    assert whole.stop_reason == final.stop_reason == "tool_use"
    assert (use.type, use.name, use.input) == ("tool_use", "travel", streamed.input)
    assert use.input.keys() == {"city", "days"} and use.input["city"] in ("Rome", "Oslo")
    for message in (whole, final):
        result = {"type": "tool_result", "tool_use_id": message.content[0].id, "content": "no trains", "is_error": True}
        turns = [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
        ended = client.messages.create(**FIELDS | {"messages": QUESTION + turns}, tools=TOOLS)
        assert ended.content
    anything = client.messages.create(**fields | {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}})
    (use,) = anything.content
    assert use.name in ("travel", "rest")


def test_structured_output(client):
    fields = FIELDS | {"max_tokens": 200}
    parsed = client.messages.parse(**fields, output_format=Visit, extra_body=GREEDY).parsed_output
    assert isinstance(parsed, Visit)
    with client.messages.stream(**fields, output_format=Visit, extra_body=GREEDY) as stream:
        assert stream.get_final_message().parsed_output == parsed


def test_errors(client):
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(**FIELDS | {"model": "claude"})
    assert (caught.value.type, bool(caught.value.request_id)) == ("not_found_error", True)
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.content\.0: content of type 'image'"):
        client.messages.create(**FIELDS | {"messages": [{"role": "user", "content": [image]}]})
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(**FIELDS | {"messages": [{"role": "user", "content": "word " * 5000}]})
    with pytest.raises(anthropic.BadRequestError, match="tools of type 'web_search_20250305' are Anthropic's own"):
        client.messages.create(**FIELDS, tools=[{"type": "web_search_20250305", "name": "web_search"}])


def test_more_tokens_than_the_context_has(client):
    message = client.messages.create(**FIELDS | {"max_tokens": 10**6}, extra_body={"stop_sequences": ["e"]})
    assert message.stop_reason in ("stop_sequence", "end_turn", "model_context_window_exceeded")


def test_an_early_end_of_a_stream_leaves_the_client_usable(client):
    with client.messages.stream(**FIELDS | {"max_tokens": 1000}) as stream:
        next(iter(stream))
    assert client.messages.create(**FIELDS | {"max_tokens": 1}).stop_reason == "max_tokens"


def test_many_at_once(url):
    async def ask_all():
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", timeout=120) as client:

            async def ask(i):
                turn = {"role": "user", "content": f"Item {i % 8}"}
                fields = FIELDS | {"messages": [turn], "max_tokens": 8}
                return (await client.messages.create(**fields, extra_body=GREEDY)).content[0].text

            return await asyncio.gather(*map(ask, range(32)))

    texts = asyncio.run(ask_all())
    assert all(text == texts[i % 8] for i, text in enumerate(texts))
