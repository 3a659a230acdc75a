"""The command `llm` and its Python API against a live server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

llm = pytest.importorskip("llm", reason="llm is not installed")

MODEL = "tiny-pydoc"
PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "guide": {"type": "boolean"}},
    "required": ["city", "guide"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(url, tmp_path_factory):
    """The user's settings, which list the server's model twice: as a chat model and as one for completions."""
    path = tmp_path_factory.mktemp("llm")
    common = f"api_base: {url}/v1, model_name: {MODEL}"
    (path / "extra-openai-models.yaml").write_text(
        f"- {{model_id: tiny, {common}, supports_schema: true, supports_tools: true}}\n"
        f"- {{model_id: tiny-completion, {common}, completion: true}}\n"
    )
    return path


@pytest.fixture(scope="module")
def run(folder):
    def run(*args, text=None):
        done = subprocess.run(
            [Path(sys.executable).with_name("llm"), *args],
            env=os.environ | {"LLM_USER_PATH": str(folder), "OPENAI_API_KEY": "none"},
            input=text,
            stdin=subprocess.DEVNULL if text is None else None,
            capture_output=True,
            text=True,
            timeout=250,
        )
        return done.returncode, done.stdout, done.stderr

    return run


def test_an_endpoint_without_settings(run, url):
    assert run("openai", "endpoint", f"{url}/v1", "--models")[1].strip() == MODEL
    options = ["openai", "endpoint", f"{url}/v1", "-m", MODEL, "-o", "max_tokens", "12", "-o", "temperature", "0"]
    code, whole, error = run(*options, "--no-stream", "What does len do?")
    assert (code, bool(whole.strip())) == (0, True), error
    assert run(*options, text="What does len do?")[1] == whole


def test_chat_streams_is_logged_and_goes_on(run):
    options = ["-m", "tiny", "-o", "max_tokens", "12", "-o", "temperature", "0"]
    code, streamed, error = run(*options, "-s", "Be brief.", "What does len do?")
    assert code == 0, error
    (logged,) = json.loads(run("logs", "list", "--json", "-n", "1")[1])
    assert logged["response"].strip() == streamed.strip() != ""
    assert logged["output_tokens"] > 0
    assert run("-c", *options, "And max?")[0] == 0


def test_completions(run):
    code, text, error = run("-m", "tiny-completion", "-o", "max_tokens", "8", "-o", "temperature", "0", "The for")
    assert (code, bool(text.strip())) == (0, True), error


def test_schema(run):
    options = ["-m", "tiny", "-o", "max_tokens", "200", "-o", "temperature", "0"]
    for stream in ([], ["--no-stream"]):
        code, text, error = run(*options, *stream, "--schema", json.dumps(PLACE), "Where to?")
        assert code == 0, error
        assert json.loads(text).keys() == {"city", "guide"}


def test_tools_are_offered(run):
    """Whether one is called is up to the model."""
    code, _, error = run(
        "-m", "tiny", "-o", "max_tokens", "40", "-o", "temperature", "0", "-T", "llm_version", "--cl", "0", "Version?"
    )
    assert code == 0, error


def test_an_error_is_one_line(run):
    code, _, error = run("-m", "tiny", "-o", "temperature", "2", "-o", "max_tokens", "9999999", "hi")
    assert code == 1
    assert "max_tokens" in error or "context" in error
