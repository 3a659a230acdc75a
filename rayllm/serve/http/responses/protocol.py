"""The bodies of /v1/responses, and the items of a conversation.

An item is read in any form in which clients send it (`Item`), and has one form from there on: that in which
GET /v1/responses/{id}/input_items lists it, a `Json` with an id and a type.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import AfterValidator, BaseModel, BeforeValidator, Discriminator, Field, Tag

from rayllm.api.sampling_params import MAX_LOGPROBS
from rayllm.serve.http.protocol import (
    MAX_TEMPLATE_KWARGS,
    MAX_TOOLS,
    Body,
    EngineBody,
    Name,
    OneOf,
    Rules,
    SamplingBody,
    Schema,
    SentBack,
    StructuredOutputsBody,
    TemplateKwargs,
)

MAX_ITEMS = 8192  # of a conversation
MAX_PARTS = 1024  # of an item's content
MAX_METADATA = 16
MAX_ID_CHARS = 128

Json = dict[str, Any]

# ---- ids


def item_id(kind: str, response_id: str, number: int) -> str:
    """Of the item `number` of a response's conversation. It follows from the response's id, and leads back to it."""
    return f"{_PREFIXES[kind]}_{response_id[-32:]}{number:04x}"


def response_of(item: str) -> str:
    """The id of the response that an item id was made for; something that is no id if it was not made here."""
    return f"resp_{item.partition('_')[2][:32]}"


_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}

# ---- parts of items


def _as_parts(content: Any) -> Any:
    """A list of parts for what may be one text."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _part_kind(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return "refusal" if kind == "refusal" else "text"


def _check_part(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind not in _TEXTS and kind != "refusal":
        raise ValueError(f"content of type {kind[:80]!r} is not supported: models are served text-only")
    return part


_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


class TextContent(Body):
    """Text of an item, whoever wrote it."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str
    # What output has, and clients send back.
    annotations: SentBack = None
    logprobs: SentBack = None
    parsed: SentBack = None  # openai-python's own reading of the text
    prompt_cache_breakpoint: SentBack = None  # prefixes are always cached


class RefusalContent(Body):
    """What a model of another provider said instead of an answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """What the model wrote."""
        return self.refusal


Part = Annotated[
    Annotated[TextContent, Tag("text")] | Annotated[RefusalContent, Tag("refusal")],
    Discriminator(_part_kind),
    BeforeValidator(_check_part),
]
Content = Annotated[
    list[Part],
    Field(max_length=MAX_PARTS, fail_fast=True),
    BeforeValidator(_as_parts, json_schema_input_type=str | list[Part]),
]
ItemStatus = Literal["in_progress", "completed", "incomplete"]

# ---- items


class ItemBody(Body):
    """Base of all items. id: None for one that gets its id here."""

    id: str | None = Field(default=None, min_length=1, max_length=MAX_ID_CHARS)
    status: ItemStatus | None = None

    def stored(self, response_id: str, number: int) -> Json:
        """The item `number` of a response's conversation as it is stored and listed."""
        form = self._form()
        form = {"id": self.id or item_id(form["type"], response_id, number), **form}
        return form | {"status": self.status or "completed"}

    def _form(self) -> Json:
        raise NotImplementedError


class MessageItem(ItemBody):
    """A message: an "easy" one of a role and a text, or one with parts, also one that the model wrote before."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    phase: SentBack = None

    def _form(self) -> Json:
        if self.role == "assistant":
            parts: list[Json] = [
                {"type": "refusal", "refusal": part.text}
                if isinstance(part, RefusalContent)
                else {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}
                for part in self.content
            ]
        else:
            parts = [{"type": "input_text", "text": part.text} for part in self.content]
        return {"type": "message", "role": self.role, "content": parts}


class FunctionCallItem(ItemBody):
    """A call that the model made before."""

    type: Literal["function_call"]
    call_id: str = Field(min_length=1, max_length=MAX_ID_CHARS)
    name: str
    arguments: str
    parsed_arguments: SentBack = None  # openai-python's own reading of them
    caller: SentBack = None
    created_by: SentBack = None

    def _form(self) -> Json:
        return {"type": "function_call", "call_id": self.call_id, "name": self.name, "arguments": self.arguments}


class FunctionCallOutputItem(ItemBody):
    """What a function returned."""

    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1, max_length=MAX_ID_CHARS)
    output: Content
    name: SentBack = None
    caller: SentBack = None
    created_by: SentBack = None

    def _form(self) -> Json:
        parts = [{"type": "input_text", "text": part.text} for part in self.output]
        output: Any = parts[0]["text"] if len(parts) == 1 else parts
        return {"type": "function_call_output", "call_id": self.call_id, "output": output}


class ReasoningItem(ItemBody):
    """What the model thought before. Without content, as providers send it that encrypt it, the summary counts."""

    type: Literal["reasoning"]
    summary: list[Part] = Field(default=[], max_length=MAX_PARTS, fail_fast=True)
    content: list[Part] | None = Field(default=None, max_length=MAX_PARTS, fail_fast=True)
    encrypted_content: SentBack = None

    def _form(self) -> Json:
        return {
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": part.text} for part in self.summary],
            "content": [{"type": "reasoning_text", "text": part.text} for part in self.content or ()],
        }


class ItemReference(Body):
    """An item of a stored response."""

    type: Literal["item_reference"] | None = None
    id: str = Field(min_length=1, max_length=MAX_ID_CHARS)


_ITEMS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")


def _item_kind(item: Any) -> str:
    """Messages may leave their type out, and so may references, which have no role."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    if kind is None and isinstance(item, dict) and "role" not in item and "id" in item:
        return "item_reference"
    return kind if kind in _ITEMS else "message"


def _check_item(item: Any) -> Any:
    kind = item.get("type") if isinstance(item, dict) else None
    if isinstance(kind, str) and kind not in _ITEMS:
        raise ValueError(f"items of type {kind[:80]!r} are not supported; there are {', '.join(_ITEMS)}")
    return item


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_item_kind),
    BeforeValidator(_check_item),
]


