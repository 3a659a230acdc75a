"""Compiling grammars: every kind, what is refused and why, the limits, the worker processes, what is kept."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, wait
from contextlib import closing
from pathlib import Path

import pytest

import rayllm
from rayllm.api.sampling_params import MAX_CHOICES, StructuredOutputs
from rayllm.config.options import BUNDLED_MODEL
from rayllm.errors import InvalidRequestError
from rayllm.text import grammar_compiler, grammar_trial
from rayllm.text.grammar import Grammar, GrammarConstraint, MaskThreads, TokenizerData
from rayllm.text.grammar_compiler import GrammarCompiler
from rayllm.text.grammar_trial import TrialWorker
from rayllm.text.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(BUNDLED_MODEL)
VOCAB, EOS = 4096, [2, 0]


def new_compiler(**options) -> GrammarCompiler:
    return GrammarCompiler(str(BUNDLED_MODEL), VOCAB, EOS, **options)


@pytest.fixture(scope="module")
def compiler():
    with closing(new_compiler()) as made:
        yield made


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


def test_an_idle_engine_waits_for_one_mask_and_a_moment_for_the_others():
    threads = MaskThreads(2)
    gates = [threading.Event(), threading.Event()]

    def wait_s(timeout: float = 10.0) -> float:
        started = time.monotonic()
        threads.wait(timeout)
        return time.monotonic() - started

    for i in (0, 1):
        threads.submit(lambda token: gates[token].wait(30), i)
    assert 0.1 <= wait_s(0.1) < 5, "no mask"
    threading.Timer(0.1, gates[0].set).start()
    assert 0.05 < wait_s() < 5, "the first"
    gates[1].set()
    assert wait_s() < 5, "the second"
    assert 0.1 <= wait_s(0.1) < 5, "each counts once"
    threads.close()


# ---- trials in worker processes

SLOW = [f"(((x{{90}}){{90}}){{90}}){{{i}}}" for i in (90, 91)]  # a quarter of a second each, then refused as too large
DATA = TokenizerData(TOKENIZER.backend.to_str(), TOKENIZER.vocab_size, VOCAB, EOS)


def status(pid: int) -> list[str]:
    """State and parent of a process; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return []


def is_alive(pid: int) -> bool:
    return status(pid)[:1] not in ([], ["Z"])


def worker_processes(parent: int | None = None) -> set[int]:
    """Pids of the living trial workers of a process, of this one by default."""
    pids = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    children = [pid for pid in pids if status(pid)[1:] == [str(parent or os.getpid())] and is_alive(pid)]
    return {pid for pid in children if b"grammar_trial" in Path(f"/proc/{pid}/cmdline").read_bytes()}


@contextlib.contextmanager
def trial_worker(limit_s: float = 30.0):
    """A worker and its pid."""
    others = worker_processes()
    worker = TrialWorker(DATA, limit_s)
    try:
        (pid,) = worker_processes() - others
        yield worker, pid
    finally:
        worker.close()
        assert worker_processes() == others


def test_a_slow_one_is_stopped_and_the_next_one_is_compiled(monkeypatch):
    monkeypatch.setattr(grammar_trial, "LATEST", 1000.0)  # workers may wait long for a core while tests run
    others = worker_processes()
    with closing(new_compiler(limit_s=0.05)) as compiler:
        compile_now(compiler, regex="a")
        for future in [compiler.compile(StructuredOutputs(regex=text)) for text in SLOW]:
            with pytest.raises(InvalidRequestError, match=r"longer than 0\.05 s"):
                future.result(60)
        assert worker_processes() == others, "they were ended"
        assert accepts(compile_now(compiler, regex="d"), "d")
        assert len(worker_processes() - others) == 1, "one is started when it is needed"
    assert worker_processes() == others


def test_a_worker_that_dies_idle_is_no_grammars_fault():
    others = worker_processes()
    with closing(new_compiler()) as compiler:
        for text in ("a", "b"):
            compile_now(compiler, regex=text)
        for pid in worker_processes() - others:
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        for text in ("c", "d"):
            assert accepts(compile_now(compiler, regex=text), text)


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_a_worker_that_crashes_refuses_the_grammar_it_had(death):
    with trial_worker() as (worker, pid):
        assert worker.run(StructuredOutputs(regex="a")) >= 0
        os.kill(pid, signal.SIGSTOP)  # so that it has the grammar when it dies

        def die() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, death)
                os.kill(pid, signal.SIGCONT)

        threading.Timer(0.2, die).start()
        with pytest.raises(InvalidRequestError, match="too much memory or too deep a stack"):
            worker.run(StructuredOutputs(regex="b"))
        assert not worker.alive


