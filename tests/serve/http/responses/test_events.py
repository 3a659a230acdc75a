"""Streams have an event of each type that the openai client knows, but for those of what no model here does.

Each event is held to the client's own types as it is read (`events_of`).
"""

from __future__ import annotations

import asyncio
from typing import get_args

from openai.types.responses import ResponseStreamEvent
from support.chat import ScriptedEngine
from support.chat_templates import HERMES, PLAIN
from support.responses import CALL, WEATHER, Conversation, events_of

from rayllm.errors import EngineDeadError

# What event types begin with that never come, and why.
NEVER = {
    "response.audio.": "models are served text-only",
    "response.code_interpreter_call": "OpenAI's hosted tools are refused",
    "response.compaction.": "/v1/responses/compact is refused",
    "response.custom_tool_call_input.": "tools without a JSON schema are refused",
    "response.file_search_call.": "OpenAI's hosted tools are refused",
    "response.image_generation_call.": "OpenAI's hosted tools are refused",
    "response.mcp_call": "OpenAI's hosted tools are refused",
    "response.mcp_list_tools.": "OpenAI's hosted tools are refused",
    "response.output_text.annotation.": "annotations come from hosted tools",
    "response.reasoning_summary_": "reasoning is told as a whole, so nothing sums it up",
    "response.refusal.": "no model here refuses in a form of its own",
    "response.shell_call": "OpenAI's hosted tools are refused",
    "response.web_search_call.": "OpenAI's hosted tools are refused",
}


def known():
    """Types of all events that the client has a class for."""
    union, *_ = get_args(ResponseStreamEvent)
    return {name for kind in get_args(union) for name in get_args(kind.model_fields["type"].annotation)}


class Waits(ScriptedEngine):
    """Says nothing."""

    def __init__(self):
        super().__init__(PLAIN, [])
        self.asked = asyncio.Event()

    async def generate(self, request, prompt_text=None):
        self.asked.set()
        await asyncio.Event().wait()
        yield


def deleted(folder):
    """The events of a response that is deleted while it runs in the background."""
    app = Conversation(folder=folder, engine=Waits())

    async def use():
        async with app.web() as web:
            body = {"model": "org/fake", "input": "hi", "background": True, "stream": True}
            posted = asyncio.create_task(web.post("/v1/responses", json=body))
            await app.engine.asked.wait()
            (record,) = folder.glob("*.json")
            await web.delete(f"/v1/responses/{record.stem}")
            return events_of((await posted).text)

    return asyncio.run(use())


def test_each_event_type_that_the_client_knows(tmp_path):
    thinks_and_calls = Conversation(f"<think>Hm.</think>I look.\n{CALL}", source=HERMES)
    failing = Conversation("Hello there", source=PLAIN, fails={2: EngineDeadError("it is gone")})
    recorded = [
        *thinks_and_calls.events(tools=[WEATHER]),
        *Conversation("Hello", source=PLAIN, finish="length").events(),
        *failing.events(),
        *deleted(tmp_path),
    ]
    sent = {event["type"] for event in recorded}
    never = {name for name in known() if name.startswith(tuple(NEVER))}
    assert all(any(name.startswith(prefix) for name in known()) for prefix in NEVER)
    assert known() - never == sent
