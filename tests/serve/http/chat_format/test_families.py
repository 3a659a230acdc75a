"""The calls of each family of models, found in whatever pieces the text comes."""

import itertools
import json
import re
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tool_calls import (
    ALL,
    DSML,
    FINAL,
    GEMMA4,
    GLM,
    MINIMAX,
    NESTED,
    NEXT,
    QWEN,
    SCHEMAS,
    TO_F,
    V3,
    V31,
    WHOLE,
    dsml,
    invoked,
    pairs,
    parameters,
)

from rayllm.config.options import ServerConfig
from rayllm.serve.http.chat_format import ChatFormat, ChatParser, ReasoningCounter
from rayllm.serve.http.chat_format.families import CALL_FORMS, Family, Reasoning

FOUND = {  # family -> text -> texts and calls in it
    "qwen3_coder": {
        QWEN.format(parameters(text="x")): [("typed", '{"text": "x"}')],
        f"Hm.\n\n{QWEN.format('')}\n{QWEN.format('')}\n": ["Hm.\n\n", ("typed", "{}"), ("typed", "{}")],
        QWEN.format(parameters(text='a "q"\n\n<b> é\\n🙂', count=3)): [
            ("typed", '{"text": "a \\"q\\"\\n\\n<b> é\\\\n🙂", "count": 3}')
        ],
        QWEN.format("<parameter=text>\n</parameter><parameter=flag>True</parameter>"): [
            ("typed", '{"text": "", "flag": true}')
        ],
        "<function=f>\n<parameter=a>\n1\n</parameter>\n</function> done": [("f", '{"a": 1}'), " done"],
        "<function=f></function><function=f></function>": [("f", "{}"), ("f", "{}")],
        # Broken off, in a string and in another value; what is not of the form.
        "<tool_call><function=typed><parameter=text>\nab\n": [("typed", '{"text": "ab')],
        "<tool_call><function=typed><parameter=count>\n12": [("typed", "")],
        "<tool_call><function=typed><parameter=coun": [("typed", "")],
        f"<tool_call><function=f> junk </tool_call>{QWEN.format('')}": [("f", ""), ("typed", "{}")],
        QWEN.format("<parameter=text>x</parameter>junk"): [("typed", '{"text": "x"')],
    },
    "glm": {
        GLM.format(pairs(text="x")): [("typed", '{"text": "x"}')],
        "<tool_call>f</tool_call>": [("f", "{}")],
        "Hm <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>\n<tool_call>f\n</tool_call>.": [
            "Hm ",
            ("f", '{"a": 1}'),
            ("f", "{}"),
            ".",
        ],
        GLM.format(pairs(text=' 5\n"x" <b>', where='{"x": "</arg>"}')): [
            ("typed", '{"text": " 5\\n\\"x\\" <b>", "where": {"x": "</arg>"}}')
        ],
        "<tool_call>typed\n<arg_key>text</arg_key>\n<arg_value>ab": [("typed", '{"text": "ab')],
        "<tool_call>f\n<arg_key>a": [("f", "")],
        "<tool_call>f\n<arg_key>a</arg_key> junk</tool_call> ok": [("f", ""), " ok"],
    },
    "llama4": {
        "[f()]": [("f", "{}")],
        '[f(a=1, b="x"), get_weather(city=\'K"öln\', on=True)]': [
            ("f", '{"a": 1, "b": "x"}'),
            ("get_weather", '{"city": "K\\"öln", "on": true}'),
        ],
        "I look.\n<|python_start|>[f(a=[1, 'b', {'c': None}], d=(-1.5e3,),)]<|python_end|>": [
            "I look.\n",
            ("f", '{"a": [1, "b", {"c": null}], "d": [-1.5e3]}'),
        ],
        r"[f(a='\u00e9\x41\n\'\d\ud800)]')]": [("f", '{"a": "éA\\n\'\\\\d\ufffd)]"}')],
        '<|python_start|>{"name": "f", "parameters": {"a": 1}}<|python_end|>': [("f", '{"a": 1}')],
        '{"name": "f", "parameters": {"a": 1}}; {"name": "f", "parameters": {}}': [("f", '{"a": 1}'), ("f", "{}")],
        '[{"name": "f", "parameters": {}}, {"name": "f", "arguments": {}}] ok': [("f", "{}"), ("f", "{}"), " ok"],
        "[f(a=1": [("f", '{"a": 1')],
        "[f(a='x": [("f", '{"a": "x')],
        "[f(a=g(1), b=2)]\nNo.": [("f", '{"a": '), "\nNo."],
        "[f(a=1 b)]": [("f", '{"a": 1')],
        "[f(a={1: 2})]": [("f", '{"a": {')],
        "[f(a=1), rm(b=2)]": [("f", '{"a": 1}'), ", rm(b=2)]"],
    },
    "mistral": {
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "a1b2c3d4e"}]': [("f", '{"a": 1}')],
        'Hm [TOOL_CALLS] [{"name": "f", "arguments": {}},\n {"name": "f", "arguments": {"a": [1]}}]\n': [
            "Hm ",
            ("f", "{}"),
            ("f", '{"a": [1]}'),
        ],
        f"[TOOL_CALLS]f[ARGS]{NESTED}": [("f", NESTED)],
        "Hm.[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{}[TOOL_CALLS]get_weather[CALL_ID]a[ARGS]{}": [
            "Hm.",
            ("f", "{}"),
            ("get_weather", "{}"),
        ],
        '[TOOL_CALLS]f{"a": 1}': [("f", '{"a": 1}')],
        '[TOOL_CALLS]{"name": "f", "arguments": {}}': [("f", "{}")],
        '[TOOL_CALLS]f[ARGS]{"a": [[TOOL_CALLS]f[ARGS]{}': [("f", '{"a": ['), ("f", "{}")],
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": "x': [("f", '{"a": "x')],
        '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "rm", "arguments": {}}]': [
            ("f", "{}"),
            ', {"name": "rm", "arguments": {}}]',
        ],
    },
    "deepseek": {
        ALL.format(V3.format("f", NESTED)): [("f", NESTED)],
        ALL.format(V31.format("f", NESTED)): [("f", NESTED)],
        f"Hm.\n{ALL.format(V3.format('f', '{}') + chr(10) + V3.format('f', NESTED))} ": [
            "Hm.\n",
            ("f", "{}"),
            ("f", NESTED),
        ],
        ALL.format(V31.format("f", "{}") + V31.format("get_weather", "{}")): [("f", "{}"), ("get_weather", "{}")],
        V31.format("f", "{}"): [("f", "{}")],
        V31.format("f", '{"a": [1'): [("f", '{"a": [1')],
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{": [("f", "{")],
        ALL.format(V31.format("f", "{}") + V31.format("rm", "{}")): [
            ("f", "{}"),
            V31.format("rm", "{}") + "<｜tool▁calls▁end｜>",
        ],
    },
    "deepseek_v32": {
        DSML.format(dsml(text="x", count=3)): [("typed", '{"text": "x", "count": 3}')],
        DSML.format(""): [("typed", "{}")],
        # What a parameter says of itself counts, not the schema; without a word of its own the schema does.
        DSML.format(dsml(string="true", count=3)): [("typed", '{"count": "3"}')],
        DSML.format(dsml(string="false", where='{"x": [null, "</p>"]}', free="True")): [
            ("typed", '{"where": {"x": [null, "</p>"]}, "free": true}')
        ],
        DSML.format(dsml(string="false", free="not JSON")): [("typed", '{"free": "not JSON"}')],
        DSML.format('<｜DSML｜parameter name="count">3</｜DSML｜parameter>'): [("typed", '{"count": 3}')],
        "Hm.\n\n" + DSML.format(dsml(text=' "q"\n<b> é🙂 ')) + "\n": [
            "Hm.\n\n",
            ("typed", '{"text": " \\"q\\"\\n<b> é🙂 "}'),
        ],
        # V4's outer tags; several calls; none of the outer tags.
        DSML.replace("function_calls", "tool_calls").format(dsml(count=3)): [("typed", '{"count": 3}')],
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n</｜DSML｜invoke>\n<｜DSML｜invoke name="get_weather">\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>": [("f", "{}"), ("get_weather", "{}")],
        '<｜DSML｜invoke name="f"></｜DSML｜invoke> done': [("f", "{}"), " done"],
        # Broken off, in a string, in another value and in a tag; what is not of the form.
        f'<｜DSML｜function_calls><｜DSML｜invoke name="typed">{dsml(text="ab").split("</")[0]}': [
            ("typed", '{"text": "ab')
        ],
        f'<｜DSML｜function_calls><｜DSML｜invoke name="typed">{dsml(count=12).split("</")[0]}': [("typed", "")],
        '<｜DSML｜function_calls><｜DSML｜invoke name="typed"><｜DSML｜parameter name="coun': [("typed", "")],
        DSML.format("junk") + "ok": [("typed", ""), "ok"],
        DSML.format(dsml(text="x") + "junk"): [("typed", '{"text": "x"')],
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n</｜DSML｜invoke>\n<｜DSML｜invoke name="rm">': [
            ("f", "{}"),
            '\n<｜DSML｜invoke name="rm">',
        ],
    },
    "minimax": {
        MINIMAX.format(invoked(text=' "q"\n<b> é🙂 ', count=3, where='{"x": [null, "</p>"]}')): [
            ("typed", '{"text": " \\"q\\"\\n<b> é🙂 ", "count": 3, "where": {"x": [null, "</p>"]}}')
        ],
        "Hm.\n" + MINIMAX.format("") + "\n": ["Hm.\n", ("typed", "{}")],
        '<minimax:tool_call><invoke name="f"></invoke><invoke name="get_weather"></invoke></minimax:tool_call>': [
            ("f", "{}"),
            ("get_weather", "{}"),
        ],
        '<invoke name="f"><parameter name="a">1</parameter></invoke> done': [("f", '{"a": 1}'), " done"],
        '<minimax:tool_call><invoke name="typed"><parameter name="text">ab': [("typed", '{"text": "ab')],
        '<minimax:tool_call><invoke name="typed"><parameter name="count">12': [("typed", "")],
        MINIMAX.format("junk") + "ok": [("typed", ""), "ok"],
    },
    "gemma4": {
        GEMMA4.format('text:<|"|>x<|"|>'): [("typed", '{"text": "x"}')],
        "Hm.\n\n<|tool_call>call:f{}<tool_call|><|tool_call>call:get_weather{}<tool_call|>\n": [
            "Hm.\n\n",
            ("f", "{}"),
            ("get_weather", "{}"),
        ],
        GEMMA4.format('text:<|"|>a "q"\n{b}, <b|> é\\n🙂<|"|>,count:-3,share:1.5e3,flag:false,maybe:null'): [
            (
                "typed",
                '{"text": "a \\"q\\"\\n{b}, <b|> é\\\\n🙂", "count": -3, "share": 1.5e3, "flag": false, "maybe": null}',
            )
        ],
        # Nested; keys as strings, strings as JSON has them, blanks; what is no value of JSON.
        '<|tool_call>call:f{a:[1,{b c:[]},[<|"|><|"|>]],d:{}}<tool_call|>': [
            ("f", '{"a": [1, {"b c": []}, [""]], "d": {}}')
        ],
        '<|tool_call>call:f{<|"|>a:<|"|> : "x, \\"}" , "b": True, c:  None }<tool_call|>.': [
            ("f", '{"a:": "x, \\"}", "b": true, "c": null}'),
            ".",
        ],
        "<|tool_call>call:f{city:New York,n:007}<tool_call|>": [("f", '{"city": "New York", "n": "007"}')],
        # Broken off; what is not of the form.
        '<|tool_call>call:typed{text:<|"|>ab': [("typed", '{"text": "ab')],
        "<|tool_call>call:typed{count:12": [("typed", '{"count": ')],
        "<|tool_call>call:typed{coun": [("typed", "{")],
        "<|tool_call>call:f{a:1 junk<tool_call|> ok": [("f", '{"a": '), " ok"],
        "<|tool_call>call:f{a:1} junk<tool_call|> ok": [("f", '{"a": 1}'), " ok"],
    },
    "gpt_oss": {
        TO_F.format(NESTED): [("f", NESTED)],
        f"{FINAL.format('Hi <b>')}<|return|>": ["Hi <b>"],
        f"<|channel|>commentary<|message|>I look.{NEXT}{TO_F.format('{}')}<|start|>assistant{TO_F.format('')}": [
            "I look.",
            ("f", "{}"),
            ("f", "{}"),
        ],
        ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}': [("f", '{"a": 1}')],
        f"<|channel|>commentary<|message|>One.{NEXT} to=functions.f<|channel|>commentary<|message|>{{}}<|call|>": [
            "One.",
            ("f", "{}"),
        ],
        f"<|channel|>commentary<|message|>One.{NEXT}{FINAL.format('Two.')}": ["One.\nTwo."],
        TO_F.format('{"a').removesuffix("<|call|>"): [("f", '{"a')],
        "plain < text": ["plain < text"],
    },
}
TEXT = {  # what is no call stays as it is
    "qwen3_coder": ["<tool_call>", "<tool_call>\n<function=rm>\n</function>", "<function=f", "<function f>", "a < b"],
    "glm": ["<tool_call>", "<tool_call>f", "<tool_call>rm\n</tool_call>", "<tool_call>f(1)</tool_call>", "<arg_key>"],
    "llama4": [
        "[1, 2]",
        "[f](x)",
        "see [f()]",
        "[f(1)]",
        "[f",
        "[",
        "[rm()]",
        "<|python_start|>x",
        '{"a": 1}',
        "[f(a)]",
    ],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS]rm[ARGS]{}", "[TOOL_CALLS]f[ARGS]", "[TOOL", "[1]", "[TOOL_CALLS][]"],
    "deepseek": [
        ALL.format(""),
        V3.format("rm", "{}"),
        V31.format("f", "[]"),
        "<｜tool▁call",
        V31.format("", "{}"),
        "<",
    ],
    "deepseek_v32": [
        "<｜DSML｜function_calls>",
        "<｜DSML｜function_calls>\n</｜DSML｜function_calls>",
        DSML.format("").replace("typed", "rm"),
        '<｜DSML｜invoke name="f"',
        "<｜DSML｜parameter",
        "a ｜DSML｜ <",
    ],
    "minimax": [
        "<minimax:tool_call>",
        "<minimax:tool_call>\n</minimax:tool_call>",
        MINIMAX.format("").replace("typed", "rm"),
        '<invoke name="f"',
        "a <invoke> <",
    ],
    "gemma4": [
        "<|tool_call>",
        "<|tool_call>call:f",
        "<|tool_call>f{}<tool_call|>",
        "<|tool_call>call:rm{a:1}<tool_call|>",
        "call:f{a:1}",
        "a <| b",
    ],
    "gpt_oss": ["", "<|", "<|channel|>commentary to=functions.rm <|message|>{}<|call|>", "<|end|>x"],
}
CASES = [(family, text, found) for family, cases in FOUND.items() for text, found in cases.items()]
CASES += [(family, text, [text] if text else []) for family, texts in TEXT.items() for text in texts]
TAGS = ["<", "</", "[", "]", "{", "}", '"', "\n", " ", ",", "\\", "(", "'", "<|", "<｜", "json", "=", ">"]


