"""What a conversation's items become for the model, and what is refused of a body."""

from __future__ import annotations

import msgspec
import pytest
from support.app import error_of
from support.chat_templates import PLAIN, THINKER
from support.responses import CALL, WEATHER, Conversation

USER = {"role": "user", "content": "hi"}


def prompt(items, source=PLAIN, **fields):
    """What the model sees."""
    app = Conversation("ok", source=source)
    answer = app.post(input=items, **fields)
    assert answer.status_code == 200, answer.text
    return app.prompt()


def refusal(**fields):
    app = Conversation("ok")
    error = error_of(app.post(**{"input": "hi"} | fields), 400)
    assert not app.engine.requests
    return error


@pytest.mark.parametrize(
    "items",
    [
        "hi",
        [USER],
        [USER | {"type": "message"}],
        [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
        [{"role": "user", "status": "completed", "id": "msg_1", "content": [{"type": "text", "text": "hi"}]}],
    ],
)
def test_forms_of_one_message(items):
    assert prompt(items) == "user: hi\n"


def test_an_answer_comes_back_as_one_message():
    answer = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "snow"}]},
    ]
    source = "{% for m in messages %}{{ m | tojson }}\n{% endfor %}"
    lines = prompt([USER, *answer], source).splitlines()
    assert len(lines) == 4
    assert '"content": "I look."' in lines[1] and '"reasoning_content": "hm"' in lines[1]
    assert lines[1].index("Rome") < lines[1].index("Oslo")
    assert '"content": "sunny"' in lines[2] and '"tool_call_id": "c1"' in lines[2]
    assert '"content": "snow"' in lines[3] and '"tool_call_id": "c2"' in lines[3]


def test_two_answers_stay_two():
    said = [{"role": "assistant", "content": "one"}, {"role": "assistant", "content": "two"}]
    assert prompt([USER, *said]) == "user: hi\nassistant: one\nassistant: two\n"
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    assert prompt([USER, said[0], thought, said[1]]).count("assistant: ") == 2
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    assert prompt([USER, refused]) == "user: hi\nassistant: no\n"


def test_instructions_and_the_first_system_messages_are_one():
    items = [{"role": "developer", "content": "Be kind."}, {"role": "system", "content": "Rhyme."}, USER]
    assert prompt(items, instructions="Be brief.") == "system: Be brief.\n\nBe kind.\n\nRhyme.\nuser: hi\n"
    assert prompt([USER, items[0]]).endswith("system: Be kind.\n")


def test_tools_and_choices():
    app = Conversation("ok", "ok", "ok", CALL)
    app.create(tools=[WEATHER])
    assert '"name": "weather"' in app.prompt() and '"strict"' not in app.prompt()
    app.create(tools=[WEATHER], tool_choice="none")
    assert '"name": "weather"' not in app.prompt()
    other = WEATHER | {"name": "clock"}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "clock"}]}
    app.create(tools=[WEATHER, other], tool_choice=allowed)
    assert '"name": "clock"' in app.prompt() and '"name": "weather"' not in app.prompt()
    app.create(tools=[WEATHER], tool_choice={"type": "function", "name": "weather"})
    assert app.engine.requests[-1].params.structured_outputs is not None
    assert Conversation("ok").create(tool_choice="auto").output_text == "ok", "without tools it asks for nothing"


def test_sampling():
    app = Conversation("ok")
    app.create(
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=7,
        extra_body={"top_k": 5, "seed": 3, "stop": "x", "logit_bias": {"5": 2}},
    )
    params = app.engine.requests[-1].params
    assert (params.temperature, params.top_p, params.max_tokens, params.top_k) == (0.5, 0.9, 7, 5)
    assert (params.seed, params.stop, params.logit_bias) == (3, ["x"], {5: 2.0})


