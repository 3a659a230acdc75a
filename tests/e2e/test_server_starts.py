"""Starts of `rayllm launch` that fail or are broken off: one clear line, the right exit code, no process left."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest
from support.launched import (
    BUNDLED,
    MODEL,
    RAYLLM,
    ROOT,
    START_LIMIT_S,
    Launched,
    clean_environment,
    free_port,
    session_processes,
)


def failing_launch(*args, files=None):
    """(exit code, last line of standard error) of a launch that must not come up. files: that it may have open."""
    done = subprocess.run(
        [*(["prlimit", f"--nofile={files}"] if files else []), RAYLLM, "launch", "--port", str(free_port()), *args],
        capture_output=True,
        text=True,
        env=clean_environment(),
        timeout=START_LIMIT_S,
        start_new_session=True,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr.strip().splitlines()[-1]


@pytest.fixture
def folder(tmp_path):
    """A copy of the bundled model to break."""
    copy = tmp_path / "model"
    shutil.copytree(BUNDLED, copy)
    return copy


def test_model_folders_that_cannot_be_served(tmp_path, folder):
    assert failing_launch("/no/such/folder") == (2, "error: model folder /no/such/folder does not exist")
    (tmp_path / "empty").mkdir()
    assert failing_launch(str(tmp_path / "empty")) == (2, f"error: model folder {tmp_path / 'empty'} is empty")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["MambaForCausalLM"]}))
    code, line = failing_launch(str(folder))
    assert (code, "MambaForCausalLM is not supported" in line) == (2, True), line


def test_deployments_that_cannot_work(tmp_path):
    shape = str(ROOT / "configs" / "models" / "qwen2.5-1.5b")
    code, line = failing_launch(shape, "--load-format", "dummy", "--tp", "8")
    assert (code, "tensor_parallel_size 8 does not divide the model's 12 attention heads" in line) == (2, True), line
    (tmp_path / "bad.yaml").write_text("max_model_length: 3\n")
    code, line = failing_launch("--config", str(tmp_path / "bad.yaml"))
    assert (code, "did you mean 'max_model_len'" in line) == (2, True), line
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, line = failing_launch("--port", str(port), "--device", "cpu")
    assert (code, line) == (2, f"error: cannot listen on 127.0.0.1 port {port}: Address already in use")
    code, line = failing_launch("--device", "cpu", files=256)
    assert (code, line) == (2, "error: the limit of open files (ulimit -Hn) is 256; at least 1,024 are needed")


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has GPUs")
def test_more_gpus_than_there_are():
    code, line = failing_launch("--device", "cuda", "--tp", "2")
    assert (code, line) == (2, 'error: device "cuda" needs a GPU, and there is none (device "cpu" works)')


def test_weights_that_only_the_engine_finds_broken(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    code, line = failing_launch(str(folder))
    assert (code, line.startswith("error: "), "model.safetensors" in line) == (2, True, True), line


def test_a_stop_while_starting_leaves_nothing(tmp_path):
    launched = Launched(tmp_path / "log", "--port", str(free_port()))
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while not any("raylet" in command for _, command in session_processes(launched.session_id)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        launched.stop(signal.SIGTERM)
        assert "ready" not in launched.log.read_text()
    finally:
        launched.kill()


def test_without_haproxy(tmp_path):
    port = free_port()
    server = Launched(tmp_path / "log", "--port", str(port), "--device", "cpu", "--ingress", "serve")
    try:
        server.wait_for("\nready ")
        url = f"http://127.0.0.1:{port}"
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == MODEL
        body = {"model": MODEL, "prompt": "def", "max_tokens": 5, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as response:
            events = [line for line in response.iter_lines() if line.startswith("data: {")]
        assert len(events) > 1 and '"finish_reason":"length"' in events[-1]
        refused = httpx.post(f"{url}/v1/completions", json=body | {"max_tokens": "x"})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "max_tokens"
        assert not any("haproxy" in command for _, command in session_processes(server.session_id))
        assert server.stop() == 0
    finally:
        server.kill()