def read(form, pieces, cut=False):
    """(reasoning, texts joined and calls as (name, arguments), in order) of a completion in pieces."""
    parser = ChatParser(form)
    reasoning, found = "", []
    for number, piece in enumerate(pieces, start=1):
        last = number == len(pieces)
        for event in parser.feed(piece, last=last, cut=last and cut):
            if event.kind == "reasoning_content":
                reasoning += event.text
            elif event.kind == "call":
                assert event.call == sum(isinstance(each, tuple) for each in found)
                found.append((event.text, ""))
            elif event.kind == "arguments":
                found[-1] = (found[-1][0], found[-1][1] + event.text)
            elif found and isinstance(found[-1], str):
                found[-1] += event.text
            else:
                found.append(event.text)
    assert parser.num_calls == sum(isinstance(each, tuple) for each in found)
    return reasoning, found


def form_of(family, **fields):
    return ChatFormat(family, schemas=SCHEMAS, **fields)


def splits(text, borders):
    places = [0, *sorted(b % (len(text) + 1) for b in borders), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(places)]


def test_the_option_knows_all_families():
    fields = ServerConfig.model_fields
    assert {*get_args(fields["tool_call_parser"].annotation)} == {"auto", "none", *get_args(Family)}
    assert {*get_args(fields["reasoning_parser"].annotation)} == {"auto", "none", *get_args(Reasoning)}
    assert {*CALL_FORMS, "gpt_oss"} == {*get_args(Family), "json"}


