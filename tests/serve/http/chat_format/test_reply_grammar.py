"""Grammars of replies: what they take and what not, followed with the bundled model's tokenizer."""

import json

import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer
from support.tool_calls import ALL, DSML, GEMMA4, MINIMAX, SCHEMAS, V3, V31, WHOLE, dsml, invoked

from rayllm.api.sampling_params import StructuredOutputs
from rayllm.config.options import BUNDLED_MODEL
from rayllm.serve.http.chat_format import ChatFormat, ChatParser
from rayllm.serve.http.chat_format.families import CALL_FORMS, THINK_TAGS, tags_of
from rayllm.serve.http.chat_format.reply_grammar import reply_grammar
from rayllm.text.tokenizer import Tokenizer

ANSWER = StructuredOutputs(
    json='{"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}'
)
STRICT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOLS = {"f": STRICT, "g": {}}
ARGUMENTS = '{"a": 3}'
CALLS = {
    "hermes": '<tool_call>\n{{"name": "f", "arguments": {}}}\n</tool_call>',
    "llama3": '{{"name": "f", "parameters": {}}}',
    "llama4": '{{"name": "f", "parameters": {}}}',
    "mistral": '[TOOL_CALLS][{{"name": "f", "arguments": {}}}]',
    "mistral named": "[TOOL_CALLS]f[ARGS]{}",
    "mistral id": "[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{}",
    "deepseek": ALL.format(V3.format("f", "{}")),
    "deepseek v3.1": ALL.format(V31.format("f", "{}")),
    "gpt_oss": "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}",
}
UNTYPED = {
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n3\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
    "deepseek_v32": DSML.format(dsml(a=3)).replace("typed", "f"),
    "deepseek_v32 v4": DSML.replace("function_calls", "tool_calls").format(dsml(a=3)).replace("typed", "f"),
    "minimax": MINIMAX.format(invoked(a=3)).replace("typed", "f"),
    "gemma4": GEMMA4.format("a:3").replace("typed", "f"),
}


def source_of(structure):
    if structure.grammar is None:
        return LLMatcher.grammar_from_json_schema(structure.json)
    return LLMatcher.grammar_from_lark(structure.grammar)


@pytest.fixture(scope="module", params=["spelled out", "special"])
def tokenizer(request):
    """The bundled model's, with all tags as special tokens or none."""
    backend = tokenizers.Tokenizer.from_file(f"{BUNDLED_MODEL}/tokenizer.json")
    if request.param == "special":
        pairs = [(tools, reasoning) for tools in (*CALL_FORMS, "gpt_oss") for reasoning in THINK_TAGS]
        tags = sorted(set().union(*(tags_of(*pair) for pair in pairs)))
        backend.add_special_tokens([tokenizers.AddedToken(tag, special=True) for tag in tags])
    return Tokenizer(backend)