def _as_items(given: Any) -> Any:
    """A list of items for what may be one text of the user's."""
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


Items = Annotated[
    list[Item],
    Field(max_length=MAX_ITEMS, fail_fast=True),
    BeforeValidator(_as_items, json_schema_input_type=str | list[Item]),
]

# ---- tools


def _check_numbers(schema: dict[str, Any]) -> dict[str, Any]:
    """Answers have the schema again, in JSON of 64 bits."""
    try:
        orjson.dumps(schema)
    except TypeError:
        raise ValueError("has an integer of more than 64 bits") from None
    return schema


EchoedSchema = Annotated[Schema, AfterValidator(_check_numbers)]


class FunctionTool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: EchoedSchema | None = None
    strict: bool | None = None
    defer_loading: Literal[False] | None = Field(default=None, exclude=True)

    def echo(self) -> Json:
        """As the Response object has it."""
        return {"description": None, "parameters": None, "strict": None} | self.model_dump()


def _check_tool(tool: Any) -> Any:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise ValueError(f"tools of type {kind[:80]!r} are not supported, only functions")
    return tool


ResponseTool = Annotated[FunctionTool, BeforeValidator(_check_tool)]


class ChosenFunction(Body):
    """The function that must be called."""

    type: Literal["function"]
    name: str


