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
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from support.driver import wait_for
from support.processes import is_running

import rayllm
from rayllm import timeouts
from rayllm.api.sampling_params import MAX_CHOICES, StructuredOutputs
from rayllm.config.options import BUNDLED_MODEL
from rayllm.errors import InvalidRequestError, OverloadedError
from rayllm.text import grammar_compiler, grammar_trial
from rayllm.text.grammar import Grammar, GrammarConstraint, MaskThreads, TokenizerData, bad_grammar
from rayllm.text.grammar_compiler import GrammarCompiler
from rayllm.text.grammar_trial import TrialWorker
from rayllm.text.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(BUNDLED_MODEL)
VOCAB, EOS = 4096, [2, 0]


def new_compiler(**options) -> GrammarCompiler:
    return GrammarCompiler(str(BUNDLED_MODEL), VOCAB, EOS, **options)


@pytest.fixture(scope="module")
def compiler():
    with closing(new_compiler(limit_s=30.0)) as made:  # of a machine that computes other things too
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
    assert str(constraint.error()).startswith("structured_outputs: its text cannot go on: ")
    assert constraint.mask() is None


def wide_object(count: int, leaf: str = "{}") -> str:
    """A schema of so many optional properties."""
    return '{"type": "object", "properties": {' + ", ".join(f'"p{i}": {leaf}' for i in range(count)) + "}}"


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
    "a very wide object": ({"json": wide_object(2600)}, "10407 items; max is 10000"),
    "one inside": ({"json": f'{{"properties": {{"a": {wide_object(2600)}}}, "required": ["a"]}}'}, "max is 10000"),
    "a regex that grows": ({"regex": "(((a{100}){100}){100}){100}"}, "too (complex|many expressions)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compiled_is_refused_with_the_reason(compiler, name):
    kind, reason = REFUSED[name]
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        compile_now(compiler, **kind)
    assert caught.value.param == "structured_outputs"
    assert str(caught.value).startswith("structured_outputs: ")
    assert len(str(caught.value)) < 600


def test_many_optional_properties_are_served(compiler):
    grammar = compile_now(compiler, json=wide_object(600, '{"type": "integer"}'))
    assert accepts(grammar, '{"p5": 12, "p77": 3, "p599": 4}')
    assert not accepts(grammar, '{"p5": 12, "p77": "x"}')


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
        threads.submit(lambda tokens: gates[tokens[0]].wait(30), [i])
    assert 0.1 <= wait_s(0.1) < 5, "no mask"
    threading.Timer(0.1, gates[0].set).start()
    assert 0.05 < wait_s() < 5, "the first"
    gates[1].set()
    assert wait_s() < 5, "the second"
    assert 0.1 <= wait_s(0.1) < 5, "each counts once"
    threads.close()


# ---- trials in worker processes

SLOW = "(((x{90}){90}){90}){90}"  # a quarter of a second, then refused as too large
STUCK = [  # for minutes
    StructuredOutputs(json=json.dumps({"allOf": [{"type": "string", "pattern": f".*x{i}{j}.*"} for j in range(16)]}))
    for i in range(6)
]
DATA = TokenizerData(TOKENIZER.backend.to_str(), TOKENIZER.vocab_size, VOCAB, EOS)


def worker_processes(parent: int | None = None) -> set[int]:
    """Pids of the living trial workers of a process, of this one by default."""
    pids = set()
    for child in psutil.Process(parent).children():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if any("grammar_trial" in word for word in child.cmdline()) and is_running(child.pid):
                pids.add(child.pid)
    return pids


def wait_until_nice(trial: int) -> None:
    while os.getpriority(os.PRIO_PROCESS, trial) != os.getpriority(os.PRIO_PROCESS, 0) + grammar_trial.NICE:
        assert is_running(trial)


@contextlib.contextmanager
def trial_worker(**options):
    """A worker and its pid."""
    others = worker_processes()
    worker = TrialWorker(DATA, **options)
    try:
        (pid,) = worker_processes() - others
        yield worker, pid
    finally:
        worker.close()
        assert worker_processes() == others


@contextlib.contextmanager
def stuck_trial():
    """A worker with a trial that does not end, the pid of that, and the future of its outcome."""
    with ThreadPoolExecutor(1) as pool, trial_worker() as (worker, pid):
        assert worker.run(StructuredOutputs(regex="a"), 30) >= 0
        outcome = pool.submit(worker.run, STUCK[0], 30)
        while not (trials := worker_processes(pid)):
            time.sleep(0.01)
        yield worker, *trials, outcome


def test_six_bad_schemas_hold_up_nobody_and_are_refused_at_once_when_they_come_again():
    others = worker_processes()
    with closing(new_compiler(first_s=0.6, limit_s=0.3)) as compiler:
        compile_now(compiler, regex="a")
        bad = [compiler.compile(structure, "one") for structure in STUCK]
        for client in ("one", "another"):
            compiler.compile(StructuredOutputs(choice=[client]), client).result(60)
        assert sum(future.done() for future in bad) <= 1
        for future in bad:
            with pytest.raises(InvalidRequestError, match=r"longer than 0\.3 s"):
                future.result(60)
        assert all(compiler.compile(structure, "one").done() for structure in STUCK)
        assert len(worker_processes() - others) == 2, "each lane has the one that it began with"
        assert accepts(compile_now(compiler, regex="d"), "d")
    assert worker_processes() == others


def test_a_trial_ends_when_its_time_is_up_and_costs_no_more():
    with trial_worker() as (worker, pid):
        assert worker.run(STUCK[0], 0.2) is None
        assert worker_processes(pid) == set()
        assert worker.alive and worker.run(StructuredOutputs(regex="a"), 30) >= 0


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
def test_a_trial_that_crashes_refuses_its_grammar(death):
    with stuck_trial() as (worker, trial, outcome):
        os.kill(trial, death)
        with pytest.raises(InvalidRequestError, match="too much memory or too deep a stack"):
            outcome.result(30)
        assert worker.run(StructuredOutputs(regex="b"), 30) >= 0


def test_a_trial_at_its_memory_limit_refuses_its_grammar():
    with trial_worker() as (worker, pid):
        assert worker.run(StructuredOutputs(regex="a"), 30) >= 0
        assert resource.prlimit(pid, resource.RLIMIT_DATA) == (2 * 2**30, 2 * 2**30)
        resource.prlimit(pid, resource.RLIMIT_DATA, (80 * 2**20, 80 * 2**20))
        with pytest.raises(InvalidRequestError, match="too much memory"):
            worker.run(StructuredOutputs(regex=SLOW), 30)
        assert worker.alive


def test_a_worker_that_does_not_answer_is_killed_and_blames_no_grammar():
    with trial_worker(silence_s=0.1) as (worker, pid):
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(RuntimeError, match="does not answer"):
            worker.run(StructuredOutputs(regex="b"), 0.1)
        assert not worker.alive


def test_a_trial_is_small_and_gives_way_to_others():
    with stuck_trial() as (_worker, trial, _outcome):
        wait_until_nice(trial)
        assert not re.search("torch|transformers|numpy|/ray/", Path(f"/proc/{trial}/maps").read_text())
        os.kill(trial, signal.SIGKILL)


def test_no_worker_outlives_an_engine_that_is_killed():
    code = f"""
import os, signal, sys, threading
from rayllm.api.sampling_params import StructuredOutputs
from rayllm.text.grammar_compiler import GrammarCompiler
compiler = GrammarCompiler({str(BUNDLED_MODEL)!r}, {VOCAB}, {EOS})
compiler.compile(StructuredOutputs(regex="a")).result(60)
compiler.compile(StructuredOutputs(json={STUCK[0].json!r}))
print("ready", flush=True)
threading.Event().wait()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as engine:
        assert engine.stdout.readline() == b"ready\n"
        (pid,) = worker_processes(engine.pid)
        while not (trials := worker_processes(pid)):
            time.sleep(0.01)
        for each in trials:
            wait_until_nice(each)  # then the kernel is to end it with its parent
        for each in (pid, *trials):
            os.kill(each, signal.SIGSTOP)  # it cannot notice by itself
        engine.kill()
    deadline = time.monotonic() + 30
    while any(map(is_running, (pid, *trials))) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_running, (pid, *trials)))


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
        assert compiled("(") is compiled("("), "a refusal is remembered"
        assert [compiled(f"x{i}") is others[i] for i in (4, 3)] == [True, True], "nor does it take the place of others"
        assert compiled("x2") is not others[2], "one too many"
        monkeypatch.setattr(grammar_compiler, "MAX_GRAMMAR_BYTES", 10)
        assert compiled("y") is not compiled("y")


# ---- whose turn it is


class HeldWorker:
    """A `TrialWorker` whose trials end when the test lets them; those of a regex with "slow" in it take too long."""

    alive = True

    def __init__(self, _data: TokenizerData):
        self.tried: list[tuple[str, float]] = []
        self.gate = threading.Semaphore(0)

    def run(self, structure: StructuredOutputs, limit_s: float) -> int | None:
        self.tried.append((structure.regex, limit_s))
        assert self.gate.acquire(timeout=60)
        if structure.regex == "(":
            raise bad_grammar("unclosed group")
        return None if "slow" in structure.regex else 0

    def close(self) -> None:
        self.gate.release(1000)


@contextlib.contextmanager
def held_compiler(**options):
    """A compiler that has begun with a first grammar, what compiles for it, and its workers: of the fast lane first."""
    workers: list[HeldWorker] = []

    def new_worker(data: TokenizerData) -> HeldWorker:
        workers.append(HeldWorker(data))
        return workers[-1]

    with closing(new_compiler(new_worker=new_worker, **options)) as compiler:

        def ask(text: str, client: str | None = "one") -> Future[Grammar]:
            return compiler.compile(StructuredOutputs(regex=text), client)

        ask("first", None)
        wait_for(lambda: workers and workers[0].tried)
        yield compiler, ask, workers


def test_clients_take_turns_and_the_smallest_of_each_comes_first():
    with held_compiler() as (_compiler, ask, workers):
        for text in ("aaa", "slow", "a", "aa"):
            ask(text, "one")
        futures = [ask("b", "two"), ask("cc", "three")]
        futures += [ask("c", "three")]
        workers[0].gate.release(100)
        wait_for(lambda: len(workers) == 2)
        wait(futures, 60)
        tried = [text for text, limit in workers[0].tried if limit == timeouts.GRAMMAR_FIRST_S]
        assert tried == ["first", "a", "b", "c", "aa", "cc", "aaa", "slow"]
        assert workers[1].tried == [("slow", timeouts.GRAMMAR_S)]
        assert accepts(ask("fast").result(60), "fast"), "it does not wait for the slow one"
        assert len(workers[1].tried) == 1


def test_only_so_many_wait(monkeypatch):
    monkeypatch.setattr(grammar_compiler, "MAX_WAITING_OF_CLIENT", 3)
    monkeypatch.setattr(grammar_compiler, "MAX_WAITING", 6)
    with held_compiler() as (_compiler, ask, workers):
        ask("a1").cancel()
        futures = [ask(f"a{i}") for i in range(3)]
        with pytest.raises(
            OverloadedError, match="3 grammars of yours wait to be compiled, and at most 3 may"
        ) as caught:
            ask("a4")
        assert caught.value.param == "structured_outputs"
        assert ask("a2") is futures[2], "one that waits already is no more"
        futures += [ask(f"b{i}", "two") for i in range(2)]
        with pytest.raises(OverloadedError, match="6 grammars wait to be compiled, and at most 6 may"):
            ask("c", "three")
        futures += [ask(f"d{i}", None) for i in range(10)]
        futures.pop(0).cancel()
        workers[0].gate.release(100)
        wait(futures, 60)
        assert "a0" not in [text for text, _ in workers[0].tried], "its request has gone"
        assert accepts(ask("c", "three").result(60), "c")


def test_refusals_are_remembered_for_a_while_and_only_so_many(monkeypatch):
    monkeypatch.setattr(grammar_compiler, "MAX_REFUSALS", 2)
    now = [100.0]
    with held_compiler(clock=lambda: now[0]) as (_compiler, ask, workers):
        workers[0].gate.release(100)

        def refused() -> Future[Grammar]:
            future = ask("(")
            assert isinstance(future.exception(60), InvalidRequestError)
            return future

        first = refused()
        now[0] += timeouts.GRAMMAR_REFUSED_S - 1
        assert ask("(") is first
        now[0] += 2
        assert refused() is not first, "the machine's load may have had a part in it"
        for text in ("slow 1", "slow 2"):
            ask(text)
        wait_for(lambda: len(workers) == 2)
        workers[1].gate.release(100)
        wait_for(lambda: ask("slow 2").done())
        before = len(workers[0].tried)
        refused()
        assert len(workers[0].tried) == before + 1, "the latest two are others"


def test_without_a_tokenizer_that_can_be_used(tmp_path):
    with (
        closing(GrammarCompiler(str(tmp_path), VOCAB, EOS)) as compiler,
        pytest.raises(InvalidRequestError, match="tokenizer cannot be used"),
    ):
        compile_now(compiler, regex="a")
