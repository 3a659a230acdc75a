"""The parts of request bodies: messages, tools, response formats. Each is checked as a whole body is."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from rayllm.api.sampling_params import StructuredOutputs
from rayllm.errors import InvalidRequestError

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 256 * 1024  # of all tools of a request, as JSON
MAX_SCHEMA_DEPTH = 64
MAX_TEMPLATE_KWARGS = 16
MAX_TEMPLATE_TEXT = 1024  # characters of a name or a value in chat_template_kwargs
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class Body(BaseModel):
    """Base of all request parts: unknown fields are errors, and nothing is coerced ("1" is not 1)."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


class TextPart(Body):
    """One part of a message's content."""

    type: Literal["text"]
    text: str


class FunctionCall(Body):
    """What a tool was called with. arguments: a JSON object as text, "" for none."""

    name: str
    arguments: str
    parsed_arguments: Any = None  # openai-python's own reading of them, in messages that it sends back


class MessageToolCall(Body):
    """A call that the assistant made in an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # clients that collect streamed calls send it back

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates know it: the arguments are an object there, not text."""
        return {
            "id": self.id,
            "type": self.type,
            "function": {"name": self.function.name, "arguments": self.arguments()},
        }

    def arguments(self) -> dict[str, Any]:
        """The arguments as an object. Raises InvalidRequestError if they are none."""
        try:
            value = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise InvalidRequestError(
                f"messages: the arguments of tool call {self.id!r} must be a JSON object, as text", "messages"
            )
        return value


class Message(Body):
    """One turn of a chat. Fields that only audio or refusals fill are accepted when they are null or empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Any = ""
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    parsed: Any = None  # openai-python's own reading of the content, in messages that it sends back
    provider_specific_fields: Any = None  # LiteLLM's own notes, in messages that it sends back

    @model_validator(mode="before")
    @classmethod
    def _drop_empty_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            raise InvalidRequestError("messages must be a list of objects with role and content", "messages")
        if data.get("role") == "function" or data.get("function_call"):
            raise InvalidRequestError("messages: function_call is not supported; use tool_calls", "messages")
        unused = ("tool_calls", "function_call", "refusal", "audio", "annotations", "reasoning_content")
        return {k: v for k, v in data.items() if not (k in unused and v in (None, [], ""))}

    @field_validator("content")
    @classmethod
    def _check_content(cls, value: Any) -> str:
        if isinstance(value, str):
            return value
        if value is None:
            return ""
        if not isinstance(value, list):
            raise InvalidRequestError("messages: content must be a string or a list of text parts", "messages")
        for part in value:
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                raise InvalidRequestError(f"messages: content of type {kind!r} is not supported yet", "messages")
        return "\n".join(TextPart.model_validate(part).text for part in value)

    @model_validator(mode="after")
    def _check_role(self) -> Message:
        for name in ("tool_calls", "reasoning_content"):
            if getattr(self, name) and self.role != "assistant":
                raise InvalidRequestError(f"messages: only assistant messages have {name}", "messages")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise InvalidRequestError("messages: tool_call_id belongs to messages of role tool, each one", "messages")
        if len(self.tool_calls or ()) > MAX_TOOLS:
            raise InvalidRequestError(f"messages: a message takes at most {MAX_TOOLS} tool_calls", "messages")
        for call in self.tool_calls or ():
            call.arguments()
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates know it: "developer" is OpenAI's newer name for "system"."""
        turn: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        if self.tool_calls:
            turn["tool_calls"] = [call.for_template() for call in self.tool_calls]
        for name in ("name", "tool_call_id", "reasoning_content"):
            if getattr(self, name) is not None:
                turn[name] = getattr(self, name)
        return turn


def check_tool_answers(messages: list[Message]) -> None:
    """Raise InvalidRequestError for a tool's answer to a call that no message before it made."""
    asked: set[str] = set()
    for message in messages:
        asked |= {call.id for call in message.tool_calls or ()}
        if message.tool_call_id is not None and message.tool_call_id not in asked:
            raise InvalidRequestError(
                f"messages: tool_call_id {message.tool_call_id!r} is of no tool call in the messages before it",
                "messages",
            )


class Function(Body):
    """A function that the model may call. strict has no effect where `tool_choice` is auto: see `Tool`."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """One entry of `tools`. Arguments are held to the schema where a call is enforced (required, a named tool)."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates show it to the model."""
        function: dict[str, Any] = {"name": self.function.name}
        for name in ("description", "parameters"):
            if getattr(self.function, name) is not None:
                function[name] = getattr(self.function, name)
        return {"type": self.type, "function": function}


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    """`tool_choice` as an object."""

    type: Literal["function"]
    function: NamedFunction


