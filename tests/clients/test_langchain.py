"""langchain-openai against a live server."""

from __future__ import annotations

import json
from typing import Literal

import pytest

langchain_openai = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")

from langchain.agents import create_agent  # noqa: E402
from langchain.agents.middleware import wrap_model_call  # noqa: E402
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy  # noqa: E402
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage  # noqa: E402
from langchain_core.tools import tool  # noqa: E402
from pydantic import BaseModel  # noqa: E402

MODEL = "tiny-pydoc"
QUESTION = "What does len do?"


class Visit(BaseModel):
    """A stay in a city."""

    city: Literal["Rome", "Oslo"]
    guide: bool


@tool
def travel(city: Literal["Rome", "Oslo"], days: Literal[1, 2, 3]) -> str:
    """Go to a city."""
    return f"{days} days in {city}"


@pytest.fixture(scope="module")
def model(url):
    return langchain_openai.ChatOpenAI(
        model=MODEL, base_url=f"{url}/v1", api_key="none", temperature=0, max_retries=0, timeout=120, max_tokens=300
    )


def test_invoke_stream_and_batch(model):
    whole = model.invoke([SystemMessage("Be brief."), HumanMessage(QUESTION)])
    assert whole.content
    assert whole.response_metadata["model_name"] == MODEL
    usage = whole.usage_metadata
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    chunks = list(model.stream([SystemMessage("Be brief."), HumanMessage(QUESTION)], stream_usage=True))
    assert len(chunks) > 2
    together = sum(chunks[1:], start=chunks[0])
    assert together.content == whole.content
    assert together.usage_metadata["output_tokens"] == usage["output_tokens"]
    assert together.response_metadata["finish_reason"] == whole.response_metadata["finish_reason"]
    assert {answer.content for answer in model.batch([QUESTION] * 4)} == {model.invoke(QUESTION).content}


def test_logprobs_and_stop(model):
    answer = model.bind(logprobs=True, top_logprobs=2, max_tokens=4, stop=["never there"]).invoke(QUESTION)
    tokens = answer.response_metadata["logprobs"]["content"]
    assert len(tokens) == 4
    assert all(len(token["top_logprobs"]) == 2 for token in tokens)


@pytest.mark.parametrize("method", ["function_calling", "json_mode", "json_schema"])
@pytest.mark.parametrize("stream", [False, True])
def test_structured_output(model, method, stream):
    # The model is far too small to follow a request for a form: json_mode, which enforces no more than JSON, gets
    # any object; the other methods get a Visit.
    chain = model.with_structured_output(None if method == "json_mode" else Visit, method=method, include_raw=True)
    if stream:
        found = {name: value for part in chain.stream(QUESTION) for name, value in part.items()}
    else:
        found = chain.invoke(QUESTION)
    raw = found["raw"]
    assert found["parsing_error"] is None
    if method == "json_mode":
        assert isinstance(found["parsed"], dict)
        assert found["parsed"] == json.loads(raw.content)
    else:
        assert isinstance(found["parsed"], Visit)
    assert bool(raw.tool_calls) == (method == "function_calling")


def test_tools_are_called_and_answered(model):
    for options in (
        {"tool_choice": "travel"},
        {"tool_choice": "any", "parallel_tool_calls": False},
        {"tool_choice": "any", "strict": True, "parallel_tool_calls": False},
    ):
        asking = model.bind_tools([travel], **options)
        called = asking.invoke(QUESTION)
        (call,) = called.tool_calls
        result = travel.invoke(call)
        assert isinstance(result, ToolMessage) and "days in" in result.content
        chunks = list(asking.stream(QUESTION))
        (streamed,) = sum(chunks[1:], start=chunks[0]).tool_calls
        assert (streamed["name"], streamed["args"]) == (call["name"], call["args"])
        answer = model.bind_tools([travel], tool_choice="none").invoke([HumanMessage(QUESTION), called, result])
        assert isinstance(answer.content, str)
    assert isinstance(model.bind_tools([travel]).invoke(QUESTION), AIMessage)  # auto: the model may answer in words


def test_completions(url):
    model = langchain_openai.OpenAI(
        model=MODEL, base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=8, max_retries=0
    )
    text = model.invoke("The for statement")
    assert text == "".join(model.stream("The for statement")) != ""
    assert model.generate(["One", "Two"]).generations[1][0].text


@pytest.fixture(scope="module")
def responses(url):
    """A model that uses /v1/responses."""
    options = {"base_url": f"{url}/v1", "api_key": "none", "temperature": 0, "max_retries": 0, "timeout": 120}
    return langchain_openai.ChatOpenAI(model=MODEL, use_responses_api=True, max_tokens=300, **options)


def test_responses_whole_and_streamed(responses):
    whole = responses.invoke([SystemMessage("Be brief."), HumanMessage(QUESTION)])
    assert whole.text
    assert whole.usage_metadata["output_tokens"] > 0
    chunks = list(responses.stream([SystemMessage("Be brief."), HumanMessage(QUESTION)]))
    assert len(chunks) > 2
    assert sum(chunks[1:], start=chunks[0]).text == whole.text
    continued = responses.bind(previous_response_id=whole.response_metadata["id"]).invoke("And max?")
    assert continued.text


def test_responses_tools_are_called_and_answered(responses):
    called = responses.bind_tools([travel], tool_choice="travel").invoke(QUESTION)
    (call,) = called.tool_calls
    result = travel.invoke(call)
    assert "days in" in result.content
    answer = responses.bind_tools([travel], tool_choice="none").invoke([HumanMessage(QUESTION), called, result])
    assert answer.text


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_responses_structured_output(responses, method):
    assert isinstance(responses.with_structured_output(Visit, method=method).invoke(QUESTION), Visit)


@wrap_model_call
def one_call_then_the_answer(request, handler):
    """Offers the tools until one was called: the model is too small to find an end by itself."""
    has_called = any(isinstance(message, ToolMessage) for message in request.messages)
    tools = [] if has_called else request.tools
    return handler(request.override(tools=tools, model_settings={"parallel_tool_calls": False}))


@pytest.mark.parametrize("kind", ["model", "responses"])
@pytest.mark.parametrize("strategy", [ProviderStrategy, ToolStrategy])
def test_an_agent_with_tools_and_a_response_format(request, kind, strategy):
    """It may call a tool before it answers; what it answers has the format."""
    model = request.getfixturevalue(kind)
    agent = create_agent(model, tools=[travel], response_format=strategy(Visit), middleware=[one_call_then_the_answer])
    state = agent.invoke({"messages": [HumanMessage(QUESTION)]})
    assert isinstance(state["structured_response"], Visit)
