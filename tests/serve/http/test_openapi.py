"""The OpenAPI document against the app it describes, and the two tokenizer routes."""

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import checks
from schemathesis.specs.openapi import checks as openapi_checks
from support.app import CHAT, Api, error_of

from rayllm.serve.http.openapi import openapi_document

API = Api()
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", API.app)


@SCHEMA.parametrize()
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_app_answers_as_the_document_says(case):
    """No answer is a 5xx; status, media type and form are the documented ones."""
    case.call_and_validate(
        checks=[
            checks.not_a_server_error,
            openapi_checks.status_code_conformance,
            openapi_checks.content_type_conformance,
            openapi_checks.response_schema_conformance,
        ]
    )


def test_every_route_is_described():
    described = {(method.upper(), path) for path, methods in openapi_document()["paths"].items() for method in methods}
    routes = {
        (method, route.path.replace("{model_id:path}", "{model_id}"))
        for route in API.app.routes
        for method in route.methods - {"HEAD"}
    }
    assert described == routes


def test_bodies_are_those_of_the_models():
    schemas = openapi_document()["components"]["schemas"]
    completion = schemas["CompletionBody"]
    assert completion["additionalProperties"] is False
    assert completion["required"] == ["prompt"]
    assert {"prompt", "max_tokens", "stream", "cache_salt"} <= completion["properties"].keys()
    assert schemas["ChatBody"]["required"] == ["messages"]


# ---- /tokenize and /detokenize


@pytest.fixture
def api():
    return Api()


def test_tokenize(api):
    answer = api.post("/tokenize", json={"prompt": "abc"}).json()
    assert answer == {"tokens": [97, 98, 99], "count": 3, "max_model_len": 64}
    answer = api.post("/tokenize", json={"prompt": "ab", "return_token_strs": True, "model": "org/fake"}).json()
    assert answer["token_strs"] == ["a", "b"]
    assert api.post("/tokenize", json=CHAT).json()["tokens"] == [104, 105]
    assert api.post("/tokenize", json={"prompt": ""}).json()["count"] == 0
    assert api.post("/tokenize", json={"prompt": "x" * 50_000}).json()["count"] == 50_000  # more than the context


def test_special_tokens_come_once(api):
    asked = []
    api.state.fake.tokenizer.encode = lambda _, add_special_tokens=True: asked.append(add_special_tokens) or []
    for body in ({"prompt": "x"}, CHAT, {"prompt": "x", "add_special_tokens": False}):
        api.post("/tokenize", json=body)
    assert asked == [True, False, False]


def test_detokenize(api):
    kept = []
    decode = api.state.fake.tokenizer.decode
    api.state.fake.tokenizer.decode = lambda ids, skip: kept.append(skip) or decode(ids)
    assert api.post("/detokenize", json={"tokens": [97, 98]}).json() == {"prompt": "ab"}
    assert api.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    assert api.post("/detokenize", json={"tokens": [97] * 50_000}).json() == {"prompt": "a" * 50_000}
    assert kept == [False] * 3


def test_bad_bodies_name_the_field(api):
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", **CHAT}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": "x", "colour": 1}, "colour"),
        ("/detokenize", {"tokens": [1000]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ):
        error = error_of(api.post(path, json=body), 400)
        assert error["param"] == param, (path, body, error)
    assert error_of(api.post("/tokenize", json={"prompt": "x", "model": "no"}), 404)["param"] == "model"
    api.state.fake.tokenizer = None
    assert "without a tokenizer" in error_of(api.post("/tokenize", json={"prompt": "x"}), 400)["message"]


def test_console_and_document_are_served(api):
    page = api.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert api.get("/openapi.json").json()["openapi"].startswith("3.1")
    error_of(api.get("/openapi.json/"), 404)
    error_of(api.post("/"), 405)
