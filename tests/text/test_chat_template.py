"""Chat templates against transformers' renderer, and templates that misbehave."""

from __future__ import annotations

import datetime
import json
import time

import pytest
import tokenizers
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from rayllm.errors import InvalidRequestError
from rayllm.text import chat_template
from rayllm.text.chat_template import ChatTemplate
from rayllm.text.tokenizer import load_tokenizer

CHATML = """{% for message in messages %}
    {% if message['role'] == 'tool' %}{% continue %}{% endif %}
{{ '<|im_start|>' + message.role + '\n' + (message.content | trim) + '<|im_end|>' + '\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- endif %}"""
TEMPLATES = {
    "chatml": CHATML,
    "tokens": "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    "{{ pad_token }}",
    "json": "{{ messages | tojson }}{{ tools | tojson(indent=2) }}{{ {'b': '<é>', 'a': 1} | tojson(sort_keys=true) }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + loop.index %}{% endfor %}"
    "{{ ns.n }}",
    "break": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "generation": "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ messages[0].content }}{% endgeneration %}{{ x }}",
    "date": "{{ strftime_now('%Y') }}{% if tools is none %}no tools{% endif %}{{ documents }}",
    "macro": "{% macro show(m) %}<{{ m.role }}>{% for i in range(2) %}{{ i }}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show(m) }}{% endfor %}",
    "undefined": "{% for m in messages %}{{ m.name }}{{ m.tool_calls is defined }}{{ thinking }}{% endfor %}",
    "strings": "{{ messages[0]['content'].split(' ')[-1].strip() }}{{ messages[1:] | length }}"
    "{{ raise_exception is defined }}",
}
CHATS = [
    [{"role": "user", "content": "Hello <b>wörld</b> & you"}],
    [
        {"role": "system", "content": "  Be kind.\n", "name": "sys"},
        {"role": "user", "content": "Hi", "tool_calls": None},
        {"role": "assistant", "content": "", "name": None},
        {"role": "tool", "content": "42"},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def chat(source: str, messages=CHATS[0], **options) -> str:
    return ChatTemplate({"default": source}, TOKENS).render(messages, **options)


def theirs(source: str, messages, **options) -> str:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(models.BPE()), **TOKENS)
    return tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False, **options)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", CHATS, ids=["one", "many"])
@pytest.mark.parametrize("options", [{}, {"add_generation_prompt": True}, {"tools": TOOLS}])
def test_as_transformers(name, messages, options):
    options = {"add_generation_prompt": False} | options
    assert chat(TEMPLATES[name], messages, **options) == theirs(TEMPLATES[name], messages, **options)


def test_template_kwargs_as_transformers():
    source, extra = "{{ thinking }}{{ bos_token }}", {"thinking": False, "bos_token": "<x>"}
    assert chat(source, template_kwargs=extra) == theirs(source, CHATS[0], **extra) == "False<x>"
    with pytest.raises(InvalidRequestError, match="'messages'") as caught:
        chat(source, template_kwargs={"messages": []})
    assert caught.value.param == "chat_template_kwargs"


def test_dates_come_from_the_clock():
    assert chat("{{ strftime_now('%d %b %Y') }}") == datetime.datetime.now().strftime("%d %b %Y")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content }}", "chat template refused"),
        ("{{ messages[0].content + 1 }}", "chat template refused"),
        ("{{ 1 // 0 }}", "chat template refused"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "chat template refused"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "chat template refused"),
        ("{{ messages.append(1) }}", "chat template refused"),
        ("{% if %}", "does not compile"),
        ("{% nonsense %}", "does not compile"),
        ("{% include 'tokenizer.json' %}", "chat template refused"),
    ],
)
def test_errors_are_the_requests(source, message):
    with pytest.raises(InvalidRequestError, match=message) as caught:
        chat(source)
    assert caught.value.param == "messages"


def test_no_template_and_no_messages():
    with pytest.raises(InvalidRequestError, match="no chat template"):
        ChatTemplate({}, {}).render(CHATS[0])
    with pytest.raises(InvalidRequestError, match="must not be empty"):
        chat("x", [])


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}{{ messages }}{% endfor %}",
        "{% for i in range(9999) %}{% for j in range(9999) %}{% for k in range(9999) %}{% endfor %}{% endfor %}"
        "{% endfor %}",
        "{% for i in range(1000) %}{% for j in range(900) %}{{ 'x' * 1000 }}{% endfor %}{% endfor %}",
        "{% for i in range(10**30) %}{% endfor %}",
    ],
)
def test_endless_templates_are_stopped(source):
    started = time.monotonic()
    with pytest.raises(InvalidRequestError, match=r"steps|characters|refused"):
        chat(source)
    assert time.monotonic() - started < 5


def test_the_output_limit(monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_OUTPUT_CHARS", 10)
    assert chat("{% for i in range(10) %}x{% endfor %}") == "x" * 10
    with pytest.raises(InvalidRequestError, match="more than 10 characters"):
        chat("{% for i in range(11) %}x{% endfor %}")


def test_the_loop_budget_is_of_one_rendering():
    template = ChatTemplate({"default": "{% for i in range(90000) %}{% endfor %}ok"}, {})
    assert {template.render(CHATS[0]) for _ in range(15)} == {"ok"}


def test_messages_are_not_changed():
    messages = [{"role": "user", "content": "x", "name": None}]
    chat(CHATML, messages)
    assert messages == [{"role": "user", "content": "x", "name": None}]


def save_folder(folder, config, files):
    tokenizers.Tokenizer(models.BPE()).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return load_tokenizer(folder)


NAMED = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]


@pytest.mark.parametrize(
    ("config", "files", "plain", "with_tools"),
    [
        ({"chat_template": "K"}, {}, "K", "K"),
        ({"chat_template": NAMED}, {}, "D", "T"),
        ({"chat_template": "K"}, {"chat_template.jinja": "F"}, "F", "F"),
        ({}, {"chat_template.jinja": "F", "additional_chat_templates/tool_use.jinja": "G"}, "F", "G"),
        ({"bos_token": "<s>", "chat_template": "{{ bos_token }}"}, {}, "<s>", "<s>"),
    ],
)
def test_where_templates_are_found(tmp_path, config, files, plain, with_tools):
    tokenizer = save_folder(tmp_path, config, files)
    assert tokenizer.apply_chat_template(CHATS[0]) == plain
    assert tokenizer.apply_chat_template(CHATS[0], tools=TOOLS) == with_tools
    loaded = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert loaded.apply_chat_template(CHATS[0], tokenize=False) == plain
    assert loaded.apply_chat_template(CHATS[0], tools=TOOLS, tokenize=False) == with_tools


def test_named_templates_without_a_default(tmp_path):
    tokenizer = save_folder(tmp_path, {"chat_template": NAMED[1:]}, {})
    assert tokenizer.apply_chat_template(CHATS[0], tools=TOOLS) == "T"
    with pytest.raises(InvalidRequestError, match="tool_use"):
        tokenizer.apply_chat_template(CHATS[0])
