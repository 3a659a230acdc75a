"""Tools, reasoning and structured outputs through the openai client and the app, over a scripted engine."""

import json

import jsonschema
import openai
import pydantic
import pytest
from support.chat import Played, chat_fields
from support.chat_templates import GPT_OSS, HERMES, LLAMA3, MISTRAL, PLAIN, THINKER

from rayllm.errors import EngineDeadError, InvalidRequestError, OverloadedError

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
HERMES_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
MISTRAL_CALL = "[TOOL_CALLS]now[ARGS]{}"
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def calls_of(message):
    assert all(call.type == "function" and call.id.startswith("call_") for call in message.tool_calls)
    return [(call.function.name, call.function.arguments) for call in message.tool_calls]


@pytest.fixture(params=["whole", "stream"])
def ask(request):
    """Asks for the one choice of an answer, whole or streamed."""

    def ask(app, **fields):
        answer = app.chat(**fields) if request.param == "whole" else app.final(**fields)
        (choice,) = answer.choices
        return choice

    return ask


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    ("source", "script", "content", "calls"),
    [
        (HERMES, HERMES_CALL, None, [("get_weather", '{"city": "Köln"}')]),
        (HERMES, f"I look.\n{HERMES_CALL}\n{HERMES_CALL}", "I look.\n", [("get_weather", '{"city": "Köln"}')] * 2),
        (LLAMA3, '{"name": "now", "parameters": {}}', None, [("now", "{}")]),
    ],
)
def test_tool_calls(ask, step, source, script, content, calls):
    app = Played(script, source=source, step=step)
    choice = ask(app, tools=TOOLS)
    assert choice.finish_reason == "tool_calls"
    assert (choice.message.content or None) == content  # the client makes "" of a stream without content
    assert calls_of(choice.message) == calls
    assert len({call.id for call in choice.message.tool_calls}) == len(calls)
    assert '"name": "get_weather"' in app.engine.prompts[0]
    assert app.params.structured_outputs is None


def test_the_form_of_streamed_calls():
    chunks = Played(f"Hm {HERMES_CALL}{HERMES_CALL}", step=5).chunks(tools=TOOLS)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    for index in (0, 1):
        start, *rest = [call for call in calls if call.index == index]
        assert (start.type, start.function.name, start.function.arguments) == ("function", "get_weather", "")
        assert start.id
        assert all(call.id is None and call.function.name is None for call in rest)
        assert len(rest) > 2
        assert "".join(call.function.arguments for call in rest) == '{"city": "Köln"}'
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "tool_calls"]


def test_what_is_no_call_stays_text(ask):
    script = '<tool_call>{"name": "rm", "arguments": {}}</tool_call> <tool_call>{'
    choice = ask(Played(script), tools=TOOLS)
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (script, None, "stop")


def test_without_tools_or_with_choice_none_nothing_is_a_call(ask):
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        app = Played(HERMES_CALL)
        choice = ask(app, **fields)
        assert (choice.message.content, choice.finish_reason) == (HERMES_CALL, "stop")
        assert "get_weather" not in app.engine.prompts[0]


def test_a_call_cut_off_by_the_limit():
    choice = Played(HERMES_CALL.split('"K')[0], finish="length").chat(tools=TOOLS).choices[0]
    assert choice.finish_reason == "length"
    assert calls_of(choice.message) == [("get_weather", '{"city": ')]


def test_one_call_only(ask):
    choice = ask(Played(f"{HERMES_CALL}{HERMES_CALL} and more"), tools=TOOLS, parallel_tool_calls=False)
    assert calls_of(choice.message) == [("get_weather", '{"city": "Köln"}')]
    assert not choice.message.content


