"""The requests of the OpenAI API that we honour, as pydantic models; everything else is a 400 that names the field.

Three kinds of fields: honoured (typed here), harmless (client metadata that has no effect on an answer), and known but
not built yet (`_NOT_YET`: refused with a message that says so, unless the value asks for nothing). Unknown fields are
refused, never ignored. Null means "not given", as OpenAI has it. Ranges of sampling parameters are checked by
`SamplingParams`; types, and what depends on more than one field, here.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from rayllm.errors import InvalidRequestError
from rayllm.sampling_params import MAX_LOGPROBS, MAX_N

MAX_CHOICES = 1024  # prompts x n of one request

Prompt = str | list[int]

# Fields whose feature comes later -> the values that ask for nothing, and so are accepted.
_NOT_YET: dict[str, tuple[Any, ...]] = {
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
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}


class _Body(BaseModel):
    """Base of all request parts: unknown fields are errors, and nothing is coerced ("1" is not 1)."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


class StreamOptions(_Body):
    """include_usage: a last chunk with the usage. continuous_usage_stats: the usage so far on every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(_Body):
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
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Extensions.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
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
    def _refuse_what_comes_later(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            raise InvalidRequestError("the request body must be a JSON object")
        kept = {}
        for name, value in data.items():
            if name not in _NOT_YET or name in cls.model_fields:
                kept[name] = value
            elif value is not None and value not in _NOT_YET[name]:
                raise InvalidRequestError(f"{name} is not supported yet", name)
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
        if self.n is not None and not 1 <= self.n <= MAX_N:
            raise InvalidRequestError(f"n must be at least 1 and at most {MAX_N}, not {self.n}", "n")
        return self

    @property
    def token_limit(self) -> int | None:
        """max_tokens under either of its names; None if not given."""
        return self.max_tokens if self.max_tokens is not None else self.max_completion_tokens

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
    best_of: int | None = None

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, value: Any) -> Any:
        if isinstance(value, str) or _is_ids(value):
            return value
        if isinstance(value, list) and value and (all(isinstance(p, str) for p in value) or all(map(_is_ids, value))):
            return value
        if value == [] or (isinstance(value, list) and [] in value):
            raise InvalidRequestError("prompt must not be empty", "prompt")
        raise InvalidRequestError(
            "prompt must be a string, a list of strings, a list of token ids or a list of lists of token ids", "prompt"
        )

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionBody:
        _check_logprobs("logprobs", self.logprobs)
        if self.best_of is not None and self.best_of != (self.n or 1):
            if self.best_of < (self.n or 1):
                raise InvalidRequestError(f"best_of ({self.best_of}) must be at least n ({self.n or 1})", "best_of")
            raise InvalidRequestError("best_of greater than n is not supported yet", "best_of")
        choices = len(self.prompts()) * (self.n or 1)
        if choices > MAX_CHOICES:
            raise InvalidRequestError(
                f"prompts x n is {choices}; one request takes at most {MAX_CHOICES} completions",
                "n" if (self.n or 1) > 1 else "prompt",
            )
        return self

    def prompts(self) -> list[Prompt]:
        """The prompts one by one, each a text or a list of token ids."""
        if isinstance(self.prompt, str) or _is_ids(self.prompt):
            return [self.prompt]
        return self.prompt


class TextPart(_Body):
    """One part of a message's content."""

    type: Literal["text"]
    text: str


class Message(_Body):
    """One turn of a chat. Fields that only tools, audio or refusals fill are accepted when they are null or empty."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Any = None
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_empty_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            raise InvalidRequestError("messages must be a list of objects with role and content", "messages")
        if data.get("role") in ("tool", "function") or data.get("tool_calls") or data.get("function_call"):
            raise InvalidRequestError("tool calls and their results are not supported yet", "messages")
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

    def for_template(self) -> dict[str, str]:
        """The message as chat templates know it: "developer" is OpenAI's newer name for "system"."""
        turn = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        return turn | ({"name": self.name} if self.name is not None else {})


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[Message]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: Literal[True] | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> ChatBody:
        if not self.messages:
            raise InvalidRequestError("messages must not be empty", "messages")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs is only allowed with logprobs: true", "top_logprobs")
        _check_logprobs("top_logprobs", self.top_logprobs)
        return self


BodyT = TypeVar("BodyT", bound=GenerationBody)


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


def _is_ids(value: Any) -> bool:
    """True for a list of integers that is not empty (True and False are not token ids)."""
    return isinstance(value, list) and bool(value) and set(map(type, value)) == {int}


def _check_logprobs(name: str, value: int | None) -> None:
    if value is not None and not 0 <= value <= MAX_LOGPROBS:
        raise InvalidRequestError(f"{name} must be at least 0 and at most {MAX_LOGPROBS}, not {value}", name)
