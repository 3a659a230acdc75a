"""The bodies of all requests as pydantic models, which say what is honoured, and the answers as the API describes them.

There are three kinds of request fields: honoured (typed here), harmless (client metadata that has no effect on an
answer), and known but not honoured (`_NOT_HONOURED`: refused with a message that says so, unless the value asks for
nothing). Unknown fields are refused, never ignored, and nothing is coerced: "1" is not 1. Null means "not given", as
OpenAI has it. Sampling parameters are those of `SamplingParams`, which checks their ranges; types, and what depends on
more than one field, are checked here. A validator's `ValueError` gets the path of its field in front (see `errors.py`);
an `InvalidRequestError` names the field itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Json, create_model, model_validator
from pydantic_core import CoreSchema, from_json

from rayllm.api.sampling_params import MAX_LOGPROBS, SamplingParams, StructuredOutputs
from rayllm.api.types import Pooling
from rayllm.errors import InvalidRequestError
from rayllm.text.json_schema import enforceable, not_enforced

MAX_BODY_BYTES = 32 * 2**20
LONG_BODY = 16_384  # bytes; what comes of longer ones is worked on in a thread, so that streams go on
LARGE_BODY = 2**18  # bytes; what the allocator keeps of longer ones is given back to the system
BASE_BYTES = 2**20  # of a body, beside its prompts
PROMPT_TOKEN_BYTES = 2**10  # of a prompt's token: all of its text's characters escaped, in the largest vocabularies
BATCH_TOKEN_BYTES = 8 * 2**10  # the same of all prompts in a batch: as token ids, MAX_CHOICES of them
MAX_VALUES = 2**16  # in a body, beside its prompts: to check one takes microseconds
# What a body may cost to parse, which holds the interpreter's lock: a comma of a list 1 (some 50 ns), an object or an
# array 8, a field 16. They are counted in prompts' text too, which costs less than MAX_TOKEN_COST a token.
MAX_COST = 2**21
MAX_TOKEN_COST = 16
MAX_CHOICES = 1024  # prompts x n of one request
MAX_INPUTS = 2048  # texts of one embeddings request, as OpenAI has it
MAX_DETOKENIZED = 2**20  # tokens
MAX_TOOLS = 128
MAX_TOOLS_BYTES = 256 * 1024  # of all tools of a request, as JSON
MAX_SCHEMA_DEPTH = 64
MAX_TEMPLATE_KWARGS = 16
MAX_TEMPLATE_TEXT = 1024  # characters of a name or a value in chat_template_kwargs

# Known fields that an endpoint does not honour -> the value beside null that asks for nothing, and so is accepted.
_NOT_HONOURED: dict[str, Any] = {
    **dict.fromkeys(("audio", "chat_template", "prediction", "truncate_prompt_tokens", "web_search_options")),
    **dict.fromkeys(("guided_choice", "guided_grammar", "guided_json", "guided_regex", "verbosity")),
    **dict.fromkeys(("function_call", "reasoning_effort", "tool_choice"), "none"),
    **{"documents": [], "functions": [], "tools": [], "modalities": ["text"]},
    **{"chat_template_kwargs": {}, "continue_final_message": False, "suffix": ""},
}

Rules = Iterator[tuple[bool, str, str]]  # whether a rule is broken, the field at fault, what is said then


class Body(BaseModel):
    """Base of all request parts."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())
    token_bytes: ClassVar[int] = PROMPT_TOKEN_BYTES

    def _rules(self) -> Rules:
        """What depends on more than one field. The field at fault is "" if it is this part itself."""
        yield from ()

    @model_validator(mode="wrap")
    @classmethod
    def _check_rules(cls, data: Any, check_fields: Callable[[Any], Self]) -> Self:
        if isinstance(data, cls):
            return data  # checked before: FastAPI gets what `read_body` has made
        body = check_fields(data)
        for is_broken, field, message in body._rules():
            if is_broken:
                raise InvalidRequestError(message, field) if field else ValueError(message)
        return body


BodyT = TypeVar("BodyT", bound=Body)


def max_bytes(kind: type[Body], max_model_len: int) -> int:
    """How long a body of this kind may be: it has room for what a full context needs, and for full batches of ids."""
    return min(MAX_BODY_BYTES, BASE_BYTES + kind.token_bytes * max_model_len)


