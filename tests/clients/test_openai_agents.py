"""openai-agents against a live server: its default model class, which uses /v1/responses, and the one for chats."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest

agents = pytest.importorskip("agents", reason="openai-agents is not installed")

import openai  # noqa: E402  (after the skip; openai-agents needs it)
from agents import Agent, ModelSettings, RunConfig, Runner  # noqa: E402
from agents.items import HandoffOutputItem, ToolCallItem, ToolCallOutputItem  # noqa: E402
from agents.models.openai_provider import OpenAIProvider  # noqa: E402
from pydantic import BaseModel  # noqa: E402

MODEL = "tiny-pydoc"
QUESTION = "What does len do?"
SETTINGS = ModelSettings(temperature=0, max_tokens=200)


class Visit(BaseModel):
    """A stay in a city."""

    city: Literal["Rome", "Oslo"]
    guide: bool


@agents.function_tool
def travel(city: Literal["Rome", "Oslo"], days: Literal[1, 2, 3]) -> str:
    """Go to a city."""
    return f"{days} days in {city}"


@pytest.fixture(params=[True, False], ids=["responses", "chat"])
def run(request, url):
    """Runs an agent to its end; `streamed=True` by its events, which it then also returns."""

    def run(agent, text=QUESTION, *, streamed=False, **options):
        async def go():
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
                provider = OpenAIProvider(openai_client=client, use_responses=request.param)
                config = RunConfig(model_provider=provider, tracing_disabled=True)
                if not streamed:
                    return await Runner.run(agent, text, run_config=config, **options)
                result = Runner.run_streamed(agent, text, run_config=config, **options)
                return result, [event async for event in result.stream_events()]

        return asyncio.run(go())

    run.responses = request.param
    return run


def forced(tool):
    """One call in a turn, lest the model goes on with calls up to its limit."""
    return ModelSettings(temperature=0, max_tokens=200, tool_choice=tool, parallel_tool_calls=False)


def test_text_whole_and_streamed(run):
    agent = Agent(name="Guide", instructions="Be brief.", model=MODEL, model_settings=SETTINGS)
    whole = run(agent)
    assert whole.final_output
    assert whole.raw_responses[0].usage.output_tokens > 0
    result, events = run(agent, streamed=True)
    assert result.final_output == whole.final_output
    deltas = [
        event.data.delta
        for event in events
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert len(deltas) > 1
    assert "".join(deltas) == whole.final_output


def test_a_conversation_goes_on(run):
    agent = Agent(name="Guide", model=MODEL, model_settings=SETTINGS)
    first = run(agent)
    again = run(agent, [*first.to_input_list(), {"role": "user", "content": "And max?"}])
    assert again.final_output
    if run.responses:
        by_id = run(agent, "And max?", previous_response_id=first.last_response_id)
        assert by_id.final_output == again.final_output


@pytest.mark.parametrize("choice", ["required", "travel"])
def test_a_tool_is_called_and_answered(run, choice):
    agent = Agent(name="Guide", model=MODEL, tools=[travel], model_settings=forced(choice))
    for streamed in (False, True):
        agent.tool_use_behavior = "stop_on_first_tool"
        result = run(agent, streamed=streamed)
        result = result[0] if streamed else result
        assert "days in" in str(result.final_output)
        kinds = [type(item) for item in result.new_items]
        assert ToolCallItem in kinds and ToolCallOutputItem in kinds
    # The second turn has the call and its answer, and no call is forced any more.
    agent.tool_use_behavior = "run_llm_again"
    try:
        result = run(agent, max_turns=4)
    except agents.MaxTurnsExceeded:  # the model went on with calls
        return
    except agents.ModelBehaviorError as error:  # or with words
        if "max_output_tokens" not in str(error):
            raise
        return
    assert len(result.raw_responses) >= 2


def test_a_handoff(run):
    expert = Agent(name="Expert", instructions="Be brief.", model=MODEL, model_settings=SETTINGS)
    agent = Agent(name="Guide", model=MODEL, handoffs=[expert], model_settings=forced("transfer_to_expert"))
    result = run(agent)
    assert result.last_agent is expert
    assert any(isinstance(item, HandoffOutputItem) for item in result.new_items)
    assert result.final_output


def test_output_types(run):
    agent = Agent(name="Guide", model=MODEL, output_type=Visit, model_settings=SETTINGS)
    whole = run(agent).final_output
    assert isinstance(whole, Visit)
    result, _ = run(agent, streamed=True)
    assert result.final_output == whole


def test_an_output_type_beside_tools(run):
    """A call is forced in the first turn; in the next ones the model calls again or answers in the type."""
    agent = Agent(name="Guide", model=MODEL, tools=[travel], output_type=Visit, model_settings=forced("required"))
    try:
        result = run(agent, max_turns=6)
    except agents.MaxTurnsExceeded:
        return
    assert isinstance(result.final_output, Visit)
    assert any(isinstance(item, ToolCallOutputItem) for item in result.new_items)


def test_errors_are_those_of_the_openai_client(run):
    with pytest.raises(openai.NotFoundError):
        run(Agent(name="Guide", model="other", model_settings=SETTINGS))