@pytest.mark.parametrize(("family", "text", "found"), CASES)
def test_calls_in_any_pieces(family, text, found):
    form = form_of(family)
    assert read(form, [text]) == ("", found)
    assert read(form, list(text) or [""]) == ("", found)
    for border in range(len(text)):
        assert read(form, [text[:border], text[border:]]) == ("", found)


@settings(deadline=None, max_examples=300)
@given(
    st.sampled_from(sorted(FOUND)), st.data(), st.lists(st.integers(0, 600), max_size=20), st.booleans(), st.booleans()
)
def test_any_pieces_of_any_mixture_give_the_same(family, data, borders, single, cut):
    texts = [text for of, text, _ in CASES if of == family]
    parts = st.sampled_from(texts) | st.sampled_from(TAGS) | st.sampled_from(texts).map(lambda text: text[:-7])
    text = "".join(data.draw(st.lists(parts, max_size=5)))
    form = form_of(family, single_call=single)
    whole = read(form, [text], cut)
    assert read(form, splits(text, borders), cut) == whole
    assert not single or sum(isinstance(found, tuple) for found in whole[1]) <= 1


@settings(deadline=None)
@given(st.text(max_size=200), st.sampled_from(sorted(FOUND)))
def test_text_without_calls_is_not_changed(text, family):
    assert "".join(read(form_of(family), [text])[1]) == text


