"""Compiling grammars: every kind, what is refused and why, the limits, the child process, what is kept."""

from __future__ import annotations

import json
import os
import signal

import msgspec
import pytest

from rayllm.api.sampling_params import MAX_CHOICES, MAX_STRUCTURE_BYTES, SamplingParams, StructuredOutputs
from rayllm.config.options import BUNDLED_MODEL
from rayllm.errors import InvalidRequestError
from rayllm.text import grammar_compiler
from rayllm.text.grammar import Grammar, GrammarConstraint
from rayllm.text.grammar_compiler import GrammarCompiler
from rayllm.text.grammar_trial import Setup, Trial
from rayllm.text.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(BUNDLED_MODEL)
VOCAB, EOS = 4096, [2, 0]


def new_compiler(**options) -> GrammarCompiler:
    return GrammarCompiler(str(BUNDLED_MODEL), VOCAB, EOS, **options)


@pytest.fixture(scope="module")
def compiler():
    made = new_compiler()
    yield made
    made.close()


def compile_now(compiler: GrammarCompiler, **kind) -> Grammar:
    return compiler.compile(StructuredOutputs(**kind)).result(60)


def allowed(constraint: GrammarConstraint, grammar: Grammar) -> set[int]:
    while constraint.mask() is None and constraint.error() is None:
        grammar.threads.wait(0.05)
    assert constraint.error() is None
    mask = constraint.mask()
    assert len(mask) == VOCAB // 8
    return {token for token in range(VOCAB) if mask[token // 8] >> (token % 8) & 1}


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether the text, token by token, is allowed, and the end after it."""
    constraint = grammar()
    for token in TOKENIZER.encode(text, add_special_tokens=False):
        if token not in allowed(constraint, grammar):
            return False
        constraint.accept(token)
    return allowed(constraint, grammar) >= set(EOS)


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ({"regex": "[a-c]+x?"}, ["a", "abcx"], ["", "x", "abxx", "A"]),
        ({"choice": ['say "so"', "a|b", "new\nline", "Ünï✓"]}, ['say "so"', "a|b", "new\nline", "Ünï✓"], ["a", "b"]),
        ({"grammar": 'start: N ("+" N)*\nN: /[0-9]+/'}, ["1", "12+3"], ["+", "1+", "a"]),
        ({"json_object": True}, ["{}", '{"a": [1, {"b": null}]}'], ["[]", '"a"', "{", ""]),
        ({"json": '{"type": "integer", "minimum": 5, "maximum": 17}'}, ["5", "17"], ["4", "18", "5.5", '"5"']),
        ({"json": "true"}, ["[]", "1", '{"a": "b"}'], ["", "[", "x"]),
    ],
)
def test_every_kind_allows_its_texts_and_no_others(compiler, kind, good, bad):
    grammar = compile_now(compiler, **kind)
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


def test_where_only_the_end_is_left_the_mask_has_only_the_end(compiler):
    grammar = compile_now(compiler, choice=["yes"])
    constraint = grammar()
    for token in TOKENIZER.encode("yes", add_special_tokens=False):
        assert not allowed(constraint, grammar) & set(EOS)
        constraint.accept(token)
    assert allowed(constraint, grammar) == set(EOS)


def test_sequences_of_one_grammar_do_not_disturb_each_other(compiler):
    grammar = compile_now(compiler, regex="(ab)*|(ba)*")
    a, b = (TOKENIZER.encode(letter, add_special_tokens=False)[0] for letter in "ab")
    first, second = grammar(), grammar()
    first.accept(a)
    second.accept(b)
    assert (a in allowed(second, grammar), b in allowed(second, grammar)) == (True, False)
    assert (a in allowed(first, grammar), b in allowed(first, grammar)) == (False, True)


def test_json_cannot_go_on_with_blanks_for_ever(compiler):
    grammar = compile_now(compiler, json_object=True)
    assert accepts(grammar, '{ "a" : 1 }')
    assert not accepts(grammar, "{" + "\n" * 50 + "}")


def test_a_token_that_the_mask_forbids_is_an_error_and_not_a_hang(compiler):
    grammar = compile_now(compiler, choice=["yes"])
    constraint = grammar()
    constraint.accept(TOKENIZER.encode("no", add_special_tokens=False)[0])
    while constraint.error() is None:
        grammar.threads.wait(0.05)
    assert constraint.error().startswith("structured_outputs: ")
    assert constraint.mask() is None


REFUSED = {
    "no JSON": ({"json": "{"}, "EOF"),
    "no schema": ({"json": "[1]"}, "schema"),
    "unknown type": ({"json": '{"type": "objec"}'}, "objec"),
    "nothing fits": ({"json": "false"}, "nsatisfiable"),
    "keyword without support": ({"json": '{"type": "array", "uniqueItems": true}'}, "uniqueItems"),
    "reference to nowhere": ({"json": '{"$ref": "#/$defs/none"}'}, "none"),
    "bad regex": ({"regex": "(a"}, "unclosed group"),
    "backreference": ({"regex": r"(a)\1"}, "backreferences"),
    "look-ahead": ({"regex": "(?=a)b"}, "look-around"),
    "unknown rule": ({"grammar": "start: x"}, "unknown name"),
    "deep schema": ({"json": '{"items":' * 6000 + "{}" + "}" * 6000}, "recursion limit"),
    "deep value": ({"json": '{"const":' + "[" * 10_000 + "]" * 10_000 + "}"}, "recursion limit"),
    "deep grammar": ({"grammar": "start: " + "(" * 20000 + '"a"' + ")" * 20000}, "nested"),
    "deep regex": ({"regex": "(" * 30000 + "a" + ")" * 30000}, "regex"),
    "a regex that grows": ({"regex": "(((a{100}){100}){100}){100}"}, "too complex"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compiled_is_refused_with_the_reason(compiler, name):
    kind, reason = REFUSED[name]
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        compile_now(compiler, **kind)
    assert caught.value.param == "structured_outputs"
    assert str(caught.value).startswith("structured_outputs: ")
    assert len(str(caught.value)) < 600


def test_known_hard_ones_that_can_be_compiled(compiler):
    assert accepts(compile_now(compiler, regex="(a+)+b"), "aaab")
    choices = [f"choice {i}" for i in range(MAX_CHOICES)]
    assert accepts(compile_now(compiler, choice=choices), "choice 999")
    enum = [f"value {i}" for i in range(4000)]
    assert accepts(compile_now(compiler, json=json.dumps({"enum": enum})), '"value 3999"')


def test_a_slow_one_is_stopped_and_the_next_one_is_compiled(monkeypatch):
    compiler = new_compiler(limit_s=30)
    try:
        compile_now(compiler, regex="a")  # a child is running now
        trials = compiler._all_trials
        for trial in trials:
            trial._limit_s = 0.0
        for text in ("b", "c"):  # both children
            with pytest.raises(InvalidRequestError, match="longer than 0 s"):
                compile_now(compiler, regex="(((x{90}){90}){90}){90}" + text)
        assert all(trial._child is None for trial in trials)
        for trial in trials:
            trial._limit_s = 30
        assert accepts(compile_now(compiler, regex="d"), "d")
    finally:
        compiler.close()
    assert all(trial._child is None for trial in trials)


def test_a_child_that_dies_takes_only_the_grammar_it_had_with_it():
    compiler = new_compiler()
    try:
        compile_now(compiler, regex="a")
        compile_now(compiler, regex="b")
        for trial in compiler._all_trials:
            if trial._child is not None:
                trial._child.kill()
                trial._child.wait()
        assert accepts(compile_now(compiler, regex="c"), "c")
        assert accepts(compile_now(compiler, regex="d"), "d")
    finally:
        compiler.close()


def test_a_child_that_crashes_refuses_the_grammar_it_had():
    trial = Trial(Setup(TOKENIZER.backend.to_str(), TOKENIZER.vocab_size, VOCAB, EOS), 30)
    assert trial.run(StructuredOutputs(regex="a")) >= 0
    child, connection = trial._child, trial._connection

    class Crashing:
        """Sends the grammar, and that was it."""

        poll, recv_bytes, close = connection.poll, connection.recv_bytes, connection.close

        def send_bytes(self, data: bytes) -> None:
            os.kill(child.pid, signal.SIGSTOP)
            connection.send_bytes(data)
            child.kill()

    trial._connection = Crashing()
    with pytest.raises(InvalidRequestError, match="too much memory or too deep a stack"):
        trial.run(StructuredOutputs(regex="b"))
    assert trial._child is None and child.returncode is not None
    assert trial.run(StructuredOutputs(regex="b")) >= 0
    trial.close()


def test_a_grammar_that_broke_is_let_go():
    compiler = new_compiler()
    try:
        grammar = compile_now(compiler, choice=["yes"])
        constraint = grammar()
        constraint.accept(TOKENIZER.encode("no", add_special_tokens=False)[0])
        while constraint.error() is None:
            grammar.threads.wait(0.05)
        again = compile_now(compiler, choice=["yes"])
        assert again is not grammar and accepts(again, "yes")
        assert compiler.kept[0] == 1
    finally:
        compiler.close()


def test_only_so_many_grammars_and_bytes_are_kept(monkeypatch):
    monkeypatch.setattr(grammar_compiler, "MAX_GRAMMARS", 3)
    compiler = new_compiler()
    try:
        one = compiler.compile(StructuredOutputs(regex="a"))
        assert compiler.compile(StructuredOutputs(regex="a")) is one, "compiled once"
        one.result(60)
        for i in range(5):
            compile_now(compiler, regex=f"x{i}")
            assert compiler.compile(StructuredOutputs(regex="a")) is one, "used again and again"
        count, size = compiler.kept
        assert count == 3 and size > 0
        with pytest.raises(InvalidRequestError):
            compile_now(compiler, regex="(")
        assert compiler.kept == (count, size), "what failed is not kept"
        monkeypatch.setattr(grammar_compiler, "MAX_GRAMMAR_BYTES", 10)
        compile_now(compiler, regex="y")
        assert compiler.kept == (0, 0)
    finally:
        compiler.close()


def test_without_a_tokenizer_that_can_be_used(tmp_path):
    compiler = GrammarCompiler(str(tmp_path), VOCAB, EOS)
    try:
        with pytest.raises(InvalidRequestError, match="tokenizer cannot be used"):
            compile_now(compiler, regex="a")
    finally:
        compiler.close()


BAD_PARAMS = [
    ({}, "exactly one"),
    ({"json": "{}", "regex": "a"}, "found json, regex"),
    ({"json": {"type": "object"}}, "must be text"),
    ({"regex": ""}, "must be text"),
    ({"choice": []}, "at least one"),
    ({"choice": "yes"}, "list of strings"),
    ({"choice": ["a", ""]}, "non-empty"),
    ({"choice": ["a"] * (MAX_CHOICES + 1)}, f"at most {MAX_CHOICES} strings, not {MAX_CHOICES + 1}"),
    ({"regex": "ü" * (MAX_STRUCTURE_BYTES // 2 + 1)}, f"at most {MAX_STRUCTURE_BYTES} bytes"),
    ({"choice": ["x" * 1000] * 100}, f"at most {MAX_STRUCTURE_BYTES} bytes, not 100000"),
    ({"json_object": 1}, "true or false"),
    ({"grammar": "\ud800"}, "surrogates"),
]


@pytest.mark.parametrize(("fields", "reason"), BAD_PARAMS)
def test_the_fields_are_checked_where_they_are_given(fields, reason):
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        StructuredOutputs(**fields)
    assert caught.value.param == "structured_outputs"


def test_sampling_params_that_contradict_a_grammar():
    grammar = StructuredOutputs(choice=["a"])
    for name, value in (("ignore_eos", True), ("min_tokens", 3)):
        with pytest.raises(InvalidRequestError, match="cannot be combined with structured_outputs") as caught:
            SamplingParams(structured_outputs=grammar, **{name: value})
        assert caught.value.param == name
    with pytest.raises(InvalidRequestError, match="must be a StructuredOutputs"):
        SamplingParams(structured_outputs={"choice": ["a"]})
    params = SamplingParams(structured_outputs=grammar)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