def test_forms_of_text():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    app = Conversation("{}", "{}", "x")
    app.create(text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}})
    assert '"integer"' in app.engine.requests[-1].params.structured_outputs.grammar
    app.create(text={"format": {"type": "json_object"}})
    assert '{"type": "object"' in app.engine.requests[-1].params.structured_outputs.grammar
    app.create(text={"format": {"type": "text"}})
    assert app.engine.requests[-1].params.structured_outputs is None


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools", "tools of type 'web_search' are not supported"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools", "tools of type 'mcp'"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice", "must be"),
        ({"tool_choice": "required"}, "tool_choice", "only allowed with tools"),
        ({"conversation": "conv_1"}, "conversation", "is not supported; use previous_response_id"),
        ({"prompt": {"id": "p"}}, "prompt", "is not supported"),
        ({"input": []}, "input", "must not be empty"),
        ({"input": [{"type": "computer_call_output", "call_id": "c"}]}, "input", "'computer_call_output'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "'input_image'"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input", "input.0.message.role"),
        ({"input": [{"id": "msg_1"}]}, "input", "there is no item 'msg_1' of a stored response"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "there is no response 'resp_1'"),
        ({"background": True, "store": False}, "background", "needs store: true"),
        ({"n": 2}, "n", "n must be 1"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text", "needs name and schema"),
        ({"metadata": {"a": "b" * 513}}, "metadata", "at most 512"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"max_output_tokens": 10**6}, "input", "max_tokens asks for 1000000"),
        ({"include": ["nothing"]}, "include", "include.0"),
        ({"temperature": 1000}, "temperature", "100"),
    ],
)
def test_refusals_name_the_field(fields, param, message):
    error = refusal(**fields)
    assert error["param"] == param
    assert message in error["message"]


def test_too_many_items_are_refused_by_the_first_that_is_too_much():
    assert "8192" in refusal(input=[USER] * 8193)["message"]


def test_truncation():
    turns = [
        {"role": role, "content": f"{number:04d}" * 1000} for number in range(20) for role in ("user", "assistant")
    ]
    items = [{"role": "system", "content": "Be brief."}, *turns, USER]
    error = refusal(input=items)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    seen = prompt(items, truncation="auto")
    assert seen.startswith("system: Be brief.\n") and seen.endswith("user: hi\n")
    assert "0000" not in seen and "0019" in seen
    assert 90_000 < len(seen) < 100_000, "no more is left out than has to be"
    assert refusal(input="x" * 200_000, truncation="auto")["code"] == "context_length_exceeded"


def test_truncation_does_not_begin_with_the_answer_of_a_tool():
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "y" * 60_000}
    seen = prompt([{"role": "user", "content": "x" * 60_000}, call, output, USER], truncation="auto")
    assert "x" * 100 not in seen
    assert "assistant: \ntool: yyy" in seen
    seen = prompt(
        [USER, call | {"arguments": '{"a": 1}'}, output, {"role": "user", "content": "z" * 60_000}], truncation="auto"
    )
    assert seen.startswith("user: zzz")


def test_a_prompt_that_opens_the_thoughts():
    app = Conversation("hm</think>yes", source=THINKER)
    assert [item.type for item in app.create().output] == ["reasoning", "message"]


def test_input_tokens():
    app = Conversation("ok", "ok", source=PLAIN)

    async def use(client):
        first = await client.responses.create(model="org/fake", input="hi")
        counted = await client.responses.input_tokens.count(
            model="org/fake", input="ho", instructions="Be brief.", previous_response_id=first.id
        )
        second = await client.responses.create(
            model="org/fake", input="ho", instructions="Be brief.", previous_response_id=first.id
        )
        return counted, second

    counted, second = app.run(use)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == second.usage.input_tokens == len(app.prompt())
    longer = app.post("/v1/responses/input_tokens", input="x" * 100_500)
    assert longer.json()["input_tokens"] > 100_500, "more than the context has"


# As those of Mistral, Gemma and Llama 2.
USER_FIRST = """{% set turns = messages[1:] if messages[0].role == 'system' else messages %}{% for m in turns %}\
{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}\
{{ m.role }}: {{ m.content }}
{% endfor %}"""


def small(source):
    app = Conversation("ok", source=source)
    app.engine.info = msgspec.structs.replace(app.engine.info, max_model_len=150)
    return app


@pytest.mark.parametrize("turns", [("a" * 60, "b" * 60, "q"), ("a" * 60, "b" * 60, "c" * 30, "d" * 10, "q")])
def test_truncation_where_the_template_wants_the_user_first(turns):
    items = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
    app = small(USER_FIRST)
    answer = app.post(model="org/fake", input=items, truncation="auto", max_output_tokens=5)
    assert answer.status_code == 200, answer.text
    assert app.engine.prompts[-1].startswith("user: ")


def test_truncation_keeps_what_the_system_says_later():
    app = small("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    roles = ("user", "system", "assistant", "user")
    items = [
        {"role": role, "content": text} for role, text in zip(roles, ("a" * 60, "RULE", "b" * 120, "q"), strict=True)
    ]
    app.post(model="org/fake", input=items, truncation="auto", max_output_tokens=5)
    assert "RULE" in app.engine.prompts[-1]
    assert "aaa" not in app.engine.prompts[-1]
