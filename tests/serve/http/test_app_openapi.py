"""The OpenAPI document against the app it describes."""

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import checks
from schemathesis.specs.openapi import checks as openapi_checks
from support.app import Api, error_of

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
    described = {path: list(methods) for path, methods in API.app.openapi()["paths"].items()}
    assert described == {
        "/": ["get"],
        "/health": ["get"],
        "/metrics": ["get"],
        "/version": ["get"],
        "/cluster": ["get"],
        "/v1/models": ["get"],
        "/v1/models/{model_id}": ["get"],
        "/v1/completions": ["post"],
        "/v1/chat/completions": ["post"],
        "/v1/messages": ["post"],
        "/v1/messages/count_tokens": ["post"],
        "/v1/embeddings": ["post"],
        "/tokenizer_info": ["get"],
        "/v1/responses": ["post"],
        "/v1/responses/input_tokens": ["post"],
        "/v1/responses/{response_id}": ["get", "delete"],
        "/v1/responses/{response_id}/cancel": ["post"],
        "/v1/responses/{response_id}/input_items": ["get"],
        "/v1/load_lora_adapter": ["post"],
        "/v1/unload_lora_adapter": ["post"],
        "/tokenize": ["post"],
        "/detokenize": ["post"],
    }


def test_errors_and_keys_are_described():
    document = API.app.openapi()
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert {"400", "401", "404", "408", "413", "429", "500", "503"} <= chat["responses"].keys()
    assert chat["responses"]["422"]["description"].startswith("The Idempotency-Key")
    assert "422" not in document["paths"]["/tokenize"]["post"]["responses"], "which is FastAPI's own"
    assert chat["responses"]["400"]["content"]["application/json"]["schema"]["$ref"].endswith("/ErrorAnswer")
    assert {"application/json", "text/event-stream"} == chat["responses"]["200"]["content"].keys()
    assert document["components"]["securitySchemes"]["key"] == {"type": "http", "scheme": "bearer"}


def test_bodies_are_those_of_the_models():
    schemas = API.app.openapi()["components"]["schemas"]
    completion = schemas["CompletionBody"]
    assert completion["additionalProperties"] is True
    assert completion["required"] == ["prompt"]
    assert {"prompt", "max_tokens", "stream", "cache_salt", "strict_fields"} <= completion["properties"].keys()
    assert schemas["ChatBody"]["required"] == ["messages"]


def test_console_and_document_are_served():
    page = API.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert API.get("/openapi.json").json()["openapi"].startswith("3.1")
    error_of(API.get("/openapi.json/"), 404)
    error_of(API.post("/"), 405)
