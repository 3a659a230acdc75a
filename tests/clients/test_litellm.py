"""LiteLLM's openai/ provider against a live server."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Literal

import pytest
from pydantic import BaseModel

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network for prices

litellm = pytest.importorskip("litellm", reason="litellm is not installed")

QUESTION = [{"role": "user", "content": "What does len do?"}]


class Visit(BaseModel):
    """A stay in a city."""

    city: Literal["Rome", "Oslo"]
    guide: bool


TOOLS = [{"type": "function", "function": {"name": "visit", "parameters": Visit.model_json_schema()}}]


@pytest.fixture(scope="module")
def at(url):
    """The options that lead a call to the server."""
    return {"model": "openai/tiny-pydoc", "api_base": f"{url}/v1", "api_key": "none", "num_retries": 0, "timeout": 120}


def test_chat_whole_and_streamed(at):
    fields = {"messages": QUESTION, "max_tokens": 24, "temperature": 0}
    whole = litellm.completion(**at, **fields)
    message = whole.choices[0].message
    assert (message.role, bool(message.content), message.tool_calls) == ("assistant", True, None)
    chunks = list(litellm.completion(**at, **fields, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == message.content
    built = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    assert built.choices[0].finish_reason == whole.choices[0].finish_reason
    assert built.usage.completion_tokens == whole.usage.completion_tokens
    again = asyncio.run(litellm.acompletion(**at, **fields))
    assert again.choices[0].message.content == message.content


def test_tools_whole_streamed_and_answered(at):
    fields = {
        "messages": QUESTION,
        "tools": TOOLS,
        "max_tokens": 200,
        "temperature": 0,
        "tool_choice": {"type": "function", "function": {"name": "visit"}},
    }
    whole = litellm.completion(**at, **fields).choices[0]
    (call,) = whole.message.tool_calls
    Visit.model_validate_json(call.function.arguments)
    built = litellm.stream_chunk_builder(list(litellm.completion(**at, **fields, stream=True))).choices[0]
    assert built.message.tool_calls[0].function.arguments == call.function.arguments
    assert (whole.finish_reason, built.finish_reason) == ("tool_calls", "tool_calls")
    # LiteLLM's own message objects go back as they are.
    turns = [*QUESTION, whole.message, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    ended = litellm.completion(**at, messages=turns, tools=TOOLS, tool_choice="none", max_tokens=4)
    assert ended.choices[0].message.content


def test_structured_output(at):
    fields = {"messages": QUESTION, "max_tokens": 200, "temperature": 0}
    content = litellm.completion(**at, **fields, response_format=Visit).choices[0].message.content
    Visit.model_validate_json(content)
    any_object = litellm.completion(**at, **fields, response_format={"type": "json_object"})
    assert isinstance(json.loads(any_object.choices[0].message.content), dict)


def test_reasoning_effort(at):
    """As LiteLLM's provider for servers like this one sends it; the one for OpenAI knows which models reason."""
    options = at | {"model": "hosted_vllm/tiny-pydoc"}
    for effort in ("low", "high"):
        answer = litellm.completion(**options, messages=QUESTION, max_tokens=8, reasoning_effort=effort)
        assert answer.choices[0].message.content
    answer = litellm.completion(
        **at, messages=QUESTION, max_tokens=8, reasoning_effort="low", allowed_openai_params=["reasoning_effort"]
    )
    assert answer.choices[0].message.content


def test_responses(at):
    fields = {"input": "What does len do?", "max_output_tokens": 24, "temperature": 0}
    whole = litellm.responses(**at, **fields)
    assert whole.status in ("completed", "incomplete")
    text = whole.output_text
    events = list(litellm.responses(**at, **fields, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == text != ""


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_anthropic_messages(at, url, provider):
    """Translated by LiteLLM, and sent as they are."""
    options = at | {"model": f"{provider}/tiny-pydoc"} | ({"api_base": url} if provider == "anthropic" else {})
    del options["num_retries"], options["timeout"]

    async def ask():
        answer = await litellm.anthropic_messages(**options, messages=QUESTION, max_tokens=24, temperature=0)
        stream = await litellm.anthropic_messages(
            **options, messages=QUESTION, max_tokens=24, temperature=0, stream=True
        )
        return answer, [event async for event in stream]

    answer, events = asyncio.run(ask())
    assert answer["content"][0]["text"]
    assert events


def test_text_completion(at):
    options = at | {"model": "text-completion-openai/tiny-pydoc"}
    fields = {"prompt": "The for statement", "max_tokens": 8, "temperature": 0}
    whole = litellm.text_completion(**options, **fields).choices[0].text
    assert whole == "".join(c.choices[0].text or "" for c in litellm.text_completion(**options, **fields, stream=True))
    assert whole


def test_errors_are_litellms(at):
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**at, messages=QUESTION, temperature=-1)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**at | {"model": "openai/other"}, messages=QUESTION)
