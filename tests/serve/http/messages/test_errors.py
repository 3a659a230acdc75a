"""Errors of Anthropic's API, whoever refuses, as its client reads them; keys as it sends them."""

import asyncio

import anthropic
import pytest
from anthropic.types.thread_unsupported_request_error import ThreadUnsupportedRequestError
from support.app import Api, FakeState, staged
from support.messages import message_fields, with_client

from rayllm.config.options import ServerConfig
from rayllm.serve.http.auth import load_api_keys

KEY = "sk-of-the-tests"


def caught(app, kind, status, error_type, words="hi", fields=None, **options):
    """The error of the client's class `kind` for one request."""

    async def use(client):
        turn = {"role": "user", "content": words}
        return await client.messages.create(**message_fields({"messages": [turn], "max_tokens": 3} | (fields or {})))

    with pytest.raises(kind) as error:
        asyncio.run(with_client(app, use, **options))
    found = error.value
    assert type(found) is kind
    assert (found.status_code, found.type) == (status, error_type)
    assert found.body["type"] == "error"
    assert found.request_id == found.body["request_id"] != ""
    assert found.api_message
    return found


@pytest.fixture
def guarded():
    return Api(keys=load_api_keys(ServerConfig(api_key=KEY), {}))


def test_keys(guarded):
    def ask(**options):
        return asyncio.run(with_client(guarded.app, lambda c: c.messages.create(**message_fields({})), **options))

    assert ask(api_key=KEY).content[0].text
    assert ask(api_key=None, auth_token=KEY).content[0].text
    error = caught(guarded.app, anthropic.AuthenticationError, 401, "authentication_error", api_key="wrong")
    assert error.response.headers["www-authenticate"] == "Bearer"
    assert "not valid" in error.api_message
    response = guarded.post("/v1/messages", json={})
    assert "or `x-api-key: <key>`" in response.json()["error"]["message"]
    for headers in ({"x-api-key": ""}, {"x-api-key": KEY, "authorization": "Bearer wrong"}):
        assert guarded.post("/v1/messages", json={}, headers=headers).status_code == 401
    for path in ("/v1/chat/completions", "/v1/models", "/v1/messagesx"):
        response = guarded.request("GET", path, headers={"x-api-key": KEY})
        assert (response.status_code, response.json()["error"].get("code")) == (401, "invalid_api_key"), path


def test_not_found():
    error = caught(Api().app, anthropic.NotFoundError, 404, "not_found_error", fields={"model": "claude"})
    assert "'org/fake'" in error.api_message
    for path in ("/v1/messages/batches", "/v1/messages/batches/1"):
        response = Api().get(path)
        assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")
    response = Api().get("/v1/messages")
    assert (response.status_code, response.json()["error"]["type"]) == (405, "invalid_request_error")


def test_bad_requests():
    error = caught(
        Api().app, anthropic.BadRequestError, 400, "invalid_request_error", fields={"extra_body": {"temperature": -1}}
    )
    assert "temperature" in error.api_message


def test_threads_are_refused_so_that_clients_go_on_without():
    fields = {"extra_body": {"thread": {"type": "create"}}}
    error = caught(Api().app, ThreadUnsupportedRequestError, 400, "invalid_request_error", fields=fields)
    assert error.body["error"]["details"]["unsupported"] == ["thread"]


def test_web_pages_of_others():
    response = Api().post("/v1/messages", json={}, headers={"origin": "http://evil"})
    assert (response.status_code, response.json()["error"]["type"]) == (403, "permission_error")


def test_too_large():
    caught(Api().app, anthropic.RequestTooLargeError, 413, "request_too_large", words="x" * 2 * 2**20)


def test_overloaded():
    state = FakeState()
    state.admission.reserve(state.admission.max_live, 0)
    error = caught(Api(state=state).app, anthropic.RateLimitError, 429, "rate_limit_error")
    assert error.response.headers["retry-after"] == "1"


def test_no_engine():
    state = FakeState()
    state.dead = True
    error = caught(Api(state=state).app, anthropic.ServiceUnavailableError, 503, "overloaded_error")
    assert error.response.headers["retry-after"] == "2"
    caught(Api().app, anthropic.ServiceUnavailableError, 503, "overloaded_error", words="dead")


def test_failures_of_the_server():
    for words in ("bad", "poison"):
        error = caught(Api().app, anthropic.InternalServerError, 500, "api_error", words=words)
        assert "secret" not in str(error)


def test_a_missed_deadline():
    app = staged(first_token_timeout=0.05).app
    error = caught(app, anthropic.RequestTimeoutError, 408, "timeout_error", words="s")
    assert "first_token_timeout" in error.api_message


def test_an_idempotency_key_that_is_no_such_thing():
    response = Api().post("/v1/messages", json={}, headers={"idempotency-key": ""})
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")


def test_the_document_has_the_statuses_that_are_tried_here():
    responses = Api().app.openapi()["paths"]["/v1/messages"]["post"]["responses"]
    tried = {"400", "401", "403", "404", "408", "413", "429", "500", "503"}
    assert tried <= responses.keys()
    schemas = [responses[status]["content"]["application/json"]["schema"]["$ref"] for status in (*tried, "422")]
    assert {schema.rpartition("/")[2] for schema in schemas} == {"MessagesError"}
