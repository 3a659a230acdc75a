"""From a conversation's items to the messages of a chat: a response runs as a request of /v1/chat/completions does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from pydantic import ValidationError

from rayllm.errors import InvalidRequestError
from rayllm.serve.http.convert import Job, chat_job
from rayllm.serve.http.errors import ContextLengthError, first_fault, renamed
from rayllm.serve.http.protocol import ChatBody, SamplingBody
from rayllm.serve.http.responses.protocol import (
    MAX_ITEMS,
    AllowedTools,
    ChosenFunction,
    ConversationBody,
    FunctionTool,
    ItemReference,
    Json,
    ResponseBody,
    response_of,
)
from rayllm.serve.http.responses.store import ResponseStore
from rayllm.serve.http.served import Target

# Fields of the chat's body -> those of a response that they come from.
_NAMES = {
    "messages": "input",
    "prompt": "input",
    "response_format": "text",
    "reasoning_effort": "reasoning",
    "verbosity": "text",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
}


def read_conversation(body: ConversationBody, store: ResponseStore, owner: str, response_id: str) -> list[Json]:
    """All items that the model is to see, as they are stored. It reads files.

    owner: whose stored responses the body may refer to. Raises InvalidRequestError if one of them is not there.
    """
    items: list[Json] = []
    if body.previous_response_id is not None:
        previous = store.read(body.previous_response_id, owner)
        if previous is None:
            message = f"previous_response_id: there is no response {body.previous_response_id!r}"
            raise InvalidRequestError(message, "previous_response_id")
        if previous.response["status"] not in ("completed", "incomplete"):
            message = f"previous_response_id: that response is {previous.response['status']}, and not completed"
            raise InvalidRequestError(message, "previous_response_id")
        items = [*previous.input, *previous.response["output"]]
    for index, item in enumerate(body.input or ()):
        if isinstance(item, ItemReference):
            items.append(_find_item(item.id, index, store, owner))
        else:
            items.append(item.stored(response_id, len(items)))
    if len(items) > MAX_ITEMS:
        message = f"input: the conversation has {len(items)} items; at most {MAX_ITEMS} are taken"
        raise InvalidRequestError(message, "input")
    return items


def _find_item(item: str, index: int, store: ResponseStore, owner: str) -> Json:
    kept = store.read(response_of(item), owner)
    known = [] if kept is None else [*kept.input, *kept.response["output"]]
    for each in known:
        if each["id"] == item:
            return each
    message = f"input.{index}.id: there is no item {item!r} of a stored response"
    raise InvalidRequestError(message, "input")


def response_job(body: ConversationBody, items: Sequence[Json], target: Target) -> Job:
    """What the engine gets for a conversation.

    With truncation "auto" the oldest messages that are not the system's are left out as far as the rest fits. Raises
    InvalidRequestError naming the field and its limit.
    """
    system, turns = _messages(body.instructions, items)
    if not turns and not system:
        raise InvalidRequestError("input must not be empty", "input")
    options = _chat_options(body)

    def job(first: int) -> Job:
        with renamed(_NAMES):
            try:
                kept = [turn for turn in turns[:first] if turn["role"] in ("system", "developer")]
                chat = ChatBody.model_validate(options | {"messages": system + kept + turns[first:]})
            except ValidationError as error:
                raise first_fault(error) from None
            found = chat_job(chat, target)
            names = {of: _NAMES.get(name, name) for of, name in found.names.items()}
            return msgspec.structs.replace(found, names=names)

    try:
        return job(0)
    except ContextLengthError:
        if body.truncation != "auto":
            raise
        # A turn may not begin with what tools returned: the calls would be missing.
        starts = [at for at, turn in enumerate(turns) if at and turn["role"] != "tool"]
        if not starts:
            raise
    try:
        return _first_that_fits(job, starts)
    except ContextLengthError:
        raise
    except InvalidRequestError:  # many templates refuse what does not begin with the user
        users = [at for at in starts if turns[at]["role"] == "user"]
        if not users:
            raise
        return _first_that_fits(job, users)


def _first_that_fits(job: Callable[[int], Job], starts: Sequence[int]) -> Job:
    """The job of the first start from which on all fits. Raises ContextLengthError if there is none."""
    low, high = 0, len(starts) - 1  # it is in between
    while low < high:
        middle = (low + high) // 2
        try:
            job(starts[middle])
            high = middle
        except ContextLengthError:
            low = middle + 1
    return job(starts[low])


def _chat_options(body: ConversationBody) -> Json:
    """The fields of the chat's body but its messages."""
    names = [*SamplingBody.model_fields, "chat_template_kwargs", "parallel_tool_calls"]
    options = {name: getattr(body, name, None) for name in names}
    options |= {"tools": [_chat_tool(tool) for tool in _offered(body)] or None, "tool_choice": _chat_choice(body)}
    options["response_format"] = _response_format(body)
    options["reasoning_effort"] = body.reasoning and body.reasoning.effort
    options["verbosity"] = body.text and body.text.verbosity
    if isinstance(body, ResponseBody):
        options["max_completion_tokens"] = body.max_output_tokens
        if body.num_logprobs is not None:
            options |= {"logprobs": True, "top_logprobs": body.num_logprobs}
        if body.logit_bias is not None:  # whose keys were texts in JSON
            options["logit_bias"] = {str(token): value for token, value in body.logit_bias.items()}
        if body.structured_outputs is not None:
            options["structured_outputs"] = body.structured_outputs.model_dump(by_alias=True, exclude_none=True)
    return {name: value for name, value in options.items() if value is not None}


