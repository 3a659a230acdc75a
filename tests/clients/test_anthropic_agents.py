"""What agents do with Anthropic's client, against a live server: its tool loop, cached blocks, thinking."""

from __future__ import annotations

from typing import Literal

import pytest

anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")

MODEL = "tiny-pydoc"
QUESTION = [{"role": "user", "content": "What does len do?"}]
CACHED = {"cache_control": {"type": "ephemeral"}}


@pytest.fixture(scope="module")
def client(url):
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.mark.parametrize("thread", [anthropic.omit, False], ids=["thread", "none"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_clients_own_tool_loop(client, stream, thread):
    called = []

    @anthropic.beta_tool
    def travel(city: Literal["Rome", "Oslo"]) -> str:
        """Go to a city."""
        called.append(city)
        return "done"

    runner = client.beta.messages.tool_runner(
        model=MODEL,
        messages=QUESTION,
        max_tokens=200,
        tools=[travel],
        tool_choice={"type": "tool", "name": "travel"},
        max_iterations=2,
        thread=thread,
        stream=stream,
    )
    assert len([message.get_final_message() if stream else message for message in runner]) == 2
    assert called and set(called) <= {"Rome", "Oslo"}


def test_cached_blocks_and_fields_that_only_anthropics_models_use(client):
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "What does len do?"} | CACHED]},
        {"role": "assistant", "content": [{"type": "text", "text": "It counts."}]},
        {"role": "user", "content": "And max?"},
    ]
    schema = {"type": "object", "properties": {}}
    answer = client.messages.create(
        model=MODEL,
        max_tokens=8,
        system=[{"type": "text", "text": "Be brief."} | CACHED],
        messages=turns,
        tools=[{"name": "rest", "input_schema": schema} | CACHED],
        metadata={"user_id": "u"},
        extra_body={"temperature": 0.0},  # what is sampled may end at once
    )
    assert answer.content
    assert answer.usage.output_tokens <= 8


def test_thinking_may_be_asked_for_and_sent_back(client):
    """The model does not think; a request for it is taken all the same, and so is the thinking of another model."""
    thinking = {"type": "enabled", "budget_tokens": 1024}
    fields = {"model": MODEL, "max_tokens": 1100, "thinking": thinking, "stop_sequences": ["."]}
    assert client.messages.create(**fields, messages=QUESTION).stop_reason
    blocks = [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, {"type": "text", "text": "It counts."}]
    turns = [*QUESTION, {"role": "assistant", "content": blocks}, {"role": "user", "content": "And max?"}]
    assert client.messages.create(**fields, messages=turns).stop_reason
