"""Reasoning and tool calls found in text, in whatever pieces it comes."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayllm.serve.http.chat_format import ChatFormat, ChatParser, Piece, ReasoningCounter

NAMES = {"f": {}, "get_weather": {}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'
CALLED = ("f", '{"a": "x"}')


def form_of(tools, single=False):
    return ChatFormat(tools, schemas=NAMES, single_call=single)


def read(form, pieces):
    """(reasoning, texts joined and calls as (name, arguments), in order) of a completion in pieces."""
    parser = ChatParser(form)
    reasoning, found = "", []
    for number, piece in enumerate(pieces, start=1):
        for event in parser.feed(piece, last=number == len(pieces)):
            num_calls = sum(isinstance(f, tuple) for f in found)
            match event.kind:
                case "reasoning_content":
                    assert not found, "reasoning comes first"
                    reasoning += event.text
                case "call":
                    assert event.call == num_calls
                    found.append((event.text, ""))
                case "arguments":
                    assert event.call == num_calls - 1
                    found[-1] = (found[-1][0], found[-1][1] + event.text)
                case "content" if found and isinstance(found[-1], str):
                    found[-1] += event.text
                case "content":
                    found.append(event.text)
    assert parser.num_calls == sum(isinstance(f, tuple) for f in found)
    return reasoning, found


def parse(tools, pieces, single=False):
    """What is found in a text without reasoning."""
    reasoning, found = read(form_of(tools, single), pieces)
    assert reasoning == ""
    return found


HERMES = {
    "": [],
    "plain text, a < b and <b>bold</b>": ["plain text, a < b and <b>bold</b>"],
    " \n ": [" \n "],
    CALL: [CALLED],
    f"Let me see.\n{CALL}\n": ["Let me see.\n", CALLED],
    f"\n\n{CALL}\n{CALL}": [CALLED, CALLED],
    f"{CALL}\n and then {CALL}": [CALLED, "\n and then ", CALLED],
    '<tool_call>{"name":"f","arguments":{"a":"</tool_call>}\\"","b":[{},[1]]}}</tool_call>x': [
        ("f", '{"a":"</tool_call>}\\"","b":[{},[1]]}'),
        "x",
    ],
    '<tool_call>{"arguments": {"k": {"n": 1}}, "name": "f"}</tool_call>': [("f", '{"k": {"n": 1}}')],
    '<tool_call>{"name": "f"}</tool_call>': [("f", "{}")],
    '<tool_call>{"name": "f", "arguments": null}</tool_call>': [("f", "{}")],
    '<tool_call>{"id": 3, "x": [{}], "t": "f", "name": "\\u0066", "arguments": {}}</tool_call>': [("f", "{}")],
    '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"é\\"}"}</tool_call>': [("f", '{"a": "é"}')],
    '<tool_call>{"arguments": "{}", "name": "f"}</tool_call>': [("f", "{}")],
    # No end tag; one brace too few; text instead of the end tag.
    '<tool_call>{"name": "f", "arguments": {"a": 1}}': [("f", '{"a": 1}')],
    '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call> ok': [("f", '{"a": 1}'), " ok"],
    '<tool_call>{"name": "f", "arguments": {}} hm </tool_call>': [("f", "{}"), " hm </tool_call>"],
    # Broken off, or no JSON, within the arguments: they are passed on as they are.
    '<tool_call>{"name": "f", "arguments": {"a": "b': [("f", '{"a": "b')],
    '<tool_call>{"name": "f", "arguments": {"a": nope}</tool_call> ok': [("f", '{"a": nope}'), " ok"],
    '<tool_call>{"name": "f", "arguments": {"a": {}</tool_call> ok': [("f", '{"a": {}'), " ok"],
}
HERMES_TEXT = [  # what is no call is text, all of it
    "<tool_call>",
    "<tool_call> \n",
    "<tool_call>f(1)</tool_call>",
    "<tool_cal",
    '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
    '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
    '<tool_call>{"arguments": {"a": 1}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "{"}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>',
    '<tool_call>{"name": "f", "arg',
    '<tool_call>{"name": "f"',
    '<tool_call>{"name" "f"}</tool_call>',
    "<tool_call>{name: f}</tool_call>",
    "<tool_call>[]</tool_call>",
    "<tool_call>{}</tool_call>",
]
LLAMA3 = {
    '{"name": "f", "parameters": {"a": "x"}}': [CALLED],
    '<|python_tag|>{"name": "f", "parameters": {"a": "x"}}': [CALLED],
    '\n{"name": "f", "parameters": {"a": "x"}}; {"name": "f", "arguments": {"a": "x"}}\n': [CALLED, CALLED],
    'I look:\n{"name": "f", "parameters": {"a": "x"}}\nDone.': ["I look:\n", CALLED, "\nDone."],
    'Now <|python_tag|> {"name": "f", "parameters": {"a": "x"}}': ["Now ", CALLED],
    '{"type": "function", "name": "f", "parameters": {"a": "x"}}': [CALLED],
    '{"name": "f", "parameters": {"a': [("f", '{"a')],
}
LLAMA3_TEXT = [
    "hello",
    "<|python_tag|>",
    "<|python_tag|> \n",
    "<|python_tag|>search.call(query='x')",
    '{"name": "Bob", "parameters": {}}',
    '{"answer": 42}\n{"x": {}}',
    'An example: {"name": "f", "parameters": {}}',
    "{\n{\n{",
    '{"a": "\n{',
]
JSON = {
    '{"name": "f", "arguments": {"a": "x"}}': [CALLED],
    ' [{"name": "f", "parameters": {"a": "x"}} ,\n{"name": "f", "arguments": {"a": "x"}} ] ': [CALLED, CALLED],
    '[{"name": "f", "arguments": {"a": "x"': [("f", '{"a": "x"')],
    '[{"name": "f", "arguments": {}}, {"na': [("f", "{}"), ', {"na'],
    '{"name": "f", "arguments": {}} x': [("f", "{}"), " x"],
}
JSON_TEXT = ["", "[", "[]", "[ 3]", "text", '{"name": "other"}', "  "]

CASES = [("hermes", text, found) for text, found in HERMES.items()]
CASES += [("hermes", text, [text]) for text in HERMES_TEXT]
CASES += [("llama3", text, found) for text, found in LLAMA3.items()]
CASES += [("llama3", text, [text]) for text in LLAMA3_TEXT]
CASES += [("json", text, found) for text, found in JSON.items()]
CASES += [("json", text, [text] if text else []) for text in JSON_TEXT]


def splits(text, borders):
    places = [0, *sorted(b % (len(text) + 1) for b in borders), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(places)]


@pytest.mark.parametrize(("form", "text", "found"), CASES)
def test_calls_in_any_pieces(form, text, found):
    assert parse(form, [text]) == found
    assert parse(form, list(text)) == found
    for border in range(len(text)):
        assert parse(form, [text[:border], text[border:]]) == found


@settings(deadline=None)
@given(
    st.sampled_from(["hermes", "llama3", "json"]), st.data(), st.lists(st.integers(0, 500), max_size=20), st.booleans()
)
def test_any_pieces_of_any_mixture_give_the_same(form, data, borders, single):
    part = st.sampled_from([t for f, t, _ in CASES if f == form] + ["<", "{", "}", '"', "\n", "[", ",", "\\", " "])
    text = "".join(data.draw(st.lists(part, max_size=6)))
    whole = parse(form, [text], single)
    assert parse(form, splits(text, borders), single) == whole
    assert not single or sum(isinstance(found, tuple) for found in whole) <= 1


@settings(deadline=None)
@given(st.text(max_size=200).filter(lambda text: "name" not in text), st.sampled_from(["hermes", "llama3", "json"]))
def test_text_without_calls_is_not_changed(text, form):
    kept = "".join(parse(form, [text]))
    assert kept == text


@settings(deadline=None)
@given(
    st.dictionaries(st.text(), st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=5)),
    st.booleans(),
)
def test_arguments_are_exactly_what_the_model_wrote(arguments, ascii_only):
    written = json.dumps(arguments, ensure_ascii=ascii_only)
    text = f'<tool_call>\n{{"name": "f", "arguments": {written}}}\n</tool_call>'
    assert parse("hermes", list(text)) == [("f", written)]
    assert json.loads(written) == arguments


def test_arguments_stream_as_they_come():
    parser = ChatParser(form_of("hermes"))
    assert parser.feed('<tool_call>{"name": "f", "arguments": ') == []
    start, first = parser.feed('{"a": "lo')
    assert (start, first) == (Piece("call", "f"), Piece("arguments", '{"a": "lo'))
    assert parser.feed('ng"') == [Piece("arguments", 'ng"')]
    assert parser.feed("}}") == [Piece("arguments", "}")]


def test_text_is_held_back_only_while_it_may_become_a_call():
    parser = ChatParser(form_of("hermes"))
    assert parser.feed("Hello <") == [Piece("content", "Hello ")]
    assert parser.feed("tool") == []
    assert parser.feed("box>") == [Piece("content", "<toolbox>")]


def test_a_single_call_leaves_out_the_rest():
    assert parse("hermes", [f"Hm {CALL}{CALL} bye"], single=True) == ["Hm ", CALLED]
    assert parse("llama3", ['{"name": "f"}; {"name": "f"}'], single=True) == [("f", "{}")]
    assert parse("json", ['[{"name": "f"}, {"name": "f"}]'], single=True) == [("f", "{}")]


def test_long_outputs_in_small_pieces():  # a parser that reads again what it has read would take minutes
    arguments = '{"text": "' + "word < { \\n " * 20_000
    text = '<tool_call>{"name": "f", "arguments": ' + arguments
    assert parse("hermes", splits(text, range(0, len(text), 4))) == [("f", arguments)]
    for form in ("hermes", "llama3", "json"):
        for piece in (" \n", '{"a": "\n', "<tool_call>{"):
            assert parse(form, [piece] * 20_000) == [piece * 20_000]


# ---- reasoning


def split(pieces, inside=False):
    reasoning, found = read(ChatFormat(reasoning="think", inside=inside), pieces)
    return reasoning, "".join(found)


REASONING = [
    ("<think>\nhm, a < b\n\n</think>\n\nanswer ", False, ("hm, a < b", "answer ")),
    ("<think></think>x", False, ("", "x")),
    ("<think>\n\n</think>\n\n", False, ("", "")),
    ("\n <think>a b</think>x<think>y</think>", False, ("a b", "x<think>y</think>")),
    ("no tags", False, ("", "no tags")),
    (" said <think>x</think>", False, ("", " said <think>x</think>")),
    ("<thinking>x", False, ("", "<thinking>x")),
    ("<thi", False, ("", "<thi")),
    ("", False, ("", "")),
    ("x</think>y", False, ("", "x</think>y")),
    ("hm</think>yes", True, ("hm", "yes")),
    ("\nhm <b> </thin k\n</think>\nyes", True, ("hm <b> </thin k", "yes")),
    ("<think>hm</think>yes", True, ("hm", "yes")),
    ("cut off </thi", True, ("cut off </thi", "")),
    ("cut off \n", True, ("cut off", "")),
    ("", True, ("", "")),
]


@pytest.mark.parametrize(("text", "inside", "parts"), REASONING)
def test_reasoning_in_any_pieces(text, inside, parts):
    assert split([text], inside) == parts
    assert split([*text, ""], inside) == parts
    for border in range(len(text)):
        assert split([text[:border], text[border:]], inside) == parts


def test_reasoning_streams_as_it_comes():
    parser = ChatParser(ChatFormat(reasoning="think"))
    pieces = ["<think>\n", "one", " two", "</", "b", ">", " </think> yes", " !"]
    found = [
        [Piece("reasoning_content", "one")],
        [Piece("reasoning_content", " two")],
        [],
        [Piece("reasoning_content", "</b")],
        [Piece("reasoning_content", ">")],
        [Piece("content", "yes")],
    ]
    assert [parser.feed(piece) for piece in pieces] == [[], *found, [Piece("content", " !")]]


@pytest.mark.parametrize(
    ("tokens", "inside", "count"),
    [
        (["<think>", "\n", "a", " b", "</think>", "\n\n", "yes"], False, 5),
        (["a", " b", "</think>", "yes"], True, 3),
        (["a", " b</", "think", "> yes", " it", " is"], True, 4),
        (["yes", "</think>"], False, 0),
        (["\n", " ", "yes"], False, 0),
        (["<", "think", ">", "cut"], False, 4),
    ],
)
def test_reasoning_tokens(tokens, inside, count):
    counter = ReasoningCounter(ChatFormat(reasoning="think", inside=inside))
    for token in tokens:
        counter.add(token)
    assert counter.tokens == count


# ---- both

PARTS = [
    "<think>",
    "</think>",
    '<tool_call>{"name": "f", "arguments": {"a": "<think>"}}</tool_call>',
    "<tool_call>",
    "{}",
    '{"name": "f", "parameters": {',
    "}}",
    " ",
    "\n",
    "word",
    "<",
    "</",
    "[",
    "]",
]


@settings(deadline=None)
@given(
    st.sampled_from([None, "hermes", "llama3", "json"]),
    st.lists(st.sampled_from(PARTS), max_size=10),
    st.lists(st.integers(0, 400), max_size=12),
    st.booleans(),
    st.booleans(),
)
def test_any_pieces_of_reasoning_and_calls_give_the_same(tools, parts, borders, thinks, inside):
    form = ChatFormat(tools, "think" if thinks else None, inside, {"f": {}})
    text = "".join(parts)
    assert read(form, splits(text, borders)) == read(form, [text])


@pytest.mark.parametrize(
    ("form", "tags"),
    [
        (ChatFormat(), set()),
        (ChatFormat("hermes"), {"<tool_call>", "</tool_call>"}),
        (ChatFormat("llama3", reasoning="think"), {"<think>", "</think>"}),
        (ChatFormat("json"), set()),
    ],
)
def test_tags(form, tags):
    assert form.tags == tags


@pytest.mark.parametrize("step", [1, 5, 1000])
def test_what_follows_a_message_of_gpt_oss_without_a_header_begins_a_line(step):
    text = "<|channel|>final<|message|>Hello<|end|>world"
    parser, found = ChatParser(ChatFormat(reasoning="gpt_oss")), ""
    for start in range(0, len(text), step):
        found += "".join(piece.text for piece in parser.feed(text[start : start + step]))
    assert found + "".join(piece.text for piece in parser.feed("", last=True)) == "Hello\nworld"
