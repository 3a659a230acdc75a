"""Errors as the OpenAI API has them: a status and {"error": {message, type, param, code}} for every exception."""

from __future__ import annotations

import logging
from typing import Any

from rayllm.errors import EngineDeadError, InvalidRequestError, RayllmError
from rayllm.serve.http.convert import ContextLengthError

logger = logging.getLogger(__name__)


class ApiError(RayllmError):
    """An error with an HTTP status of its own.

    retry_after: seconds after which the client may try again. headers: of the response, beside retry-after.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self._headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The JSON of the response, or of an error in mid-stream."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        return self._headers | ({} if self.retry_after is None else {"retry-after": str(self.retry_after)})


def as_api_error(error: Exception) -> ApiError:
    """The API's view of any exception. Unexpected ones are logged, and their text stays on the server."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequestError):
        code = "context_length_exceeded" if isinstance(error, ContextLengthError) else None
        return ApiError(400, str(error), param=error.param, code=code)
    if isinstance(error, EngineDeadError):
        message = f"the engine cannot answer now: {error}"
        return ApiError(503, message, kind="server_error", code="engine_unavailable", retry_after=2)
    logger.error("unexpected error while answering a request", exc_info=error)
    return ApiError(500, "internal error; the server's log has the details", kind="server_error", code="internal_error")


def request_failed(reason: object) -> ApiError:
    """The engine gave up on this one request and goes on serving others."""
    message = f"the engine failed on this request: {reason or 'no reason given'}"
    return ApiError(500, message, kind="server_error", code="request_failed")
