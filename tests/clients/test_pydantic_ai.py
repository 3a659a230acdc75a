"""pydantic-ai's models for OpenAI's chats and responses and Anthropic's messages against a live server."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest

pydantic_ai = pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed")

from pydantic import BaseModel  # noqa: E402
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, ToolOutput, UnexpectedModelBehavior  # noqa: E402
from pydantic_ai.messages import ToolReturnPart  # noqa: E402
from pydantic_ai.models.anthropic import AnthropicModel  # noqa: E402
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel  # noqa: E402
from pydantic_ai.providers.anthropic import AnthropicProvider  # noqa: E402
from pydantic_ai.providers.openai import OpenAIProvider  # noqa: E402

QUESTION = "What does len do?"
SETTINGS = {"temperature": 0, "max_tokens": 200, "timeout": 120}


class Visit(BaseModel):
    """A stay in a city."""

    city: Literal["Rome", "Oslo"]
    guide: bool


@pytest.fixture(params=["chat", "responses", "anthropic"])
def model(request, url):
    if request.param == "anthropic":
        provider = AnthropicProvider(base_url=url, api_key="none")
        return AnthropicModel("tiny-pydoc", provider=provider, profile={"supports_json_schema_output": True})
    kind = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[request.param]
    return kind("tiny-pydoc", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))


def test_text_whole_and_streamed(model):
    agent = Agent(model, instructions="Be brief.", model_settings=SETTINGS)
    whole = agent.run_sync(QUESTION)
    assert whole.output
    assert whole.usage.output_tokens > 0

    async def streamed():
        async with agent.run_stream(QUESTION) as run:
            return [text async for text in run.stream_text(delta=True, debounce_by=None)]

    pieces = asyncio.run(streamed())
    assert len(pieces) > 1
    assert "".join(pieces) == whole.output
    second = agent.run_sync("And max?", message_history=whole.all_messages())
    assert second.output and len(second.all_messages()) == 4


def test_output_by_a_tool_is_a_forced_call(model):
    agent = Agent(model, output_type=ToolOutput(Visit), model_settings=SETTINGS)
    assert isinstance(agent.run_sync(QUESTION).output, Visit)
    several = Agent(model, output_type=[ToolOutput(Visit), ToolOutput(bool, name="no")], model_settings=SETTINGS)
    assert isinstance(several.run_sync(QUESTION).output, Visit | bool)


def test_output_by_the_schema_whole_and_streamed(model):
    agent = Agent(model, output_type=NativeOutput(Visit), model_settings=SETTINGS)
    whole = agent.run_sync(QUESTION).output
    assert isinstance(whole, Visit)

    async def streamed():
        async with agent.run_stream(QUESTION) as run:
            return [output async for output in run.stream_output(debounce_by=None)]

    *_, last = asyncio.run(streamed())
    assert last == whole


@pytest.mark.parametrize("kind", [ToolOutput, NativeOutput])
def test_tools_beside_an_output_type(model, kind):
    """The model calls the tool as often as it likes, at most until its requests are used up, and then answers."""
    agent = Agent(model, output_type=kind(Visit), model_settings=SETTINGS)
    asked = []

    @agent.tool_plain
    def weather(city: Literal["Rome", "Oslo"]) -> str:
        """The weather in a city."""
        asked.append(city)
        return "sunny"

    try:
        result = agent.run_sync(QUESTION, usage_limits=pydantic_ai.UsageLimits(request_limit=5))
    except pydantic_ai.UsageLimitExceeded:
        assert asked
        return
    assert isinstance(result.output, Visit)
    returned = [p for m in result.all_messages() for p in m.parts if isinstance(p, ToolReturnPart)]
    assert len([p for p in returned if p.tool_name == "weather"]) == len(asked)


def test_errors(model, url):
    with pytest.raises(ModelHTTPError, match="temperature") as caught:
        Agent(model, model_settings=SETTINGS | {"temperature": -1}).run_sync(QUESTION)
    assert caught.value.status_code == 400
    with pytest.raises(UnexpectedModelBehavior):
        Agent(model, output_type=NativeOutput(Visit), model_settings=SETTINGS | {"max_tokens": 2}).run_sync(QUESTION)
