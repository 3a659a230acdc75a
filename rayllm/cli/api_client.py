"""What the commands that talk to a running server share: its address, the key, and what its errors say."""

from __future__ import annotations

import httpx
import orjson

from rayllm.errors import EngineDeadError, InvalidRequestError


def api_base(url: str) -> str:
    """The address of the API, given the server's with or without /v1."""
    return url.rstrip("/").removesuffix("/v1") + "/v1"


def auth_headers(api_key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {api_key}"} if api_key else {}


def error_of(status: int, body: bytes) -> tuple[str, str | None]:
    """(message, code) of an error response; of one that is not in OpenAI's form, its status."""
    try:
        error = orjson.loads(body)["error"]
        return str(error["message"]), error.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"the server answered with status {status}", None


def check_response(response: httpx.Response) -> None:
    """Raise what an error response (already read) says: InvalidRequestError for 4xx, EngineDeadError for 5xx."""
    if response.status_code != 200:
        message, _ = error_of(response.status_code, response.content)
        raise (InvalidRequestError if response.status_code < 500 else EngineDeadError)(message)


def first_model(response: httpx.Response) -> str:
    """The first model of a response to GET /v1/models. Raises as `check_response`; EngineDeadError if it has none."""
    check_response(response)
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, KeyError, TypeError, IndexError):
        raise EngineDeadError(f"{response.url} lists no models") from None
