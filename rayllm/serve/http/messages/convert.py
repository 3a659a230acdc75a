"""From the bodies of Anthropic's API to a `ChatBody` with the same meaning, and to its `Job`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
from pydantic import ValidationError

from rayllm.api.types import EngineInfo
from rayllm.serve.http.convert import MAX_TOKENIZED, Job, chat_job, encode, prompt_text
from rayllm.serve.http.errors import ApiError, first_fault, renamed
from rayllm.serve.http.messages.protocol import (
    MessagesBody,
    PromptBody,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from rayllm.serve.http.protocol import ChatBody
from rayllm.serve.http.served import Target
from rayllm.text.tokenizer import Tokenizer

Json = dict[str, Any]

# Fields of a `ChatBody` and of the engine's requests -> the fields that they come from.
_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "prompt": "messages",
    "continue_final_message": "messages",
}
# A line that coding agents put in front of their system prompt for Anthropic's accounts. It is another one in each
# request, so no prompt that it begins would be found in the prefix cache.
_BILLING = re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*\n?")


def messages_job(body: MessagesBody, target: Target) -> Job:
    """Raises InvalidRequestError naming field and limit if the conversation cannot be served.

    max_tokens may be more than what the context has left: clients must give it, and many give the most that they know.
    """
    with renamed(_NAMES):
        sampling = {
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "stop": body.stop_sequences,
            "cache_salt": body.cache_salt,
            "priority": body.priority,
        }
        job = chat_job(_chat_body(body, target.engine.tokenizer, sampling), target)
    (request,) = job.requests
    limit = min(body.max_tokens, target.info.max_model_len - len(request.prompt_token_ids))
    params = msgspec.structs.replace(request.params, max_tokens=max(limit, 1))
    return msgspec.structs.replace(
        job,
        requests=[msgspec.structs.replace(request, params=params)],
        names={name: _NAMES.get(field, field) for name, field in job.names.items()},
        discard_output=body.max_tokens == 0,
    )


def count_tokens(body: PromptBody, info: EngineInfo, tokenizer: Tokenizer) -> int:
    """How many tokens the prompt has, which may be more than fit into the context. Raises InvalidRequestError."""
    with renamed(_NAMES):
        text = prompt_text(_chat_body(body, tokenizer, {}), tokenizer)
        return len(encode(text, False, tokenizer, max(info.max_model_len, MAX_TOKENIZED)))


def _chat_body(body: PromptBody, tokenizer: Tokenizer | None, sampling: Json) -> ChatBody:
    """Raises InvalidRequestError for what no `ChatBody` may have, by the names of its fields, and ApiError for threads.

    In a thread, the server keeps the conversation. Anthropic's client asks for one by itself when it runs tools, and
    sends the whole conversation each time where it is told that there are none.
    """
    if body.thread is not None:
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        raise ApiError(400, "thread is not supported; send the whole conversation", param="thread", details=details)
    chat: Json = {**sampling, "messages": _messages(body)}
    chat["tools"] = [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema},
        }
        for tool in body.tools or ()
    ]
    choice = body.tool_choice
    if choice is not None and (body.tools or choice.type not in ("auto", "none")):  # without tools, both mean nothing
        named = {"type": "function", "function": {"name": choice.name}}
        chat["tool_choice"] = {"any": "required", "tool": named}.get(choice.type, choice.type)
        chat["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if body.messages[-1].role == "assistant":  # what the answer begins with already
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    if body.output_config is not None:
        chat["reasoning_effort"] = body.output_config.effort
    if body.format is not None:
        form = {"name": "output", "schema": body.format.schema_}
        chat["response_format"] = {"type": "json_schema", "json_schema": form}
    if tokenizer is not None:
        with_tools = bool(body.tools) and chat.get("tool_choice") != "none"
        known = tokenizer.chat_template_variables(with_tools=with_tools)
        asked = {name: value for name, value in _thinking(body).items() if name in known}
        chat["chat_template_kwargs"] = asked | (body.chat_template_kwargs or {})
    try:
        return ChatBody.model_validate(chat)
    except ValidationError as error:
        raise first_fault(error) from None


def _thinking(body: PromptBody) -> Json:
    """What chat templates call thinking, each of the names that models have for it."""
    if body.thinking is None:
        return {}
    thinks, budget = body.thinking.type != "disabled", body.thinking.budget_tokens
    variables: Json = {"enable_thinking": thinks, "thinking": thinks}
    return variables if budget is None else variables | {"thinking_budget": budget}


# ---- messages


def _messages(body: PromptBody) -> list[Json]:
    """The conversation as OpenAI's messages. Turns of a user that follow on one another are one, as are the model's."""
    messages: list[Json] = []
    if system := _system_text(body.system or []):
        messages.append({"role": "system", "content": system})
    for turn in body.messages:
        for message in _parts(turn):
            last: Json = messages[-1] if messages else {"role": None}
            if message["role"] != last["role"] or message["role"] not in ("user", "assistant"):
                messages.append(message)
                continue
            for name, value in message.items():
                if isinstance(value, list):
                    last[name] = last.get(name, []) + value
                elif name != "role":
                    last[name] = "\n".join(filter(None, (last.get(name), value)))
    return messages


def _parts(turn: Turn) -> Iterator[Json]:
    """OpenAI's messages for one of Anthropic's: results of tools are messages of their own there."""
    if turn.role == "system":
        yield {"role": "system", "content": _system_text([block for block in turn.content if block.type == "text"])}
    elif turn.role == "assistant":
        yield _assistant(turn)
    else:
        texts: list[str] = []
        for block in turn.content:
            if isinstance(block, TextBlock):
                texts.append(block.text)
            elif isinstance(block, ToolResultBlock):
                if texts:
                    yield {"role": "user", "content": "\n".join(texts)}
                    texts = []
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result_text(block)}
        if texts or not turn.content:
            yield {"role": "user", "content": "\n".join(texts)}


def _assistant(turn: Turn) -> Json:
    message: Json = {"role": "assistant"}
    message["content"] = "\n".join(block.text for block in turn.content if isinstance(block, TextBlock))
    if thinking := "\n".join(block.thinking for block in turn.content if isinstance(block, ThinkingBlock)):
        message["reasoning_content"] = thinking
    uses = [block for block in turn.content if isinstance(block, ToolUseBlock)]
    if uses:
        message["tool_calls"] = [
            {"id": use.id, "function": {"name": use.name, "arguments": json.dumps(use.input, ensure_ascii=False)}}
            for use in uses
        ]
    return message


def _result_text(block: ToolResultBlock) -> str:
    """Chat templates have no place for `is_error`, so the text says it."""
    text = "\n".join(part.text for part in block.content or ())
    return f"Error: {text}" if block.is_error else text


def _system_text(blocks: list[TextBlock]) -> str:
    return "\n".join(filter(None, (_BILLING.sub("", block.text, count=1) for block in blocks)))
