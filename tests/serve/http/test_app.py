"""The HTTP app over a fake engine: routes, SSE, errors, disconnects, metrics."""

import asyncio
import inspect
import json
import subprocess
import sys

import httpx
import pytest
from fastapi.routing import APIRoute
from support.app import CHAT, Api, error_of

from rayllm.serve.http.protocol import MAX_BODY_BYTES


@pytest.fixture
def api():
    return Api()


def events(response):
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.text.split("\n\n")
    assert frames.pop() == ""
    assert frames.pop() == "data: [DONE]"
    return [json.loads(f.removeprefix("data: ")) for f in frames]


def test_models(api):
    models = api.get("/v1/models").json()
    assert models["object"] == "list"
    (card,) = models["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("org/fake", "model", 64)
    assert api.get("/v1/models/org/fake").json() == card
    assert error_of(api.get("/v1/models/other"), 404)["code"] == "model_not_found"
    assert error_of(api.get("/v1/models/"), 404)["message"] == "no such path: GET /v1/models/"


def test_completion_and_chat(api):
    answer = api.completion(max_tokens=4, model="org/fake").json()
    assert answer["choices"] == [{"index": 0, "text": "abcd", "logprobs": None, "finish_reason": "length"}]
    assert answer["usage"]["total_tokens"] == 6
    answer = api.chat(n=2).json()
    assert [c["message"]["content"] for c in answer["choices"]] == ["abc", "abc"]
    assert api.state.fake.aborted == api.state.fake.started


def test_prompt_list_and_n(api):
    answer = api.completion(prompt=["a", "b", "c"], n=2, max_tokens=2).json()
    assert [c["index"] for c in answer["choices"]] == list(range(6))
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 12,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_completion_stream_with_usage(api):
    *chunks, usage = events(api.completion(stream=True, stream_options={"include_usage": True}, max_tokens=3))
    assert "".join(c["choices"][0]["text"] for c in chunks) == "abc"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 3)
    assert len({c["id"] for c in [*chunks, usage]}) == 1


def test_chat_stream(api):
    chunks = events(api.chat(stream=True, logprobs=True))
    deltas = [c["choices"][0]["delta"] for c in chunks]
    assert deltas[0]["role"] == "assistant"
    assert "".join(d.get("content", "") for d in deltas) == "abc"
    assert deltas[-1] == {}
    assert chunks[1]["choices"][0]["logprobs"]["content"][0]["token"] == "a"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_bad_bodies(api, path):
    for body in (b"", b"{", b"[]", b"null", b"\xff"):
        assert error_of(api.post(path, content=body), 400)["type"] == "invalid_request_error"
    error = error_of(api.post(path, json=CHAT | {"prompt": "x", "strict_fields": True}), 400)
    assert error["param"] in ("prompt", "messages")


def test_validation_errors_name_the_field(api):
    cases = [
        ({"strict_fields": True, "colour": 1}, "colour"),
        ({"temperature": 3000}, "temperature"),
        ({"n": 10**9}, "n"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1000]}, "prompt"),
        ({"top_p": 2}, "top_p"),
        ({"min_tokens": 20}, "min_tokens"),
    ]
    for fields, param in cases:
        error = error_of(api.completion(**fields), 400)
        assert (error["param"], error["type"]) == (param, "invalid_request_error")
        assert param in error["message"]
        assert error_of(api.completion(**fields, stream=True), 400) == error
    error = error_of(api.completion(prompt="x" * 60, max_tokens=10), 400)
    assert error["code"] == "context_length_exceeded"
    assert api.state.fake.started == []


