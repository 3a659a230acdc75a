"""The OpenAPI document of the app: bodies from the pydantic models, answers and errors as schemas of their own."""

from __future__ import annotations

import functools
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import rayllm
from rayllm.api.sampling_params import MAX_N
from rayllm.serve.http.embeddings import MAX_INPUTS, EmbeddingBody
from rayllm.serve.http.protocol import ChatBody, CompletionBody
from rayllm.serve.http.tokenize import DetokenizeBody, TokenizeBody

_REF = "#/components/schemas/"
_STRING, _INT = {"type": "string"}, {"type": "integer"}
_TEXT_OR_NULL, _INT_OR_NULL = {"type": ["string", "null"]}, {"type": ["integer", "null"]}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


def _texts_or_ids(length: dict[str, int]) -> dict[str, Any]:
    """One prompt or several, whose number has limits."""
    several = [{"type": "array", "items": items, **length} for items in (_STRING, _IDS)]
    return {"anyOf": [_STRING, several[0], _IDS, several[1]]}


# Fields that the models check by hand, for better messages than a union's.
_BY_HAND: dict[str, dict[str, Any]] = {
    "prompt": _texts_or_ids({"minItems": 1}),
    "input": _texts_or_ids({"minItems": 1, "maxItems": MAX_INPUTS}),
    "stop": {"anyOf": [_STRING, {"type": "array", "items": _STRING}, {"type": "null"}]},
    "early_stopping": {"anyOf": [{"type": "boolean"}, {"const": "never"}, {"type": "null"}]},
    "best_of": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": MAX_N}, {"type": "null"}]},
    "n": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": MAX_N}, {"type": "null"}]},
}


def _object(properties: dict[str, Any], optional: tuple[str, ...] = ()) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


_ERROR = _object(
    {"error": _object({"message": _STRING, "type": _STRING, "param": _TEXT_OR_NULL, "code": _TEXT_OR_NULL})}
)
_MODEL = _object(
    {"id": _STRING, "object": {"const": "model"}, "created": _INT, "owned_by": _STRING, "max_model_len": _INT},
    optional=("max_model_len",),
)
_USAGE = _object(
    {
        "prompt_tokens": _INT,
        "completion_tokens": _INT,
        "total_tokens": _INT,
        "prompt_tokens_details": _object({"cached_tokens": _INT}),
    }
)
_EVENT = _object({"data": _STRING})  # of a stream: the JSON of a chunk, or [DONE]
_EMBEDDING = {"anyOf": [{"type": "array", "items": {"type": "number"}}, _STRING]}  # a string with base64
_LOGPROBS = {"type": ["object", "null"]}