@pytest.mark.parametrize(
    ("fields", "script", "names", "bad"),
    [
        (
            {"tool_choice": "required"},
            '[{"name": "now", "arguments": {}}, {"name": "get_weather", "arguments": {"city": "B"}}]',
            ["now", "get_weather"],
            ["[]", '[{"name": "rm", "arguments": {}}]', '[{"name": "get_weather", "arguments": {}}]', '"text"'],
        ),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            '{"name": "now", "arguments": {}}',
            ["now"],
            ['[{"name": "now", "arguments": {}}]', '{"name": "now"}'],
        ),
        (
            {"tool_choice": NAMED},
            '{"name": "get_weather", "arguments": {"city": "B"}}',
            ["get_weather"],
            ['{"name": "now", "arguments": {}}', '{"name": "get_weather", "arguments": {"city": 3}}'],
        ),
    ],
)
def test_enforced_calls(ask, fields, script, names, bad):
    app = Played(script)
    choice = ask(app, tools=TOOLS, **fields)
    assert choice.finish_reason == "tool_calls"
    assert [name for name, _ in calls_of(choice.message)] == names
    assert not choice.message.content
    check = jsonschema.Draft202012Validator(app.schema())
    assert check.is_valid(json.loads(script))
    assert not any(check.is_valid(json.loads(text)) for text in bad)


def test_enforced_calls_of_llama3_have_parameters():
    app = Played('{"name": "now", "parameters": {}}', source=LLAMA3)
    choice = app.chat(tools=[NOW], tool_choice="required", parallel_tool_calls=False).choices[0]
    assert calls_of(choice.message) == [("now", "{}")]
    assert app.schema()["required"] == ["name", "parameters"]


class Place(pydantic.BaseModel):
    """A place with a place in it."""

    name: str
    within: "Place | None" = None


class Travel(pydantic.BaseModel):
    """Go somewhere."""

    start: Place
    end: Place


def test_schemas_with_references_keep_their_meaning():
    app = Played('[{"name": "Travel", "arguments": {"start": {"name": "a"}, "end": {"name": "b"}}}]')
    app.chat(tools=[NOW, openai.pydantic_function_tool(Travel)], tool_choice="required")
    check = jsonschema.Draft202012Validator(app.schema())
    place = {"name": "a", "within": {"name": "b", "within": None}}
    assert check.is_valid([{"name": "Travel", "arguments": {"start": place, "end": place}}])
    wrong = {"name": "a", "within": {"name": "b", "within": 3}}
    assert not check.is_valid([{"name": "Travel", "arguments": {"start": place, "end": wrong}}])


def test_the_client_parses_arguments_and_content():
    script = '{"name": "Travel", "arguments": {"start": {"name": "a"}, "end": {"name": "b"}}}'
    app = Played(f"<tool_call>{script}</tool_call>", "Done.")
    tools = [openai.pydantic_function_tool(Travel)]
    answer = app.run(lambda client: client.chat.completions.parse(**chat_fields({"tools": tools})))
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.parsed_arguments == Travel(start=Place(name="a"), end=Place(name="b"))
    turns = [{"role": "user", "content": "hi"}, answer.choices[0].message]
    answers = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    again = app.run(lambda client: client.chat.completions.create(**chat_fields({"messages": [*turns, answers]})))
    assert again.choices[0].message.content == "Done."
    app = Played('{"name": "here", "within": null}')
    answer = app.run(lambda client: client.chat.completions.parse(**chat_fields({"response_format": Place})))
    assert answer.choices[0].message.parsed == Place(name="here")
    assert app.schema()["required"] == ["name", "within"]


def test_a_round_trip_with_a_tool():
    app = Played(f"<think>The weather...</think>I look.{HERMES_CALL}", "It is sunny.")
    messages = [{"role": "user", "content": "Weather in Köln?"}]

    async def use(client):
        async with client.chat.completions.stream(**chat_fields({"messages": messages, "tools": TOOLS})) as stream:
            message = (await stream.get_final_completion()).choices[0].message
        (call,) = message.tool_calls
        answer = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        turns = [*messages, message.model_dump(exclude_none=True), answer]
        return await client.chat.completions.create(**chat_fields({"messages": turns, "tools": TOOLS}))

    assert app.run(use).choices[0].message.content == "It is sunny."
    assert '{"name": "get_weather", "arguments": {"city": "Köln"}}' in app.engine.prompts[1]
    assert "<tool_response>\nsunny\n" in app.engine.prompts[1]


