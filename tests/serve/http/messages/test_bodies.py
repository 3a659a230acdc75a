"""Bodies of Anthropic's API: what becomes of each of their parts, what is refused, and what a prompt counts."""

import pytest
from support.app import Api
from support.chat_templates import PLAIN
from support.messages import Answered

from rayllm.api.types import EngineInfo

# Everything that a template sees of a message, of a model that writes calls as Hermes does.
SHOW = """{# <tool_call> #}{% for m in messages %}{{ m.role }}({{ m.content }}
{%- for call in m.tool_calls or [] %} {{ call.id }}={{ call.function.name }}{{ call.function.arguments | tojson }}
{%- endfor %}{% if m.tool_call_id %} for {{ m.tool_call_id }}{% endif %}){% endfor %}
{%- for tool in tools or [] %} {{ tool.function | tojson }}{% endfor %}"""
TOOL = {"name": "look", "input_schema": {"type": "object"}}
USE = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "Ö"}}


def text(words, **more):
    return {"type": "text", "text": words, **more}


def result(content, **more):
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, **more}


def prompt(*turns, **fields):
    """What the model sees of these turns: (role, content) each."""
    app = Answered("", source=SHOW)
    app.message(messages=[{"role": role, "content": content} for role, content in turns], **fields)
    return app.engine.prompts[0]


@pytest.mark.parametrize(
    ("turns", "fields", "expected"),
    [
        ([("user", "a")], {"system": "S"}, "system(S)user(a)"),
        (
            [("user", "a")],
            {"system": [text("S"), text("T", cache_control={"type": "ephemeral"})]},
            "system(S\nT)user(a)",
        ),
        ([("user", [text("a", citations=[]), text("b")])], {}, "user(a\nb)"),
        ([("user", "a"), ("user", [text("b")])], {}, "user(a\nb)"),
        ([("user", "a"), ("assistant", "b"), ("assistant", [USE]), ("user", [result("c")])], {"tools": [TOOL]}, None),
        ([("user", "a"), ("system", "c"), ("user", "d")], {}, "user(a)system(c)user(d)"),
        ([("user", "a"), ("assistant", []), ("user", [])], {}, "user(a)assistant()user()"),
    ],
)
def test_turns(turns, fields, expected):
    shown = prompt(*turns, **fields)
    tools = ' {"name": "look", "parameters": {"type": "object"}}'
    assert shown == (expected or 'user(a)assistant(b toolu_1=look{"at": "Ö"})tool(c for toolu_1)' + tools)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ([result("c")], "tool(c for toolu_1)"),
        ([result([text("c"), text("d")])], "tool(c\nd for toolu_1)"),
        ([result(None)], "tool( for toolu_1)"),
        ([result("no such place", is_error=True)], "tool(Error: no such place for toolu_1)"),
        ([result("c"), text("And"), text("now?")], "tool(c for toolu_1)user(And\nnow?)"),
        ([text("Here:"), result("c")], "user(Here:)tool(c for toolu_1)"),
    ],
)
def test_results_of_tools(content, expected):
    shown = prompt(("user", "a"), ("assistant", [text("b"), USE]), ("user", content))
    assert shown == 'user(a)assistant(b toolu_1=look{"at": "Ö"})' + expected


def test_what_changes_with_each_request_is_not_part_of_the_prompt():
    line = "x-anthropic-billing-header: cc_version=2.1; cch=1a2b3;"
    for system in (f"{line}\nS", [text(line), text("S")], [text(f"{line}\nS")]):
        assert prompt(("user", "a"), system=system) == "system(S)user(a)"
    assert prompt(("user", line)) == f"user({line})"


def test_sampling_and_extensions():
    app = Answered("", source=SHOW)
    app.message(
        metadata={"user_id": "u"},
        service_tier="auto",
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 5, "cache_salt": "tenant", "priority": 3},
    )
    (request,) = app.engine.requests
    assert (request.params.temperature, request.params.top_p, request.params.top_k) == (0.5, 0.9, 5)
    assert (request.cache_salt, request.priority) == ("tenant", 3)


def test_fields_that_are_not_known():
    fields = {"context_management": {"edits": []}, "speed": "fast", "tools": [TOOL | {"defer_loading": False}]}
    api = Api()
    api.state.fake = Answered("x", source=SHOW).engine
    response = api.post("/v1/messages", json=HI | fields)
    assert response.status_code == 200
    assert set(response.headers["x-rayllm-ignored"].split(", ")) == {
        "context_management",
        "speed",
        "tools.defer_loading",
    }
    strict = api.post("/v1/messages", json=HI | fields | {"strict_fields": True})
    assert "unknown field" in refusal(strict, 400, "invalid_request_error")


# ---- refusals

HI = {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
FORM = {"type": "json_schema", "schema": {"type": "object"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}


def turns(*contents):
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]}