def _reply(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    common = {"index": _INT, "logprobs": _LOGPROBS, "finish_reason": _TEXT_OR_NULL}
    return _object(
        {
            "id": _STRING,
            "object": {"const": kind},
            "created": _INT,
            "model": _STRING,
            "choices": _list(_object(choice | common)),
            "usage": _USAGE,
        }
    )


_SCHEMAS: dict[str, dict[str, Any]] = {
    "Error": _ERROR,
    "Model": _MODEL,
    "ModelList": _object({"object": {"const": "list"}, "data": _list({"$ref": f"{_REF}Model"})}),
    "Completion": _reply("text_completion", {"text": _STRING}),
    "ChatCompletion": _reply("chat.completion", {"message": _object({"role": _STRING, "content": _TEXT_OR_NULL})}),
    "Embeddings": _object(
        {
            "object": {"const": "list"},
            "data": _list(_object({"object": {"const": "embedding"}, "index": _INT, "embedding": _EMBEDDING})),
            "model": _STRING,
            "usage": _object({"prompt_tokens": _INT, "total_tokens": _INT}),
        }
    ),
    "Tokens": _object(
        {"tokens": _list(_INT), "count": _INT, "max_model_len": _INT, "token_strs": _list(_STRING)},
        optional=("token_strs",),
    ),
    "Text": _object({"prompt": _STRING}),
    "Health": _object({"status": {"const": "ok"}}),
    "Version": _object({"version": _STRING}),
}

# (method, path, summary, body, answer: (media type, schema), further statuses)
_BODY_ERRORS = (400, 401, 404, 408, 413, 500, 503)
_ROUTES: tuple[tuple[str, str, str, type[BaseModel] | None, dict[str, Any], tuple[int, ...]], ...] = (
    ("get", "/", "A console in the browser.", None, {"text/html": _STRING}, (400, 401)),
    ("get", "/health", "Whether requests are answered.", None, {"application/json": "Health"}, (400, 404, 503)),
    ("get", "/metrics", "Figures for Prometheus.", None, {"text/plain": _STRING}, (400, 401)),
    ("get", "/version", "The version of rayllm.", None, {"application/json": "Version"}, (400, 401)),
    ("get", "/openapi.json", "This document.", None, {"application/json": {"type": "object"}}, (400, 401)),
    ("get", "/v1/models", "The models served.", None, {"application/json": "ModelList"}, (400, 401)),
    ("get", "/v1/models/{model_id}", "One model.", None, {"application/json": "Model"}, (400, 401, 404)),
    (
        "post",
        "/v1/completions",
        "Complete prompts.",
        CompletionBody,
        {"application/json": "Completion", "text/event-stream": _EVENT},
        (*_BODY_ERRORS, 429),
    ),
    (
        "post",
        "/v1/chat/completions",
        "Answer a conversation.",
        ChatBody,
        {"application/json": "ChatCompletion", "text/event-stream": _EVENT},
        (*_BODY_ERRORS, 429),
    ),
    ("post", "/v1/embeddings", "Embed texts.", EmbeddingBody, {"application/json": "Embeddings"}, (*_BODY_ERRORS, 429)),
    ("post", "/tokenize", "Tokens of a text.", TokenizeBody, {"application/json": "Tokens"}, _BODY_ERRORS),
    ("post", "/detokenize", "Text of tokens.", DetokenizeBody, {"application/json": "Text"}, _BODY_ERRORS),
)

_MEANING = {
    400: "The request is not valid; the message names the field and its limit.",
    401: "No API key, or one that is not valid.",
    404: "No such model.",
    408: "A deadline was missed before the first token.",
    413: "The body is too long.",
    429: "The queue is full; retry-after says when to try again.",
    500: "The request failed on the server.",
    503: "There is no engine to answer now; retry-after says when to try again.",
}


@functools.cache
def openapi_document() -> dict[str, Any]:
    """The whole document, OpenAPI 3.1."""
    kinds = [(body, "validation") for *_, body, _, _ in _ROUTES if body is not None]
    _, bodies = models_json_schema(kinds, ref_template=_REF + "{model}")  # type: ignore[arg-type]
    schemas = bodies["$defs"] | _SCHEMAS
    for kind in (CompletionBody, ChatBody, EmbeddingBody):
        properties = schemas[kind.__name__]["properties"]
        properties.update({name: schema for name, schema in _BY_HAND.items() if name in properties})
    paths: dict[str, Any] = {}
    for method, path, summary, body, answer, statuses in _ROUTES:
        paths.setdefault(path, {})[method] = _operation(path, summary, body, answer, statuses)
    return {
        "openapi": "3.1.0",
        "info": {"title": "rayllm", "version": rayllm.__version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],  # keys are optional: a server may have none
    }


def _operation(
    path: str, summary: str, body: type[BaseModel] | None, answer: dict[str, Any], statuses: tuple[int, ...]
) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": summary, "responses": {"200": _response("The answer.", answer)}}
    for status in sorted(statuses):
        operation["responses"][str(status)] = _response(_MEANING[status], {"application/json": "Error"})
    if "{model_id}" in path:
        operation["parameters"] = [{"name": "model_id", "in": "path", "required": True, "schema": _STRING}]
    if path == "/health":
        text = "The model to ask about; all if absent."
        operation["parameters"] = [{"name": "model", "in": "query", "schema": _STRING, "description": text}]
    if body is not None:
        content = {"application/json": {"schema": {"$ref": _REF + body.__name__}}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _response(description: str, content: dict[str, Any]) -> dict[str, Any]:
    as_schema = {
        media: {"schema": {"$ref": _REF + schema} if isinstance(schema, str) else schema}
        for media, schema in content.items()
    }
    return {"description": description, "content": as_schema}