def _offered(body: ConversationBody) -> list[FunctionTool]:
    """The tools that the model is told of."""
    tools = body.tools or []
    if isinstance(body.tool_choice, AllowedTools):
        allowed = {choice.name for choice in body.tool_choice.tools}
        return [tool for tool in tools if tool.name in allowed]
    return tools


def _chat_tool(tool: FunctionTool) -> Json:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


def _chat_choice(body: ConversationBody) -> Any:
    match body.tool_choice:
        case AllowedTools(mode=mode):
            return mode
        case ChosenFunction(name=name):
            return {"type": "function", "function": {"name": name}}
        case choice if choice == "auto" and not body.tools:  # what some clients say in any case
            return None
        case choice:
            return choice


def _response_format(body: ConversationBody) -> Json | None:
    form = body.format
    if form is None:
        return None
    if form.type == "json_object":
        return {"type": "json_object"}
    schema = {"name": form.name, "schema": form.schema_, "description": form.description, "strict": form.strict}
    return {"type": "json_schema", "json_schema": {name: value for name, value in schema.items() if value is not None}}


# ---- messages


def _messages(instructions: str | None, items: Sequence[Json]) -> tuple[list[Json], list[Json]]:
    """(at most one system message, the turns after it).

    Templates know one system message, at the beginning: instructions and the system's first messages become one.
    """
    turns: list[Json] = []
    for item in items:
        match item["type"]:
            case "message" if item["role"] == "assistant":
                _add_to_answer(turns, "content", _text(item["content"]))
            case "message":
                turns.append({"role": item["role"], "content": _text(item["content"])})
            case "reasoning":
                _add_to_answer(turns, "reasoning_content", _text(item["content"] or item["summary"]))
            case "function_call":
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                _answer(turns).setdefault("tool_calls", []).append(call)
            case "function_call_output":
                content = _text(item["output"])
                turns.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
    leading = [] if instructions is None else [instructions]
    while turns and turns[0]["role"] in ("system", "developer"):
        leading.append(turns.pop(0)["content"])
    return [{"role": "system", "content": "\n\n".join(leading)}] if leading else [], turns


def _answer(turns: list[Json]) -> Json:
    """The assistant's message that the conversation ends with, which may be new."""
    if not turns or turns[-1]["role"] != "assistant":
        turns.append({"role": "assistant", "content": ""})
    return turns[-1]


def _add_to_answer(turns: list[Json], field: str, text: str) -> None:
    """Reasoning, text and calls of one answer are one message, in this order; another text is another answer."""
    answer = _answer(turns)
    begun = ("content",) if field == "content" else ("content", "reasoning_content", "tool_calls")
    if any(answer.get(each) for each in begun):
        answer = {"role": "assistant", "content": ""}
        turns.append(answer)
    if text:
        answer[field] = text


def _text(content: str | Sequence[Mapping[str, str]]) -> str:
    """Of a content's parts, each on lines of its own."""
    if isinstance(content, str):
        return content
    return "\n".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in content)
