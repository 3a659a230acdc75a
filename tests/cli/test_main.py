"""The command as a whole: exit codes, one line for each error, what `--help` imports."""

import functools
import io
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rayllm
from rayllm.cli import main as cli
from rayllm.errors import EngineDeadError, ModelError, StartupError


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the real entry point; returns (exit code, standard error)."""

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["rayllm", *args])
        monkeypatch.setattr(sys, "stdin", io.StringIO())
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return caught.value.code, capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["launch", "--block-size", "0"], "block_size: input should be greater than or equal to 1, not 0"),
        (["launch", "--config", "/no/such.yaml"], "/no/such.yaml"),
        (["launch", "a", "--model", "b"], "given twice"),
        (["launch", "/no/such/model"], "model folder /no/such/model does not exist"),
        (["generate", "hi", "--temperature", "-1"], "temperature"),
        (["generate", "hi", "--best-of", "2", "--temperature", "0"], "best_of must be 1 with temperature 0"),
        (["generate", "hi", "--use-beam-search"], "use_beam_search needs at least 2 beams; best_of, or else n"),
        (["generate", "hi", "--use-beam-search", "--n", "2", "--early-stopping", "no"], "early_stopping must be true"),
        (["generate", "hi", "--length-penalty", "2"], "length_penalty is only allowed with use_beam_search"),
        (["generate", "hi", "--model", "/no/such/model"], "/no/such/model"),
        (["generate"], "there is no prompt: give one as an argument or on standard input"),
        (["bench", "offline", "--workload", "x"], "unknown workload 'x'"),
        (["bench", "kernels", "nothing"], "no kernel case begins with 'nothing'"),
        (["bench", "serve"], "exactly one of --rate and --concurrency"),
    ],
)
def test_bad_options_are_one_line_and_exit_code_2(run, args, text):
    code, error = run(*args)
    assert code == 2
    line = error.splitlines()[-1]
    assert line.startswith("error: ")
    assert text in line
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("error", "code"), [(ModelError("m"), 2), (StartupError("a\nb"), 1), (EngineDeadError("e"), 1)]
)
def test_exit_codes(monkeypatch, run, error, code):
    def start_server(*_args, **_kwargs):
        raise error

    monkeypatch.setattr("rayllm.serve.cluster.launch.start_server", start_server)
    seen, text = run("launch")
    assert seen == code
    assert text.splitlines()[-1] == "error: " + " ".join(str(error).split())


@pytest.mark.parametrize(
    ("flag", "value", "text"),
    [
        ("--bogus", "1", "No such option"),
        ("--tp", "3", "Invalid value for '--tensor-parallel-size' / '--tp'"),
        ("--device", "tpu", "'tpu' is not one of 'auto', 'cpu', 'cuda'"),
        ("--port", "x", "Invalid value for '--port'"),
    ],
)
def test_flags_that_cannot_be_read_are_refused(run, flag, value, text):
    code, error = run("launch", flag, value)
    assert code == 2
    assert text in error


def test_version(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["rayllm", "--version"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"{rayllm.__version__}\n"


def test_help_is_quick():
    heavy = {"torch", "ray", "transformers", "fastapi", "openai", "guidellm", "rich"}
    code = f"import sys, rayllm.cli.main; heavy = {heavy} & set(sys.modules); assert not heavy, heavy"
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True)
    assert time.monotonic() - started < 10  # a fraction of a second on an idle machine


COMMAND = str(Path(sys.executable).with_name("rayllm"))


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("rayllm la", ["launch"]),
        ("rayllm bench o", ["offline"]),
        ("rayllm launch --tensor", ["--tensor-parallel-size"]),
        ("rayllm launch --device ", ["auto", "cpu", "cuda"]),
        ("rayllm generate --early", ["--early-stopping"]),
    ],
)
def test_completion_of_what_is_typed(typed, found, monkeypatch, capsys):
    """Asked as the shell's function asks."""
    words = typed.split(" ")
    monkeypatch.setenv("_RAYLLM_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    monkeypatch.setattr(sys, "argv", ["rayllm"])
    with pytest.raises(SystemExit):
        cli.main(functools.partial(cli.app, prog_name="rayllm"))  # else it has the name of pytest
    assert capsys.readouterr().out.split() == found


def test_bash_completes_after_an_installation(tmp_path):
    """--install-completion writes into the home folder; a bash that reads it there completes by the command."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    environment = os.environ | {"HOME": str(tmp_path), "PATH": f"{Path(COMMAND).parent}:{os.environ['PATH']}"}
    # Something after the command keeps bash from becoming it: the command looks for the shell among its parents.
    install = subprocess.run(
        [bash, "-c", "rayllm --install-completion; code=$?; exit $code"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert install.returncode == 0, install.stderr
    script = """
        source "$HOME/.bashrc"
        eval "set -- $(complete -p rayllm)"
        COMP_WORDS=(rayllm col) COMP_CWORD=1
        "$5" rayllm
        echo "${COMPREPLY[@]}"
    """
    found = subprocess.run([bash, "--norc", "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert found.stdout.split() == ["collect-env"], found.stderr
