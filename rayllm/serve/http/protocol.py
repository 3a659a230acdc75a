"""The bodies of requests as pydantic models, which say what is honoured.

Known request fields are honoured, without effect on an answer (client metadata), or refused (`NotSupported`). Unknown
ones are ignored and reported, or refused with `strict_fields` (see `unknown_fields.py`). Nothing is coerced: "1" is not
1. Null means "not given", as OpenAI has it. Sampling parameters are those of `SamplingParams`, which checks their
ranges; types, and what depends on more than one field, are checked here. A validator's `ValueError` gets the path of
its field in front (see `errors.py`); an `InvalidRequestError` names the field itself.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Json,
    PrivateAttr,
    ValidationInfo,
    create_model,
    model_validator,
)
from pydantic_core import CoreSchema, from_json

from rayllm.api.sampling_params import MAX_LOGPROBS, SamplingParams, StructuredOutputs
from rayllm.api.types import Pooling
from rayllm.config.options import check_adapter_name
from rayllm.errors import InvalidRequestError
from rayllm.serve.http.unknown_fields import UnknownField, UnknownFields
from rayllm.text.chat_template import CallArguments
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
MAX_CACHE_KEY = 1024  # characters
MAX_DOCUMENTS = 128
MAX_TEMPLATE_KWARGS = 16
MAX_TEMPLATE_TEXT = 1024  # characters of a name or a value in chat_template_kwargs

Rules = Iterator[tuple[bool, str, str]]  # whether a rule is broken, the field at fault, what is said then


class Body(BaseModel):
    """Base of all request parts. Fields that a part does not know are added to the context, an `UnknownFields`."""

    model_config = ConfigDict(
        extra="ignore",
        strict=True,
        frozen=True,
        protected_namespaces=(),
        json_schema_extra={"additionalProperties": True},
    )
    _names: ClassVar[frozenset[str]]  # of the fields in JSON

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        cls._names = frozenset(str(field.validation_alias or name) for name, field in cls.model_fields.items())

    def _rules(self) -> Rules:
        """What depends on more than one field. The field at fault is "" if it is this part itself."""
        yield from ()

    @model_validator(mode="wrap")
    @classmethod
    def _check_rules(cls, data: Any, check_fields: Callable[[Any], Self], info: ValidationInfo) -> Self:
        if isinstance(data, cls):
            return data  # checked before: FastAPI gets what `read_body` has made
        body = check_fields(data)
        for is_broken, field, message in body._rules():
            if is_broken:
                raise InvalidRequestError(message, field) if field else ValueError(message)
        if isinstance(info.context, UnknownFields) and isinstance(data, dict):
            info.context.add(data, cls._names)
        return body


class RequestBody(Body):
    """Base of the whole bodies of requests."""

    token_bytes: ClassVar[int] = PROMPT_TOKEN_BYTES
    prompts: ClassVar[Sequence[str]] = ()  # fields that hold only texts and token ids, and do not count as values
    model: str | None = None
    strict_fields: bool | None = None  # an extension: unknown fields are refused, or ignored; by the server's option
    _unknown: list[UnknownField] = PrivateAttr(default_factory=list)

    @property
    def unknown_fields(self) -> list[UnknownField]:
        """Fields that were ignored, in the body or its parts, as `read_body` found them."""
        return self._unknown


BodyT = TypeVar("BodyT", bound=RequestBody)


def max_bytes(kind: type[RequestBody], max_model_len: int) -> int:
    """How long a body of this kind may be: it has room for what a full context needs, and for full batches of ids."""
    return min(MAX_BODY_BYTES, BASE_BYTES + kind.token_bytes * max_model_len)


def read_body(kind: type[BodyT], text: bytes, max_model_len: int, strict_fields: bool = False) -> BodyT:
    """The body in a text that is no longer than `max_bytes` says, with its `unknown_fields`.

    strict_fields: whether these are refused if the body does not say it itself. Nothing here holds the interpreter's
    lock for long, so it may run in a thread beside streams. Raises InvalidRequestError and ValidationError.
    """
    cost = text.count(b",") + 8 * (text.count(b"{") + text.count(b"[")) + 16 * text.count(b":")
    if cost > MAX_COST + MAX_TOKEN_COST * max_model_len:
        raise InvalidRequestError("the request body has too many values, or commas, colons and brackets in its texts")
    try:
        value = from_json(text.removeprefix(codecs.BOM_UTF8))
    except ValueError as error:
        raise InvalidRequestError(f"the request body is not valid JSON: {error}") from None
    if len(text) > LONG_BODY:
        _check_size(value, kind.prompts)
    unknown = UnknownFields()
    body = kind.model_validate(value, context=unknown)
    if strict_fields if body.strict_fields is None else body.strict_fields:
        unknown.check(value, kind.prompts)
    body._unknown = unknown.fields(value, kind.prompts)
    return body


def _check_size(body: Any, prompts: Sequence[str]) -> None:
    """Refuse what would take long to validate, or to list the errors of. Prompts are validated up to the first one."""
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


def _text_of(content: Any, info: ValidationInfo) -> str:
    """A message's content as one text."""
    if isinstance(content, str) or content is None:
        return content or ""
    if not isinstance(content, list):
        raise ValueError("must be a string or a list of text parts")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise ValueError(f"content of type {kind[:80]!r} is not supported: models are served text-only")
    return "\n".join(TextPart.model_validate(part, context=info.context).text for part in content)