@pytest.mark.parametrize("family", WHOLE)
def test_nothing_of_a_call_that_is_cut_off_is_text(family):
    text = WHOLE[family]
    *_, last = read(form_of(family), [text])[1]
    for end in range(len(text)):
        reasoning, found = read(form_of(family), [text[:end]], cut=True)
        assert reasoning == ""
        assert all(isinstance(each, tuple) for each in found)
        assert not found or last[1].startswith(found[-1][1])
        said = "" if family in ("json", "gpt_oss") else "I look.\n"
        texts = [each for each in read(form_of(family), [said + text[:end]], cut=True)[1] if isinstance(each, str)]
        assert "".join(texts) == said


def test_text_that_is_cut_off_stays():
    for family in ("llama3", "llama4"):
        answer = '{"answer": [1, 2, {"name": "x'
        assert read(form_of(family), [answer], cut=True)[1] == [answer]
    assert read(form_of("hermes"), ["a < b, <tool_box> and"], cut=True)[1] == ["a < b, <tool_box> and"]
    assert read(ChatFormat(reasoning="think"), ["a <"], cut=True)[1] == ["a <"]


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("text", "5", '"5"'),
        ("text", "null", '"null"'),
        ("count", " 5 ", "5"),
        ("count", "five", '"five"'),
        ("count", "5.5", '"5.5"'),
        ("share", "5", "5"),
        ("share", "NaN", '"NaN"'),
        ("flag", "False", "false"),
        ("flag", "true", "true"),
        ("flag", "yes", '"yes"'),
        ("items", '["a", 1]', '["a", 1]'),
        ("items", "[" * 100_000, json.dumps("[" * 100_000)),
        ("where", '{"a": {}}', '{"a": {}}'),
        ("where", "[]", '"[]"'),
        ("maybe", "None", "null"),
        ("maybe", "5", '"5"'),
        ("either", "5", "5"),
        ("either", "5.0", '"5.0"'),
        ("free", '{"a": 1}', '{"a": 1}'),
        ("free", "plain", '"plain"'),
        ("unknown", "5", "5"),
        ("kind", "1", '"1"'),
        ("endless", "5", "5"),
        ("wide", "x", '"x"'),
    ],
)
def test_values_between_tags_have_the_type_of_the_schema(key, text, value):
    for family, written in (
        ("qwen3_coder", QWEN.format(parameters(**{key: text}))),
        ("glm", GLM.format(pairs(**{key: text}))),
        ("minimax", MINIMAX.format(invoked(**{key: text}))),
    ):
        _, [(_, arguments)] = read(form_of(family), [written])
        assert arguments == f'{{"{key}": {value}}}'