def refusal(response, status, kind):
    """The message of an error, which has Anthropic's form."""
    assert response.status_code == status, response.text
    body = response.json()
    assert body == {
        "type": "error",
        "error": {"type": kind, "message": body["error"]["message"]},
        "request_id": response.headers["request-id"],
    }
    return body["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages must not be empty"),
        ({"messages": [{"role": "user"}]}, "messages.0.content is required"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        (
            turns([text("a"), IMAGE]),
            "messages.0.content.1: content of type 'image' is not supported: models are served text-only",
        ),
        (turns([{"type": "document", "source": {}}]), "messages.0.content.0: content of type 'document'"),
        (turns("a", [USE], [result([IMAGE])]), "messages.2.content.0.tool_result.content.0: content of type 'image'"),
        (
            turns("a", [{"type": "server_tool_use", "id": "x"}], "b"),
            "messages.1.content.0: content of type 'server_tool",
        ),
        (turns([USE]), "content.0 of type tool_use is not allowed in messages of role user"),
        (turns("a", [result("x")], "b"), "content.0 of type tool_result is not allowed in messages of role assistant"),
        (turns("a", [{**USE, "input": "x"}], "b"), "messages.1.content.0.tool_use.input"),
        (turns("a", [USE]), "messages: the last message has no content"),
        ({"system": [IMAGE]}, "system.0: content of type 'image'"),
        ({"system": 3}, "system"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "tools.0.type: tools of type 'web_search_2",
        ),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name"),
        ({"tools": [{"name": "a"}]}, "tools.0.input_schema is required"),
        ({"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "input_schema must be a schema of type object"),
        ({"tools": [TOOL, TOOL]}, "two functions of the name 'look'"),
        ({"tools": [TOOL]}, "no place for tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice is only allowed with tools"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice: name belongs to type tool"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice names 'x'"),
        ({"mcp_servers": [{}]}, "mcp_servers is not supported"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": "x"}}, "thinking.budget_tokens"),
        ({"temperature": -1}, "temperature must be"),
        ({"temperature": "1"}, "temperature"),
        ({"top_k": -3}, "top_k must be"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["x"] * 65}, "stop_sequences"),
        ({"output_config": {"effort": "some"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format"),
        ({"output_config": {"format": FORM}, "output_format": FORM}, "not both"),
        ({"chat_template_kwargs": {"x": 1}}, "no variable 'x'"),
        ({"service_tier": "fast"}, "service_tier"),
    ],
)
def test_refusals_name_the_place(fields, message):
    assert message in refusal(Api().post("/v1/messages", json=HI | fields), 400, "invalid_request_error")


def test_no_json():
    response = Api().post("/v1/messages", content=b"{")
    assert "not valid JSON" in refusal(response, 400, "invalid_request_error")


def test_a_prompt_that_is_too_long_says_so_in_words_that_agents_look_for():
    message = refusal(Api().post("/v1/messages", json=HI | turns("x" * 64)), 400, "invalid_request_error")
    assert message.startswith("prompt is too long: ")
    assert "messages has 64 tokens; this model's context is 64 tokens" in message


# ---- count_tokens


def test_count_tokens():
    app = Answered(source=SHOW)
    fields = {"model": "org/fake", "messages": [{"role": "user", "content": "hi"}], "system": "S", "tools": [TOOL]}
    count = app.run(lambda client: client.messages.count_tokens(**fields))
    assert count.input_tokens == len('system(S)user(hi) {"name": "look", "parameters": {"type": "object"}}')
    assert app.engine.requests == []


def test_what_counts_is_what_the_answer_says():
    app = Answered("x", source=PLAIN)
    turn = {"model": "org/fake", "messages": [{"role": "user", "content": "How are you?"}]}
    count = app.run(lambda client: client.messages.count_tokens(**turn))
    assert app.message(**turn).usage.input_tokens == count.input_tokens


def test_count_tokens_beyond_the_context_and_errors():
    api = Api()
    body = turns("x" * 50_000)
    assert api.post("/v1/messages/count_tokens", json=body).json() == {"input_tokens": 50_000}
    assert api.state.fake.started == []
    bad = api.post("/v1/messages/count_tokens", json=turns([IMAGE]))
    assert "image" in refusal(bad, 400, "invalid_request_error")
    unknown = api.post("/v1/messages/count_tokens", json=body | {"model": "no"})
    assert "'no' does not exist" in refusal(unknown, 404, "not_found_error")
    api.state.fake.tokenizer = None
    assert "tokenizer" in refusal(api.post("/v1/messages/count_tokens", json=body), 400, "invalid_request_error")
    assert "tokenizer" in refusal(api.post("/v1/messages", json=HI), 400, "invalid_request_error")


def test_a_model_that_ends_at_its_context():
    api = Api()
    api.state.fake.info = EngineInfo(model="m", max_model_len=8, vocab_size=1000, num_kv_tokens=80, eos_token_ids=[0])
    body = api.post("/v1/messages", json=HI | {"max_tokens": 4096}).json()
    assert (body["content"][0]["text"], body["stop_reason"]) == ("abcdef", "model_context_window_exceeded")
