"""The answers of the API's routes as pydantic models: what the OpenAPI document says of them.

Answers of generation are described here and made by `replies.py`; the others are made of these models.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Every error of the API."""

    error: ErrorDetail


class AdapterAnswer(BaseModel):
    id: str
    object: Literal["adapter"] = "adapter"
    parent: str
    deleted: bool = False


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "rayllm"
    max_model_len: int | None = None  # left out while the model has no engine
    parent: str | None = None  # the model of an adapter; left out for models


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
