"""The bodies of all requests as pydantic models, which say what is honoured, and the answers as the API describes them.

There are three kinds of request fields: honoured (typed here), harmless (client metadata that has no effect on an
answer), and known but not honoured (`_NOT_HONOURED`: refused with a message that says so, unless the value asks for
nothing). Unknown fields are refused, never ignored, and nothing is coerced: "1" is not 1. Null means "not given", as
OpenAI has it. Ranges of sampling parameters are checked by `SamplingParams`; types, and what depends on more than one
field, here. A validator's `ValueError` gets the path of its field in front (see `errors.py`); an `InvalidRequestError`
names the field itself.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, WithJsonSchema, model_validator

from rayllm.api.sampling_params import MAX_LOGPROBS, MAX_N, StructuredOutputs
from rayllm.api.types import Pooling
from rayllm.errors import InvalidRequestError

MAX_CHOICES = 1024  # prompts x n of one request
MAX_INPUTS = 2048  # texts of one embeddings request, as OpenAI has it
MAX_TOOLS = 128
MAX_TOOLS_BYTES = 256 * 1024  # of all tools of a request, as JSON
MAX_SCHEMA_DEPTH = 64
MAX_TEMPLATE_KWARGS = 16
MAX_TEMPLATE_TEXT = 1024  # characters of a name or a value in chat_template_kwargs

# Known fields that an endpoint does not honour -> the values that ask for nothing, and so are accepted.
_NOT_HONOURED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": ("none",),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "verbosity": (),
    "web_search_options": (),
}


class Body(BaseModel):
    """Base of all request parts."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


# ---- parts


def _check_name(name: str) -> str:
    if not re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name):
        raise ValueError(f"must be 1 to 64 letters, digits, _ or -, not {name[:80]!r}")
    return name


def _check_depth(schema: dict[str, Any]) -> dict[str, Any]:
    level: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        level = [
            child
            for value in level
            if isinstance(value, dict | list)
            for child in (value.values() if isinstance(value, dict) else value)
        ]
    if level:
        raise ValueError(f"is nested deeper than {MAX_SCHEMA_DEPTH} levels")
    return schema


def _text_of(content: Any) -> str:
    """A message's content as one text."""
    if isinstance(content, str) or content is None:
        return content or ""
    if not isinstance(content, list):
        raise ValueError("must be a string or a list of text parts")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise ValueError(f"content of type {kind!r} is not supported yet")
    return "\n".join(TextPart.model_validate(part).text for part in content)


def _check_empty(value: Any) -> None:
    if value not in (None, [], ""):
        raise ValueError("is not supported")


def _parse_object(text: Any, expected: str = "a JSON object, as text") -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (TypeError, ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"must be {expected}")
    return value


def _parse_schema(value: Any) -> dict[str, Any]:
    schema = value if isinstance(value, dict) else _parse_object(value, "a JSON schema: an object, or its text")
    return _check_depth(schema)


_TEXT, _NULL = {"type": "string"}, {"type": "null"}
Name = Annotated[str, AfterValidator(_check_name)]
Schema = Annotated[dict[str, Any], AfterValidator(_check_depth)]
SchemaOrText = Annotated[Any, AfterValidator(_parse_schema)]
ObjectText = Annotated[Any, AfterValidator(_parse_object), WithJsonSchema(_TEXT)]  # text that becomes an object
Unused = Annotated[Any, AfterValidator(_check_empty)]  # a field that only audio, refusals or old clients fill


class TextPart(Body):
    """One part of a message's content."""

    type: Literal["text"]
    text: str


class FunctionCall(Body):
    """What a tool was called with."""

    name: str
    arguments: ObjectText  # "" for none
    parsed_arguments: Any = None  # openai-python's own reading of them, in messages that it sends back


