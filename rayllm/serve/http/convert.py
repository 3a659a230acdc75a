"""From the bodies of `protocol.py` to the engine's `GenerationRequest`s: defaults, chat template, tokens, limits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence, Set
from typing import Any, Protocol

import msgspec

from rayllm.api.sampling_params import SamplingParams, StructuredOutputs
from rayllm.api.types import EngineInfo, GenerationRequest
from rayllm.api.validation import validate_request
from rayllm.errors import InvalidRequestError
from rayllm.serve.http import reasoning
from rayllm.serve.http.chat_format import ChatFormat, ReplyFormat
from rayllm.serve.http.protocol import ChatBody, CompletionBody, GenerationBody, Prompt
from rayllm.serve.http.protocol_parts import as_sent
from rayllm.serve.http.tool_choice import calls_schema

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions; chat takes the rest of the context
LONG_TEXT = 16_384  # characters; longer texts are tokenised in a thread, so that other streams go on

# Body fields that are SamplingParams fields of the same name and meaning.
_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "prompt_logprobs",
    "seed",
    "n",
    "best_of",
    "use_beam_search",
    "length_penalty",
    "early_stopping",
)


class Tokenizer(Protocol):
    """What the front uses of `rayllm.text.tokenizer`."""

    @property
    def special_ids(self) -> frozenset[int]: ...
    @property
    def special_texts(self) -> frozenset[str]: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, token_ids: list[int]) -> str: ...
    def token_text(self, token_id: int) -> str: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def chat_template_source(self, with_tools: bool = False) -> str: ...
    def chat_template_variables(self, with_tools: bool = False) -> Set[str]: ...
    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        *,
        template_kwargs: dict[str, Any] | None = None,
    ) -> str: ...


class ContextLengthError(InvalidRequestError):
    """Prompt and output together are longer than the model's context."""


class Job(msgspec.Struct, frozen=True):
    """One HTTP request as the engine sees it.

    requests: one a prompt. prompts: their texts, where the body had text or an echo needs it.
    discard_output: max_tokens was 0, so the one token that the engine makes is not part of the answer.
    reply_format: what to look for in a chat's output. constraint_field: the body's field that constrains the output.
    """

    requests: list[GenerationRequest]
    prompts: list[str | None]
    discard_output: bool = False
    reply_format: ReplyFormat = ReplyFormat()
    constraint_field: str = "structured_outputs"


async def completion_job(body: CompletionBody, job_id: str, info: EngineInfo, tokenizer: Tokenizer | None) -> Job:
    """Raises InvalidRequestError naming field and limit if any of the prompts can't be served."""
    echo = bool(body.echo)
    if body.token_limit == 0 and not echo:
        name = body.token_limit_field
        raise InvalidRequestError(f"{name} must be at least 1, or 0 with echo: true", name)
    special = body.add_special_tokens if body.add_special_tokens is not None else True
    prompts: list[str | None] = []
    token_ids: list[list[int]] = []
    for prompt in body.prompts():
        ids = await encode(prompt, special, tokenizer)
        token_ids.append(ids)
        prompts.append(prompt if isinstance(prompt, str) else None)
    options = _sampling_options(body)
    options["logprobs"] = body.logprobs
    if echo and body.logprobs is not None and body.prompt_logprobs is None:
        options["prompt_logprobs"] = body.logprobs
    requests = []
    for index, ids in enumerate(token_ids):
        room = info.max_model_len - len(ids)
        limit = body.token_limit
        if limit is None:
            limit = min(DEFAULT_COMPLETION_TOKENS, max(room, 1))
        params = _sampling_params(body, options, max(limit, 1))
        requests.append(_request(body, f"{job_id}-{index}", ids, params, info))
    if echo:  # only now, when the ids are known to be valid
        prompts = [
            text if text is not None else _decode(tokenizer, ids) for text, ids in zip(prompts, token_ids, strict=True)
        ]
    return Job(requests, prompts, body.token_limit == 0, constraint_field=body.constraint_field)


async def chat_job(
    body: ChatBody, job_id: str, info: EngineInfo, tokenizer: Tokenizer | None, form: ChatFormat = ChatFormat()
) -> Job:
    """Raises InvalidRequestError naming field and limit if the conversation can't be served.

    form: what the server's model writes. A constraint (response_format, structured_outputs, a call that must be made)
    holds for the whole output, so no reasoning is looked for then.
    """
    if tokenizer is None:
        raise InvalidRequestError("this server runs without a tokenizer; only token ids in /v1/completions work")
    if body.token_limit == 0:
        name = body.token_limit_field
        raise InvalidRequestError(f"{name} must be at least 1", name)
    text = _prompt_text(body, tokenizer)
    # The template writes the special tokens itself; a second begin-of-sequence would change the answer.
    ids = await encode(text, body.add_special_tokens or False, tokenizer, param="messages")
    options = _sampling_options(body)
    reply_format = _tool_format(body, form)
    if body.must_call:
        options["structured_outputs"] = _calls_constraint(body, form)
    if form.thinks and "structured_outputs" not in options:
        inside = text.rstrip().endswith(reasoning.OPEN)
        reply_format = msgspec.structs.replace(reply_format, thinks=True, inside=inside)
    if reply_format.tags & tokenizer.special_texts:
        options.setdefault("skip_special_tokens", False)  # or what has to be looked for would not be in the text
    options["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    params = _sampling_params(body, options, body.token_limit)
    requests = [_request(body, f"{job_id}-0", ids, params, info, param="messages")]
    return Job(requests, [text], reply_format=reply_format, constraint_field=body.constraint_field)


def _prompt_text(body: ChatBody, tokenizer: Tokenizer) -> str:
    """The conversation by the model's template. Refuses what the template would ignore."""
    options: dict[str, Any] = {}
    if tools := body.offered_tools:
        if "tools" not in tokenizer.chat_template_variables(with_tools=True):
            raise InvalidRequestError("tools: this model's chat template has no place for tools", "tools")
        options["tools"] = [tool.for_template() for tool in tools]
    if extra := body.chat_template_kwargs:
        known = tokenizer.chat_template_variables(with_tools=bool(tools))
        for name in extra:
            if name not in known:
                message = f"chat_template_kwargs: this model's chat template has no variable {name[:80]!r}"
                raise InvalidRequestError(message, "chat_template_kwargs")
        options["template_kwargs"] = extra
    turns = [message.for_template() for message in body.messages]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, **options)