@pytest.mark.parametrize(
    ("source", "script", "reasoning", "content", "tokens"),
    [
        (HERMES, "<think>\nhm, a<b\n</think>\n\nYes.", "hm, a<b", "Yes.", 24),
        (HERMES, "Yes.", None, "Yes.", 0),
        (THINKER, "hm\n</think>\n\nYes.", "hm", "Yes.", 11),
        (THINKER, "hm and", "hm and", "", 7),
    ],
)
@pytest.mark.parametrize("step", [1, 4, 100])
def test_reasoning(source, script, reasoning, content, tokens, step):
    answer = Played(script, source=source, step=step).chat()
    message = answer.choices[0].message
    assert (getattr(message, "reasoning_content", None), message.content) == (reasoning, content)
    assert answer.usage.completion_tokens_details.reasoning_tokens == tokens
    chunks = Played(script, source=source, step=step).chunks(stream_options={"include_usage": True})
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(getattr(d, "reasoning_content", "") or "" for d in deltas) == (reasoning or "")
    assert "".join(d.content or "" for d in deltas) == content
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == tokens


def test_reasoning_then_a_call(ask):
    choice = ask(Played(f"<think>{HERMES_CALL}?</think>\n{HERMES_CALL}"), tools=TOOLS)
    assert choice.message.reasoning_content == f"{HERMES_CALL}?"
    assert len(calls_of(choice.message)) == 1
    assert not choice.message.content


def test_tags_that_are_special_tokens_are_kept_in_the_text():
    for special, kept in (("<think>", True), ("<tool_call>", True), ("<s>", False)):
        app = Played("Yes.")
        app.engine.tokenizer.special_texts = frozenset({special})
        app.chat(tools=TOOLS)
        assert app.params.skip_special_tokens != kept
        app = Played("Yes.", source=LLAMA3)
        app.engine.tokenizer.special_texts = frozenset({special})
        app.chat(tools=TOOLS)
        assert app.params.skip_special_tokens


def test_reasoning_can_be_off(ask):
    app = Played("<think>hm</think>Yes.", reasoning_parser="none")
    assert ask(app).message.content == "<think>hm</think>Yes."
    app = Played("Yes.")
    assert ask(app, extra_body={"chat_template_kwargs": {"enable_thinking": False}}).message.content == "Yes."
    assert app.engine.prompts[0].endswith("<think>\n\n</think>\n\n")


def test_a_constraint_holds_for_all_but_the_reasoning(ask):
    for source, script, begin in (
        (THINKER, 'hm\n</think>\n\n{"a": 1}', "start: rule_1 NL? NL? "),  # the prompt opened the tag
        (HERMES, '<think>hm</think>{"a": 1}', 'start: ("<think>" rule_1 NL? NL?)? '),
    ):
        app = Played(script, source=source)
        choice = ask(app, response_format={"type": "json_object"})
        assert (choice.message.reasoning_content, choice.message.content) == ("hm", '{"a": 1}')
        assert app.params.structured_outputs.grammar.startswith(begin)
        assert app.schema()["type"] == "object"
    app = Played('{"a": 1}', source=HERMES, reasoning_parser="none")
    assert ask(app, response_format={"type": "json_object"}).message.content == '{"a": 1}'
    assert app.params.structured_outputs.json_object


@pytest.mark.parametrize(
    ("fields", "field", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", True),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "null"}}}},
            "json",
            '{"type": "null"}',
        ),
        ({"extra_body": {"structured_outputs": {"json": {"type": "null"}}}}, "json", '{"type": "null"}'),
        ({"extra_body": {"structured_outputs": {"json": '{"type":  "null"}'}}}, "json", '{"type": "null"}'),
        ({"extra_body": {"structured_outputs": {"json_object": True}}}, "json_object", True),
        ({"extra_body": {"structured_outputs": {"regex": "a+"}}}, "regex", "a+"),
        ({"extra_body": {"structured_outputs": {"choice": ["a", "b"]}}}, "choice", ["a", "b"]),
        ({"extra_body": {"structured_outputs": {"grammar": 'start: "a"'}}}, "grammar", 'start: "a"'),
    ],
)
def test_constraints_arrive(fields, field, value):
    app = Played("a", source=PLAIN)
    app.chat(**fields)
    assert getattr(app.params.structured_outputs, field) == value
    app = Played("a")
    body = {"model": "org/fake", "prompt": "p", "extra_body": dict(fields.get("extra_body", {}))}
    if "response_format" in fields:
        body["extra_body"]["response_format"] = fields["response_format"]
    app.run(lambda client: client.completions.create(**body))
    assert getattr(app.params.structured_outputs, field) == value