class MessageToolCall(Body):
    """A call that the assistant made in an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # clients that collect streamed calls send it back


# The fields of a message that chat templates know.
_FOR_TEMPLATE: Any = {
    **dict.fromkeys(("role", "content", "name", "tool_call_id", "reasoning_content"), True),
    "tool_calls": {"__all__": {"id": True, "type": True, "function": {"name", "arguments"}}},
}


class Message(Body):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Any, AfterValidator(_text_of)] = ""
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    parsed: Any = None  # openai-python's own reading of the content, in messages that it sends back
    provider_specific_fields: Any = None  # LiteLLM's own notes, in messages that it sends back
    function_call: Unused = None
    refusal: Unused = None
    audio: Unused = None
    annotations: Unused = None

    @model_validator(mode="after")
    def _check_role(self) -> Message:
        for name in ("tool_calls", "reasoning_content"):
            if getattr(self, name) and self.role != "assistant":
                raise ValueError(f"only assistant messages have {name}")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("tool_call_id belongs to messages of role tool, each one")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates know it: "developer" is OpenAI's newer name for "system"."""
        turn = self.model_dump(include=_FOR_TEMPLATE) | {"role": "system" if self.role == "developer" else self.role}
        return {name: value for name, value in turn.items() if value or name == "content"}


class Function(Body):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None  # has no effect: arguments are held to the schema where a call is enforced

    @model_validator(mode="after")
    def _check_parameters(self) -> Function:
        kind = (self.parameters or {}).get("type", "object")
        if kind != "object":
            raise ValueError(f"parameters must be a schema of type object, not {str(kind)[:80]!r}")
        return self


class Tool(Body):
    """One entry of `tools`."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates show it to the model."""
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


def _check_tool_choice(value: Any) -> Any:
    match value:
        case None | "none" | "auto" | "required":
            return value
        case {"type": "function", "function": {"name": str(), **options}, **more} if not options and not more:
            return value
    raise InvalidRequestError(
        'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}',
        "tool_choice",
    )


def _check_template_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    for key, value in kwargs.items():
        if not isinstance(value, str | int | float | None):
            raise ValueError(f"{key[:80]} must be a string, a number, true, false or null")
        if max(len(key), len(value) if isinstance(value, str) else 0) > MAX_TEMPLATE_TEXT:
            raise ValueError(f"names and values take at most {MAX_TEMPLATE_TEXT} characters")
    return kwargs


def _check_prompts(value: Any, info: ValidationInfo) -> list[Prompt]:
    """The prompts one by one, each a text or a list of token ids."""
    name = str(info.field_name)
    prompts = [value] if isinstance(value, str) or _is_ids(value) else value
    if not isinstance(prompts, list) or not (all(isinstance(p, str) for p in prompts) or all(map(_is_ids, prompts))):
        if isinstance(prompts, list) and [] in prompts:
            raise InvalidRequestError(f"{name} must not hold an empty list", name)
        forms = "a string, a list of strings, a list of token ids or a list of lists of token ids"
        raise InvalidRequestError(f"{name} must be {forms}", name)
    return prompts


def _is_ids(value: Any) -> bool:
    """True for a list of integers that is not empty (True and False are not token ids)."""
    return isinstance(value, list) and bool(value) and set(map(type, value)) == {int}


Prompt = str | list[int]

# What may have several forms is checked by hand, as pydantic reports one error for each form of a union.
_TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_ID_LISTS = {"type": "array", "items": _IDS, "minItems": 1}
Prompts = Annotated[Any, AfterValidator(_check_prompts), WithJsonSchema({"anyOf": [_TEXT, _TEXTS, _IDS, _ID_LISTS]})]
Stop = Annotated[Any, WithJsonSchema({"anyOf": [_TEXT, _TEXTS, _NULL]})]  # SamplingParams checks it
EarlyStopping = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "boolean"}, {"const": "never"}, _NULL]})]  # so too


