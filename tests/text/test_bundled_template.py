"""The bundled model's chat template: ChatML without tools, the form of Hermes and Qwen with them."""

import ast
import json
from pathlib import Path

import pytest
from jinja2 import Environment, StrictUndefined

from rayllm.config.options import BUNDLED_MODEL, ServerConfig
from rayllm.errors import InvalidRequestError
from rayllm.serve.http.chat_format import ChatFormat, chat_format
from rayllm.text.tokenizer import load_tokenizer

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_tiny_model.py"
PARAMETERS = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
LOOKUP = {"type": "function", "function": {"name": "lookup", "description": "<Docs>", "parameters": PARAMETERS}}
NOW = {"type": "function", "function": {"name": "now"}}
LISTED = (
    '<tools>\n{"name": "lookup", "description": "<Docs>", "parameters": {"type": "object", '
    '"properties": {"name": {"type": "string"}}, "required": ["name"]}}\n{"name": "now"}\n</tools>'
)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(BUNDLED_MODEL)


def call(name, arguments):
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_the_script_that_trains_writes_this_template():
    (source,) = (
        ast.literal_eval(node.value)
        for node in ast.parse(SCRIPT.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CHAT_TEMPLATE"
    )
    assert json.loads(Path(BUNDLED_MODEL, "tokenizer_config.json").read_text())["chat_template"] == source


def test_without_tools_every_message_is_a_turn(tokenizer):
    chat = [{"role": role, "content": role[:1]} for role in ("system", "user", "assistant", "system", "user")]
    expected = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in chat)
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=False) == expected
    assert tokenizer.apply_chat_template(chat) == expected + "<|im_start|>assistant\n"
    with pytest.raises(InvalidRequestError, match="role must be system, user, assistant or tool, got critic"):
        tokenizer.apply_chat_template([{"role": "critic", "content": ""}])


def test_it_asks_for_nothing_that_a_client_may_leave_undefined():
    """lm-eval renders the template of /tokenizer_info itself, without tools, and refuses what is not defined."""
    source = json.loads(Path(BUNDLED_MODEL, "tokenizer_config.json").read_text())["chat_template"]
    template = Environment(undefined=StrictUndefined).from_string(source)
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    expected = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n"
    assert template.render(messages=chat, add_generation_prompt=False) == expected


@pytest.mark.parametrize(
    ("system", "opening"),
    [([], LISTED), ([{"role": "system", "content": "Be brief."}], f"Be brief.\n\n{LISTED}")],
    ids=["alone", "after the system message"],
)
def test_tools_are_lines_of_json_in_the_system_turn(tokenizer, system, opening):
    text = tokenizer.apply_chat_template([*system, {"role": "user", "content": "Hi"}], tools=[LOOKUP, NOW])
    assert text == (f"<|im_start|>system\n{opening}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("tools", [None, [LOOKUP]], ids=["no tools", "tools"])
def test_calls_and_their_results(tokenizer, tools):
    calls = [call("lookup", {"name": "é"}), call("now", '{"zone": 1}')]
    chat = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "one"},
        {"role": "tool", "tool_call_id": "call_1", "content": "two"},
        {"role": "assistant", "tool_calls": calls[:1]},
        {"role": "tool", "tool_call_id": "call_1", "content": "three"},
    ]
    text = tokenizer.apply_chat_template(chat, tools=tools)
    first = '<tool_call>\n{"name": "lookup", "arguments": {"name": "é"}}\n</tool_call>'
    second = '<tool_call>\n{"name": "now", "arguments": {"zone": 1}}\n</tool_call>'
    assert ("<tools>" in text) == bool(tools)
    assert text[text.index("<|im_start|>user") :] == (
        "<|im_start|>user\n?<|im_end|>\n"
        f"<|im_start|>assistant\nI look.\n{first}\n{second}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        f"<|im_start|>assistant\n{first}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nthree\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_server_finds_its_calls(tokenizer):
    assert chat_format(ServerConfig(), tokenizer) == ChatFormat("hermes")
