"""compare.py: other engines run in their own Python, on the same prompts, and leave nothing behind.

The others are fakes with the API of vLLM and of SGLang (fake_engines/), which note what they are asked.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import compare
import launched_server
import peers
import psutil
import pytest
from launched_server import ProcessFailedError
from offline import custom_workload, fit_vocabulary
from support.processes import is_running
from support.sse_server import FakeServer

from rayllm.config.options import BUNDLED_MODEL

ROOT = Path(__file__).parents[2]
FAKES = Path(__file__).with_name("fake_engines")
BOTH = pytest.mark.parametrize("kind", ["vllm", "sglang"])
VERSIONS = {"vllm": "0.24.0", "sglang": "0.5.23"}


@pytest.fixture
def python(tmp_path):
    """The Python of an environment that has the fakes."""
    path = tmp_path / "venv" / "python"
    path.parent.mkdir()
    path.write_text(f'#!/bin/sh\nPYTHONPATH={FAKES}:{FAKES.parents[1]} exec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def notes(tmp_path, monkeypatch):
    """Reads what the fakes were asked, in order."""
    path = tmp_path / "notes"
    monkeypatch.setenv("FAKE_ENGINE_NOTES", str(path))
    return lambda: [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(launched_server, "STOP_LIMIT_S", 0.2)


def arguments(*words):
    return compare.read_arguments(["--model", BUNDLED_MODEL, "--warmup", "1", "--repeat", "2", *words])


HTTP = ["--http", "4", "--input-len", "6", "--output-len", "3", "--clients", "1"]


@BOTH
def test_an_engine_gets_the_prompts_of_offline_py(kind, python, notes, capsys):
    engine = compare.find_engine(kind, python)
    assert str(engine) == f"{kind} {VERSIONS[kind]}"
    assert engine.versions["torch"]
    args = arguments("--workload", "3x4:9x5", "--set", "max_model_len=64", "--set", "rayllm.device=cpu")
    figures = compare.offline(engine, args)
    start, *runs = notes()
    assert start == {"engine": {"model": BUNDLED_MODEL, "skip": True, "max_model_len": 64}}
    workload = custom_workload(3, "4:9", "5")
    assert runs == [fit_vocabulary(workload.make(run), 4096)._asdict() for run in (-1, 0, 1)]
    assert list(figures) == ["engine start", workload.name]
    assert len(figures[workload.name].values) == 2
    assert figures[workload.name].unit == "out tok/s"
    warned = "warning: sglang 0.5.23: 3 x 4:9 in, 5 out: 15 of 18 prompt tokens came" in capsys.readouterr().err
    assert warned == (kind == "sglang")


@BOTH
def test_a_server_is_loaded_and_ends_with_all_its_processes(kind, python, notes, impatient):
    args = arguments(*HTTP, "--set", "max_model_len=64", "--set", "vllm.enforce_eager=false")
    figures = compare.over_http(compare.find_engine(kind, python), args)
    (start,) = notes()
    assert start["server"].items() >= {"model": BUNDLED_MODEL, "host": "127.0.0.1", "max_model_len": 64}.items()
    assert start["server"].get("enforce_eager") in (False, None)
    assert start["folder"] != os.getcwd()  # Ray's workers would take modules from there
    load = "http, 4 in flight, 6 in, 3 out"
    assert [(name, each.unit, len(each.values)) for name, each in figures.items()] == [
        ("server start", "s", 1),
        (load, "out tok/s", 2),
        (f"{load}, first token p50", "ms", 2),
    ]
    assert all(value > 0 for each in figures.values() for value in each.values)
    assert not any(map(is_running, start["pids"]))


def test_a_shape_without_a_tokenizer_is_served_with_one(python, notes, tmp_path, impatient):
    shape, folder = tmp_path / "shape", tmp_path / "made"
    for each in (shape, folder):
        each.mkdir()
    shutil.copy(Path(BUNDLED_MODEL, "config.json"), shape)
    args = arguments(*HTTP, "--model", str(shape))
    with compare.served(compare.find_engine("vllm", python), args, folder, {}):
        assert notes()[0]["server"]["model"] == str(folder)
        assert {"config.json", "tokenizer.json"} <= {each.name for each in folder.iterdir()}


def test_a_server_that_is_running():
    gate = threading.Barrier(4)  # nothing is answered unless four requests are in flight

    def answer(handler, body):
        gate.wait(timeout=200)
        handler.begin()
        handler.event({"choices": [{"text": "x"}], "usage": {"prompt_tokens": 6, "completion_tokens": 3}})
        handler.end()

    with FakeServer(answer).running() as server:
        engine = compare.find_engine("vllm", f"{server.url}/")
        figures = compare.over_http(engine, arguments(*HTTP, "--warmup", "0", "--repeat", "1", "--clients", "2"))
    assert str(engine) == "vllm of unknown version"
    assert len(figures) == 2


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--set", "load_format=broken", "--workload", "2x4x5"], "exit code 1\n.*no kernel image is available"),
        (["--set", "max_model_len=8", "--workload", "2x4x5"], "exit code 1\n.*outputs ended early"),
        (["--limit", "0.01", "--workload", "2x4x5"], r"did not end within 0\.01 s"),
        (["--set", "load_format=broken", *HTTP], "ended with exit code 1\n.*loaded\n.*no kernel image is available"),
        (["--limit", "-1", *HTTP], "did not come up within -1 s"),
        (["--set", "load_format=refuses", *HTTP], "status 500: .*illegal memory access"),
        (["--set", "load_format=short", *HTTP], "24 of 24 requests failed, the first with: the answer has 2 of 3"),
    ],
)
def test_a_failure_shows_the_end_of_the_log(words, text, python, notes, impatient):
    args = arguments(*words)
    engine = compare.find_engine("vllm", python)
    with pytest.raises(ProcessFailedError) as caught:
        (compare.offline if args.workload else compare.over_http)(engine, args)
    assert re.search(text, str(caught.value), re.DOTALL), caught.value


def test_rayllm_beside_a_fake_and_one_that_fails(python, notes, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/nowhere")  # the checkout is found all the same
    saved = tmp_path / "saved.yaml"
    words = ["--model", BUNDLED_MODEL, "--workload", "2x4x5", "--warmup", "0", "--repeat", "1", "--save", str(saved)]
    words += ["--set", "rayllm.device=cpu", "--set", "sglang.colour=blue"]
    assert compare.main([*words, "--peer", f"vllm={python}", "--peer", f"sglang={python}"]) == 1
    out, err = capsys.readouterr()
    assert "error: sglang 0.5.23: it ended with exit code 1" in err
    assert "unexpected keyword argument 'colour'" in err
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line[:1] == "|"]
    assert rows[0][0] == "case"
    assert re.fullmatch(r"rayllm \S+ [0-9a-f]{7,}(-dirty)?", rows[0][1])
    assert rows[0][2:] == ["vllm 0.24.0", "ratio", "sglang 0.5.23", "ratio"]
    case, ours, theirs, ratio, *failed = rows[-1]
    assert case == "2 x 4 in, 5 out, out tok/s"
    assert float(ratio) == pytest.approx(number(ours) / number(theirs), rel=0.1, abs=0.01)
    assert failed == ["", ""]
    here, there = peers.read_records(saved)
    assert (here.engine, there.engine, there.version) == ("rayllm", "vllm", "0.24.0")
    assert here.options == {"device": "cpu"}
    assert there.model == "tiny-pydoc"
    assert there.hardware == peers.hardware()
    assert "one after the other with rayllm" in there.how
    assert there.figures.keys() == {"engine start", "2 x 4 in, 5 out"}


def test_sigterm_ends_the_engine():
    words = ["--model", BUNDLED_MODEL, "--set", "rayllm.device=cpu", "--workload", "1x8x2000"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    process = subprocess.Popen([sys.executable, compare.__file__, *words], env=environment)
    try:
        deadline = time.monotonic() + 60
        while not (engines := [each for each in psutil.Process(process.pid).children() if last_word(each) == "work"]):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
        assert not is_running(engines[0].pid)
    finally:
        process.kill()


def last_word(process):
    """Of a process's command; a driver that measures has the file of its work there."""
    try:
        return Path(process.cmdline()[-1]).name
    except (psutil.Error, IndexError):
        return ""