def test_response_format_text_constrains_nothing():
    app = Played("a")
    app.chat(response_format={"type": "text"})
    assert app.params.structured_outputs is None


def test_grammars_that_the_engine_refuses():
    refused = InvalidRequestError("structured_outputs: no such keyword", "structured_outputs")
    for fields, param in (
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"extra_body": {"structured_outputs": {"regex": "a"}}}, "structured_outputs"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tools"),
    ):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                Played("abc", fails={0: refused}).chat(**fields, stream=stream)
            assert caught.value.body["param"] == param
            assert caught.value.body["message"] == f"{param}: no such keyword"


def test_a_grammar_that_cannot_go_on():
    """In mid-stream too it is the request's fault."""
    ended = InvalidRequestError("structured_outputs: its text cannot go on: 11 items; max is 10", "structured_outputs")
    body = {"response_format": {"type": "json_object"}}
    with pytest.raises(openai.BadRequestError, match="response_format: its text cannot go on: 11 items") as refused:
        Played("abcdefgh", fails={2: ended}).chat(**body)
    with pytest.raises(openai.APIError, match="response_format: its text cannot go on: 11 items") as broken:
        Played("abcdefgh", fails={2: ended}).chunks(**body)
    for caught in (refused, broken):
        assert (caught.value.type, caught.value.param) == ("invalid_request_error", "response_format")


def test_too_many_grammars_wait():
    busy = OverloadedError("structured_outputs: 64 grammars of yours wait to be compiled", "structured_outputs")
    with pytest.raises(openai.RateLimitError, match="response_format: 64 grammars of yours") as caught:
        Played("abc", fails={0: busy}).chat(response_format={"type": "json_object"})
    assert (caught.value.code, caught.value.param) == ("queue_full", "response_format")
    assert caught.value.response.headers["retry-after"] == "1"


def test_an_error_in_mid_stream():
    with pytest.raises(openai.APIError, match="cannot answer now"):
        Played("abcdefgh", fails={2: EngineDeadError("a worker was lost")}).chunks(tools=TOOLS)


def test_several_choices_are_parsed_one_by_one():
    answer = Played([HERMES_CALL, "No.", f"<think>x</think>{HERMES_CALL}"]).chat(tools=TOOLS, n=3)
    assert [choice.finish_reason for choice in answer.choices] == ["tool_calls", "stop", "tool_calls"]
    assert answer.choices[1].message.content == "No."
    assert answer.usage.completion_tokens_details.reasoning_tokens == 16


def test_logprobs_of_all_tokens_are_kept():
    script = f"<think>x</think>{HERMES_CALL}"
    tokens = [t.token for t in Played(script).chat(tools=TOOLS, logprobs=True).choices[0].logprobs.content]
    assert "".join(tokens) == script + "\0"
    chunks = Played(script).chunks(tools=TOOLS, logprobs=True)
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    assert "".join(t.token for part in parts if part for t in part.content) == script + "\0"


FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object", "required": ["answer"]}}}


def test_tools_or_an_answer_in_a_format(ask):
    fields = {"tools": TOOLS, "response_format": FORMAT}
    for source, script, opening in ((HERMES, HERMES_CALL, '"<tool_call>"'), (MISTRAL, MISTRAL_CALL, '"[TOOL_CALLS]"')):
        app = Played(script, '{"answer": 1}', source=source)
        choice = ask(app, **fields)
        assert choice.finish_reason == "tool_calls"
        assert not choice.message.content
        grammar = app.params.structured_outputs.grammar
        assert opening in grammar
        assert '"required": ["answer"]' in grammar
        choice = ask(app, **fields)
        assert (choice.finish_reason, choice.message.content) == ("stop", '{"answer": 1}')
        assert app.params.structured_outputs.grammar == grammar


