"""Unknown fields of request bodies are ignored and named, or refused with strict_fields."""

import json
import logging

import msgspec
import pytest
from support.app import CHAT, Api, error_of, figures

from rayllm.config.options import ServerConfig
from rayllm.serve.http import unknown_fields
from rayllm.serve.http.unknown_fields import HEADER, UnknownField

BODIES = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": CHAT,
    "/v1/embeddings": {"input": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [104]},
}
FUNCTION = {"name": "f", "colour": 1, "parameters": {"type": "object", "colour": 1}}


@pytest.fixture
def api():
    return Api()


def ignored(answer):
    assert answer.status_code == 200, answer.text
    return answer.headers.get(HEADER)


@pytest.mark.parametrize("path", BODIES)
def test_unknown_fields_are_ignored_and_named_on_all_routes(api, path):
    assert ignored(api.post(path, json=BODIES[path])) is None
    assert ignored(api.post(path, json=BODIES[path] | {"colour": {"red": 1}, "size": None})) == "colour, size"
    assert figures(api.state.metrics, "request_ignored_fields_total") == {None: 1}
    error = error_of(api.post(path, json=BODIES[path] | {"colour": 1, "strict_fields": True}), 400)
    assert (error["message"], error["param"]) == ("unknown field 'colour'", "colour")
    assert error_of(api.post(path, json=BODIES[path] | {"strict_fields": 1}), 400)["param"] == "strict_fields"


@pytest.mark.parametrize("path", BODIES)
def test_the_option_refuses_them_and_a_body_may_say_otherwise(path):
    api = Api(ServerConfig(strict_fields=True))
    assert error_of(api.post(path, json=BODIES[path] | {"colour": 1}), 400)["param"] == "colour"
    assert ignored(api.post(path, json=BODIES[path] | {"colour": 1, "strict_fields": False})) == "colour"
    assert ignored(api.post(path, json=BODIES[path])) is None


def test_nested_fields_have_paths(api):
    messages = [
        {"role": "user", "content": "hi", "colour": 1},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "size": 1}]},
        {"role": "user", "content": "hi", "colour": 2, "size": 2},
    ]
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"colour": 1}, "colour": 1}}
    body = {"colour": 1, "messages": messages, "response_format": schema, "metadata": {"colour": "red"}}
    names = "colour, messages.colour, messages.content.size, messages.size, response_format.json_schema.colour"
    assert ignored(api.chat(**body)) == names
    assert ignored(api.post("/tokenize", json={"messages": messages})) == ", ".join(names.split(", ")[1:4])
    error = error_of(api.chat(strict_fields=True, messages=[CHAT["messages"][0], messages[1]]), 400)
    assert (error["message"], error["param"]) == ("unknown field 'messages.1.content.1.size'", "messages")


def test_parts_of_unions_have_paths(api):
    tools = [{"type": "function", "function": {"name": "f"}}]
    api.state.fake.tokenizer.chat_template_variables = lambda **_: frozenset({"tools"})
    choice = {"type": "function", "function": {"name": "f", "colour": 1}, "size": 1}
    answer = api.chat(tools=tools, tool_choice=choice)
    assert ignored(answer) == "tool_choice.size, tool_choice.function.colour"


def test_a_stream_has_the_header_too(api):
    answer = api.chat(stream=True, colour=1)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert ignored(answer) == "colour"


def test_a_known_field_with_a_wrong_value_is_refused(api):
    error = error_of(api.completion(colour=1, temperature="hot", strict_fields=False), 400)
    assert error["param"] == "temperature"


def test_the_header_is_bounded_and_printable(api):
    answer = api.completion(**{f"x{i}": 1 for i in range(1000)})
    assert ignored(answer) == ", ".join([*(f"x{i}" for i in range(unknown_fields.MAX_REPORTED)), "..."])
    names = ("a,b", "a b", "a\r\nset-cookie: x", "\u00e4\u20ac", "", "y" * 100_000)
    answer = api.completion(**dict.fromkeys(names, 1))
    assert ignored(answer) == ", ".join(["a?b", "a??set-cookie:?x", "??", "", "y" * 100])
    error = error_of(api.completion(**{"y" * 100_000: 1, "strict_fields": True}), 400)
    assert len(error["message"]) < 300
    assert len(error["param"]) <= 200


def test_many_unknown_fields_are_taken_as_far_as_a_body_may_have_values(api):
    api.state.fake.info = msgspec.structs.replace(api.state.fake.info, max_model_len=4096)
    names = (f'"a{i}": {{"b": 1}}' for i in range(20_000))
    answer = api.post("/v1/completions", content=f'{{"prompt": "hi", {", ".join(names)}}}'.encode())
    assert ignored(answer).startswith("a0, a1, ")
    turn = json.dumps({"role": "user", "content": "h", **{f"a{i}": 1 for i in range(10)}})
    answer = api.post(
        "/v1/chat/completions", content=f'{{"max_tokens": 1, "messages": [{",".join([turn] * 3000)}]}}'.encode()
    )
    assert ignored(answer) == ", ".join(f"messages.a{i}" for i in range(10))


def test_each_name_is_logged_once_and_so_many_of_them(api, caplog, monkeypatch):
    monkeypatch.setattr(unknown_fields, "MAX_LOGGED", 3)
    with caplog.at_level(logging.WARNING):
        for name in ("colour", "repeat_penalty", "colour", "a\nb", "size"):
            api.completion(**{name: 1})
    assert caplog.messages == [
        "ignored the unknown field colour of a request to /v1/completions",
        "ignored the unknown field repeat_penalty of a request to /v1/completions; did you mean repetition_penalty?",
        "ignored the unknown field a?b of a request to /v1/completions",
        "ignored fields of 3 names; no more are logged",
    ]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("repeat_penalty", "repetition_penalty"),
        ("max_new_tokens", "max_tokens"),
        ("num_predict", "max_tokens"),
        ("stop_sequences", "stop"),
        ("temprature", "temperature"),
        ("topp", "top_p"),
    ],
)
def test_names_of_other_servers_and_slips_get_a_hint(api, name, meant):
    error = error_of(api.completion(**{name: 1, "strict_fields": True}), 400)
    assert error["message"] == f"unknown field {name!r}; did you mean {meant}?"


def test_hints_are_fields_that_there_are():
    assert UnknownField("system", "system", {"messages"}).hint == "; did you mean messages?"
    assert UnknownField("system", "system", {"prompt"}).hint == ""
    assert UnknownField("colour", "colour", {"prompt"}).hint == ""


def test_pages_of_other_origins_may_read_the_header():
    api = Api(ServerConfig(allowed_origins=["https://a.example"]))
    answer = api.request("POST", "/tokenize", json={"prompt": "a"}, headers={"origin": "https://a.example"})
    assert HEADER in answer.headers["access-control-expose-headers"]
