"""The requests of the OpenAI API that we honour, as pydantic models; everything else is a 400 that names the field.

Three kinds of fields: honoured (typed here and in `protocol_parts.py`), harmless (client metadata that has no effect on
an answer), and known but not honoured (`_NOT_HONOURED`: refused with a message that says so, unless the value asks for
nothing). Unknown fields are refused, never ignored. Null means "not given", as OpenAI has it. Ranges of sampling
parameters are checked by `SamplingParams`; types, and what depends on more than one field, here.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError, field_validator, model_validator

from rayllm.api.sampling_params import MAX_LOGPROBS, MAX_N, StructuredOutputs
from rayllm.errors import InvalidRequestError
from rayllm.serve.http.protocol_parts import (
    Body,
    Message,
    NamedTool,
    ResponseFormat,
    StructuredOutputsBody,
    Tool,
    check_template_kwargs,
    check_tool_answers,
    check_tools,
)

MAX_CHOICES = 1024  # prompts x n of one request

Prompt = str | list[int]

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


class StreamOptions(Body):
    """include_usage: a last chunk with the usage. continuous_usage_stats: the usage so far on every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(Body):
    """What completions and chat share: sampling, streaming, extensions, client metadata."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    # Unions make pydantic report one error per member; SamplingParams has the better message.
    stop: Any = None
    seed: int | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Extensions.
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: Any = None  # a boolean or "never"
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    structured_outputs: StructuredOutputsBody | None = None
    add_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    cache_salt: str | None = Field(default=None, max_length=256)
    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)
    # Client metadata without any effect on the answer.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_honoured(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            raise InvalidRequestError("the request body must be a JSON object")
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
        limit = self.token_limit
        if limit is not None and not 0 <= limit < 2**31:
            name = self.token_limit_field
            raise InvalidRequestError(f"{name} must be at least 0 and at most {2**31 - 1}, not {limit}", name)
        if self.n is not None and not 1 <= self.n <= MAX_N:
            raise InvalidRequestError(f"n must be at least 1 and at most {MAX_N}, not {self.n}", "n")
        if self.stream and (self.use_beam_search or self.num_sampled > (self.n or 1)):
            name = "use_beam_search" if self.use_beam_search else "best_of greater than n"
            raise InvalidRequestError(f"{name} is not available with stream: true", name.split()[0])
        if self.structured_outputs is not None and self.response_format and self.response_format.type != "text":
            raise InvalidRequestError("give response_format or structured_outputs, not both", "structured_outputs")
        self.constraint()  # raises for what it refuses
        return self

    def constraint(self) -> StructuredOutputs | None:
        """The form that the whole output must have; None for any text."""
        if self.structured_outputs is not None:
            return self.structured_outputs.structured_outputs()
        return None if self.response_format is None else self.response_format.structured_outputs()

    @property
    def constraint_field(self) -> str:
        """The field that a constraint comes from."""
        return "response_format" if self.structured_outputs is None else "structured_outputs"

    @property
    def num_sampled(self) -> int:
        """Sequences that run for each prompt; the best n of them are the answer."""
        return max(self.best_of or 1, self.n or 1)

    @property
    def token_limit(self) -> int | None:
        """max_tokens under either of its names; None if not given."""
        return self.max_tokens if self.max_tokens is not None else self.max_completion_tokens

    @property
    def token_limit_field(self) -> str:
        """The name under which token_limit was given."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionBody(GenerationBody):
    """POST /v1/completions. prompt: a string, a list of strings, a list of ids or a list of lists of ids."""

    prompt: Any
    echo: bool | None = None
    logprobs: int | None = None

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, value: Any) -> Any:
        if isinstance(value, str) or is_ids(value):
            return value
        if isinstance(value, list) and value and (all(isinstance(p, str) for p in value) or all(map(is_ids, value))):
            return value
        if value == [] or (isinstance(value, list) and [] in value):
            raise InvalidRequestError("prompt must not be empty", "prompt")
        raise InvalidRequestError(
            "prompt must be a string, a list of strings, a list of token ids or a list of lists of token ids", "prompt"
        )

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionBody:
        _check_logprobs("logprobs", self.logprobs)
        choices = len(self.prompts()) * self.num_sampled
        if choices > MAX_CHOICES:
            raise InvalidRequestError(
                f"prompts x {self._factor} is {choices}; one request takes at most {MAX_CHOICES} completions",
                self._factor if self.num_sampled > 1 else "prompt",
            )
        return self

    @property
    def _factor(self) -> str:
        return "n" if self.num_sampled == (self.n or 1) else "best_of"

    def prompts(self) -> list[Prompt]:
        """The prompts one by one, each a text or a list of token ids."""
        if isinstance(self.prompt, str) or is_ids(self.prompt):
            return [self.prompt]
        return self.prompt


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[Message]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Any = None  # checked below: pydantic would report one error per member of a union
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: Literal[True] | None = None

    @field_validator("tool_choice")
    @classmethod
    def _check_tool_choice(cls, value: Any) -> Any:
        if value in (None, "none", "auto", "required"):
            return value
        try:
            return NamedTool.model_validate(value)
        except ValidationError:
            raise InvalidRequestError(
                'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}',
                "tool_choice",
            ) from None

    @model_validator(mode="after")
    def _check_chat(self) -> ChatBody:
        if not self.messages:
            raise InvalidRequestError("messages must not be empty", "messages")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs is only allowed with logprobs: true", "top_logprobs")
        _check_logprobs("top_logprobs", self.top_logprobs)
        check_tool_answers(self.messages)
        check_template_kwargs(self.chat_template_kwargs or {})
        check_tools(self.tools or [])
        self._check_choice()
        return self

    def _check_choice(self) -> None:
        if not self.tools and self.tool_choice not in (None, "none"):
            raise InvalidRequestError("tool_choice is only allowed with tools", "tool_choice")
        names = [tool.function.name for tool in self.tools or ()]
        if self.named_tool is not None and self.named_tool not in names:
            raise InvalidRequestError(f"tool_choice names {self.named_tool[:80]!r}, which tools lacks", "tool_choice")
        if self.offered_tools and self.constraint() is not None:
            name = super().constraint_field
            raise InvalidRequestError(
                f"{name} holds for the whole output, which leaves no room for tool calls; set tool_choice to none", name
            )

    @property
    def named_tool(self) -> str | None:
        """The one tool that must be called."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def constraint_field(self) -> str:
        return "tools" if self.must_call else super().constraint_field

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be a tool call."""
        return self.named_tool is not None or self.tool_choice == "required"


BodyT = TypeVar("BodyT", bound=Body)


def parse_body(kind: type[BodyT], body: bytes) -> BodyT:
    """Parse and check a request's JSON. Raises InvalidRequestError with the first field at fault as `param`."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidRequestError):
        raise cause
    path = ".".join(str(part) for part in first["loc"])
    name = str(first["loc"][0]) if first["loc"] else None
    match first["type"]:
        case "json_invalid":
            raise InvalidRequestError(f"the request body is not valid JSON: {first['ctx']['error']}")
        case "extra_forbidden":
            raise InvalidRequestError(f"unknown field {path!r}", name)
        case "missing":
            raise InvalidRequestError(f"{path} is required", name)
        case _:
            raise InvalidRequestError(f"{path}: {first['msg'][0].lower()}{first['msg'][1:]}", name)


def is_ids(value: Any) -> bool:
    """True for a list of integers that is not empty (True and False are not token ids)."""
    return isinstance(value, list) and bool(value) and set(map(type, value)) == {int}


def _check_logprobs(name: str, value: int | None) -> None:
    if value is not None and not 0 <= value <= MAX_LOGPROBS:
        raise InvalidRequestError(f"{name} must be at least 0 and at most {MAX_LOGPROBS}, not {value}", name)