def test_a_format_without_tools_that_may_be_called(ask):
    app = Played('{"answer": 1}', source=MISTRAL)
    assert ask(app, tools=TOOLS, tool_choice="none", response_format=FORMAT).message.content == '{"answer": 1}'
    assert "TOOL_CALLS" not in (app.params.structured_outputs.grammar or "")


def test_forced_calls_of_gpt_oss_are_messages(ask):
    text = "<|channel|>analysis<|message|>f?<|end|><|start|>assistant"
    text += "<|channel|>commentary to=functions.now json<|message|>{}"
    app = Played(text, source=GPT_OSS)
    choice = ask(app, tools=TOOLS, tool_choice="required")
    assert (choice.finish_reason, choice.message.reasoning_content) == ("tool_calls", "f?")
    assert calls_of(choice.message) == [("now", "{}")]
    assert "to=functions.get_weather" in app.params.structured_outputs.grammar
    named = ask(app := Played(text, source=GPT_OSS), tools=TOOLS, tool_choice=NAMED | {"function": {"name": "now"}})
    assert calls_of(named.message) == [("now", "{}")]
    assert "get_weather" not in app.params.structured_outputs.grammar


def test_nothing_of_a_forced_call_is_content_when_it_is_cut():
    for end in range(1, 60):
        script = '[{"name": "get_weather", "arguments": {"city": "Bergen"}}]'[:end]
        played = Played(script, script, finish="length", step=7)
        assert not played.chat(tools=TOOLS, tool_choice="required").choices[0].message.content
        chunks = played.chunks(tools=TOOLS, tool_choice="required")
        assert not any(chunk.choices[0].delta.content for chunk in chunks)


def test_what_is_not_enforced_is_named():
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}, "not": {"required": ["b"]}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    response_format = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    for fields, header in (
        ({"response_format": response_format}, "response_format.schema: not, uniqueItems"),
        ({"extra_body": {"structured_outputs": {"json": schema}}}, "structured_outputs.json: not, uniqueItems"),
        ({"tools": tools, "tool_choice": "required"}, "tools.f: not, uniqueItems"),
        (
            {"tools": tools, "response_format": response_format},
            "response_format.schema: not, uniqueItems; tools.f: not, uniqueItems",
        ),
        ({"tools": tools}, None),
        ({"response_format": FORMAT}, None),
    ):
        for stream in (False, True):
            app = Played('{"a": []}')
            body = chat_fields(fields | {"stream": stream})
            answer = app.run(lambda client, body=body: client.chat.completions.with_raw_response.create(**body))
            assert answer.headers.get("x-rayllm-not-enforced") == header
    many = [{"type": "function", "function": {"name": f"f{i}" * 9, "parameters": schema}} for i in range(64)]
    body = chat_fields({"tools": many, "tool_choice": "required"})
    answer = Played("[]").run(lambda client: client.chat.completions.with_raw_response.create(**body))
    assert len(answer.headers["x-rayllm-not-enforced"]) == 1000


@pytest.mark.parametrize("arguments", ["{", "[1]", "3", "", "null", "[" * 1000, None, {"a": 1}])
def test_histories_are_taken_as_the_template_takes_them(arguments):
    call = {"type": "function", "function": {"name": "now", "arguments": arguments}}
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm"},
        {"role": "tool", "content": "x", "tool_call_id": "of nothing"},
        {"role": "tool", "content": "y"},
        {"role": "assistant", "content": None, "tool_calls": None, "reasoning": "hm, hm"},
    ]
    app = Played("Yes.")
    assert app.chat(messages=turns).choices[0].message.content == "Yes."
    shown = {"": {}, None: {}}.get(arguments, arguments) if not isinstance(arguments, dict) else arguments
    assert f'"arguments": {json.dumps(shown)}}}' in app.engine.prompts[0]
    assert "<tool_response>\ny\n" in app.engine.prompts[0]
    assert "<think>hm, hm</think>" in app.engine.prompts[0]