@settings(deadline=None)
@given(st.text(max_size=60).filter(lambda text: "</" not in text), st.lists(st.integers(0, 300), max_size=8))
def test_strings_between_tags_come_back_as_they_were(value, borders):
    for family, written in (
        ("qwen3_coder", QWEN.format(parameters(text=value))),
        ("glm", GLM.format(pairs(text=value))),
        ("deepseek_v32", DSML.format(dsml(text=value))),
        ("minimax", MINIMAX.format(invoked(text=value))),
    ):
        _, [(_, arguments)] = read(form_of(family), splits(written, borders))
        assert json.loads(arguments) == {"text": value}


ANY_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None)
@given(ANY_VALUE, st.lists(st.integers(0, 300), max_size=8))
def test_python_literals_become_the_same_json(value, borders):
    _, [(_, arguments)] = read(form_of("llama4"), splits(f"[f(a={value!r})]", borders))
    assert json.loads(arguments) == {"a": value}


def as_gemma4(value):
    """As the chat template of Gemma 4 writes a value, but for keys, which it writes without quotes."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{as_gemma4(key)}:{as_gemma4(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(as_gemma4, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)


@settings(deadline=None)
@given(ANY_VALUE.filter(lambda value: '<|"' not in str(value)), st.lists(st.integers(0, 300), max_size=8))
def test_values_of_gemma4_become_the_same_json(value, borders):
    _, [(_, arguments)] = read(
        form_of("gemma4"), splits(f"<|tool_call>call:f{{a:{as_gemma4(value)}}}<tool_call|>", borders)
    )
    assert json.loads(arguments) == {"a": value}


def test_arguments_stream_as_they_come():
    parser = ChatParser(form_of("qwen3_coder"))
    steps = [
        "<tool_call>\n<function=typed>\n<parameter=text>\n",
        "one",
        " two\n",
        "three",
        "\n</parameter>\n</function>",
    ]
    written = ["".join(piece.text for piece in parser.feed(step) if piece.kind == "arguments") for step in steps]
    assert written == ['{"text": "', "one", " two", "\\nthree", '"}']
    parser = ChatParser(form_of("gpt_oss"))
    steps = ["<|channel|>commentary to=functions.f<|message|>", '{"a": ', "1}", "<|call|>"]
    assert [[piece.text for piece in parser.feed(step)] for step in steps] == [["f"], ['{"a": '], ["1}"], []]


@pytest.mark.parametrize("family", WHOLE)
def test_a_single_call_leaves_out_the_rest(family):
    text = WHOLE[family] + ("<|call|><|start|>assistant" if family == "gpt_oss" else "") + WHOLE[family] + " bye"
    _, found = read(form_of(family, single_call=True), [text])
    assert len(found) == 1
    assert isinstance(found[0], tuple)


def test_long_outputs_in_small_pieces():  # a parser that reads again what it has read would take minutes
    for family, text in WHOLE.items():
        long = re.sub(r"\bx\b", "word < [ \n" * 10_000, text).replace("🙂", "word < [" * 10_000)
        _, found = read(form_of(family), splits(long, range(0, len(long), 4)))
        assert all(isinstance(each, tuple) for each in found)
        noise = [
            "<tool_call>",
            "[TOOL_CALLS]",
            "<｜tool▁call▁begin｜>f",
            "<｜DSML｜",
            "<|channel|>x",
            "<|tool_call>call:",
            "<minimax:tool_call>",
            "[f(",
            "\n{",
            "<function=",
        ] * 2_000
        assert "".join(map(str, read(form_of(family), noise)[1])) or family == "llama4"


# ---- reasoning

ANALYSIS = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("form", "text", "reasoning", "found"),
    [
        (ChatFormat(reasoning="mistral"), "[THINK]\nhm [x]\n[/THINK]\n\nYes.", "hm [x]", ["Yes."]),
        (ChatFormat(reasoning="mistral", inside=True), "hm[/THINK]Yes.", "hm", ["Yes."]),
        (ChatFormat(reasoning="mistral"), "[THIN", "", ["[THIN"]),
        (ChatFormat(reasoning="gemma4"), "<|channel>thought\nhm <b>\n<channel|>Yes.", "hm <b>", ["Yes."]),
        (ChatFormat(reasoning="gemma4"), "<|channel>thought\n<channel|>Yes.", "", ["Yes."]),
        (ChatFormat(reasoning="gemma4"), "<|channel>thou", "", ["<|channel>thou"]),
        (
            form_of("gemma4", reasoning="gemma4", inside=True),
            "f?\n<channel|><|tool_call>call:f{}<tool_call|>",
            "f?",
            [("f", "{}")],
        ),
        (
            form_of("mistral", reasoning="mistral"),
            "[THINK]f?[TOOL_CALLS][/THINK][TOOL_CALLS]f[ARGS]{}",
            "f?[TOOL_CALLS]",
            [("f", "{}")],
        ),
        (form_of("glm", reasoning="think"), "\n<think>f?</think>\n<tool_call>f\n</tool_call>", "f?", [("f", "{}")]),
        (
            form_of("deepseek", reasoning="think", inside=True),
            f"f?</think>\n\n{ALL.format(V31.format('f', '{}'))}",
            "f?",
            [("f", "{}")],
        ),
        (ChatFormat(reasoning="gpt_oss"), f"{ANALYSIS.format('hm <b>')}{FINAL.format('Yes.')}", "hm <b>", ["Yes."]),
        (ChatFormat("gpt_oss"), f"{ANALYSIS.format('hm')}{FINAL.format('Yes.')}", "", ["hm\nYes."]),
        (
            form_of("gpt_oss", reasoning="gpt_oss"),
            f"{ANALYSIS.format('f?')}{TO_F.format('{}')}<|start|>assistant{ANALYSIS.format('g?')}",
            "f?\ng?",
            [("f", "{}")],
        ),
        (
            form_of("gpt_oss", reasoning="gpt_oss"),
            f"<|channel|>analysis to=python code<|message|>1+1<|call|><|start|>assistant{FINAL.format('2')}",
            "1+1",
            ["2"],
        ),
        (ChatFormat(reasoning="gpt_oss"), "<|channel|>analysis<|message|>cut off", "cut off", []),
    ],
)
def test_reasoning_in_any_pieces(form, text, reasoning, found):
    for border in range(len(text)):
        assert read(form, [text[:border], text[border:]]) == (reasoning, found)
    assert read(form, list(text)) == (reasoning, found)


def test_tokens_of_reasoning_are_counted():
    analysis = ["<|channel|>", "analysis", "<|message|>", "hm", " a", "<|end|>"]
    rest = ["<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "Yes", "."]
    for tokens, count in (
        (analysis + rest, 6),
        (rest[2:], 0),
        (analysis + rest[:2] + analysis + rest, 14),
        (analysis[:4], 4),
    ):
        counter = ReasoningCounter(ChatFormat(reasoning="gpt_oss"))
        for token in tokens:
            counter.add(token)
        assert counter.tokens == count
    for reasoning, tokens, count in (
        ("mistral", ["[THINK]", "a", "b", "[/THINK]", "Yes"], 4),
        ("gemma4", ["<|channel>", "thought", "\n", "a", "\n", "<channel|>", "Yes"], 6),
    ):
        counter = ReasoningCounter(ChatFormat(reasoning=reasoning))
        for token in tokens:
            counter.add(token)
        assert counter.tokens == count
