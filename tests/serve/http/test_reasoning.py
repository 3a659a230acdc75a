"""Reasoning split off the text, in whatever pieces it comes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayllm.serve.http.reasoning import ReasoningCounter, ReasoningSplitter


def split(pieces, inside=False):
    splitter = ReasoningSplitter(inside)
    parts = [splitter.feed(piece) for piece in pieces] + [splitter.finish()]
    return "".join(p.reasoning for p in parts), "".join(p.content for p in parts)


CASES = [
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


@pytest.mark.parametrize(("text", "inside", "parts"), CASES)
def test_splits_in_any_pieces(text, inside, parts):
    assert split([text], inside) == parts
    assert split(list(text), inside) == parts
    for border in range(len(text)):
        assert split([text[:border], text[border:]], inside) == parts


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "</", ">", "a", " ", "\n", "word"]), max_size=12),
    st.lists(st.integers(0, 80), max_size=10),
    st.booleans(),
)
def test_any_pieces_give_the_same(parts, borders, inside):
    text = "".join(parts)
    places = [0, *sorted(b % (len(text) + 1) for b in borders), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    assert split(pieces, inside) == split([text], inside)


def test_reasoning_streams_as_it_comes():
    splitter = ReasoningSplitter(False)
    assert [splitter.feed(p).reasoning for p in ("<think>\n", "one", " two", "</", "b", ">")] == [
        "",
        "one",
        " two",
        "",
        "</b",
        ">",
    ]
    assert splitter.feed(" </think> yes") == ("", "yes")
    assert splitter.feed(" !") == ("", " !")


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
    counter = ReasoningCounter(inside)
    for token in tokens:
        counter.add(token)
    assert counter.tokens == count