class JsonSchemaFormat(Body):
    """The schema of a `response_format`. It is always enforced, whether `strict` is given or not."""

    name: Name
    description: str | None = None
    schema_: Schema = Field(alias="schema")  # the name would hide a method of pydantic's
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _check_type(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to type json_schema, and is required there")
        return self

    def structured_outputs(self) -> StructuredOutputs | None:
        """The engine's form of it; None for any text. Raises InvalidRequestError."""
        if self.json_schema is not None:
            return StructuredOutputs(json=json.dumps(self.json_schema.schema_, ensure_ascii=False))
        return StructuredOutputs(json_object=True) if self.type == "json_object" else None


class StructuredOutputsBody(Body):
    """The extension `structured_outputs`; exactly one field is given."""

    json_: SchemaOrText = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    def structured_outputs(self) -> StructuredOutputs:
        """The engine's form of it. Raises InvalidRequestError."""
        given = self.model_dump(exclude_none=True, by_alias=True)
        if "json" in given:
            given["json"] = json.dumps(given["json"], ensure_ascii=False)
        return StructuredOutputs(**given)


class StreamOptions(Body):
    include_usage: bool | None = None  # a last chunk with the usage
    continuous_usage_stats: bool | None = None  # the usage so far on every chunk


# ---- whole bodies


class EngineBody(Body):
    """What all requests to an engine share."""

    model: str | None = None
    user: str | None = None  # client metadata without any effect on the answer
    # Extensions.
    add_special_tokens: bool | None = None
    cache_salt: str | None = Field(default=None, max_length=256)
    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)


class EmbeddingBody(EngineBody):
    """POST /v1/embeddings."""

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None  # only the model's own number
    pooling: Pooling | None = None  # an extension; "last" if absent

    @model_validator(mode="after")
    def _check_number(self) -> EmbeddingBody:
        if not 1 <= len(self.input) <= MAX_INPUTS:
            raise InvalidRequestError(f"input takes 1 to {MAX_INPUTS} entries, not {len(self.input)}", "input")
        return self