def test_unknown_model_path_and_method(api):
    error = error_of(api.completion(model="gpt-9"), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    error_of(api.get("/v2/nothing"), 404)
    error_of(api.get("/v1/completions"), 405)


def test_body_limit(api):
    big = b'{"prompt": "' + b"x" * MAX_BODY_BYTES + b'"}'
    assert error_of(api.post("/v1/completions", content=big), 413)["code"] == "request_too_large"

    async def chunks():  # no content-length
        for _ in range(40):
            yield b"x" * 2**20

    error_of(api.post("/v1/completions", content=chunks()), 413)


def test_engine_errors_before_the_first_token_are_statuses(api):
    for stream in (False, True):
        response = api.completion(prompt="dead", stream=stream)
        error = error_of(response, 503)
        assert (error["type"], response.headers["retry-after"]) == ("server_error", "2")
        error = error_of(api.completion(prompt="bad", stream=stream), 500)
        assert "secret" not in error["message"]
        error = error_of(api.completion(prompt="poison", stream=stream), 500)
        assert (error["code"], "no such kernel" in error["message"]) == ("request_failed", True)
    api.state.dead = True
    error_of(api.completion(), 503)
    error_of(api.chat(), 503)
    assert api.get("/v1/models").status_code == 200


def test_engine_errors_in_mid_stream_are_events(api):
    first, error = events(api.completion(prompt="dying", stream=True))
    assert first["choices"][0]["text"] == "a"
    assert error["error"]["code"] == "engine_unavailable"


def test_one_failing_prompt_aborts_the_others(api):
    error_of(api.completion(prompt=["slow", "dead", "slow"]), 503)
    assert sorted(api.state.fake.aborted) == sorted(api.state.fake.started)


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_aborts(api, stream):
    body = json.dumps({"prompt": ["slow", "slow"], "stream": stream}).encode()
    sent = []

    async def call():
        gone = asyncio.Event()
        messages = [{"type": "http.request", "body": body}]

        async def receive():
            if messages:
                return messages.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"",
            "query_string": b"",
            "headers": [],
            "asgi": {"spec_version": "2.3"},
        }
        serving = asyncio.create_task(api.app(scope, receive, send))
        async with asyncio.timeout(30):
            while len(api.state.fake.started) < 2 or (stream and len(sent) < 2):
                await asyncio.sleep(0.01)
        assert api.state.fake.aborted == []
        gone.set()
        await asyncio.wait_for(serving, 5)
        await asyncio.sleep(0.05)

    asyncio.run(call())
    assert sorted(api.state.fake.aborted) == sorted(api.state.fake.started)
    if stream:
        assert sent[0]["status"] == 200
        assert b'"text":"a"' in sent[1]["body"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_cancelled_call_aborts(api, stream):
    """Serve cancels the call when its proxy sees the client leave."""

    async def call():
        transport = httpx.ASGITransport(app=api.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            task = asyncio.create_task(client.post("/v1/completions", json={"prompt": "slow", "stream": stream}))
            await asyncio.sleep(0.1)
            task.cancel()
            await asyncio.wait([task])
        await asyncio.sleep(0.05)

    asyncio.run(call())
    assert len(api.state.fake.started) == 1
    assert api.state.fake.aborted == api.state.fake.started


def test_health(api):
    assert api.get("/health").status_code == 200
    api.state.reason = "no step finished for 60 s"
    assert error_of(api.get("/health"), 503)["message"] == "no step finished for 60 s"


def test_no_route_waits_for_a_thread(api):
    """FastAPI runs what is not async in a thread, which a busy server's /health would wait for."""

    def calls(dependant):
        return [dependant.call, *(call for each in dependant.dependencies for call in calls(each))]

    found = [call for route in api.app.routes if isinstance(route, APIRoute) for call in calls(route.dependant)]
    assert len(found) > 20
    for call in found:
        assert inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__), call


def test_version(api):
    assert api.get("/version").json()["version"]
    assert api.get("/cluster").text == "hosts\n  10.0.0.1"


def test_head_is_answered_as_get(api):
    for path in ("/", "/health", "/metrics", "/version", "/v1/models", "/v1/models/org/fake", "/openapi.json"):
        head, get = api.request("HEAD", path), api.get(path)
        assert (head.status_code, head.headers["content-type"]) == (200, get.headers["content-type"]), path
    assert api.request("HEAD", "/v1/completions").status_code == 405
    assert api.request("HEAD", "/nothing").status_code == 404


def test_metrics(api):
    api.completion(n=2, max_tokens=3)
    api.chat(stream=True)
    response = api.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    labels = 'engine="0",model_name="org/fake"'
    front = 'engine="all",model_name="org/fake"'
    for line in (
        f"rayllm:num_replicas{{{front}}} 1.0",
        f"rayllm:num_requests_running{{{labels}}} 2.0",
        f"rayllm:num_requests_waiting{{{labels}}} 0.0",
        f"rayllm:num_requests_swapped{{{labels}}} 0.0",
        f"rayllm:kv_cache_usage_perc{{{labels}}} 0.25",
        f"rayllm:prompt_tokens_total{{{labels}}} 11.0",
        f"rayllm:generation_tokens_total{{{labels}}} 0.0",
        f"rayllm:num_preemptions_total{{{labels}}} 0.0",
        f"rayllm:prefix_cache_queries_total{{{labels}}} 0.0",
        f"rayllm:prefix_cache_hits_total{{{labels}}} 0.0",
        'rayllm:request_success_total{engine="all",finished_reason="length",model_name="org/fake"} 3.0',
        f"rayllm:time_to_first_token_seconds_count{{{front}}} 2.0",
        f"rayllm:inter_token_latency_seconds_count{{{front}}} 6.0",
        f"rayllm:e2e_request_latency_seconds_count{{{front}}} 2.0",
        f"rayllm:request_decode_time_seconds_count{{{front}}} 2.0",
    ):
        assert line in response.text, response.text
    api.state.dead = True
    text = api.get("/metrics").text
    assert "rayllm:num_requests_running" not in text
    assert "rayllm:e2e_request_latency_seconds_count" in text


def test_the_front_imports_without_torch():
    code = (
        "import sys; import rayllm.cli.main, rayllm.serve.http.app, rayllm.serve.cluster.application;"
        "heavy = {'torch', 'transformers', 'triton'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
