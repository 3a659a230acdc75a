"""From the bodies of `protocol.py` to the engine's `GenerationRequest`s: defaults, chat template, tokens, limits."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from rayllm.api.sampling_params import SamplingParams
from rayllm.api.types import EngineInfo, GenerationRequest, Pooling
from rayllm.api.validation import validate_request
from rayllm.errors import InvalidRequestError
from rayllm.serve.http.answers import Detokenized, Tokens
from rayllm.serve.http.chat_format import ChatFormat, chat_format
from rayllm.serve.http.chat_format.reply_grammar import reply_grammar
from rayllm.serve.http.errors import ContextLengthError, renamed
from rayllm.serve.http.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    EngineBody,
    GenerationBody,
    TokenizeBody,
)
from rayllm.serve.http.served import Target
from rayllm.text.bad_words import bad_token_ids
from rayllm.text.tokenizer import LONG_TEXT, Tokenizer

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions; chat takes the rest of the context
MAX_TOKENIZED = 2**17  # tokens that /tokenize counts beyond any context


class Job(msgspec.Struct, frozen=True):
    """One HTTP request as the engine sees it."""

    requests: list[GenerationRequest]  # one a prompt
    prompts: list[str | None]  # their texts, where the body had text or an echo needs it
    names: dict[str, str]  # of the requests' fields -> of the body's fields that they come from
    reply_format: ChatFormat = ChatFormat()  # what to look for in a chat's output
    not_enforced: list[str] = []  # for each schema of a constraint: its field, and the keywords that are not enforced
    discard_output: bool = False  # max_tokens was 0, so the one token that the engine makes is not part of the answer


def completion_job(body: CompletionBody, target: Target) -> Job:
    """Raises InvalidRequestError naming field and limit if any of the prompts cannot be served."""
    tokenizer, info = target.engine.tokenizer, target.info
    names = {"structured_outputs": body.constraint_field or ""}
    requests, prompts = [], []
    marks = _infill_marks(tokenizer) if body.suffix else None
    bad = _bad_token_ids(body, tokenizer, info)
    with renamed(names):
        options = body.sampling_options(body.logprobs)
        if body.echo and body.logprobs is not None:
            options.setdefault("prompt_logprobs", body.logprobs)
        for index, prompt in enumerate(body.prompt):
            text = f"{marks[0]}{prompt}{marks[1]}{body.suffix}{marks[2]}" if marks else prompt
            whole = encode(text, body.add_special_tokens is not False, tokenizer, info.max_model_len)
            ids = _truncated(whole, body, info, body.token_limit or 1)
            params = _params(body, options, info, len(ids), DEFAULT_COMPLETION_TOKENS)
            requests.append(_request(body, target, index, ids, params, bad=bad))
            text = prompt if isinstance(prompt, str) and len(ids) == len(whole) else None
            if text is None and body.echo and tokenizer is not None:  # only now, when the ids are known to be valid
                text = tokenizer.decode(ids)
            prompts.append(text)
    return Job(requests, prompts, names, not_enforced=body.not_enforced(), discard_output=body.token_limit == 0)


def chat_job(body: ChatBody, target: Target) -> Job:
    """Raises InvalidRequestError naming field and limit if the conversation cannot be served."""
    tokenizer = target.engine.tokenizer
    if tokenizer is None:
        raise InvalidRequestError("this server runs without a tokenizer; only token ids in /v1/completions work")
    form = chat_format(target.model.server, tokenizer)
    tools_field = "functions" if body.functions else "tools"
    constraint_field = tools_field if body.must_call else body.constraint_field
    names = {"structured_outputs": constraint_field or "", "prompt": "messages"}
    with renamed(names):
        text = prompt_text(body, tokenizer)
        # The template writes the special tokens itself; a second begin-of-sequence would change the answer.
        ids = encode(text, body.add_special_tokens or False, tokenizer, target.info.max_model_len)
        ids = _truncated(ids, body, target.info, body.token_limit or 1)
        reply_format = _calls_format(body, form)
        options = body.sampling_options((body.top_logprobs or 0) if body.logprobs else None)
        inside = form.opened_by(text)
        reply_format = msgspec.structs.replace(reply_format, reasoning=form.reasoning, inside=inside)
        if constraint_field is not None:
            answer = None if body.must_call else options["structured_outputs"]
            key = "parameters" if form.tools in ("llama3", "llama4") else "arguments"
            options["structured_outputs"] = reply_grammar(reply_format, answer, key, tokenizer.special_id)
        if reply_format.tags & tokenizer.special_texts:
            options["skip_special_tokens"] = False  # or what has to be looked for would not be in the text
        params = _params(body, options, target.info, len(ids), None)
        bad = _bad_token_ids(body, tokenizer, target.info)
        request = _request(body, target, 0, ids, params, bad=bad)
    return Job([request], [text], names, reply_format, body.not_enforced())


def embedding_job(body: EmbeddingBody, target: Target) -> Job:
    """Raises InvalidRequestError naming field and limit if any of the inputs cannot be served."""
    size, tokenizer = target.info.hidden_size, target.engine.tokenizer
    if body.dimensions not in (None, size):
        message = f"dimensions must be {size}, the size of this model's embeddings, or left out; not {body.dimensions}"
        raise InvalidRequestError(message, "dimensions")
    names = {"prompt": "input"}
    requests = []
    with renamed(names):
        for index, text in enumerate(body.input):
            ids = encode(text, body.add_special_tokens is not False, tokenizer, target.info.max_model_len)
            ids = _truncated(ids, body, target.info, 0)
            requests.append(_request(body, target, index, ids, SamplingParams(), body.pooling or "last"))
    return Job(requests, [text if isinstance(text, str) else None for text in body.input], names)


def encode(prompt: Any, special: bool, tokenizer: Tokenizer | None, limit: int) -> list[int]:
    """The tokens of a `Prompt`. special: with the special tokens around a text.

    limit: text that has more than twice as many tokens is refused after work for about so many. Raises
    InvalidRequestError.
    """
    if not isinstance(prompt, str):
        return prompt
    if tokenizer is None:
        raise InvalidRequestError("prompt: this server runs without a tokenizer; send token ids", "prompt")
    if len(prompt) > max(8 * limit, LONG_TEXT):
        # Pieces have more tokens than the whole, as words are cut, but by far not twice as many.
        count = 0
        for start in range(0, len(prompt), LONG_TEXT):
            count += len(tokenizer.encode(prompt[start : start + LONG_TEXT], False))
            if count > 2 * limit:
                message = f"prompt has {len(prompt)} characters, which are far more than {limit} tokens"
                raise ContextLengthError(message, "prompt")
    return tokenizer.encode(prompt, special)


def _truncated(ids: list[int], body: EngineBody, info: EngineInfo, room: int) -> list[int]:
    """The end of a prompt, if the body wants no more. room: tokens of the context that are not the prompt's."""
    limit = body.truncate_prompt_tokens
    if limit == 0:
        message = "truncate_prompt_tokens must be at least 1, or -1 for as many tokens as fit; not 0"
        raise InvalidRequestError(message, "truncate_prompt_tokens")
    if limit is None or not ids:
        return ids
    if limit == -1:
        limit = max(info.max_model_len - room, 1)
    return ids[-limit:]