def read_body(kind: type[BodyT], text: bytes, max_model_len: int) -> BodyT:
    """The body in a text that is no longer than `max_bytes` says.

    Nothing here holds the interpreter's lock for long, so it may run in a thread beside streams.
    Raises InvalidRequestError and ValidationError.
    """
    cost = text.count(b",") + 8 * (text.count(b"{") + text.count(b"[")) + 16 * text.count(b":")
    if cost > MAX_COST + MAX_TOKEN_COST * max_model_len:
        raise InvalidRequestError("the request body has too many values, or commas, colons and brackets in its texts")
    try:
        value = from_json(text)
    except ValueError as error:
        raise InvalidRequestError(f"the request body is not valid JSON: {error}") from None
    if len(text) > LONG_BODY:
        _check_size(value)
    return kind.model_validate(value)


def _check_size(body: Any) -> None:
    """Refuse what would take long to validate, or to list the errors of. Prompts are validated up to the first one."""
    prompts = ("prompt", "input", "tokens")
    level = [value for name, value in body.items() if name not in prompts] if isinstance(body, dict) else [body]
    count = len(level)
    while level and count <= MAX_VALUES:
        parts = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        count += sum(map(len, parts))
        level = [value for part in parts for value in part] if count <= MAX_VALUES else []
    if count > MAX_VALUES:
        raise InvalidRequestError(f"the request body has more than {MAX_VALUES} values beside its prompts")


# ---- parts


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether values are nested in more than so many levels."""
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels == 0 or any(_is_deeper(child, levels - 1) for child in children)


def _check_depth(schema: dict[str, Any]) -> dict[str, Any]:
    if _is_deeper(schema, MAX_SCHEMA_DEPTH):
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


def _arguments(value: Any) -> dict[str, Any] | str:
    """A call's arguments as chat templates want them: an object, or the text if it is none."""
    if isinstance(value, dict):
        return value
    if not isinstance(value, str | None):
        raise ValueError("must be the text of a JSON object")
    try:
        parsed = from_json(value or "{}")
    except ValueError:
        return value or ""
    return parsed if isinstance(parsed, dict) else value or ""


@dataclass(frozen=True)
class OneOf:
    """On a union: one error that names its forms, where pydantic has an error for each of them."""

    message: str

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> CoreSchema:
        return handler(source) | {"custom_error_type": "one_of", "custom_error_message": self.message}


Name = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
Schema = Annotated[dict[str, Any], AfterValidator(_check_depth)]
SchemaOrText = Annotated[Schema | Json[Schema], OneOf("must be a JSON schema: an object, or its text")]
Arguments = Annotated[Any, AfterValidator(_arguments)]
SentBack = Annotated[Any, Field(exclude=True)]  # what a client adds to messages, and sends back with them
Empty = Annotated[Literal[""] | Annotated[list[Any], Field(max_length=0)], OneOf("is not supported")]
Unused = Annotated[Empty | None, Field(exclude=True)]  # a field that only audio, refusals or old clients fill

TemplateText = Annotated[str, Field(max_length=MAX_TEMPLATE_TEXT)]
_TEMPLATE_VALUES = f"must be a string of at most {MAX_TEMPLATE_TEXT} characters, a number, true, false or null"
TemplateKwargs = dict[TemplateText, Annotated[TemplateText | int | float | bool, OneOf(_TEMPLATE_VALUES)] | None]
TokenIds = Annotated[list[int], Field(min_length=1, fail_fast=True)]
Prompt = str | TokenIds
Prompts = Annotated[
    str | TokenIds | Annotated[list[str], Field(fail_fast=True)] | Annotated[list[TokenIds], Field(fail_fast=True)],
    OneOf("must be a string, a list of strings, a list of token ids or a list of such lists, none of them empty"),
    AfterValidator(lambda value: [value] if isinstance(value, str) or isinstance((*value, None)[0], int) else value),
]
# Forms of JSON that `SamplingParams` does not have.
TokenKey = Annotated[str, Field(pattern="^[0-9]{1,10}$"), AfterValidator(int)]
Stop = Annotated[str | list[str], OneOf("must be a string or a list of strings")]
EarlyStopping = Annotated[bool | Literal["never"], OneOf('must be true, false or "never"')]


class TextPart(Body):
    """One part of a message's content."""

    type: Literal["text"]
    text: str


class FunctionCall(Body):
    """What a tool was called with."""

    name: str
    arguments: Arguments = ""  # "" for none; what is no object goes to the template as the text it is
    parsed_arguments: SentBack = None  # openai-python's own reading of them


class MessageToolCall(Body):
    """A call that the assistant made in an earlier turn."""

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall
    index: SentBack = None  # in the stream that the client collected