def _refuse(value: Any) -> None:
    if value is not None:
        raise ValueError("is not supported")


def _arguments(value: Any) -> CallArguments | str:
    """A call's arguments as chat templates want them: an object, or the text if it is none."""
    if isinstance(value, dict):
        return CallArguments(value, json.dumps(value, ensure_ascii=False))
    if not isinstance(value, str | None):
        raise ValueError("must be the text of a JSON object")
    try:
        parsed = from_json(value or "{}")
    except ValueError:
        return value or ""
    return CallArguments(parsed, value or "{}") if isinstance(parsed, dict) else value or ""


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
Hint = Annotated[Any, Field(exclude=True)]  # what to cache; all prompts are
Empty = Annotated[Literal[""] | Annotated[list[Any], Field(max_length=0)], OneOf("is not supported")]
NotSupported = Annotated[None, BeforeValidator(_refuse)]  # a known field that asks for what no model here does
Unused = Annotated[Empty | None, Field(exclude=True)]  # a field that only audio, refusals or old clients fill

TemplateText = Annotated[str, Field(max_length=MAX_TEMPLATE_TEXT)]
_TEMPLATE_VALUES = f"must be a string of at most {MAX_TEMPLATE_TEXT} characters, a number, true, false or null"
TemplateKwargs = dict[TemplateText, Annotated[TemplateText | int | float | bool, OneOf(_TEMPLATE_VALUES)] | None]
Documents = list[dict[str, str]]
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
TokenLimit = Annotated[int, Field(lt=2**31, json_schema_extra={"minimum": 0})]
EarlyStopping = Annotated[bool | Literal["never"], OneOf('must be true, false or "never"')]


class TextPart(Body):
    """One part of a message's content."""

    type: Literal["text"]
    text: str
    cache_control: Hint = None


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

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates know it."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": self.type, "function": function}