def number(cell):
    return float(cell.split()[0].replace(",", ""))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--peer", "vllm"], "--peer must be KIND=WHERE"),
        (["--peer", "tgi=/x", "--http", "1"], "--peer must be KIND=WHERE"),
        (["--peer", "vllm=http://x", "--workload", "nano256"], "is a running server"),
        (["--set", "tgi.a=1", "--http", "1"], "--set must be NAME=VALUE"),
        ([], "nothing to measure"),
        (["--http", "0"], "must be at least 1"),
    ],
)
def test_bad_options(words, text, capsys):
    with pytest.raises(SystemExit):
        compare.read_arguments(["--model", "m", *words])
    assert text in capsys.readouterr().err


def test_what_is_not_there_is_told_before_anything_runs(capsys):
    for words in (["--workload", "x"], ["--http", "1", "--peer", "vllm=/no/python"]):
        assert compare.main(["--model", BUNDLED_MODEL, *words]) == 2
    assert compare.main(["--model", BUNDLED_MODEL, "--http", "1", "--peer", f"vllm={sys.executable}"]) == 2
    err = capsys.readouterr().err
    assert "error: unknown workload 'x'" in err
    assert "No such file or directory: '/no/python'" in err
    assert f"vllm is not installed for {sys.executable}" in err
