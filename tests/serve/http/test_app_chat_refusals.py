"""Chat requests that are refused, each with the field and the limit, before the engine sees them."""

import openai
import pytest
from support.chat import Played
from support.chat_templates import PLAIN

NOW = {"type": "function", "function": {"name": "now"}}
STRICT = {"extra_body": {"strict_fields": True}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def refusal(app, **fields):
    with pytest.raises(openai.BadRequestError) as caught:
        app.chat(**fields)
    assert app.engine.requests == []
    return caught.value.body["message"], caught.value.body["param"]


def tool(**function):
    return {"type": "function", "function": {"name": "f"} | function}


def kwargs(entries):
    return {"extra_body": {"chat_template_kwargs": entries}}


def schema(**fields):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x"} | fields}}


def structure(**fields):
    return {"extra_body": {"structured_outputs": fields}}


def deep(levels):
    return {"type": "object", "properties": {"x": deep(levels - 1)}} if levels else {}


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"tool_choice": "auto"}, "tool_choice", "only allowed with tools"),
        ({"tool_choice": NAMED, "tools": [NOW]}, "tool_choice", "'get_weather', which tools lacks"),
        ({"tool_choice": "any", "tools": [NOW]}, "tool_choice", '"required"'),
        ({"tool_choice": {"type": "function"}, "tools": [NOW]}, "tool_choice", '"required"'),
        ({"tools": [tool(name=str(i)) for i in range(129)]}, "tools", "at most 128"),
        ({"tools": [NOW, NOW]}, "tools", "two functions of the name 'now'"),
        ({"tools": [tool(name="a b")]}, "tools", "tools.0.function.name"),
        ({"tools": [tool(name="x" * 129)]}, "tools", "{1,128}"),
        ({"tools": [tool(parameters={"type": "string"})]}, "tools", "type object"),
        ({"tools": [tool(parameters=[1])]}, "tools", "tools.0.function.parameters"),
        ({"tools": [tool(parameters=deep(40))]}, "tools", "deeper than 64"),
        ({"tools": [tool(description="x" * 300_000)]}, "tools", "at most 262144 bytes"),
        (STRICT | {"tools": [tool(colour=1)]}, "tools", "unknown field 'tools.0.function.colour'"),
        ({"tools": [{"type": "retrieval"}]}, "tools", "tools.0"),
        (
            {"tools": [tool(parameters={"title": "x" * 70_000})], "tool_choice": "required"},
            "tools",
            "at most 65536 bytes",
        ),
        (kwargs({"colour": 1}), "chat_template_kwargs", "no variable 'colour'"),
        (kwargs({"messages": "x"}), "chat_template_kwargs", "'messages'"),
        (kwargs({"tools": "x"}), "chat_template_kwargs", "'tools'"),
        (kwargs({"enable_thinking": {}}), "chat_template_kwargs", "must be a string"),
        (kwargs({"a": "x" * 1025}), "chat_template_kwargs", "at most 1024"),
        (kwargs({str(i): 1 for i in range(17)}), "chat_template_kwargs", "at most 16"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "is required there"),
        ({"response_format": schema(schema={})["response_format"] | {"type": "text"}}, "response_format", "belongs"),
        (schema(), "response_format", "schema is required"),
        (schema(schema=deep(40)), "response_format", "deeper than 64"),
        (schema(schema={"title": "x" * 70_000}), "response_format", "at most 65536 bytes"),
        (structure(), "structured_outputs", "exactly one"),
        (structure(regex="a", choice=["b"]), "structured_outputs", "exactly one"),
        (structure(json="{"), "structured_outputs", "JSON schema"),
        ({"response_format": {"type": "json_object"}} | structure(regex="a"), "structured_outputs", "not both"),
    ],
)
def test_refusals_name_field_and_limit(fields, param, text):
    message, named = refusal(Played(), **fields)
    assert named == param
    assert text in message


def test_models_that_cannot_call_tools():
    assert "no place for tools" in refusal(Played(source=PLAIN), tools=[NOW])[0]
    assert "tool_call_parser" in refusal(Played(tool_call_parser="none"), tools=[NOW])[0]
    app = Played('{"name": "now", "arguments": {}}', tool_call_parser="none")  # enforced calls need no parser
    choice = app.chat(tools=[NOW], tool_choice="required", parallel_tool_calls=False).choices[0]
    assert choice.message.tool_calls[0].function.name == "now"


CALLED = {
    "role": "assistant",
    "tool_calls": [{"id": "c1", "type": "function", "function": NOW["function"] | {"arguments": "{}"}}],
}
USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([{"role": "user", "content": "x", "tool_call_id": "c1"}], "role tool"),
        ([CALLED | {"role": "user"}], "only assistant messages have tool_calls"),
        ([{"role": "user", "content": "x", "reasoning_content": "hm"}], "reasoning_content"),
        ([CALLED | {"tool_calls": CALLED["tool_calls"] * 129}], "at most 128"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages.0.tool_calls.0.function is required"),
        (
            [CALLED | {"tool_calls": [{"id": "c", "function": {"name": "f", "arguments": 3}}]}],
            "tool_calls.0.function.arguments: must be the text of a JSON object",
        ),
    ],
    ids=str,
)
def test_bad_tool_messages(messages, text):
    message, param = refusal(Played(), messages=messages)
    assert param == "messages"
    assert text in message
