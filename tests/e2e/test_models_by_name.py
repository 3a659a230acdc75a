"""`rayllm launch org/name`: a server of a model that it downloads from a stand-in of the hub."""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path

import httpx
import pytest
from support.hub import HubStandIn, Repository
from support.launched import BUNDLED, RAYLLM, START_LIMIT_S, Launched, clean_environment, free_port


@pytest.fixture
def stand_in(tmp_path):
    """A hub that has org/tiny."""
    with HubStandIn({"org/tiny": Repository({"main": shutil.copytree(BUNDLED, tmp_path / "repository")})}) as server:
        yield server


def test_a_server_has_the_name_that_was_typed(stand_in, tmp_path):
    port, environment = free_port(), {"HF_ENDPOINT": stand_in.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    server = Launched(tmp_path / "log", "org/tiny", "--device", "cpu", "--port", str(port), **environment)
    try:
        server.wait_for("Ctrl-C stops the server")
        commit = Repository.commit(stand_in.repositories["org/tiny"].revisions["main"])
        snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / commit
        assert f"model    org/tiny  ({snapshot})" in server.log.read_text()
        assert sorted(stand_in.downloads()).count("model.safetensors") == 1
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["org/tiny"]
            body = {"model": "org/tiny", "prompt": "def f(", "max_tokens": 4, "ignore_eos": True}
            answer = client.post("/v1/completions", json=body).json()
            assert (answer["model"], answer["usage"]["completion_tokens"]) == ("org/tiny", 4)
            assert 'model_name="org/tiny"' in client.get("/metrics").text
        assert stand_in.downloads() == [], "ranks and API servers read the folder"
        assert server.stop(signal.SIGINT) == 0
    finally:
        server.kill()


def test_a_name_that_the_hub_has_not_is_one_line(stand_in):
    done = subprocess.run(
        [RAYLLM, "launch", "org/tyni", "--port", str(free_port())],
        capture_output=True,
        text=True,
        env={**clean_environment(), "HF_ENDPOINT": stand_in.url, "HF_HUB_OFFLINE": "0"},
        timeout=START_LIMIT_S,
        cwd=Path("/"),
    )
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert done.stderr.strip().splitlines()[-1].startswith("error: model org/tyni is no folder here, and http://127")