def check_tools(tools: list[Tool]) -> None:
    """Raise InvalidRequestError, naming the limit, for tools that are too many, too large or not well formed."""
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(f"tools takes at most {MAX_TOOLS} entries, not {len(tools)}", "tools")
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        name, parameters = tool.function.name, tool.function.parameters
        if not _NAME.fullmatch(name):
            raise InvalidRequestError(
                f"tools.{index}.function.name must be 1 to 64 letters, digits, _ or -, not {name[:80]!r}", "tools"
            )
        if name in seen:
            raise InvalidRequestError(f"tools has two functions of the name {name!r}", "tools")
        seen.add(name)
        if parameters and parameters.get("type", "object") != "object":
            raise InvalidRequestError(
                f"tools.{index}.function.parameters must be a schema of type object, "
                f"not {str(parameters['type'])[:80]!r}",
                "tools",
            )
        check_depth(parameters, f"tools.{index}.function.parameters", "tools")
    size = sum(len(tool.model_dump_json()) for tool in tools)
    if size > MAX_TOOLS_BYTES:
        raise InvalidRequestError(f"tools takes at most {MAX_TOOLS_BYTES} bytes in all, not {size}", "tools")


def check_depth(schema: Any, name: str, param: str) -> None:
    """Raise InvalidRequestError for a schema that is nested deeper than MAX_SCHEMA_DEPTH."""
    level = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        level = [
            child
            for value in level
            if isinstance(value, dict | list)
            for child in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return
    raise InvalidRequestError(f"{name} is nested deeper than {MAX_SCHEMA_DEPTH} levels", param)


class JsonSchemaFormat(Body):
    """The schema of a `response_format`. It is always enforced, whether `strict` is given or not."""

    name: str
    description: str | None = None
    # "schema" would hide a method of pydantic's.
    schema_: dict[str, Any]
    strict: bool | None = None

    model_config = ConfigDict(alias_generator=lambda name: name.rstrip("_"))


class ResponseFormat(Body):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def structured_outputs(self) -> StructuredOutputs | None:
        """The engine's form of it; None for any text. Raises InvalidRequestError."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise InvalidRequestError(
                "response_format: json_schema belongs to type json_schema, and is required there", "response_format"
            )
        if self.json_schema is None:
            return StructuredOutputs(json_object=True) if self.type == "json_object" else None
        if not _NAME.fullmatch(self.json_schema.name):
            raise InvalidRequestError(
                "response_format.json_schema.name must be 1 to 64 letters, digits, _ or -", "response_format"
            )
        return _structured("response_format", json=self.json_schema.schema_)


class StructuredOutputsBody(Body):
    """The extension `structured_outputs`; exactly one field is given. json: a schema, as an object or as text."""

    json_: Any = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    model_config = ConfigDict(alias_generator=lambda name: name.rstrip("_"))

    def structured_outputs(self) -> StructuredOutputs:
        """The engine's form of it. Raises InvalidRequestError."""
        given = {
            name: getattr(self, name) for name in ("regex", "choice", "grammar") if getattr(self, name) is not None
        }
        if self.json_object:
            given["json_object"] = True
        if self.json_ is not None:
            given["json"] = self.json_
        return _structured("structured_outputs", **given)


def _structured(param: str, **given: Any) -> StructuredOutputs:
    schema = given.get("json")
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            schema = None
    if "json" in given:
        if not isinstance(schema, dict):
            raise InvalidRequestError(f"{param}: json must be a JSON schema: an object, or its text", param)
        check_depth(schema, f"{param}: the schema", param)
        given["json"] = json.dumps(schema, ensure_ascii=False)
    try:
        return StructuredOutputs(**given)
    except InvalidRequestError as error:
        raise as_sent(error, param) from None


def as_sent(error: InvalidRequestError, name: str) -> InvalidRequestError:
    """An error about structured_outputs, if it is one, under the name of the field that asked for them."""
    if error.param != "structured_outputs" or name == "structured_outputs":
        return error
    return InvalidRequestError(str(error).replace("structured_outputs", name, 1), name)


def check_template_kwargs(value: dict[str, Any]) -> None:
    """Raise InvalidRequestError unless this is a small, flat mapping."""
    name = "chat_template_kwargs"
    if len(value) > MAX_TEMPLATE_KWARGS:
        raise InvalidRequestError(f"{name} takes at most {MAX_TEMPLATE_KWARGS} entries, not {len(value)}", name)
    for key, entry in value.items():
        if not isinstance(entry, str | int | float | None):
            raise InvalidRequestError(f"{name}.{key[:80]} must be a string, a number, true, false or null", name)
        if max(len(key), len(entry) if isinstance(entry, str) else 0) > MAX_TEMPLATE_TEXT:
            raise InvalidRequestError(f"{name}: names and values take at most {MAX_TEMPLATE_TEXT} characters", name)
