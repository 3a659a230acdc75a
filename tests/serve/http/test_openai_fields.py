"""Fields of OpenAI's that most models have no use for, and older or rarer forms of others."""

import openai
import pytest
from support.app import CHAT, Api, error_of
from support.chat import Played
from support.chat_templates import HERMES

from rayllm.serve.http.unknown_fields import HEADER

WEATHER = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
NOW = {"name": "now"}
TOOLS = [{"type": "function", "function": each} for each in (WEATHER, NOW)]
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
LEVELS = "{{ reasoning_effort }} {{ verbosity }}|" + HERMES


def refusal(app, **fields):
    with pytest.raises(openai.BadRequestError) as caught:
        app.chat(**fields)
    return caught.value.body["message"], caught.value.body["param"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt_cache_key", "a conversation"),
        ("prompt_cache_retention", "24h"),
        ("store", True),
        ("metadata", {"a": "b"}),
        ("user", "me"),
        ("safety_identifier", "me"),
        ("service_tier", "flex"),
        ("prediction", {"type": "content", "content": [{"type": "text", "text": "hi"}]}),
        ("modalities", ["text"]),
        ("reasoning_effort", "minimal"),
        ("verbosity", "low"),
        ("messages", [{"role": "user", "content": "hi", "cache_control": {"type": "ephemeral"}}]),
        ("messages", [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "e"}}]}]),
    ],
)
def test_what_changes_nothing_is_taken(field, value):
    answer = Api().chat(**{field: value, "strict_fields": True})
    assert answer.json()["choices"][0]["message"]["content"] == "abc"
    assert HEADER not in answer.headers


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("service_tier", "gold"),
        ("modalities", ["text", "audio"]),
        ("prediction", "hi"),
        ("metadata", {"a": 1}),
        ("store", "yes"),
        ("reasoning_effort", "a lot"),
        ("verbosity", 3),
        ("prompt_cache_key", "x" * 1025),
        ("audio", {"voice": "x"}),
        ("web_search_options", {}),
        ("chat_template", "{{ messages }}"),
    ],
)
def test_wrong_values_of_known_fields_are_refused(field, value):
    assert error_of(Api().chat(**{field: value}), 400)["param"] == field


def test_streams_are_never_padded():
    answer = Api().chat(stream=True, stream_options={"include_obfuscation": True, "include_usage": True})
    assert HEADER not in answer.headers
    assert "obfuscation" not in answer.text


def test_reasoning_effort_and_verbosity_are_variables_of_the_template():
    app = Played("a", "a", "a", "a", source=LEVELS)
    app.chat(reasoning_effort="high", verbosity="low")
    app.chat(reasoning_effort="high", extra_body={"chat_template_kwargs": {"reasoning_effort": "by hand"}})
    app.chat()
    assert [prompt.split("|")[0] for prompt in app.engine.prompts] == ["high low", "by hand ", " "]
    plain = Played("a", "a")
    plain.chat(reasoning_effort="high", verbosity="low")
    plain.chat()
    assert plain.engine.prompts[0] == plain.engine.prompts[1]


def test_the_key_of_a_prompt_cache_reaches_the_choice_of_a_replica():
    app = Played("a")
    app.chat(prompt_cache_key="mine")
    assert app.engine.requests[0].prompt_cache_key == "mine"


def test_reasoning_is_the_same_under_both_names():
    app = Played("a", "a", "a")
    for fields in ({"reasoning_content": "hm"}, {"reasoning": "hm"}, {}):
        app.chat(messages=[CHAT["messages"][0], {"role": "assistant", "content": "yes", **fields}])
    assert app.engine.prompts[0] == app.engine.prompts[1] != app.engine.prompts[2]
    assert refusal(app, messages=[{"role": "user", "content": "a", "reasoning": "hm"}])[1] == "messages"


# ---- functions


def test_functions_are_called_as_tools_are():
    app = Played(f"I look. {CALL}", CALL, "no")
    choice = app.chat(functions=[WEATHER, NOW]).choices[0]
    assert (choice.finish_reason, choice.message.tool_calls) == ("function_call", None)
    call = choice.message.function_call
    assert (choice.message.content.strip(), call.name, call.arguments) == ("I look.", "now", "{}")
    chunks = app.chunks(functions=[WEATHER, NOW])
    deltas = [chunk.choices[0].delta for chunk in chunks]
    made = [delta.function_call for delta in deltas if delta.function_call is not None]
    assert (made[0].name, "".join(each.arguments or "" for each in made)) == ("now", "{}")
    assert (chunks[-1].choices[0].finish_reason, [d.tool_calls for d in deltas]) == (
        "function_call",
        [None] * len(deltas),
    )
    assert app.chat(functions=[WEATHER]).choices[0].finish_reason == "stop"
    app = Played("a", "a")
    app.chat(functions=[WEATHER])
    app.chat(tools=TOOLS[:1])
    assert app.engine.prompts[0] == app.engine.prompts[1]