def _bad_token_ids(body: GenerationBody, tokenizer: Tokenizer | None, info: EngineInfo) -> list[list[int]]:
    if not body.bad_words:
        return []
    if tokenizer is None:
        raise InvalidRequestError("bad_words: this server runs without a tokenizer", "bad_words")
    SamplingParams(bad_words=body.bad_words)  # checks how many there are, before they are tokenised
    return bad_token_ids(body.bad_words, tokenizer, info.vocab_size)


def _infill_marks(tokenizer: Tokenizer | None) -> tuple[str, str, str]:
    """What stands before a text, before its suffix, and before what the model fills in. Raises InvalidRequestError."""
    marks = None if tokenizer is None else tokenizer.infill_marks
    if marks is None:
        raise InvalidRequestError("suffix: this model has no tokens for filling in the middle of a text", "suffix")
    return marks


def tokens_of(body: TokenizeBody, info: EngineInfo, tokenizer: Tokenizer) -> Tokens:
    """The answer of /tokenize. Raises InvalidRequestError."""
    text, special = body.prompt or "", body.add_special_tokens
    if body.messages is not None:
        text = prompt_text(body.chat(), tokenizer)
    special = body.messages is None if special is None else special
    ids = encode(text, special, tokenizer, max(info.max_model_len, MAX_TOKENIZED))
    return Tokens(
        tokens=ids,
        count=len(ids),
        max_model_len=info.max_model_len,
        token_strs=[tokenizer.token_text(token) for token in ids] if body.return_token_strs else None,
    )


def text_of(body: DetokenizeBody, info: EngineInfo, tokenizer: Tokenizer) -> Detokenized:
    """The answer of /detokenize. Raises InvalidRequestError."""
    for token in body.tokens:
        if not 0 <= token < info.vocab_size:
            message = f"tokens has token id {token}; ids of this model are 0 to {info.vocab_size - 1}"
            raise InvalidRequestError(message, "tokens")
    return Detokenized(prompt=tokenizer.decode(body.tokens, False))


