"""Adapters over HTTP: their names are models' names, everywhere, and two routes load and unload them."""

from __future__ import annotations

import hashlib

import pytest
from support.app import CHAT, Api, FakeState, error_of

from rayllm.serve.http.auth import ApiKey

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture
def api():
    return Api()


def load(api, name, **fields):
    return api.post(LOAD, json={"lora_name": name, "lora_path": f"/adapters/{name}"} | fields)


def test_an_adapter_comes_and_goes(api):
    answer = load(api, "sql")
    assert (answer.status_code, answer.json()) == (
        200,
        {"id": "sql", "object": "adapter", "parent": "org/fake", "deleted": False},
    )
    assert api.state.adapters == {"sql": "/adapters/sql"}
    cards = api.get("/v1/models").json()["data"]
    assert [(card["id"], card.get("parent")) for card in cards] == [("org/fake", None), ("sql", "org/fake")]
    assert api.get("/v1/models/sql").json()["parent"] == "org/fake"
    assert api.get("/health?model=sql").status_code == 200
    assert api.post(UNLOAD, json={"lora_name": "sql"}).json()["deleted"]
    assert [card["id"] for card in api.get("/v1/models").json()["data"]] == ["org/fake"]
    assert error_of(api.completion(model="sql"), 404)["param"] == "model"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/chat/completions", CHAT),
        ("/v1/messages", CHAT | {"max_tokens": 3}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/embeddings", {"input": "hi"}),
    ],
)
def test_requests_for_an_adapter_say_so_to_the_engine(api, path, body):
    load(api, "sql")
    for name, adapter in (("sql", "sql"), ("org/fake", "")):
        answer = api.post(path, json=body | {"model": name})
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == name
        assert api.state.fake.adapters[-1] == adapter


def test_what_needs_no_engine_takes_the_name_too(api):
    load(api, "sql")
    assert api.post("/tokenize", json={"prompt": "hi", "model": "sql"}).json()["tokens"] == [104, 105]
    assert api.get("/tokenizer_info?model=sql").status_code == 200
    assert api.post("/v1/messages/count_tokens", json=CHAT | {"model": "sql"}).json() == {"input_tokens": 2}


def test_what_is_refused(api):
    assert error_of(load(api, "x", lora_path="/bad"), 400)["param"] == "lora_path"
    assert error_of(load(api, "a b"), 400)["message"].startswith("lora_name: an adapter's name has")
    assert "is the name of a model" in error_of(load(api, "org/fake"), 400)["message"]
    assert error_of(load(api, "x", model="other"), 404)["param"] == "model"
    assert error_of(api.post(LOAD, json={"lora_name": "x"}), 400)["param"] == "lora_path"
    assert error_of(api.post(UNLOAD, json={"lora_name": "x"}), 404)["param"] == "model"
    assert error_of(api.post(UNLOAD, json={"lora_name": "x", "model": "org/fake"}), 400)["param"] == "lora_name"
    assert api.state.adapters == {}


def test_two_models_share_no_name():
    state = FakeState(name="one")
    other = FakeState(name="two")
    state.models = {"one": state, "two": other}
    api = Api(state=state)
    assert load(api, "sql", model="two").json()["parent"] == "two"
    assert "is the name of a model or its adapter" in error_of(load(api, "sql", model="one"), 400)["message"]
    assert api.completion(model="sql").status_code == 200
    assert (state.fake.adapters, other.fake.adapters) == ([], ["sql"])
    assert api.post(UNLOAD, json={"lora_name": "sql"}).json()["parent"] == "two"


def test_keys_are_asked_for():
    api = Api(keys=[ApiKey("me", hashlib.sha256(b"secret").digest())])
    assert load(api, "sql").status_code == 401
    headers = {"authorization": "Bearer secret"}
    body = {"lora_name": "sql", "lora_path": "/adapters/sql"}
    assert api.post(LOAD, json=body, headers=headers).status_code == 200
    assert api.post(UNLOAD, json={"lora_name": "sql"}).status_code == 401


def test_keys_of_requests_belong_to_an_adapter(api):
    """The same Idempotency-Key for the model and for its adapter is of two requests."""
    load(api, "sql")
    ids = {
        api.post("/v1/completions", json={"prompt": "hi", "model": name}, headers={"Idempotency-Key": "k"}).json()["id"]
        for name in ("sql", "org/fake")
    }
    assert len(ids) == 2
