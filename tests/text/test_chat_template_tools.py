"""Templates with tools, as transformers renders them, from OpenAI's messages."""

import pytest
import tokenizers
from support.chat_templates import (
    DEEPSEEK,
    DEEPSEEK_V32,
    GEMMA4,
    GLM,
    GPT_OSS,
    HERMES,
    LLAMA3,
    LLAMA4,
    MAGISTRAL,
    MINIMAX,
    MISTRAL,
    PLAIN,
    QWEN3_CODER,
    THINKER,
)
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from rayllm.config.options import ServerConfig
from rayllm.serve.http.chat_format import ChatFormat, chat_format
from rayllm.serve.http.protocol import ChatBody
from rayllm.text.tokenizer import Tokenizer

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a <city> & 'more'",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "default": None}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
TIME = {"type": "function", "function": {"name": "now"}}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Zürich", "days": 2}'},
}
CHAT = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    {"role": "assistant", "content": "It is sunny.", "reasoning_content": "easy"},
]
AS_TEMPLATES_HAVE_IT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}},
            }
        ],
    },
    {"role": "tool", "content": "sunny", "tool_call_id": "call_1"},
    {"role": "assistant", "content": "It is sunny.", "reasoning_content": "easy", "thinking": "easy"},
]


def parse(**fields):
    return ChatBody.model_validate({"messages": CHAT} | fields)


def tokenizer(source, **more):
    return Tokenizer(tokenizers.Tokenizer(models.BPE()), TOKENS, {"default": source, **more})


def test_messages_as_templates_have_them():
    assert [message.for_template() for message in parse().messages] == AS_TEMPLATES_HAVE_IT


@pytest.mark.parametrize(("content", "thought"), [("", True), ("I look.", False)])
def test_thoughts_before_a_call_have_the_name_that_gpt_oss_reads(content, thought):
    """Its template refuses content and thinking beside calls."""
    turn = {"role": "assistant", "content": content, "reasoning": "hm", "tool_calls": [CALL]}
    shown = parse(messages=[turn]).messages[0].for_template()
    assert (shown.get("thinking"), shown["reasoning_content"]) == ("hm" if thought else None, "hm")


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("{{ '<' + call.arguments + '>' + call.name }}", '<{"city": "Zürich",  "days": 2}>get_weather'),
        ("{{ '<' ~ call.arguments ~ '>' }}", '<{"city": "Zürich",  "days": 2}>'),
        ("{{ call.arguments | tojson }}", '{"city": "Zürich", "days": 2}'),
        ("{{ call.arguments is mapping }} {{ call.arguments is string }}", "True False"),
        ("{% for name, value in call.arguments | items %}{{ name }}={{ value }};{% endfor %}", "city=Zürich;days=2;"),
        ("{{ call.arguments.city }}{{ call.arguments.items() | list | length }}", "Zürich2"),
    ],
)
@pytest.mark.parametrize("old", [False, True])
def test_arguments_are_an_object_and_where_they_are_joined_to_text_what_the_model_wrote(source, shown, old):
    """DeepSeek's templates join them, which fails on an object."""
    function = {"name": "get_weather", "arguments": '{"city": "Zürich",  "days": 2}'}
    turn = {"role": "assistant", "content": None}
    turn |= {"function_call": function} if old else {"tool_calls": [{"id": "1", "function": function}]}
    text = "{% set call = messages[0]['tool_calls'][0]['function'] %}" + source
    messages = [message.for_template() for message in parse(messages=[turn]).messages]
    assert tokenizer(text).apply_chat_template(messages) == shown


def test_tools_as_templates_have_them():
    strict = {"type": "function", "function": TIME["function"] | {"strict": True, "description": None}}
    assert [tool.for_template() for tool in parse(tools=[WEATHER, strict]).tools] == [WEATHER, TIME]


@pytest.mark.parametrize(
    "source", [HERMES, LLAMA3, THINKER, PLAIN, GEMMA4], ids=["hermes", "llama3", "thinker", "plain", "gemma4"]
)
@pytest.mark.parametrize("tools", [None, [WEATHER], [WEATHER, TIME]], ids=["none", "one", "two"])
@pytest.mark.parametrize("extra", [{}, {"enable_thinking": False}, {"date_string": "1 May"}], ids=str)
@pytest.mark.parametrize("turns", [2, 4, 5])
def test_as_transformers(source, tools, extra, turns):
    body = parse(messages=CHAT[:turns], tools=tools)
    ours = tokenizer(source).apply_chat_template(
        [message.for_template() for message in body.messages],
        tools=[tool.for_template() for tool in body.tools] if body.tools else None,
        template_kwargs=extra,
    )
    reference = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(models.BPE()), **TOKENS)
    theirs = reference.apply_chat_template(
        AS_TEMPLATES_HAVE_IT[:turns],
        tools=tools,
        chat_template=source,
        tokenize=False,
        add_generation_prompt=True,
        **extra,
    )
    assert ours == theirs
    shows_calls = source in (HERMES, LLAMA3, GEMMA4)
    assert ("Zürich" in ours) == (turns > 2 and shows_calls)
    assert ("get_weather" in ours.split("Weather?")[0]) == (tools is not None and shows_calls)


@pytest.mark.parametrize(
    ("source", "tools", "reasoning"),
    [
        (HERMES, "hermes", "think"),
        (QWEN3_CODER, "qwen3_coder", None),
        (GLM, "glm", "think"),
        (LLAMA3, "llama3", None),
        (LLAMA3 + "<|python_tag|>", "llama3", None),
        (LLAMA4, "llama4", None),
        (MISTRAL, "mistral", None),
        (MAGISTRAL, "mistral", "mistral"),
        (DEEPSEEK, "deepseek", "think"),
        (DEEPSEEK_V32, "deepseek_v32", "think"),
        (MINIMAX, "minimax", "think"),
        (GEMMA4, "gemma4", "gemma4"),
        (GPT_OSS, "gpt_oss", "gpt_oss"),
        (THINKER, None, "think"),
        (PLAIN, None, None),
        ("{% broken", None, None),
    ],
)
def test_the_format_is_guessed_from_the_template(source, tools, reasoning):
    assert chat_format(ServerConfig(), tokenizer(source)) == ChatFormat(tools, reasoning)


def test_options_come_before_the_guess():
    none = ServerConfig(tool_call_parser="none", reasoning_parser="none")
    assert chat_format(none, tokenizer(HERMES)) == ChatFormat()
    some = ServerConfig(tool_call_parser="llama3", reasoning_parser="think")
    assert chat_format(some, tokenizer(PLAIN)) == ChatFormat("llama3", "think")
    assert chat_format(ServerConfig(), tokenizer(PLAIN, tool_use=HERMES)) == ChatFormat("hermes")
    assert chat_format(ServerConfig(), Tokenizer(tokenizers.Tokenizer(models.BPE()))) == ChatFormat()


def test_what_a_template_reads():
    both = tokenizer(THINKER, tool_use=HERMES)
    assert {"tools", "enable_thinking"} <= both.chat_template_variables(with_tools=True)
    assert not {"tools", "enable_thinking"} & both.chat_template_variables()
    assert tokenizer("{% broken").chat_template_variables() == frozenset()