def _tool_format(body: ChatBody, form: ChatFormat) -> ReplyFormat:
    """What to look for in the output because of the body's tools."""
    tools = body.offered_tools
    if not tools:
        return ReplyFormat()
    if form.tools is None and not body.must_call:
        raise InvalidRequestError(
            "tools: this server does not know how its model writes tool calls (its option tool_call_parser); "
            "only tool_choice required, a named tool or none work",
            "tools",
        )
    return ReplyFormat(
        tools="json" if body.must_call else form.tools,
        tool_names=frozenset(tool.function.name for tool in tools),
        single_call=body.named_tool is not None or body.parallel_tool_calls is False,
    )


def _calls_constraint(body: ChatBody, form: ChatFormat) -> StructuredOutputs:
    """Tool calls and nothing else: of the named tool, or of any."""
    tools = [tool for tool in body.offered_tools if body.named_tool in (None, tool.function.name)]
    single = body.named_tool is not None or body.parallel_tool_calls is False
    try:
        return StructuredOutputs(
            json=calls_schema(tools, single, "parameters" if form.tools == "llama3" else "arguments")
        )
    except InvalidRequestError as error:
        raise as_sent(error, "tools") from None


def _sampling_options(body: GenerationBody) -> dict[str, Any]:
    """The sampling fields that were given (null is not given)."""
    options = {name: getattr(body, name) for name in _SAMPLING_FIELDS if getattr(body, name) is not None}
    if body.logit_bias is not None:
        options["logit_bias"] = dict(_bias_entry(key, value) for key, value in body.logit_bias.items())
    if (constraint := body.constraint()) is not None:
        options["structured_outputs"] = constraint
    return options


def _sampling_params(body: GenerationBody, options: dict[str, Any], max_tokens: int | None) -> SamplingParams:
    try:
        return SamplingParams(**options, max_tokens=max_tokens)
    except InvalidRequestError as error:
        raise as_sent(error, body.constraint_field) from None


def _bias_entry(key: str, value: float) -> tuple[int, float]:
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        raise InvalidRequestError(f"logit_bias keys must be token ids, not {key!r}", "logit_bias")
    return int(key), value


def _request(
    body: GenerationBody,
    request_id: str,
    ids: list[int],
    params: SamplingParams,
    info: EngineInfo,
    param: str = "prompt",
) -> GenerationRequest:
    """Build and check one request; `param` is the body's field that holds the prompt."""
    limit = body.token_limit
    if len(ids) + (limit or 1) > info.max_model_len:
        asked = f" and max_tokens asks for {limit} more" if limit else ""
        raise ContextLengthError(
            f"{param} has {len(ids)} tokens{asked}; this model's context is {info.max_model_len} tokens, "
            "of which the output takes at least one",
            param,
        )
    request = GenerationRequest(
        request_id=request_id,
        prompt_token_ids=ids,
        params=params,
        priority=body.priority or 0,
        arrival_time=time.time(),
        cache_salt=body.cache_salt or "",
    )
    return checked(request, info, param, body.constraint_field)


def checked(
    request: GenerationRequest, info: EngineInfo, param: str, constraint_field: str = "structured_outputs"
) -> GenerationRequest:
    """A request that the engine can serve. Raises InvalidRequestError otherwise.

    param: the body's field that holds the prompt. constraint_field: the one that constrains the output.
    """
    try:
        validate_request(request, info)
    except InvalidRequestError as error:
        if error.param == "prompt" and param != "prompt":
            raise InvalidRequestError(str(error).replace("prompt", param, 1), param) from None
        raise as_sent(error, constraint_field) from None
    return request


async def encode(prompt: Prompt, special: bool, tokenizer: Tokenizer | None, param: str = "prompt") -> list[int]:
    """The tokens of a prompt; `param` is the body's field that holds it. Raises InvalidRequestError."""
    if not isinstance(prompt, str):
        return prompt
    if tokenizer is None:
        raise InvalidRequestError("this server runs without a tokenizer; send the prompt as token ids", param)
    if len(prompt) > LONG_TEXT:
        return await asyncio.to_thread(tokenizer.encode, prompt, special)
    return tokenizer.encode(prompt, special)


def _decode(tokenizer: Tokenizer | None, ids: list[int]) -> str:
    return "" if tokenizer is None else tokenizer.decode(ids)
