"""LlamaIndex's models for servers like OpenAI's, against a live server."""

import asyncio
from typing import Literal

import pytest

openai_like = pytest.importorskip("llama_index.llms.openai_like", reason="llama-index-llms-openai-like is missing")

import openai  # noqa: E402  (after the skip; LlamaIndex needs it)
from llama_index.core.llms import ChatMessage  # noqa: E402
from llama_index.core.prompts import PromptTemplate  # noqa: E402
from llama_index.core.tools import FunctionTool  # noqa: E402
from pydantic import BaseModel  # noqa: E402

MODEL = "tiny-pydoc"
QUESTION = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="What does len do?")]


class Visit(BaseModel):
    """A stay in a city."""

    city: Literal["Rome", "Oslo"]
    guide: bool


def travel(city: Literal["Rome", "Oslo"], days: Literal[1, 2, 3]) -> str:
    """Go to a city."""
    return f"{days} days in {city}"


TRAVEL = FunctionTool.from_defaults(travel)


@pytest.fixture(scope="module")
def options(url):
    return {"model": MODEL, "api_base": f"{url}/v1", "api_key": "none", "max_retries": 0, "temperature": 0}


@pytest.fixture(scope="module")
def chat(options):
    return openai_like.OpenAILike(**options, is_chat_model=True, is_function_calling_model=True, max_tokens=200)


def test_chat_whole_streamed_and_async(chat):
    whole = chat.chat(QUESTION)
    assert whole.message.content
    *_, last = chat.stream_chat(QUESTION)
    assert last.message.content == whole.message.content
    assert asyncio.run(chat.achat(QUESTION)).message.content == whole.message.content
    assert whole.raw.usage.completion_tokens > 0


def test_completions(options):
    model = openai_like.OpenAILike(**options, is_chat_model=False, max_tokens=8)
    whole = model.complete("The for statement")
    *_, last = model.stream_complete("The for statement")
    assert whole.text == last.text != ""


@pytest.mark.parametrize("choice", [{"tool_required": True}, {"tool_choice": "travel"}], ids=str)
def test_enforced_tools_are_called_and_answered(chat, choice):
    called = chat.chat_with_tools([TRAVEL], chat_history=QUESTION, **choice)
    calls = chat.get_tool_calls_from_response(called, error_on_no_tool_call=True)
    results = [TRAVEL.call(**call.tool_kwargs) for call in calls]
    assert all("days in" in str(result) for result in results)
    *_, streamed = chat.stream_chat_with_tools([TRAVEL], chat_history=QUESTION, **choice)
    again = chat.get_tool_calls_from_response(streamed)
    assert [call.tool_kwargs for call in again] == [call.tool_kwargs for call in calls]
    answers = [
        ChatMessage(role="tool", content=str(result), additional_kwargs={"tool_call_id": call.tool_id})
        for call, result in zip(calls, results, strict=True)
    ]
    ended = chat.chat_with_tools([TRAVEL], chat_history=[*QUESTION, called.message, *answers], tool_choice="none")
    assert ended.message.content
    assert chat.predict_and_call([TRAVEL], "Go.", tool_required=True).sources


@pytest.mark.parametrize("native", [True, False])
def test_structured_output(options, native):
    """By response_format, or by a forced call."""
    model = openai_like.OpenAILike(
        **options,
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=native,
        max_tokens=200,
    )
    found = model.structured_predict(Visit, PromptTemplate("Where to?"))
    assert isinstance(found, Visit)
    assert model.as_structured_llm(Visit).chat(QUESTION).raw.city in ("Rome", "Oslo")
    if native:
        *_, last = model.stream_structured_predict(Visit, PromptTemplate("Where to?"))
        assert last.city in ("Rome", "Oslo")


def test_errors_are_those_of_the_openai_client(options):
    model = openai_like.OpenAILike(**options | {"model": "other"}, is_chat_model=True)
    with pytest.raises(openai.NotFoundError):
        model.chat(QUESTION)
