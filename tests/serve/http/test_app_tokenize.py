"""/tokenize and /detokenize."""

import pytest
from support.app import CHAT, Api, error_of
from support.chat import Played


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


def test_a_conversation_has_the_tokens_that_it_has_in_a_chat():
    tools = [{"type": "function", "function": {"name": "now"}}]
    messages = [*CHAT["messages"], {"role": "assistant", "content": "It is"}]
    for fields in (
        {},
        {"tools": tools},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"add_generation_prompt": False},
        {"messages": messages, "continue_final_message": True},
    ):
        app = Played("a")
        app.chat(messages=fields.get("messages", CHAT["messages"]), extra_body=fields)
        answer = app.post("/tokenize", CHAT | fields).json()
        assert "".join(map(chr, answer["tokens"])) == app.engine.prompts[0]


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


def test_tokenizer_info(api):
    answer = api.get("/tokenizer_info").json()
    absent = {"bos_token": None, "pad_token": None, "chat_template": None}
    assert answer == absent | {"eos_token": "\0", "model_max_length": 64}
    assert api.get("/tokenizer_info?model=org/fake").json() == answer
    assert error_of(api.get("/tokenizer_info?model=no"), 404)["param"] == "model"
    api.state.fake.tokenizer.chat_template_source = lambda: "{{ messages }}"
    assert api.get("/tokenizer_info").json()["chat_template"] == "{{ messages }}"


def test_bad_bodies_name_the_field(api):
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", **CHAT}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": "x", "colour": 1, "strict_fields": True}, "colour"),
        ("/tokenize", {"prompt": "x", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        (
            "/tokenize",
            {**CHAT, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ("/tokenize", {**CHAT, "chat_template_kwargs": {"colour": 1}}, "chat_template_kwargs"),
        ("/detokenize", {"tokens": [1000]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ):
        error = error_of(api.post(path, json=body), 400)
        assert error["param"] == param, (path, body, error)
    assert error_of(api.post("/tokenize", json={"prompt": "x", "model": "no"}), 404)["param"] == "model"
    api.state.fake.tokenizer = None
    for answer in (api.post("/tokenize", json={"prompt": "x"}), api.get("/tokenizer_info")):
        assert "without a tokenizer" in error_of(answer, 400)["message"]
