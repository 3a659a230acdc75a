"""Request ids and the request log in both forms: what it holds, and what it never holds."""

import asyncio
import json
import logging
import os
import re
import stat

import pytest
from support.app import Api, staged

from rayllm.config.options import ServerConfig
from rayllm.serve.http.auth import load_api_keys
from rayllm.serve.http.request_log import LOGGER_NAME, open_log

SECRET, PROMPT = "sk-very-secret", "confidential words"


@pytest.fixture
def log(tmp_path):
    """A function that gives the lines logged so far."""
    path = tmp_path / "logs" / "requests.log"
    open_log("json", path)
    yield lambda: path.read_text().splitlines()
    logger = logging.getLogger(LOGGER_NAME)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()


def events(log):
    return [json.loads(line) for line in log()]


def test_ids_are_taken_or_made():
    api = Api()
    assert api.request("GET", "/version", headers={"x-request-id": "a.b:c-1"}).headers["x-request-id"] == "a.b:c-1"
    made = [api.get("/version").headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in made)
    stream = api.request("POST", "/v1/completions", json={"prompt": "x", "stream": True}, headers={"x-request-id": "s"})
    assert stream.headers["x-request-id"] == "s"
    for bad in ("x" * 129, "a b", 'a"b', "a;b"):
        response = api.request("GET", "/version", headers={"x-request-id": bad})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "x-request-id")
        assert response.headers["x-request-id"] != bad


def test_start_and_end_of_a_request(log):
    keys = load_api_keys(ServerConfig(api_key=SECRET), {})
    api = Api(keys=keys)
    headers = {"x-request-id": "r1", "authorization": f"Bearer {SECRET}"}
    api.request("POST", "/v1/completions", json={"prompt": PROMPT, "n": 2, "max_tokens": 3}, headers=headers)
    start, end = events(log)
    assert (start["event"], end["event"]) == ("start", "end")
    common = {"request_id": "r1", "method": "POST", "path": "/v1/completions", "model": "org/fake"}
    common["key"] = keys[0].name
    counts = {"prompts": 1, "choices": 2, "prompt_tokens": len(PROMPT)}
    assert start.items() >= (common | counts).items()
    assert end.items() >= (common | counts | {"status": 200, "completion_tokens": 6}).items()
    assert end["total"] >= end["first_token"] > 0
    assert start["reply_id"] == end["reply_id"]


def test_engine_times_are_in_the_log(log):
    api = staged(request_timeout=0.05)
    api.completion(prompt="st")
    end = events(log)[-1]
    assert (end["event"], end["status"], end["error"]) == ("abort", 408, "request_timeout")
    assert (end["queued"], end["prefill"]) == (0.25, 0.5)


def test_what_fails_is_logged_and_questions_are_not(log):
    api = Api()
    api.get("/health")
    api.get("/metrics")
    api.completion(prompt="x" * 99)
    api.get("/v2")
    api.completion(prompt="dying", stream=True)
    lines = [(e["event"], e["path"], e.get("status"), e.get("error")) for e in events(log)]
    assert lines == [
        ("end", "/v1/completions", 400, "context_length_exceeded"),
        ("end", "/v2", 404, "invalid_request_error"),
        ("start", "/v1/completions", None, None),
        ("abort", "/v1/completions", 200, "engine_unavailable"),
    ]


def test_a_client_that_leaves_is_an_abort(log):
    async def call():
        body = json.dumps({"prompt": "slow", "stream": True}).encode()
        messages = [{"type": "http.request", "body": body}]

        async def receive():
            if messages:
                return messages.pop()
            await asyncio.sleep(0.05)
            return {"type": "http.disconnect"}

        async def send(message):
            pass

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"",
            "query_string": b"",
            "headers": [],
            "asgi": {"spec_version": "2.3"},
        }
        await Api().app(scope, receive, send)

    asyncio.run(call())
    start, end = events(log)
    assert (start["event"], end["event"], end["status"]) == ("start", "abort", 200)
    assert end["error"] == "client_disconnected"
    assert end["completion_tokens"] > 0


def test_prompts_outputs_and_keys_are_never_logged(log, caplog):
    caplog.set_level(logging.DEBUG)
    api = Api(keys=load_api_keys(ServerConfig(api_key=SECRET), {}))
    for headers in ({"authorization": f"Bearer {SECRET}"}, {"authorization": "Bearer sk-wrong-secret"}, {}):
        for path, body in (
            ("/v1/completions", {"prompt": PROMPT, "echo": True}),
            ("/v1/completions", {"prompt": PROMPT, "colour": PROMPT}),
            ("/v1/completions", {"prompt": [PROMPT, "bad"], "stream": True}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}),
            ("/tokenize", {"prompt": PROMPT}),
        ):
            api.request("POST", path, json=body, headers=headers)
    text = "\n".join(log()) + caplog.text
    assert len(log()) > 15
    assert "secret" not in text.replace("secret detail", "")  # which a fake engine's own exception has
    assert "confidential" not in text


def test_no_field_can_forge_a_line(tmp_path):
    path = tmp_path / "log"
    open_log("text", path)
    api = Api()
    api.get("/x%0A2026-01-01T00:00:00Z end status=200 b=c")
    (line,) = path.read_text().splitlines()
    assert re.match(r"\S+Z end request_id=[0-9a-f]{32} method=GET path=\"/x\\n2026", line)
    assert line.count("status=") == 2
    assert " status=404" in line


def test_nobody_else_may_read_the_log(tmp_path, monkeypatch):
    monkeypatch.setattr("rayllm.serve.http.request_log.LOG_FILE_BYTES", 2000)
    old = os.umask(0)
    try:
        open_log("json", tmp_path / "serve" / "log")
        api = Api()
        for _ in range(30):
            api.get("/nothing")
    finally:
        os.umask(old)
    files = list((tmp_path / "serve").iterdir())
    assert len(files) > 2
    assert {stat.S_IMODE(each.stat().st_mode) for each in files} == {0o600}
    assert stat.S_IMODE((tmp_path / "serve").stat().st_mode) == 0o700


def test_the_log_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("rayllm.serve.http.request_log.LOG_FILE_BYTES", 2000)
    open_log("json", tmp_path / "log")
    api = Api()
    for _ in range(100):
        api.get("/nothing")
    sizes = [each.stat().st_size for each in tmp_path.iterdir()]
    assert len(sizes) == 4
    assert max(sizes) <= 2000