class Message(Body):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[Any, AfterValidator(_text_of)] = ""
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(default=None, exclude=True)  # the same under the name that others give it
    cache_control: Hint = None
    parsed: SentBack = None  # openai-python's own reading of the content
    provider_specific_fields: SentBack = None  # LiteLLM's own notes
    function_call: FunctionCall | None = Field(default=None, exclude=True)  # OpenAI's older form of one tool call
    refusal: Unused = None
    audio: Unused = None
    annotations: Unused = None

    def _rules(self) -> Rules:
        for name in ("tool_calls", "function_call", "reasoning_content", "reasoning"):
            is_broken = bool(getattr(self, name)) and self.role != "assistant"
            yield is_broken, "", f"only assistant messages have {name}"
        is_broken = self.tool_call_id is not None and self.role != "tool"
        yield is_broken, "", "tool_call_id belongs to messages of role tool"
        is_broken = self.role == "function" and self.name is None
        yield is_broken, "", "name is required in messages of role function"

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates know it, with the newer names of what OpenAI and others have several for."""
        turn = self.model_dump()
        if self.role == "developer":
            turn["role"] = "system"
        if self.role == "function":  # the answer to the call of this name
            turn |= {"role": "tool", "tool_call_id": f"call_{self.name}"}
        calls = self.tool_calls or []
        if self.function_call is not None and not calls:
            calls = [MessageToolCall(id=f"call_{self.function_call.name}", function=self.function_call)]
        turn["tool_calls"] = [call.for_template() for call in calls]
        turn["reasoning_content"] = self.reasoning_content or self.reasoning
        if not (turn["tool_calls"] and self.content):  # the template of gpt-oss takes one of the two beside calls
            turn["thinking"] = turn["reasoning_content"]
        return {name: value for name, value in turn.items() if value or name == "content"}


class Function(Body):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,128}$")]  # as long as Anthropic has them
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
    cache_control: Hint = None

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates show it to the model."""
        return self.model_dump(exclude_none=True)


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class ToolsAllowed(Body):
    """Which of `tools` the model may call, and whether it must call one."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    allowed_tools: ToolsAllowed


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool | AllowedTools,
    OneOf(
        'must be "none", "auto", "required", {"type": "function", "function": {"name": ...}} or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}'
    ),
]
FunctionChoice = Annotated[
    Literal["none", "auto"] | NamedFunction, OneOf('must be "none", "auto" or an object with the name of a function')
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
    include_obfuscation: bool | None = None  # no chunk is padded either way


# ---- whole bodies


class EngineBody(RequestBody):
    """What all requests to an engine share."""

    user: str | None = None  # client metadata without any effect on the answer
    prompt_cache_key: str | None = Field(default=None, max_length=MAX_CACHE_KEY)  # a hint for choosing a replica
    # Extensions.
    add_special_tokens: bool | None = None
    # So many tokens of a prompt's end are kept; -1 for all that fit.
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1, lt=2**31)
    cache_salt: str | None = Field(default=None, max_length=256)
    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)


# The answer's id, behind its prefix.
RequestId = Annotated[str, Field(pattern="^[a-zA-Z0-9_.:/+-]{1,128}$")]


class EmbeddingBody(EngineBody):
    """POST /v1/embeddings."""

    token_bytes, prompts = BATCH_TOKEN_BYTES, ("input",)
    request_id: RequestId | None = None
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


# Fields of which each says what form the whole output has.
_CONSTRAINTS = (
    *("response_format", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)


class GenerationBody(SamplingBody):  # type: ignore[valid-type, misc]
    """What completions and chat share: sampling, streaming, extensions, client metadata."""

    request_id: RequestId | None = None
    max_tokens: TokenLimit | None = None
    max_completion_tokens: TokenLimit | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    structured_outputs: StructuredOutputsBody | None = None
    # vLLM's older names of what structured_outputs has.
    guided_json: SchemaOrText | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    return_token_ids: bool | None = None  # an extension: the answer has the token ids of prompts and completions too
    # Without any effect on the answer.
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    prediction: dict[str, Any] | None = None
    modalities: list[Literal["text"]] | None = None

    # Refused by name.
    audio: NotSupported = None
    chat_template: NotSupported = None  # only the model's own is ever used
    web_search_options: NotSupported = None

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
        limits = {limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None}
        message = f"max_tokens ({self.max_tokens}) and max_completion_tokens ({self.max_completion_tokens}) differ; "
        yield len(limits) > 1, "max_completion_tokens", message + "give one of them"
        name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        least, otherwise = self._least_tokens()
        yield min(limits, default=least) < least, name, f"{name} must be at least {otherwise}, not {self.token_limit}"
        given = self._constraint_fields
        yield len(given) > 1, given[-1] if given else "", f"give {' or '.join(given)}, not both"

    def _least_tokens(self) -> tuple[int, str]:
        """The least token limit, and how it is told."""
        return 1, "1"

    @property
    def constraint_field(self) -> str | None:
        """The field that the form of the whole output comes from; None for any text."""
        return next(iter(self._constraint_fields), None)

    @property
    def _constraint_fields(self) -> list[str]:
        fields = [name for name in _CONSTRAINTS if getattr(self, name) is not None]
        is_text = self.response_format is not None and self.response_format.type == "text"
        return [name for name in fields if name != "response_format" or not is_text]

    def _structured_outputs(self) -> StructuredOutputs | None:
        """What the form of the output must be. Raises InvalidRequestError."""
        if (field := self.constraint_field) is None:
            return None
        value = getattr(self, field)
        if field.startswith("guided_"):
            value = StructuredOutputsBody.model_validate({field.removeprefix("guided_"): value})
        return value.structured_outputs()

    def constraint_schemas(self) -> dict[str, dict[str, Any]]:
        """The JSON schemas that the output is held to, by their fields."""
        schemas = {}
        if self.response_format and self.response_format.json_schema:
            schemas["response_format.schema"] = self.response_format.json_schema.schema_
        if self.structured_outputs and self.structured_outputs.json_:
            schemas["structured_outputs.json"] = self.structured_outputs.json_
        if self.guided_json:
            schemas["guided_json"] = self.guided_json
        return schemas

    def not_enforced(self) -> list[str]:
        """For each of these schemas that has some: its field, and the keywords that are not enforced."""
        found = {field: not_enforced(schema) for field, schema in self.constraint_schemas().items()}
        return [f"{field}: {', '.join(keywords)}" for field, keywords in found.items() if keywords]

    def sampling_options(self, logprobs: int | None) -> dict[str, Any]:
        """What `SamplingParams` is made of but the limit: the fields that were given, with null as not given.

        logprobs: how many an output token has. Raises InvalidRequestError naming structured_outputs.
        """
        options = {name: getattr(self, name) for name in _SAMPLING if getattr(self, name) is not None}
        return options | {"structured_outputs": self._structured_outputs(), "logprobs": logprobs}

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

    token_bytes, prompts = BATCH_TOKEN_BYTES, ("prompt",)
    prompt: Prompts
    suffix: str | None = None  # the model fills in what stands between it and the prompt
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    def _rules(self) -> Rules:
        yield from super()._rules()
        yield not self.prompt, "prompt", "prompt must not be empty"
        is_broken = bool(self.suffix) and not all(isinstance(prompt, str) for prompt in self.prompt)
        yield is_broken, "suffix", "suffix is only allowed with prompts that are text"
        yield bool(self.suffix and self.echo), "suffix", "suffix is not available with echo: true"
        choices, factor = len(self.prompt) * self.num_sampled, "n" if self.num_sampled == (self.n or 1) else "best_of"
        message = f"prompts x {factor} is {choices}; one request takes at most {MAX_CHOICES} completions"
        yield choices > MAX_CHOICES, factor if self.num_sampled > 1 else "prompt", message

    def _least_tokens(self) -> tuple[int, str]:
        return (0, "0") if self.echo else (1, "1, or 0 with echo: true")


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tools: list[Tool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Function] | None = Field(default=None, max_length=MAX_TOOLS)  # OpenAI's older form of tools
    function_call: FunctionChoice | None = None
    # Variables of the chat template, where it has them.
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    chat_template_kwargs: TemplateKwargs | None = Field(default=None, max_length=MAX_TEMPLATE_KWARGS)
    add_generation_prompt: bool | None = None  # true if absent, unless the last message is to be continued
    continue_final_message: bool | None = None
    documents: Documents | None = Field(default=None, max_length=MAX_DOCUMENTS)  # for the chat template

    def _rules(self) -> Rules:
        yield from super()._rules()
        both = bool(self.continue_final_message and self.add_generation_prompt)
        yield both, "continue_final_message", "continue_final_message needs add_generation_prompt: false"
        without = self.top_logprobs is not None and not self.logprobs
        yield without, "top_logprobs", "top_logprobs is only allowed with logprobs: true"
        both = bool(self.tools and self.functions)
        yield both, "functions", "give tools or functions, its older form, not both"
        field, choice = ("functions", "function_call") if self.functions else ("tools", "tool_choice")
        names = [tool.function.name for tool in self.all_tools]
        for name in names:
            yield names.count(name) > 1, field, f"{field} has two functions of the name {name!r}"
        size = sum(len(tool.model_dump_json()) for tool in self.all_tools)
        yield size > MAX_TOOLS_BYTES, field, f"{field} takes at most {MAX_TOOLS_BYTES} bytes in all, not {size}"
        for each, owner, given in (
            ("tool_choice", "tools", self.tools),
            ("function_call", "functions", self.functions),
        ):
            is_broken = not given and getattr(self, each) not in (None, "none")
            yield is_broken, each, f"{each} is only allowed with {owner}"
        for name in self._chosen_names or ():
            yield name not in names, choice, f"{choice} names {name[:80]!r}, which {field} lacks"

    def constraint_schemas(self) -> dict[str, dict[str, Any]]:
        tools = self.offered_tools if self.must_call or self.constraint_field else []
        schemas = {f"tools.{tool.function.name}": tool.function.parameters or {} for tool in tools}
        return ({} if self.must_call else super().constraint_schemas()) | schemas

    @property
    def all_tools(self) -> list[Tool]:
        """What `tools` holds, or its older form `functions`."""
        return self.tools or [Tool(type="function", function=each) for each in self.functions or ()]

    @property
    def _chosen_names(self) -> list[str] | None:
        """The functions that the model may call; None for all of them."""
        choice = self.function_call if self.functions else self.tool_choice
        if isinstance(choice, AllowedTools):
            return [tool.function.name for tool in choice.allowed_tools.tools]
        named = choice.function if isinstance(choice, NamedTool) else choice
        return [named.name] if isinstance(named, NamedFunction) else None

    @property
    def named_tool(self) -> str | None:
        """The one tool that must be called."""
        chosen = self._chosen_names
        return None if chosen is None or isinstance(self.tool_choice, AllowedTools) else chosen[0]

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be a tool call."""
        choice = self.tool_choice
        mode = choice.allowed_tools.mode if isinstance(choice, AllowedTools) else choice
        return self.named_tool is not None or mode == "required"

    @property
    def single_call(self) -> bool:
        """Whether the answer has at most one tool call. In the form of `functions` there is no place for more."""
        return self.named_tool is not None or self.parallel_tool_calls is False or bool(self.functions)

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model may call."""
        choice = self.function_call if self.functions else self.tool_choice
        if choice == "none":
            return []
        allowed = self._chosen_names if isinstance(choice, AllowedTools) else None
        return [tool for tool in self.all_tools if allowed is None or tool.function.name in allowed]


_OF_CHATS = ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")  # in /tokenize


class TokenizeBody(RequestBody):
    """POST /tokenize. Either prompt, or messages, which go through the chat template as in /v1/chat/completions."""

    prompts = ("prompt",)
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    # As in chats, beside messages.
    tools: list[Tool] | None = Field(default=None, max_length=MAX_TOOLS)
    chat_template_kwargs: TemplateKwargs | None = Field(default=None, max_length=MAX_TEMPLATE_KWARGS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None  # as the tokenizer does by itself: true for a prompt, false for messages
    return_token_strs: bool | None = None  # the text of each token too

    def _rules(self) -> Rules:
        yield (self.prompt is None) == (self.messages is None), "prompt", "give either prompt or messages"
        for name in _OF_CHATS:
            is_broken = bool(getattr(self, name)) and self.messages is None
            yield is_broken, name, f"{name} is only allowed with messages"

    def chat(self) -> ChatBody:
        """The conversation as a chat has it. Raises InvalidRequestError."""
        return ChatBody(messages=self.messages, **{name: getattr(self, name) for name in _OF_CHATS})


class DetokenizeBody(RequestBody):
    """POST /detokenize."""

    prompts = ("tokens",)
    tokens: list[int] = Field(max_length=MAX_DETOKENIZED, fail_fast=True)


def _check_adapter(name: str) -> str:
    check_adapter_name(name)
    return name


AdapterName = Annotated[str, AfterValidator(_check_adapter)]


class UnloadAdapterBody(RequestBody):
    """The body of /v1/unload_lora_adapter. model: the adapter's, found by the adapter's name if absent."""

    lora_name: AdapterName


class LoadAdapterBody(UnloadAdapterBody):
    """The body of /v1/load_lora_adapter. model: may be absent if there is only one."""

    lora_path: str
