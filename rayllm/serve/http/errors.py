"""Errors as the OpenAI API has them: a status and {"error": {message, type, param, code}} for every exception.

The routes of Anthropic's API have the same errors in its own form.

`as_api_error` is the one place that maps exceptions to answers. What has a code of its own is raised as `ApiError`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import orjson
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from rayllm.api.types import KEY_HEADER
from rayllm.errors import EngineDeadError, InvalidRequestError, OverloadedError

logger = logging.getLogger(__name__)

CONTEXT_LENGTH_CODE = "context_length_exceeded"
_KINDS = {408: "timeout_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}  # OpenAI's `type`
_ANTHROPIC_KINDS = {  # the same in Anthropic's words
    **{401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error"},
    **{413: "request_too_large", 429: "rate_limit_error", 500: "api_error", 503: "overloaded_error"},
}
_RETRY_AFTER = {429: "1", 503: "2"}  # seconds


def is_anthropic(path: str) -> bool:
    """Whether a path belongs to Anthropic's API: its clients send keys, and read errors, in a form of their own."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


class ContextLengthError(InvalidRequestError):
    """Prompt and output together are longer than the model's context."""


class ApiError(HTTPException):
    """An error with an HTTP status of its own.

    param, code: as OpenAI has them. details: as Anthropic has them, for its clients. headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        details: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(status, message, headers)
        if status in _RETRY_AFTER:
            self.headers = {"retry-after": _RETRY_AFTER[status]}
        self.kind = _KINDS.get(status, "invalid_request_error")
        self.param = param
        self.code = code
        self.details = details

    def body(self) -> dict[str, Any]:
        """The JSON of the response, or of an error in mid-stream."""
        return {"error": {"message": self.detail, "type": self.kind, "param": self.param, "code": self.code}}

    def anthropic_body(self, request_id: str) -> dict[str, Any]:
        """The same in Anthropic's form."""
        kind = _ANTHROPIC_KINDS.get(self.status_code, "invalid_request_error")
        # Coding agents look for these words, and make the conversation shorter then.
        long = "prompt is too long: " if self.code == CONTEXT_LENGTH_CODE else ""
        error: dict[str, Any] = {"type": kind, "message": long + self.detail}
        if self.details is not None:
            error["details"] = self.details
        return {"type": "error", "error": error, "request_id": request_id}

    def response(self, path: str = "", request_id: str = "") -> Response:
        """path: which the request was for. It decides the form."""
        body = self.anthropic_body(request_id) if is_anthropic(path) else self.body()
        return Response(orjson.dumps(body), self.status_code, self.headers, "application/json")


def as_api_error(error: Exception, method: str, path: str) -> ApiError:
    """The API's view of any exception. Unexpected ones are logged, and their text stays on the server.

    method, path: of the request, for errors of the router itself.
    """
    match error:
        case ApiError():
            return error
        case RequestValidationError():  # by FastAPI itself: for a parameter in the URL, or a request without a body
            for fault in error.errors():
                if fault["loc"][0] == "query":
                    name, message = str(fault["loc"][-1]), str(fault["msg"])
                    return ApiError(400, f"{name}: {message[0].lower()}{message[1:]}", param=name)
            return ApiError(400, "the request body must be a JSON object")
        case ValidationError():
            return as_api_error(first_fault(error), method, path)
        case OverloadedError():
            return ApiError(429, str(error), param=error.param, code="queue_full")
        case InvalidRequestError():
            if error.param == KEY_HEADER:
                return ApiError(422, str(error), param=error.param, code="idempotency_key_reused")
            code = CONTEXT_LENGTH_CODE if isinstance(error, ContextLengthError) else None
            return ApiError(400, str(error), param=error.param, code=code)
        case EngineDeadError():
            return ApiError(503, f"the engine cannot answer now: {error}", code="engine_unavailable")
        case ClientDisconnect():
            # Nobody reads this answer; 499 is what proxies log.
            return ApiError(499, "the client closed the connection", code="client_disconnected")
        case HTTPException(status_code=status):
            messages = {404: f"no such path: {method} {path}", 405: f"method {method} is not allowed for {path}"}
            return ApiError(status, messages.get(status, error.detail), headers=error.headers)
    logger.error("unexpected error while answering a request", exc_info=error)
    return ApiError(500, "internal error; the server's log has the details", code="internal_error")


def first_fault(error: ValidationError) -> InvalidRequestError:
    """The first of the errors that pydantic found in a request, with the field at fault as `param`."""
    errors = error.errors(include_url=False)
    causes = [each.get("ctx", {}).get("error") for each in errors]
    for cause in causes:
        if isinstance(cause, Exception):
            cause.__traceback__ = None  # its frames refer to the body, and to this list
    first, place = errors[0], errors[0]["loc"]
    if isinstance(causes[0], InvalidRequestError):
        return causes[0]
    if not place:
        return InvalidRequestError("the request body must be a JSON object")
    path = ".".join(map(str, place))[:200]
    messages = {
        "missing": f"{path} is required",
        "too_short": f"{path} must not be empty",
        "value_error": f"{path}: {causes[0]}",
        # What pydantic says of Python's types, in the words of JSON.
        "list_type": f"{path}: input should be an array",
        "dict_type": f"{path}: input should be an object",
        "model_type": f"{path}: input should be an object",
    }
    otherwise = f"{path}: {first['msg'][0].lower()}{first['msg'][1:]}"
    return InvalidRequestError(messages.get(first["type"], otherwise), str(place[0]))


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about a field of the engine's requests become errors about the field of the body that it came from.

    names: of the engine's fields -> of the body's.
    """
    try:
        yield
    except InvalidRequestError as error:
        name = names.get(error.param or "")
        if not name or error.param is None:
            raise
        raise type(error)(str(error).replace(error.param, name, 1), name) from None