class AllowedTools(Body):
    """Those of the tools that may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[ChosenFunction] = Field(min_length=1, max_length=MAX_TOOLS)


ResponseToolChoice = Annotated[
    Literal["none", "auto", "required"] | ChosenFunction | AllowedTools,
    OneOf(
        'must be "none", "auto", "required", {"type": "function", "name": ...} or {"type": "allowed_tools", '
        '"mode": "auto" or "required", "tools": [{"type": "function", "name": ...}, ...]}'
    ),
]

# ---- other fields


class TextFormat(Body):
    """The form of the answer's text. A schema is always enforced, whether `strict` is given or not."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: str | None = None
    schema_: EchoedSchema | None = Field(default=None, alias="schema")  # the name would hide a method of pydantic's
    strict: bool | None = None

    def _rules(self) -> Rules:
        has_schema = self.schema_ is not None and self.name is not None
        yield self.type == "json_schema" and not has_schema, "", "type json_schema needs name and schema"
        yield self.type != "json_schema" and self.schema_ is not None, "", "schema belongs to type json_schema"


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Body):
    """summary: no summaries are made, as reasoning items have all of the reasoning."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(Body):
    include_obfuscation: bool | None = None  # nothing is added to events whose sizes nobody hides


Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",  # reasoning items have their content as it is
    # Of items that never are in an answer here.
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


def _check_metadata(metadata: dict[str, str]) -> dict[str, str]:
    if any(len(name) > 64 or len(value) > 512 for name, value in metadata.items()):
        raise ValueError("has names of at most 64 characters, and values of at most 512")
    return metadata


Metadata = Annotated[dict[str, str], Field(max_length=MAX_METADATA), AfterValidator(_check_metadata)]


def _refused(message: str) -> BeforeValidator:
    """Of a known field that must not be given."""

    def check(value: Any) -> None:
        if value is not None:
            raise ValueError(message)

    return BeforeValidator(check)


# ---- whole bodies


class ConversationBody(EngineBody):
    """What a request has that runs a conversation, or counts its tokens."""

    input: Items | None = None
    instructions: str | None = None
    previous_response_id: str | None = Field(default=None, max_length=MAX_ID_CHARS)
    tools: list[ResponseTool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    # Extensions, as in /v1/chat/completions.
    chat_template_kwargs: TemplateKwargs | None = Field(default=None, max_length=MAX_TEMPLATE_KWARGS)
    # Refused by name.
    conversation: Annotated[None, _refused("is not supported; use previous_response_id")] = None
    prompt: Annotated[None, _refused("is not supported")] = None

    def _rules(self) -> Rules:
        empty = not self.input and self.instructions is None and self.previous_response_id is None
        yield empty, "input", "input must not be empty"
        names = {tool.name for tool in self.tools or ()}
        for choice in self.tool_choice.tools if isinstance(self.tool_choice, AllowedTools) else ():
            yield choice.name not in names, "tool_choice", f"tool_choice names {choice.name[:80]!r}, which tools lacks"

    @property
    def format(self) -> TextFormat | None:
        """`text.format`, if it asks for anything but text."""
        form = None if self.text is None else self.text.format
        return None if form is None or form.type == "text" else form


class InputTokensBody(ConversationBody):
    """POST /v1/responses/input_tokens."""


class ResponseBody(ConversationBody, SamplingBody):  # type: ignore[valid-type, misc]
    """POST /v1/responses."""

    max_output_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    include: list[Include] | None = Field(default=None, max_length=16)
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    structured_outputs: StructuredOutputsBody | None = None  # an extension
    # Without any effect on the answer, and said again in it.
    metadata: Metadata | None = None
    max_tool_calls: int | None = Field(default=None, ge=1, lt=2**31)  # of tools that the server itself would call
    prompt_cache_key: str | None = Field(default=None, max_length=1024)
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    safety_identifier: str | None = Field(default=None, max_length=1024)
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"] | None = None

    def _rules(self) -> Rules:
        yield from super()._rules()
        only_streams = self.stream_options is not None and not self.stream
        yield only_streams, "stream_options", "stream_options is only allowed with stream: true"
        not_stored = self.background is True and self.store is False
        yield not_stored, "background", "background: true needs store: true, which is the default"
        both = self.structured_outputs is not None and self.format is not None
        yield both, "structured_outputs", "give text.format or structured_outputs, not both"
        for name in ("n", "best_of"):
            yield getattr(self, name) not in (None, 1), name, f"{name} must be 1: there is one answer to a response"
        for name in ("use_beam_search", "prompt_logprobs"):
            yield getattr(self, name) not in (None, False), name, f"{name} is not supported here"

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def num_logprobs(self) -> int | None:
        """The most likely tokens that each output token comes with; None for no log-probabilities."""
        asked = self.top_logprobs is not None or "message.output_text.logprobs" in (self.include or ())
        return (self.top_logprobs or 0) if asked else None


# ---- answers, as the OpenAPI document describes them


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseAnswer(BaseModel):
    """The Response object, with the settings of its request beside these fields."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "failed", "in_progress", "queued", "cancelled"]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    model: str
    output: list[dict[str, Any]]
    usage: ResponseUsage | None


class ItemList(BaseModel):
    """A page of a response's input items."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputTokens(BaseModel):
    """The answer of /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
