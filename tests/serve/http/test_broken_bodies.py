"""Bodies that never come whole: what the server held of them is free again."""

from __future__ import annotations

import asyncio
import gzip

import pytest
from support.app import Api

from rayllm.serve.http import limits
from rayllm.serve.http.request import RequestLife


def bodies_of(app):
    app.middleware_stack = app.middleware_stack or app.build_middleware_stack()
    layer = app.middleware_stack
    while not isinstance(layer, RequestLife):
        layer = layer.app
    return layer.bodies


def post(app, pieces, headers=(), *, more=True):
    """The status of the answer to these pieces of a body, behind which the client goes; None if there is none."""
    sent = []

    async def call():
        messages = iter([{"type": "http.request", "body": piece, "more_body": more} for piece in pieces])

        async def receive():
            return next(messages, {"type": "http.disconnect"})

        async def send(message):
            sent.append(message)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "root_path": "",
            "query_string": b"",
            "headers": list(headers),
            "client": ("1.2.3.4", 1),
            "server": ("t", 80),
        }
        await app(scope, receive, send)

    asyncio.run(call())
    return sent[0]["status"] if sent else None


@pytest.mark.parametrize(
    ("pieces", "headers", "more", "status"),
    [
        ([b"x" * 1000], [], True, 499),
        ([b"x" * 900_000] * 4, [], True, 413),
        ([gzip.compress(b"x" * 100_000)[:-8]], [(b"content-encoding", b"gzip")], False, 400),
    ],
    ids=["the client goes", "too long", "bad gzip"],
)
def test_nothing_is_held_of_it(pieces, headers, more, status):
    api = Api()
    bodies = bodies_of(api.app)
    for _ in range(3):
        assert post(api.app, pieces, headers, more=more) in (status, None)
    assert bodies.num_bytes == 0


def test_many_of_them_close_nobody_out(monkeypatch):
    monkeypatch.setattr(limits, "BODIES_BYTES", 10_000)
    api = Api()
    for _ in range(11):
        post(api.app, [b"x" * 1000])
    assert api.completion().status_code == 200