def prompt_text(body: ChatBody, tokenizer: Tokenizer) -> str:
    """The conversation by the model's template. Refuses what the template would ignore."""
    options: dict[str, Any] = {}
    tools, extra = body.offered_tools, body.chat_template_kwargs or {}
    hints = {"reasoning_effort": body.reasoning_effort, "verbosity": body.verbosity}  # clients send them to any model
    hints = {name: value for name, value in hints.items() if value is not None}
    if tools or extra or hints or body.documents:
        known = tokenizer.chat_template_variables(with_tools=bool(tools))
        if tools and "tools" not in known:
            field = "functions" if body.functions else "tools"
            raise InvalidRequestError(f"{field}: this model's chat template has no place for tools", field)
        if body.documents and "documents" not in known:
            message = "documents: this model's chat template has no place for documents"
            raise InvalidRequestError(message, "documents")
        for name in extra:
            if name not in known:
                message = f"chat_template_kwargs: this model's chat template has no variable {name[:80]!r}"
                raise InvalidRequestError(message, "chat_template_kwargs")
        extra = {name: value for name, value in hints.items() if name in known} | extra
        options = {"tools": [tool.for_template() for tool in tools] or None, "template_kwargs": extra or None}
        if body.documents:
            options["documents"] = body.documents
    turns = [message.for_template() for message in body.messages]
    goes_on = bool(body.continue_final_message)
    add = not goes_on if body.add_generation_prompt is None else body.add_generation_prompt
    content, mark = turns[-1]["content"], f"<{uuid.uuid4().hex}>"
    if goes_on:  # what the template writes behind a content may look like the content itself
        turns[-1]["content"] = content.rstrip() + mark + content[len(content.rstrip()) :]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=add, **options)
    return _up_to(content, mark, text) if goes_on else text


def _up_to(content: str, mark: str, text: str) -> str:
    """A conversation's text up to the end of the content of its last message. Raises InvalidRequestError.

    mark: stands in the text where that content ends, but for blanks.
    """
    before, _, after = text.rpartition(mark)
    if not content.strip() or not before.endswith(content.strip()):
        reason = "the last message has no content, or the model's chat template does not show it as it is"
        raise InvalidRequestError(f"continue_final_message: {reason}", "continue_final_message")
    blanks = content[len(content.rstrip()) :]  # most templates strip contents; where this one does not, they are kept
    return before + (blanks if after.startswith(blanks) else "")


def _calls_format(body: ChatBody, form: ChatFormat) -> ChatFormat:
    """What to look for in the output because of the body's tools."""
    if not body.offered_tools:
        return ChatFormat()
    if form.tools is None and not body.must_call:
        raise InvalidRequestError(
            "tools: this server does not know how its model writes tool calls (its option tool_call_parser); "
            "only tool_choice required, a named tool or none work",
            "tools",
        )
    tools = [tool.function for tool in body.offered_tools if body.named_tool in (None, tool.function.name)]
    return ChatFormat(
        tools="json" if body.must_call and form.tools != "gpt_oss" else form.tools,
        schemas={tool.name: tool.parameters or {} for tool in tools},
        single_call=body.single_call,
    )


def _params(
    body: GenerationBody, options: dict[str, Any], info: EngineInfo, num_tokens: int, limit: int | None
) -> SamplingParams:
    """Parameters of these options, with the model's defaults for what they leave out.

    num_tokens: of the prompt. limit: tokens of an output where neither body nor model says it; None for all that fit.
    """
    defaults = dict(info.sampling_defaults)
    limit = defaults.pop("max_tokens", limit)
    if body.token_limit is not None:
        limit = body.token_limit
    elif limit is not None:
        limit = min(limit, info.max_model_len - num_tokens)
    if body.use_beam_search:
        defaults = {}  # they are of sampling
    return SamplingParams(**defaults | options, max_tokens=None if limit is None else max(limit, 1))


def _request(
    body: GenerationBody | EmbeddingBody,
    target: Target,
    index: int,
    ids: list[int],
    params: SamplingParams,
    pooling: Pooling | None = None,
    bad: Sequence[list[int]] = (),
) -> GenerationRequest:
    """The request for prompt number `index`. Raises InvalidRequestError if the engine could not serve it.

    bad: token sequences of bad_words.
    """
    info = target.info
    room = 0 if pooling else params.max_tokens or 1
    if len(ids) + room > info.max_model_len:
        asked = f" and max_tokens asks for {room} more" if room > 1 else ""
        output = ", of which the output takes at least one" if room else ""
        raise ContextLengthError(
            f"prompt has {len(ids)} tokens{asked}; this model's context is {info.max_model_len} tokens{output}",
            "prompt",
        )
    key = target.key and msgspec.structs.replace(target.key, id=f"{target.key.id}-{index}")
    # The engine's own is new each time: a reply with a key may be made twice, and clients may choose the same id.
    own_id = uuid.uuid4().hex if key or body.request_id else target.reply_id
    request = GenerationRequest(
        request_id=f"{own_id}-{index}",
        prompt_token_ids=ids,
        params=params,
        bad_token_ids=list(bad),
        priority=body.priority or 0,
        arrival_time=time.time(),
        cache_salt=body.cache_salt or "",
        client=target.client,
        prompt_cache_key=body.prompt_cache_key or "",
        pooling=pooling,
        key=key,
        adapter=target.adapter,
    )
    validate_request(request, info)
    return request
