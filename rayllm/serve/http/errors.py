"""Errors as the OpenAI API has them: a status and {"error": {message, type, param, code}} for every exception.

`as_api_error` is the one place that maps exceptions to answers. The functions below it make the refusals and failures
that have a code of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import orjson
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from rayllm.errors import EngineDeadError, InvalidRequestError

logger = logging.getLogger(__name__)

DeadlineName = Literal["queue_timeout", "first_token_timeout", "request_timeout"]

_MISSED: dict[DeadlineName, str] = {
    "queue_timeout": "the engine did not start the request within {:g} s (queue_timeout)",
    "first_token_timeout": "there was no first token within {:g} s (first_token_timeout)",
    "request_timeout": "the answer was not complete within {:g} s (request_timeout)",
}


class ContextLengthError(InvalidRequestError):
    """Prompt and output together are longer than the model's context."""


class ApiError(HTTPException):
    """An error with an HTTP status of its own. kind, param, code: as OpenAI has them. headers: of the response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(status, message, headers)
        self.kind = kind
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """The JSON of the response, or of an error in mid-stream."""
        return {"error": {"message": self.detail, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return Response(orjson.dumps(self.body()), self.status_code, self.headers, "application/json")


def as_api_error(error: Exception, method: str, path: str) -> ApiError:
    """The API's view of any exception. Unexpected ones are logged, and their text stays on the server.

    method, path: of the request, for errors of the router itself.
    """
    match error:
        case ApiError():
            return error
        case RequestValidationError():
            return as_api_error(_first_fault(error), method, path)
        case InvalidRequestError():
            code = "context_length_exceeded" if isinstance(error, ContextLengthError) else None
            return ApiError(400, str(error), param=error.param, code=code)
        case EngineDeadError():
            message = f"the engine cannot answer now: {error}"
            return _server_error(503, message, "engine_unavailable", {"retry-after": "2"})
        case ClientDisconnect():
            # Nobody reads this answer; 499 is what proxies log.
            return ApiError(499, "the client closed the connection", code="client_disconnected")
        case HTTPException(status_code=404):
            return ApiError(404, f"no such path: {method} {path}")
        case HTTPException(status_code=405):
            return ApiError(405, f"method {method} is not allowed for {path}", headers=error.headers)
        case HTTPException():
            return ApiError(error.status_code, error.detail, headers=error.headers)
    logger.error("unexpected error while answering a request", exc_info=error)
    return _server_error(500, "internal error; the server's log has the details", "internal_error")


def _first_fault(error: RequestValidationError) -> InvalidRequestError:
    """The first of the errors that pydantic found in a request, with the field at fault as `param`."""
    causes = [each.get("ctx", {}).get("error") for each in error.errors()]
    for cause in causes:
        if isinstance(cause, Exception):
            cause.__traceback__ = None  # its frames refer to the body, and to this list
    first, place = error.errors()[0], error.errors()[0]["loc"][1:]  # without "body"
    if isinstance(causes[0], InvalidRequestError):
        return causes[0]
    if not place:
        return InvalidRequestError("the request body must be a JSON object")
    path = ".".join(map(str, place))
    messages = {
        "extra_forbidden": f"unknown field {path!r}",
        "missing": f"{path} is required",
        "too_short": f"{path} must not be empty",
        "value_error": f"{path}: {causes[0]}",
        # What pydantic says of Python's types, in the words of JSON.
        "list_type": f"{path}: input should be an array",
        "dict_type": f"{path}: input should be an object",
        "model_attributes_type": f"{path}: input should be an object",
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


def _server_error(status: int, message: str, code: str, headers: Mapping[str, str] | None = None) -> ApiError:
    return ApiError(status, message, kind="server_error", code=code, headers=headers)


def unauthorized(message: str, challenge: str) -> ApiError:
    """challenge: which credentials the client may send."""
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": challenge})


def unhealthy(reason: str) -> ApiError:
    return _server_error(503, reason, "unhealthy", {"retry-after": "2"})


def request_failed(reason: object) -> ApiError:
    """The engine gave up on this one request and goes on serving others."""
    return _server_error(500, f"the engine failed on this request: {reason or 'no reason given'}", "request_failed")


def queue_full(message: str) -> ApiError:
    """The server has enough to do."""
    return ApiError(429, message, kind="rate_limit_error", code="queue_full", headers={"retry-after": "1"})


def body_late(seconds: float) -> ApiError:
    """The request's body did not come in time."""
    message = f"the request body did not arrive within {seconds:g} s"
    return ApiError(408, message, kind="timeout_error", code="body_timeout")


def deadline_missed(name: DeadlineName, seconds: float) -> ApiError:
    return ApiError(408, _MISSED[name].format(seconds), kind="timeout_error", code=name)


def body_too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request body is longer than {limit} bytes", code="request_too_large")


def model_not_found(message: str) -> ApiError:
    return ApiError(404, message, param="model", code="model_not_found")
