"""`/tokenize` and `/detokenize`: the model's tokenizer over HTTP. They need no engine step and hold no place in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, cast

from pydantic import model_validator

from rayllm.errors import InvalidRequestError
from rayllm.serve.http.convert import LONG_TEXT, Tokenizer
from rayllm.serve.http.fanout import Engine
from rayllm.serve.http.protocol import parse_body
from rayllm.serve.http.protocol_parts import Body, Message

FindEngine = Callable[[str | None], Engine]


class TokenizeBody(Body):
    """POST /tokenize. Either prompt, or messages, which go through the chat template as in /v1/chat/completions.

    add_special_tokens: as the tokenizer does by itself; true for a prompt, false for messages, whose template has them.
    return_token_strs: the text of each token too.
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("give either prompt or messages", "prompt")
        if self.messages == []:
            raise InvalidRequestError("messages must not be empty", "messages")
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


class _Decoder(Protocol):
    """A tokenizer that can keep special tokens."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str: ...


async def tokenize(raw: bytes, find_engine: FindEngine) -> Any:
    """The answer to POST /tokenize. Raises InvalidRequestError, and what find_engine raises for a model's name."""
    body = parse_body(TokenizeBody, raw)
    engine = find_engine(body.model)
    known = _tokenizer(engine.tokenizer)
    if body.messages is not None:
        turns = [message.for_template() for message in body.messages]
        text = known.apply_chat_template(turns, add_generation_prompt=True)
    else:
        text = body.prompt or ""
    special = body.messages is None if body.add_special_tokens is None else body.add_special_tokens
    ids = await asyncio.to_thread(known.encode, text, special) if len(text) > LONG_TEXT else known.encode(text, special)
    answer: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": engine.info.max_model_len}
    if body.return_token_strs:
        answer["token_strs"] = [known.token_text(token) for token in ids]
    return answer


async def detokenize(raw: bytes, find_engine: FindEngine) -> Any:
    """The answer to POST /detokenize, special tokens included. Raises InvalidRequestError, or what find_engine does."""
    body = parse_body(DetokenizeBody, raw)
    engine = find_engine(body.model)
    decoder = cast(_Decoder, _tokenizer(engine.tokenizer))
    vocab_size = engine.info.vocab_size
    for token in body.tokens:
        if not 0 <= token < vocab_size:
            message = f"tokens has token id {token}; ids of this model are 0 to {vocab_size - 1}"
            raise InvalidRequestError(message, "tokens")
    if len(body.tokens) > LONG_TEXT:
        return {"prompt": await asyncio.to_thread(decoder.decode, body.tokens, False)}
    return {"prompt": decoder.decode(body.tokens, False)}


def _tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise InvalidRequestError("this server runs without a tokenizer")
    return tokenizer
