"""The header Idempotency-Key, over an engine that notes what it is asked for."""

from __future__ import annotations

import json

import pytest
from support.app import CHAT, Api, FakeEngine, FakeState, error_of
from support.chat import Played
from support.chat_templates import HERMES

from rayllm.config.options import ServerConfig
from rayllm.errors import InvalidRequestError
from rayllm.serve.http.auth import load_api_keys

BODY = b'{"prompt": "hi"}'


class NotingEngine(FakeEngine):
    """Keeps requests, and says that each was first made at 1700."""

    def __init__(self):
        super().__init__()
        self.requests = []

    async def generate(self, request, prompt_text=None):
        self.requests.append(request)
        async for output in super().generate(request, prompt_text):
            output.created = 1700 if request.key else 0
            yield output


class Keyed(Api):
    """An app over a NotingEngine, whose API keys are "one" and "two" if it has any."""

    def __init__(self, server=None, *, keys=False, model="m", state=None):
        state = state or FakeState(name=model)
        state.fake = NotingEngine()
        super().__init__(server, load_api_keys(ServerConfig(), {"RAYLLM_API_KEYS": "one two"}) if keys else (), state)

    def asked(self, header="k", path="/v1/completions", body=BODY, authorization="Bearer one"):
        """(answer, keys of the engine's requests)"""
        before = len(self.state.fake.requests)
        headers = {"idempotency-key": header, "authorization": authorization}
        answer = self.post(path, content=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer, [request.key for request in self.state.fake.requests[before:]]


def test_who_repeats_a_request_gets_the_same_id_and_time():
    api = Keyed()
    (first, (key,)), (second, (again,)) = api.asked(), api.asked()
    assert (key.id, key.fingerprint) == (again.id, again.fingerprint)
    assert first.json() == second.json()
    assert first.json()["created"] == 1700
    assert key.id == f"{first.json()['id']}-0"
    one, two = api.state.fake.requests
    assert one.request_id != two.request_id, "both may run at the same time"
    assert one.numbered(1, 5).seed == two.numbered(2, None).seed, "and if both are computed, they are the same"
    streams = [api.asked(body=b'{"prompt": "hi", "stream": true}')[0].text for _ in range(2)]
    assert streams[0] == streams[1]
    assert json.loads(streams[0].split("\n")[0].removeprefix("data: "))["created"] == 1700


def test_what_makes_a_key_another_one():
    api, chat = Keyed(keys=True), json.dumps(CHAT).encode()
    _, (key,) = api.asked()
    _, prompts = api.asked(body=b'{"prompt": ["hi", "ho"]}')
    others = [
        api.asked("K")[1],
        api.asked(authorization="Bearer two")[1],
        api.asked(path="/v1/chat/completions", body=chat)[1],
        api.asked(path="/v1/embeddings", body=b'{"input": "hi"}')[1],
        Keyed(model="n", keys=True).asked()[1],
        prompts[1:],
    ]
    assert len({key.id, *(other.id for (other,) in others)}) == 1 + len(others)
    assert prompts[0].id == key.id
    assert prompts[0].fingerprint == prompts[1].fingerprint != key.fingerprint


def test_without_the_header_nothing_is_kept():
    api = Keyed()
    first, second = api.completion().json(), api.completion().json()
    assert [request.key for request in api.state.fake.requests] == [None, None]
    assert first["id"] != second["id"]
    assert first["created"] > 1700


@pytest.mark.parametrize("header", ["", "k" * 256])
def test_its_length_has_a_limit(header):
    error = error_of(Keyed().post("/v1/completions", content=BODY, headers={"idempotency-key": header}), 400)
    expected = f"the header Idempotency-Key must have 1 to 255 characters, not {len(header)}"
    assert (error["message"], error["param"]) == (expected, "Idempotency-Key")
    Keyed().asked("k" * 255)


class Reused(FakeEngine):
    """Has every key already, with another body."""

    async def generate(self, request, prompt_text=None):
        raise InvalidRequestError("this Idempotency-Key came before, with another body", "Idempotency-Key")
        yield


@pytest.mark.parametrize("stream", [False, True])
def test_another_body_is_a_422(stream):
    api = Api()
    api.state.fake = Reused()
    error = error_of(api.completion(stream=stream), 422)
    assert (error["code"], error["type"]) == ("idempotency_key_reused", "invalid_request_error")
    assert (error["param"], "another body" in error["message"]) == ("Idempotency-Key", True)


@pytest.mark.parametrize("stream", [False, True])
def test_who_misses_a_deadline_leaves_nothing_that_runs_on(stream):
    state = FakeState()
    body = json.dumps({"prompt": ["hi", "slow"], "stream": stream}).encode()
    answer = Api(ServerConfig(request_timeout=0.1), (), state).post(
        "/v1/completions", content=body, headers={"idempotency-key": "k"}
    )
    assert "request_timeout" in answer.text
    assert len(state.fake.started) == len(set(state.fake.forgotten)) == 2
    assert sorted(state.fake.aborted) == sorted(state.fake.started)


def test_tool_calls_have_the_same_ids():
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    app = Played(*[call * 2] * 4, source=HERMES)
    tools = [{"type": "function", "function": {"name": "now"}}]

    def ids(key, ask):
        (choice,) = ask(tools=tools, extra_headers={"Idempotency-Key": key}).choices
        return [each.id for each in choice.message.tool_calls]

    first = ids("a", app.chat)
    assert len(set(first)) == 2
    assert first == ids("a", app.chat) == ids("a", app.final)
    assert not set(first) & set(ids("b", app.chat))


def test_pages_of_allowed_origins_may_send_it():
    page = "https://page.test"
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "idempotency-key"}
    answer = Api(ServerConfig(allowed_origins=[page])).request(
        "OPTIONS", "/v1/completions", headers={"origin": page} | asks
    )
    assert answer.status_code == 200
    assert "idempotency-key" in answer.headers["access-control-allow-headers"].lower()
