"""Streams have an event, a block and a delta of each type that Anthropic's client knows, but for those of what no model
here does. Each event is held to the client's own types as it is read (`Answered.events`).
"""

from __future__ import annotations

from typing import get_args

from anthropic.types import RawContentBlockDelta, RawMessageStreamEvent
from anthropic.types.raw_content_block_start_event import ContentBlock
from support.chat_templates import HERMES
from support.messages import Answered

from rayllm.errors import EngineDeadError

CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>'
NOW = {"name": "now", "input_schema": {"type": "object", "properties": {"zone": {"type": "string"}}}}
NEVER = {
    "citations_delta": "no model here cites documents in a form of its own",
    "redacted_thinking": "thinking is told as it is",
    "server_tool_use": "tools that Anthropic's servers run are refused",
    "web_search_tool_result": "tools that Anthropic's servers run are refused",
    "web_fetch_tool_result": "tools that Anthropic's servers run are refused",
    "code_execution_tool_result": "tools that Anthropic's servers run are refused",
    "bash_code_execution_tool_result": "tools that Anthropic's servers run are refused",
    "text_editor_code_execution_tool_result": "tools that Anthropic's servers run are refused",
    "tool_search_tool_result": "tools that Anthropic's servers run are refused",
    "container_upload": "tools that Anthropic's servers run are refused",
}


def known(union):
    """The `type` of each class of a union of the client's."""
    classes, *_ = get_args(union)
    return {name for each in get_args(classes) for name in get_args(each.model_fields["type"].annotation)}


def test_each_type_that_the_client_knows():
    recorded = [
        *Answered(f"<think>Hm.</think>I look.\n{CALL}", source=HERMES).events(tools=[NOW]),
        *Answered("a long text", source=HERMES, fails={2: EngineDeadError("a worker was lost")}).events(),
    ]
    blocks = {event["content_block"]["type"] for event in recorded if "content_block" in event}
    deltas = {event["delta"]["type"] for event in recorded if event["type"] == "content_block_delta"}
    # These two are read by the client without a class.
    assert {event["type"] for event in recorded} == known(RawMessageStreamEvent) | {"ping", "error"}
    assert deltas == known(RawContentBlockDelta) - NEVER.keys()
    assert blocks == known(ContentBlock) - NEVER.keys()