@pytest.fixture(scope="module")
def takes(tokenizer):
    tokens = LLTokenizer(tokenizer.backend.to_str(), n_vocab=tokenizer.vocab_size, eos_token=[2, 0])

    def takes(structure: StructuredOutputs, text: str) -> bool:
        matcher = LLMatcher(tokens, source_of(structure), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher.consume_tokens(tokenizer.encode(text, False)) and matcher.is_accepting()

    return takes


@pytest.mark.parametrize("family", [*CALLS, *UNTYPED])
def test_calls_or_an_answer(tokenizer, takes, family):
    tools = family.split()[0]
    form = ChatFormat(tools, "gpt_oss" if tools == "gpt_oss" else None, schemas=TOOLS)
    grammar = reply_grammar(form, ANSWER, "arguments", tokenizer.special_id)
    final = "<|channel|>final<|message|>" if tools == "gpt_oss" else ""
    assert takes(grammar, final + '{"answer": 5}')
    assert takes(grammar, final + '{"answer":5}')
    assert not takes(grammar, final + '{"answer": "x"}')
    assert not takes(grammar, final + "text")
    call = CALLS[family].format(ARGUMENTS) if family in CALLS else UNTYPED[family]
    assert takes(grammar, call)
    assert not takes(grammar, call.replace("f", "rm", 1).replace("<rmunction=f", "<function=rm"))
    if family in CALLS:
        assert not takes(grammar, CALLS[family].format('{"a": "x"}'))
        assert not takes(grammar, CALLS[family].format('{"a":  3}'))
    pieces = ChatParser(form).feed(call, last=True)
    assert [piece.text for piece in pieces] == ["f", ARGUMENTS]


@pytest.mark.parametrize("text", ["", "x", "</p> <｜ </ \n", '"quoted" <b>'])
def test_text_between_tags_of_which_a_part_is_a_token(tokenizer, takes, text):
    form = ChatFormat("deepseek_v32", schemas=TOOLS)
    grammar = reply_grammar(form, ANSWER, "arguments", tokenizer.special_id)
    assert takes(grammar, DSML.format(dsml(text=text, a="[1]")).replace("typed", "f"))
    assert not takes(grammar, DSML.format(dsml(text=text, a="x")).replace("typed", "f"))


def test_values_of_gemma4(tokenizer, takes):
    grammar = reply_grammar(ChatFormat("gemma4", schemas=TOOLS), ANSWER, "arguments", tokenizer.special_id)
    good = ["", 'a:<|"|>x "y" <b>\n<|"|>', "a:[1,{b:true,c:{}},[]],d e:-1.5e3", "a:null"]
    for arguments in good:
        assert takes(grammar, GEMMA4.format(arguments).replace("typed", "f"))
    for arguments in ("a", "a:x", "a:[1", "a:1,", ':<|"|>x<|"|>', 'a:<|"|>x'):
        assert not takes(grammar, GEMMA4.format(arguments).replace("typed", "f"))


@pytest.mark.parametrize(
    "family", ["hermes", "qwen3_coder", "glm", "deepseek v3.1", "mistral named", "llama3", "minimax", "gemma4"]
)
def test_several_calls_only_where_they_may_be(tokenizer, takes, family):
    tools, call = family.split()[0], CALLS[family].format(ARGUMENTS) if family in CALLS else UNTYPED[family]
    twice = f"{call}; {call}" if tools == "llama3" else call + call
    if tools == "deepseek":
        twice = call.removesuffix("<｜tool▁calls▁end｜>") + call.removeprefix("<｜tool▁calls▁begin｜>")
    if tools == "minimax":
        twice = call.removesuffix("</minimax:tool_call>") + call.removeprefix("<minimax:tool_call>\n")
    for single in (False, True):
        form = ChatFormat(tools, schemas=TOOLS, single_call=single)
        grammar = reply_grammar(form, ANSWER, "arguments", tokenizer.special_id)
        assert takes(grammar, call)
        assert takes(grammar, twice) != single


@pytest.mark.parametrize(
    ("structure", "good", "bad"),
    [
        (StructuredOutputs(json_object=True), "{}", "[]"),
        (StructuredOutputs(regex="a/b\\/[0-9]+\n"), "a/b/12\n", "a/b/x\n"),
        (StructuredOutputs(choice=["yes", 'n"o']), 'n"o', "no"),
        (StructuredOutputs(grammar='start: word ("," word)*\nword: "a" | "b"'), "a,b", "a,c"),
    ],
)
def test_reasoning_comes_before_any_answer(tokenizer, takes, structure, good, bad):
    channel = reply_grammar(ChatFormat(reasoning="gemma4"), structure, "arguments", tokenizer.special_id)
    assert takes(channel, f"<|channel>thought\nhm\n<channel|>{good}")
    assert not takes(channel, f"<|channel>hm<channel|>{good}")
    form = ChatFormat(reasoning="think")
    grammar = reply_grammar(form, structure, "arguments", tokenizer.special_id)
    for text in (good, f"<think>hm, <b>\n</think>\n\n{good}", f"<think></think>{good}"):
        assert takes(grammar, text)
    for text in (bad, f"<think>hm</think>{bad}", f"<think>hm{good}", f"hm</think>{good}"):
        assert not takes(grammar, text)
    inside = reply_grammar(ChatFormat(reasoning="think", inside=True), structure, "arguments", tokenizer.special_id)
    assert takes(inside, f"hm</think>\n\n{good}")
    assert not takes(inside, good)


def test_messages_of_gpt_oss(tokenizer, takes):
    form = ChatFormat("gpt_oss", "gpt_oss", schemas=TOOLS)
    analysis = "<|channel|>analysis<|message|>f <or> g?<|end|><|start|>assistant"
    call, final = CALLS["gpt_oss"].format(ARGUMENTS), '<|channel|>final<|message|>{"answer": 5}'
    both = reply_grammar(form, ANSWER, "arguments", tokenizer.special_id)
    forced = reply_grammar(form, None, "arguments", tokenizer.special_id)
    answer = reply_grammar(ChatFormat(reasoning="gpt_oss"), ANSWER, "arguments", tokenizer.special_id)
    for text, of in ((call, (both, forced)), (analysis * 2 + call, (both, forced)), (analysis + final, (both, answer))):
        assert [takes(grammar, text) for grammar in (both, forced, answer)] == [g in of for g in (both, forced, answer)]


def test_forced_calls_have_at_most_one_space_between_tokens(tokenizer, takes):
    form = ChatFormat("json", schemas=TOOLS, single_call=True)
    grammar = reply_grammar(form, None, "arguments", tokenizer.special_id)
    assert takes(grammar, '{"name": "f", "arguments": {"a": 3}}')
    assert takes(grammar, '{"name":"f","arguments":{"a":3}}')
    assert takes(grammar, '{ "name" : "f" , "arguments" : { "a" : 3 } }')
    for text in ('{"name":  "f", "arguments": {"a": 3}}', '{"name":"f",\n"arguments": {"a": 3}}', ' {"name": "f"'):
        assert not takes(grammar, text)
    several = reply_grammar(ChatFormat("json", schemas=TOOLS), None, "arguments", tokenizer.special_id)
    call = '{"name": "f", "arguments": {"a": 3}}'
    assert [takes(several, json.dumps([json.loads(call)] * count)) for count in (0, 1, 16, 17)] == [
        False,
        True,
        True,
        False,
    ]
    thinking = ChatFormat("json", "think", schemas=TOOLS, single_call=True)
    assert takes(reply_grammar(thinking, None, "arguments", tokenizer.special_id), f"<think>f?</think>\n{call}")


def test_calls_have_no_properties_but_those_of_their_schemas(tokenizer, takes):
    """Nor has a tool without parameters any. A schema that says so itself lets the model add others."""
    listed = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"properties": {"c": {}}}}}
    tools = {"f": listed, "g": {}, "open": listed | {"additionalProperties": True}, "any": {"type": "object"}}
    tools["parts"] = {"allOf": [listed, {"properties": {"d": {"type": "integer"}}}]}
    good = [
        ("f", "{}"),
        ("f", '{"a": 3, "b": {"c": [1]}}'),
        ("g", "{}"),
        ("open", '{"a": 3, "x": 1}'),
        ("any", '{"x": 1}'),
        ("parts", '{"a": 3, "d": 4}'),
    ]
    bad = [("f", '{"x": 1}'), ("f", '{"a": 3, "x": 1}'), ("f", '{"b": {"c": 1, "x": 1}}'), ("g", '{"x": 1}')]
    for form, text in (
        (ChatFormat("json", schemas=tools, single_call=True), '{{"name": "{}", "arguments": {}}}'),
        (ChatFormat("mistral", schemas=tools), "[TOOL_CALLS]{}[ARGS]{}"),
        (ChatFormat("deepseek", schemas=tools), ALL.format(V31)),
    ):
        grammar = reply_grammar(form, None, "arguments", tokenizer.special_id)
        assert [call for call in good if not takes(grammar, text.format(*call))] == []
        assert [call for call in bad if takes(grammar, text.format(*call))] == []


def test_schemas_that_are_not_enforced_as_a_whole_are_taken(tokenizer, takes):
    schema = STRICT | {"not": {"required": ["b"]}, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}
    for form in (
        ChatFormat("json", schemas={"f": schema}, single_call=True),
        ChatFormat("hermes", schemas={"f": schema}),
    ):
        text = '{"name": "f", "arguments": {"a": 3}}'
        text = text if form.tools == "json" else f"<tool_call>{text}</tool_call>"
        grammar = reply_grammar(form, None, "arguments", tokenizer.special_id)
        assert takes(grammar, text)
        assert not takes(grammar, text.replace("3", "x"))


def test_names_of_all_tools_are_there():
    for family in WHOLE:
        if family != "json":
            form = ChatFormat(family, schemas=SCHEMAS)
            grammar = reply_grammar(form, ANSWER, "arguments", lambda _: None).grammar
            assert all(name in grammar for name in SCHEMAS)
