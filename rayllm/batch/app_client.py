"""`AppClient`: sends requests to an ASGI app in this process, without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from starlette.types import ASGIApp, Message

from rayllm.batch.lines import BatchRequest

# What batches may ask, as far as an app has it.
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages")
CALLER = "rayllm.caller"  # in the scope: the name of the API key for which the server itself sends a request


def batch_endpoints(routes: Iterable[Any]) -> tuple[str, ...]:
    """Those of ENDPOINTS that an app with these routes has."""
    paths = {getattr(route, "path", None) for route in routes}
    return tuple(endpoint for endpoint in ENDPOINTS if endpoint in paths)


class AppClient:
    """Asks an app. caller: the name of the API key on whose behalf it does; None if the app needs no keys.

    A cancelled call tells the app that the client has left.
    """

    def __init__(self, app: ASGIApp, caller: str | None = None):
        self._app, self._caller = app, caller

    async def ask(self, request: BatchRequest) -> tuple[int, bytes]:
        """(status, body) of the answer. Raises what the app raises."""
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": request.url,
            "raw_path": request.url.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(request.body)).encode()),
                (b"x-request-id", request.id.encode()),
            ],
            "client": ("batch", 0),
            "server": ("batch", 80),
            CALLER: self._caller,
        }
        body: bytes | None = request.body
        status, parts = 0, []

        async def receive() -> Message:
            nonlocal body
            if body is None:
                await asyncio.get_running_loop().create_future()  # the client stays until the answer has come
            sent, body = body, None
            return {"type": "http.request", "body": sent, "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                parts.append(message.get("body", b""))

        await self._app(scope, receive, send)
        return status, b"".join(parts)