class Message(Body):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Any, AfterValidator(_text_of)] = ""
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(default=None, exclude=True)  # the same, as some clients call it
    parsed: SentBack = None  # openai-python's own reading of the content
    provider_specific_fields: SentBack = None  # LiteLLM's own notes
    function_call: Unused = None
    refusal: Unused = None
    audio: Unused = None
    annotations: Unused = None

    def _rules(self) -> Rules:
        for name in ("tool_calls", "reasoning_content", "reasoning"):
            is_broken = bool(getattr(self, name)) and self.role != "assistant"
            yield is_broken, "", f"only assistant messages have {name}"
        is_broken = self.tool_call_id is not None and self.role != "tool"
        yield is_broken, "", "tool_call_id belongs to messages of role tool"

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates know it: "developer" is OpenAI's newer name for "system"."""
        turn = self.model_dump() | {"role": "system" if self.role == "developer" else self.role}
        turn["reasoning_content"] = self.reasoning_content or self.reasoning
        return {name: value for name, value in turn.items() if value or name == "content"}


class Function(Body):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = Field(default=None, exclude=True)  # arguments are held to the schema if a call is enforced

    def _rules(self) -> Rules:
        kind = (self.parameters or {}).get("type", "object")
        yield kind != "object", "", f"parameters must be a schema of type object, not {str(kind)[:80]!r}"


class Tool(Body):
    """One entry of `tools`."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates show it to the model."""
        return self.model_dump(exclude_none=True)


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool,
    OneOf('must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}'),
]


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

    def _rules(self) -> Rules:
        is_broken = (self.type == "json_schema") != (self.json_schema is not None)
        yield is_broken, "", "json_schema belongs to type json_schema, and is required there"

    def structured_outputs(self) -> StructuredOutputs | None:
        """The engine's form of it; None for any text. Raises InvalidRequestError."""
        if self.json_schema is not None:
            return StructuredOutputs(json=json.dumps(enforceable(self.json_schema.schema_), ensure_ascii=False))
        return StructuredOutputs(json_object=True) if self.type == "json_object" else None


class StructuredOutputsBody(Body):
    """The extension `structured_outputs`; exactly one field is given."""

    json_: SchemaOrText | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    def structured_outputs(self) -> StructuredOutputs:
        """The engine's form of it. Raises InvalidRequestError."""
        given = self.model_dump(exclude_none=True, by_alias=True)
        if "json" in given:
            given["json"] = json.dumps(enforceable(given["json"]), ensure_ascii=False)
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

    token_bytes = BATCH_TOKEN_BYTES
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None  # only the model's own number
    pooling: Pooling | None = None  # an extension; "last" if absent

    def _rules(self) -> Rules:
        number = len(self.input)
        yield not 1 <= number <= MAX_INPUTS, "input", f"input takes 1 to {MAX_INPUTS} entries, not {number}"


# Sampling parameters by their own names, where JSON has them in another form than `SamplingParams`.
_FORMS: dict[str, Any] = {"stop": Stop, "early_stopping": EarlyStopping, "logit_bias": dict[TokenKey, float]}
_SAMPLING: dict[str, Any] = {
    name: (_FORMS.get(name, kind) | None, None)
    for name, kind in get_type_hints(SamplingParams).items()
    if name not in ("logprobs", "max_tokens", "structured_outputs")  # the API's have another type or meaning
}
SamplingBody = create_model("SamplingBody", __base__=EngineBody, **_SAMPLING)