def test_a_worker_at_its_memory_limit_refuses_the_grammar_it_had():
    with trial_worker() as (worker, pid):
        assert worker.run(StructuredOutputs(regex="a")) >= 0
        assert resource.prlimit(pid, resource.RLIMIT_DATA) == (2 * 2**30, 2 * 2**30)
        resource.prlimit(pid, resource.RLIMIT_DATA, (80 * 2**20, 80 * 2**20))
        with pytest.raises(InvalidRequestError, match="too much memory"):
            worker.run(StructuredOutputs(regex=SLOW[0]))
        assert not worker.alive


def test_a_worker_that_does_not_answer_is_killed():
    with trial_worker(limit_s=0.05) as (worker, pid):
        os.kill(pid, signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(InvalidRequestError, match="takes too long"):
            worker.run(StructuredOutputs(regex="b"))
        assert 0.3 <= time.monotonic() - started < 5
        assert not worker.alive


def test_a_worker_is_small_and_gives_way_to_all_others():
    with trial_worker() as (worker, pid):
        assert worker.run(StructuredOutputs(regex="a")) >= 0
        assert os.sched_getscheduler(pid) == os.SCHED_IDLE
        assert not re.search("torch|transformers|numpy|/ray/", Path(f"/proc/{pid}/maps").read_text())


def test_no_worker_outlives_an_engine_that_is_killed():
    code = f"""
import os, signal, sys, threading
from rayllm.api.sampling_params import StructuredOutputs
from rayllm.text.grammar_compiler import GrammarCompiler
compiler = GrammarCompiler({str(BUNDLED_MODEL)!r}, {VOCAB}, {EOS})
compiler.compile(StructuredOutputs(regex="a")).result(60)
print("ready", flush=True)
threading.Event().wait()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as engine:
        assert engine.stdout.readline() == b"ready\n"
        (pid,) = worker_processes(engine.pid)
        os.kill(pid, signal.SIGSTOP)  # it cannot notice by itself
        engine.kill()
    deadline = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(pid)


def test_a_script_without_a_guard_compiles_grammars(tmp_path):
    """Workers do not run the main module."""
    script = tmp_path / "script.py"
    script.write_text(
        f"""
print("main")
from rayllm import StructuredOutputs
from rayllm.text.grammar_compiler import GrammarCompiler
compiler = GrammarCompiler({str(BUNDLED_MODEL)!r}, {VOCAB}, {EOS})
compiler.compile(StructuredOutputs(regex="a")).result(60)
compiler.close()
"""
    )
    path = os.pathsep.join([str(Path(rayllm.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(script)], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "main\n"), done.stderr


# ---- what is kept


def test_a_grammar_that_broke_is_let_go():
    with closing(new_compiler()) as compiler:
        grammar = compile_now(compiler, choice=["yes"])
        constraint = grammar()
        constraint.accept(TOKENIZER.encode("no", add_special_tokens=False)[0])
        while constraint.error() is None:
            grammar.threads.wait(0.05)
        again = compile_now(compiler, choice=["yes"])
        assert again is not grammar and accepts(again, "yes")


def test_only_so_many_grammars_and_bytes_are_kept(monkeypatch):
    monkeypatch.setattr(grammar_compiler, "MAX_GRAMMARS", 3)
    with closing(new_compiler()) as compiler:

        def compiled(text: str) -> Future[Grammar]:
            future = compiler.compile(StructuredOutputs(regex=text))
            wait([future], 60)
            return future

        one = compiler.compile(StructuredOutputs(regex="a"))
        assert compiler.compile(StructuredOutputs(regex="a")) is one, "compiled once"
        others = []
        for i in range(5):
            others.append(compiled(f"x{i}"))
            assert compiled("a") is one, "used again and again"
        assert [compiled(f"x{i}") is others[i] for i in (4, 3)] == [True, True]
        assert isinstance(compiled("(").exception(), InvalidRequestError)
        assert compiled("(") is not compiled("("), "what failed is not kept"
        assert [compiled(f"x{i}") is others[i] for i in (4, 3)] == [True, True], "nor does it take the place of others"
        assert compiled("x2") is not others[2], "one too many"
        monkeypatch.setattr(grammar_compiler, "MAX_GRAMMAR_BYTES", 10)
        assert compiled("y") is not compiled("y")


def test_without_a_tokenizer_that_can_be_used(tmp_path):
    with (
        closing(GrammarCompiler(str(tmp_path), VOCAB, EOS)) as compiler,
        pytest.raises(InvalidRequestError, match="tokenizer cannot be used"),
    ):
        compile_now(compiler, regex="a")
