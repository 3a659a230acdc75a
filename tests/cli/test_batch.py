"""`rayllm batch` on the bundled model: a file, a run that is stopped and goes on from standard input, bad options."""

import json
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from rayllm.cli import main as cli

runner = CliRunner()
OPTIONS = ["--device", "cpu", "--max-model-len", "128", "--num-gpu-blocks-override", "32"]


def requests(*bodies, url="/v1/completions"):
    lines = [json.dumps({"custom_id": str(n), "url": url, "body": body}) for n, body in enumerate(bodies)]
    return "".join(f"{line}\n" for line in lines)


def results(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def files(tmp_path):
    """(the input, the output, the arguments that name them)."""
    given, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    return given, output, ["batch", "-i", str(given), "-o", str(output)]


def test_a_file_is_answered_once(files):
    given, output, args = files
    sampling = {"max_tokens": 6, "temperature": 0}
    chat = {"messages": [{"role": "user", "content": "What is a list?"}]} | sampling
    given.write_text(
        requests({"prompt": "The for statement"} | sampling, {"prompt": ["a list"], "stop": ["."]} | sampling, {})
        + json.dumps({"custom_id": "chat", "url": "/v1/chat/completions", "body": chat})
        + "\nnonsense\n"
    )
    result = runner.invoke(cli.app, [*args, *OPTIONS, "--served-model-name", "tiny"])
    assert result.exit_code == 0, result.output
    assert "5 of 5 requests, 2 of them errors" in result.stderr
    found = {each["custom_id"]: each for each in results(output)}
    assert found["0"]["response"]["body"]["choices"][0]["text"] == "\n*******************\n\nThe"
    assert {found[name]["response"]["status_code"] for name in ("0", "1", "chat")} == {200}
    assert found["chat"]["response"]["body"]["model"] == "tiny"
    assert found["2"]["response"]["status_code"] == 400
    assert found[None]["error"]["code"] == "invalid_json"
    before = output.read_bytes()
    again = runner.invoke(cli.app, [*args, *OPTIONS])
    assert "has the results of all 5 requests already" in again.stderr
    assert output.read_bytes() == before


def test_a_run_that_is_stopped_goes_on(files):
    given, output, args = files
    bodies = [{"prompt": f"{n}", "max_tokens": 4 if n < 8 else 110, "ignore_eos": True} for n in range(30)]
    given.write_text(requests(*bodies))
    command = [sys.executable, "-m", "rayllm.cli", *args, *OPTIONS, "--max-num-seqs", "4"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not (output.exists() and output.read_bytes()):
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        said = process.communicate()[1]
    assert process.returncode == 128 + signal.SIGTERM, said
    assert "stopped by SIGTERM; the same command goes on from here" in said
    assert 0 < len(results(output)) < 30
    command[command.index("-i") + 1] = "-"
    done = subprocess.run(command, input=given.read_text(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(int(each["custom_id"]) for each in results(output)) == list(range(30))


@pytest.mark.parametrize(
    ("notes", "says"),
    [(None, "cannot be read"), ("notes\n", "is no output of a batch"), ("notes", "is no output of a batch")],
)
def test_files_that_cannot_be_used_are_refused(files, notes, says):
    given, output, args = files
    if notes is not None:
        given.touch()
        output.write_text(notes)
    assert says in str(runner.invoke(cli.app, args).exception)
    assert notes is None or output.read_text() == notes


def test_an_output_of_another_input_is_refused(files):
    given, output, args = files
    given.write_text(requests({"prompt": "a"}))
    line = {"id": "batch_req_1", "custom_id": "x", "response": None, "error": {"code": "c", "message": "m"}}
    output.write_text(json.dumps(line) + "\n")
    assert "does not belong to the input" in str(runner.invoke(cli.app, args).exception)