class GenerationBody(SamplingBody):  # type: ignore[valid-type, misc]
    """What completions and chat share: sampling, streaming, extensions, client metadata."""

    max_tokens: int | None = Field(default=None, ge=0, lt=2**31)
    max_completion_tokens: int | None = Field(default=None, ge=0, lt=2**31)
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    structured_outputs: StructuredOutputsBody | None = None
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
        others = {name: value for name, value in data.items() if name in _NOT_HONOURED.keys() - cls.model_fields.keys()}
        for name, value in others.items():
            if value not in (None, _NOT_HONOURED[name]):
                raise InvalidRequestError(f"{name} is not supported here", name)
        return {name: value for name, value in data.items() if name not in others}

    def _rules(self) -> Rules:
        only_streams = self.stream_options is not None and not self.stream
        yield only_streams, "stream_options", "stream_options is only allowed with stream: true"
        for name, is_given in (
            ("prompt_logprobs", self.prompt_logprobs is not None),
            ("use_beam_search", self.use_beam_search),
            ("best_of", self.num_sampled > (self.n or 1)),
        ):
            what = "best_of greater than n" if name == "best_of" else name
            yield bool(self.stream and is_given), name, f"{what} is not available with stream: true"
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        message = f"max_tokens ({self.max_tokens}) and max_completion_tokens ({self.max_completion_tokens}) differ; "
        yield len(limits) > 1, "max_completion_tokens", message + "give one of them"
        both = self.structured_outputs and self.response_format and self.response_format.type != "text"
        yield bool(both), "structured_outputs", "give response_format or structured_outputs, not both"

    @property
    def constraint_field(self) -> str | None:
        """The field that the form of the whole output comes from; None for any text."""
        if self.structured_outputs is not None:
            return "structured_outputs"
        return "response_format" if self.response_format and self.response_format.type != "text" else None

    def constraint_schemas(self) -> dict[str, dict[str, Any]]:
        """The JSON schemas that the output is held to, by their fields."""
        schemas = {}
        if self.response_format and self.response_format.json_schema:
            schemas["response_format.schema"] = self.response_format.json_schema.schema_
        if self.structured_outputs and self.structured_outputs.json_:
            schemas["structured_outputs.json"] = self.structured_outputs.json_
        return schemas

    def not_enforced(self) -> list[str]:
        """For each of these schemas that has some: its field, and the keywords that are not enforced."""
        found = {field: not_enforced(schema) for field, schema in self.constraint_schemas().items()}
        return [f"{field}: {', '.join(keywords)}" for field, keywords in found.items() if keywords]

    def sampling_options(self, logprobs: int | None) -> dict[str, Any]:
        """What `SamplingParams` is made of but the limit: the fields that were given, with null as not given.

        logprobs: how many an output token has. Raises InvalidRequestError naming structured_outputs.
        """
        form = self.structured_outputs or self.response_format
        options = {name: getattr(self, name) for name in _SAMPLING if getattr(self, name) is not None}
        return options | {"structured_outputs": form and form.structured_outputs(), "logprobs": logprobs}

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

    token_bytes = BATCH_TOKEN_BYTES
    prompt: Prompts
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    def _rules(self) -> Rules:
        yield from super()._rules()
        yield not self.prompt, "prompt", "prompt must not be empty"
        name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        without = self.token_limit == 0 and not self.echo
        yield without, name, f"{name} must be at least 1, or 0 with echo: true"
        choices, factor = len(self.prompt) * self.num_sampled, "n" if self.num_sampled == (self.n or 1) else "best_of"
        message = f"prompts x {factor} is {choices}; one request takes at most {MAX_CHOICES} completions"
        yield choices > MAX_CHOICES, factor if self.num_sampled > 1 else "prompt", message


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tools: list[Tool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = Field(default=None, max_length=MAX_TEMPLATE_KWARGS)
    add_generation_prompt: Literal[True] | None = None

    def _rules(self) -> Rules:
        yield from super()._rules()
        without = self.top_logprobs is not None and not self.logprobs
        yield without, "top_logprobs", "top_logprobs is only allowed with logprobs: true"
        tools = self.tools or []
        names = [tool.function.name for tool in tools]
        for name in names:
            yield names.count(name) > 1, "tools", f"tools has two functions of the name {name!r}"
        size = sum(len(tool.model_dump_json()) for tool in tools)
        yield size > MAX_TOOLS_BYTES, "tools", f"tools takes at most {MAX_TOOLS_BYTES} bytes in all, not {size}"
        without = not tools and self.tool_choice not in (None, "none")
        yield without, "tool_choice", "tool_choice is only allowed with tools"
        is_unknown = self.named_tool not in (None, *names)
        yield is_unknown, "tool_choice", f"tool_choice names {str(self.named_tool)[:80]!r}, which tools lacks"

    def constraint_schemas(self) -> dict[str, dict[str, Any]]:
        tools = self.offered_tools if self.must_call or self.constraint_field else []
        schemas = {f"tools.{tool.function.name}": tool.function.parameters or {} for tool in tools}
        return ({} if self.must_call else super().constraint_schemas()) | schemas

    @property
    def named_tool(self) -> str | None:
        """The one tool that must be called."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None

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

    def _rules(self) -> Rules:
        yield (self.prompt is None) == (self.messages is None), "prompt", "give either prompt or messages"


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int] = Field(max_length=MAX_DETOKENIZED, fail_fast=True)


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