def test_one_function_can_be_forced_or_none_be_offered():
    app = Played('{"name": "now", "arguments": {}}', CALL)
    choice = app.chat(functions=[WEATHER, NOW], function_call={"name": "now"}).choices[0]
    assert (choice.message.function_call.name, choice.finish_reason) == ("now", "function_call")
    assert app.schema()["properties"]["name"] == {"const": "now"}
    assert app.chat(functions=[NOW], function_call="none").choices[0].message.content == CALL
    assert "now" not in app.engine.prompts[1]


def test_calls_and_answers_of_functions_are_told_as_those_of_tools():
    app = Played("a", "a")
    user, call = CHAT["messages"][0], {"name": "now", "arguments": "{}"}
    app.chat(
        messages=[
            user,
            {"role": "assistant", "content": None, "function_call": call},
            {"role": "function", "name": "now", "content": "noon"},
        ]
    )
    app.chat(
        messages=[
            user,
            {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": call}]},
            {"role": "tool", "tool_call_id": "c", "content": "noon"},
        ]
    )
    assert app.engine.prompts[0] == app.engine.prompts[1]
    assert "noon" in app.engine.prompts[0]


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"functions": [NOW], "tools": TOOLS}, "functions", "not both"),
        ({"functions": [NOW, NOW]}, "functions", "two functions of the name 'now'"),
        ({"functions": [NOW], "function_call": {"name": "then"}}, "function_call", "'then', which functions lacks"),
        ({"functions": [NOW], "function_call": "required"}, "function_call", '"none", "auto"'),
        ({"functions": [NOW], "tool_choice": "required"}, "tool_choice", "only allowed with tools"),
        ({"function_call": "auto"}, "function_call", "only allowed with functions"),
        ({"tools": TOOLS, "function_call": "auto"}, "function_call", "only allowed with functions"),
        ({"functions": [{"name": "a b"}]}, "functions", "functions.0.name"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages", "name is required"),
    ],
)
def test_wrong_functions_are_refused(fields, param, text):
    message, named = refusal(Played(), **fields)
    assert (named, text in message) == (param, True), message


# ---- allowed tools


def allowed(mode, *names):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_only_allowed_tools_are_offered():
    app = Played(CALL, "[]")
    choice = app.chat(tools=TOOLS, tool_choice=allowed("auto", "now")).choices[0]
    assert [call.function.name for call in choice.message.tool_calls] == ["now"]
    assert "get_weather" not in app.engine.prompts[0]
    assert app.params.structured_outputs is None
    app.chat(
        tools=[*TOOLS, {"type": "function", "function": {"name": "then"}}],
        tool_choice=allowed("required", "now", "then"),
    )
    names = [each["properties"]["name"]["const"] for each in app.schema()["items"]["anyOf"]]
    assert names == ["now", "then"]


def test_wrong_allowed_tools_are_refused():
    assert "'then', which tools lacks" in refusal(Played(), tools=TOOLS, tool_choice=allowed("auto", "then"))[0]
    assert "allowed_tools" in refusal(Played(), tools=TOOLS, tool_choice=allowed("any", "now"))[0]
    assert "allowed_tools" in refusal(Played(), tools=TOOLS, tool_choice=allowed("auto"))[0]


# ---- filling in the middle


def test_a_suffix_needs_a_model_that_can_fill_in():
    api = Api()
    assert error_of(api.completion(suffix=3), 400)["param"] == "suffix"
    error = error_of(api.completion(suffix="!"), 400)
    assert (error["param"], "filling in the middle" in error["message"]) == ("suffix", True)
    assert api.completion(suffix="").status_code == 200


def test_a_suffix_stands_between_the_models_marks():
    api = Api()
    texts, encode = [], api.state.fake.tokenizer.encode
    api.state.fake.tokenizer.encode = lambda text, *_: texts.append(text) or encode(text)
    api.state.fake.tokenizer.infill_marks = ("<p>", "<s>", "<m>")
    assert api.completion(prompt=["def f", "x"], suffix="return").json()["choices"][0]["text"].startswith("abc")
    assert texts == ["<p>def f<s>return<m>", "<p>x<s>return<m>"]
    assert error_of(api.completion(prompt=[1, 2], suffix="a"), 400)["param"] == "suffix"
    assert error_of(api.completion(echo=True, suffix="a"), 400)["param"] == "suffix"


def test_arguments_of_functions_are_text():
    message = {"role": "assistant", "function_call": {"name": "f", "arguments": 1}}
    assert "function_call.arguments" in refusal(Played(), messages=[message])[0]