class GenerationBody(EngineBody):
    """What completions and chat share: sampling, streaming, extensions, client metadata."""

    n: int | None = Field(default=None, ge=1, le=MAX_N)
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = Field(default=None, ge=0, lt=2**31)
    max_completion_tokens: int | None = Field(default=None, ge=0, lt=2**31)
    stop: Stop = None
    seed: int | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Extensions.
    best_of: int | None = Field(default=None, ge=1, le=MAX_N)
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: EarlyStopping = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    structured_outputs: StructuredOutputsBody | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    # Client metadata without any effect on the answer.
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_honoured(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {}
        for name, value in data.items():
            if name not in _NOT_HONOURED or name in cls.model_fields:
                kept[name] = value
            elif value is not None and value not in _NOT_HONOURED[name]:
                raise InvalidRequestError(f"{name} is not supported here", name)
        return kept

    @model_validator(mode="after")
    def _check_combinations(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options is only allowed with stream: true", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError("prompt_logprobs is not available with stream: true", "prompt_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequestError(
                f"max_tokens ({self.max_tokens}) and max_completion_tokens ({self.max_completion_tokens}) differ; "
                "give one of them",
                "max_completion_tokens",
            )
        if self.stream and (self.use_beam_search or self.num_sampled > (self.n or 1)):
            name = "use_beam_search" if self.use_beam_search else "best_of greater than n"
            raise InvalidRequestError(f"{name} is not available with stream: true", name.split()[0])
        if self.structured_outputs is not None and self.response_format and self.response_format.type != "text":
            raise InvalidRequestError("give response_format or structured_outputs, not both", "structured_outputs")
        return self

    @property
    def constraint_field(self) -> str | None:
        """The field that the form of the whole output comes from; None for any text."""
        if self.structured_outputs is not None:
            return "structured_outputs"
        return "response_format" if self.response_format and self.response_format.type != "text" else None

    def constraint(self) -> StructuredOutputs | None:
        """The form that the whole output must have. Raises InvalidRequestError naming structured_outputs."""
        form = self.structured_outputs or self.response_format
        return None if form is None else form.structured_outputs()

    @property
    def num_sampled(self) -> int:
        """Sequences that run for each prompt; the best n of them are the answer."""
        return max(self.best_of or 1, self.n or 1)

    @property
    def token_limit(self) -> int | None:
        """max_tokens under either of its names; None if not given."""
        return self.max_tokens if self.max_tokens is not None else self.max_completion_tokens


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionBody:
        if not self.prompt:
            raise InvalidRequestError("prompt must not be empty", "prompt")
        if self.token_limit == 0 and not self.echo:
            name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
            raise InvalidRequestError(f"{name} must be at least 1, or 0 with echo: true", name)
        choices = len(self.prompt) * self.num_sampled
        if choices > MAX_CHOICES:
            factor = "n" if self.num_sampled == (self.n or 1) else "best_of"
            raise InvalidRequestError(
                f"prompts x {factor} is {choices}; one request takes at most {MAX_CHOICES} completions",
                factor if self.num_sampled > 1 else "prompt",
            )
        return self


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tools: list[Tool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Annotated[Any, AfterValidator(_check_tool_choice)] = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_check_template_kwargs)] | None = Field(
        default=None, max_length=MAX_TEMPLATE_KWARGS
    )
    add_generation_prompt: Literal[True] | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs is only allowed with logprobs: true", "top_logprobs")
        asked: set[str] = set()
        for message in self.messages:
            asked |= {call.id for call in message.tool_calls or ()}
            if message.tool_call_id is not None and message.tool_call_id not in asked:
                raise InvalidRequestError(
                    f"messages: tool_call_id {message.tool_call_id!r} is of no tool call in the messages before it",
                    "messages",
                )
        self._check_tools()
        return self

    def _check_tools(self) -> None:
        tools = self.tools or []
        names = [tool.function.name for tool in tools]
        for name in names:
            if names.count(name) > 1:
                raise InvalidRequestError(f"tools has two functions of the name {name!r}", "tools")
        size = sum(len(tool.model_dump_json()) for tool in tools)
        if size > MAX_TOOLS_BYTES:
            raise InvalidRequestError(f"tools takes at most {MAX_TOOLS_BYTES} bytes in all, not {size}", "tools")
        if not tools and self.tool_choice not in (None, "none"):
            raise InvalidRequestError("tool_choice is only allowed with tools", "tool_choice")
        if self.named_tool is not None and self.named_tool not in names:
            raise InvalidRequestError(f"tool_choice names {self.named_tool[:80]!r}, which tools lacks", "tool_choice")
        if self.offered_tools and (field := self.constraint_field) is not None:
            raise InvalidRequestError(
                f"{field} holds for the whole output, which leaves no room for tool calls; set tool_choice to none",
                field,
            )

    @property
    def named_tool(self) -> str | None:
        """The one tool that must be called."""
        return self.tool_choice["function"]["name"] if isinstance(self.tool_choice, dict) else None

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be a tool call."""
        return self.named_tool is not None or self.tool_choice == "required"

    @property
    def single_call(self) -> bool:
        """Whether the answer has at most one tool call."""
        return self.named_tool is not None or self.parallel_tool_calls is False

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []


class TokenizeBody(Body):
    """POST /tokenize. Either prompt, or messages, which go through the chat template as in /v1/chat/completions."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    add_special_tokens: bool | None = None  # as the tokenizer does by itself: true for a prompt, false for messages
    return_token_strs: bool | None = None  # the text of each token too

    @model_validator(mode="after")
    def _check(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("give either prompt or messages", "prompt")
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


# ---- answers, as the OpenAPI document describes them; those of generation are made by `replies.py`


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Every error of the API."""

    error: ErrorDetail


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "rayllm"
    max_model_len: int | None = None  # left out while the model has no engine


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int = 0
    total_tokens: int
    prompt_tokens_details: dict[str, int] = {}


class Choice(BaseModel):
    index: int
    logprobs: dict[str, Any] | None
    finish_reason: str | None


class CompletionChoice(Choice):
    text: str


class ChatChoice(Choice):
    message: dict[str, Any]


class Answer(BaseModel):
    id: str
    created: int
    model: str
    usage: Usage


class Completion(Answer):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ChatCompletion(Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Embedding(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # text is base64


class Embeddings(BaseModel):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class Tokens(BaseModel):
    """The answer of /tokenize."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class Detokenized(BaseModel):
    """The answer of /detokenize."""

    prompt: str
